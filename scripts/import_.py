"""`keptset import`: an engine's recorded output into a spool; what is bad goes to a file in it, whole, with why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from keptset.schemas.adapters.base import Adapter
from keptset.schemas.adapters.collect import Adapted, merged
from keptset.schemas.adapters.recorded import adapt_files, is_readable
from keptset.schemas.adapters.registry import ADAPTERS, adapter_for
from keptset.schemas.adapters.rejected import RejectedWriter
from keptset.schemas.adapters.settings import Stated
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, KeptsetError, StorageError
from keptset.schemas.findings import Finding
from keptset.schemas.storage.spool import SpoolWriter


def command(
    files: Annotated[
        list[Path], typer.Argument(help="Files (.json, .jsonl, .gz of either; prime_rl: .msgpack, .bin) or folders.")
    ],
    engine: Annotated[str, typer.Option("--from", help=f"The engine: {', '.join(ADAPTERS)}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The spool, a folder; new files are added to it.")],
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary size; left out: ids are checked for sign only.", min=1)
    ] = None,
    identity: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE about the model or engine, such as model_id=Qwen3-8B.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of a sampling setting that the files do not tell.")
    ] = None,
    others_off: Annotated[
        bool,
        typer.Option(
            "--others-off", help="Settings that neither the files nor --setting tell were off (not temperature)."
        ),
    ] = False,
    logprobs: Annotated[
        str | None, typer.Option(help="What log-probabilities are over where files do not tell: kept, full, raw.")
    ] = None,
    no_update_in_flight: Annotated[
        bool,
        typer.Option(
            "--no-update-in-flight",
            help="Weights never changed during a response: one version holds for all its tokens.",
        ),
    ] = False,
    id_prefix: Annotated[str, typer.Option(help="Put before every rollout_id.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Read an engine's recorded output into a spool.

    Kept sets are taken as recorded. A response with an error goes whole, with its findings, to rejected/*.jsonl in the
    spool, and the command ends with 1; the good ones go on. A file that is not the engine's ends it with 3.
    """
    adapter = adapter_for(engine)
    stated = Stated(
        identity=_identity(vocab_size, identity or []),
        settings={name: _value(name, text) for name, text in _pairs("--setting", setting or [])},
        others_off=others_off,
        logprob_domain=logprobs,
        no_update_in_flight=no_update_in_flight,
        id_prefix=id_prefix,
    )
    paths = _paths(files, adapter)
    done = Summary(spool=str(out))
    failure: KeptsetError | None = None
    with SpoolWriter(out) as writer, RejectedWriter(out, writer.writer) as rejected, _progress() as tell:
        try:
            for adapted in adapt_files(adapter, paths, stated):
                for batch in adapted.batches:
                    writer.append(batch)
                rejected.write(adapted.rejected)
                done.add(adapted)
                tell(f"{done.responses + done.rejected} responses")
        except KeptsetError as error:
            failure = error
    done.rejected_file = str(rejected.path) if rejected.count else None
    print(json.dumps(asdict(done), indent=2) if as_json else done.text())
    if failure is not None:
        raise failure
    if done.rejected:
        raise typer.Exit(1)


@dataclass(kw_only=True)
class Summary:
    """What was done so far."""

    spool: str
    responses: int = 0
    tokens: int = 0
    rejected: int = 0
    rejected_file: str | None = None
    findings: tuple[Finding, ...] = field(default=())

    def add(self, adapted: Adapted) -> None:
        self.responses += sum(len(batch) for batch in adapted.batches)
        self.tokens += sum(batch.num_tokens for batch in adapted.batches)
        self.rejected += len(adapted.rejected)
        self.findings = merged((*self.findings, *adapted.findings))

    def text(self) -> str:
        lines = [str(finding) for finding in self.findings]
        if self.rejected:
            lines.append(f"{self.rejected} responses rejected, whole in {self.rejected_file}")
        return "\n".join([*lines, f"{self.responses} responses, {self.tokens} tokens in {self.spool}"])


def _pairs(option: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise InvalidInput(f"{option} {text!r}: give it as NAME=VALUE")
        yield name.strip(), value.strip()


def _value(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(
            f"--setting {name}={text}: the value must be a number, or a JSON object for a bias"
        ) from error


def _identity(vocab_size: int | None, texts: Iterable[str]) -> Identity:
    known = {entry.name for entry in fields(Identity)} - {"vocab_size"}
    told = dict(_pairs("--identity", texts))
    strange = sorted(set(told) - known)
    if strange:
        raise InvalidInput(f"--identity knows no {', '.join(strange)}; there are {', '.join(sorted(known))}")
    return Identity(vocab_size=vocab_size, **told)


def _paths(files: Sequence[Path], adapter: Adapter) -> list[Path]:
    """The files asked for; of a folder all that can be read by their names, at any depth, in order."""
    paths: list[Path] = []
    for path in files:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if is_readable(p, msgpack=adapter.msgpack) and p.is_file())
            if not inside:
                raise StorageError(f"folder {path} holds no file that --from {adapter.engine} reads")
            paths += inside
        elif not path.exists():
            raise StorageError(f"{path} does not exist")
        else:
            paths.append(path)
    return paths


@contextmanager
def _progress() -> Iterator[Any]:
    """A line that says how far it is, on a terminal; nothing in a pipe."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    if not console.is_terminal:
        yield lambda text: None
        return
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("reading", total=None)
        yield lambda text: bars.update(task, description=text)
