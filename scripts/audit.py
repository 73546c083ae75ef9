"""`keptset audit`: recorded rollouts, however many, searched for every way in which their ratios can lie."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from keptset.schemas.errors import CheckpointError, InvalidInput
from keptset.schemas.findings import Severity
from keptset.scripts.audit_outputs import check_outputs, put_out
from keptset.scripts.audit_ray import audit_on_ray
from keptset.scripts.audit_ray import with_left_out_values as with_left_out_values
from keptset.scripts.demo_model import default_cache
from keptset.trainer_bridge.audit import checkpoint
from keptset.trainer_bridge.audit.against import compare
from keptset.trainer_bridge.audit.options import AuditOptions, BatchScorer, Progress
from keptset.trainer_bridge.audit.recorded_logprobs import RecordedColumn
from keptset.trainer_bridge.audit.report import AuditReport
from keptset.trainer_bridge.audit.runner import audit
from keptset.trainer_bridge.usable_cores import usable_cores

FOUND, UNREADABLE, INTERRUPTED = 1, 3, 130
_THREADS = "MKL_NUM_THREADS", "OMP_NUM_THREADS"
"""What Paddle and torch ask for how many threads to take."""


class FailOn(str, Enum):
    """The severity from which on findings end the command with 1."""

    warning = "warning"
    error = "error"


def command(
    paths: Annotated[
        list[str],
        typer.Argument(help="Spools, archives, Arrow files, folders of these at any depth, globs, addresses."),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[VERSION=]DIR",
            help="Score with this model, a Hugging Face folder; once for each version whose weights are at hand.",
        ),
    ] = None,
    trainer_logprobs: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Score with what the trainer recorded in this column, x_ and a name."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OTHER",
            help="Compare with another recording of the same rollouts instead: where and since when they part.",
        ),
    ] = None,
    max_version_lag: Annotated[
        int | None, typer.Option(help="Tokens of weights more versions old than this are a finding.", min=0)
    ] = None,
    filtered: Annotated[
        bool,
        typer.Option("--filtered", help="Rollouts were chosen by reward: tests of the draws are shown, not judged."),
    ] = False,
    sample: Annotated[
        int | None, typer.Option(help="A quick look at about this many responses, chosen at random.", min=1)
    ] = None,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="End with 1 where a finding is at least this severe; left out: error.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON: docs/audit.schema.json describes it.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option(help="Write the JSON to this file, beside what is printed.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML file, with plots.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with tokenizer.json, for the text of responses; left out: the model's, if given."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; left out: as many as there are cores, one with a model.", min=1)
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Spread the work over a Ray cluster; without an address that of RAY_ADDRESS, or one started here.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on where the same audit was interrupted.")
    ] = True,
    unguarded: Annotated[
        bool,
        typer.Option(
            "--unguarded",
            help="Also take Parquet files without keptset's checksums; a damaged one may end the process.",
        ),
    ] = False,
) -> None:
    """Search recorded rollouts for every way in which their importance ratios can be wrong.

    Without a model: structure, settings, versions, repeats, and whether tokens are draws from what was recorded. With
    one, or with the trainer's own log-probabilities: ratios too, and which fault explains them.

    Ends with 0 where all is well, 1 with findings, 2 for wrong use, 3 where something could not be read. With --against
    it ends with 1 where the recordings part.
    """
    if against:
        _refuse_beside_against(
            {
                "--model": model or None,
                "--trainer-logprobs": trainer_logprobs,
                "--max-version-lag": max_version_lag,
                "--filtered": filtered or None,
                "--sample": sample,
                "--fail-on": fail_on,
                "--html": html,
                "--tokenizer": tokenizer,
                "--workers": workers,
                "--ray": ray,
            }
        )
        check_outputs(None, json_file)
        comparison = compare(paths, against, unguarded=unguarded)
        put_out(comparison, as_json=as_json, json_file=json_file, html=None)
        if comparison.parts:
            raise typer.Exit(FOUND)
        return
    check_outputs(html, json_file)
    options = AuditOptions(
        max_version_lag=max_version_lag,
        filtered=filtered,
        sample=sample,
        workers=1 if model and workers is None and ray is None else workers,
        unguarded=unguarded,
        work_stays=True,
        scorer=_scorer(model or [], trainer_logprobs),
    )
    if resume:
        options = replace(options, work=_work_folder(paths, options))
    with sharing_cores(workers if model and workers and ray is None else 1):
        report = _run(paths, options, ray)
    report = _decoded(report, tokenizer, model or [])
    put_out(report, as_json=as_json, json_file=json_file, html=html)
    _forget(options.work)
    code = exit_code(report, Severity((fail_on or FailOn.error).value))
    if code:
        raise typer.Exit(code)


def exit_code(report: AuditReport, fail_on: Severity) -> int:
    """1 with findings at or above `fail_on`; 3 where a file could not be read to its end, or nothing was there."""
    grave = {Severity.ERROR} if fail_on is Severity.ERROR else {Severity.ERROR, Severity.WARNING}
    if report.severity in grave:
        return FOUND
    return UNREADABLE if report.totals.damaged_files or not report.totals.responses else 0


def _refuse_beside_against(given: Mapping[str, object]) -> None:
    named = [option for option, value in given.items() if value is not None]
    if named:
        raise InvalidInput(
            f"--against compares two recordings and nothing else: leave {', '.join(named)} out, or run twice"
        )


def _scorer(models: list[str], column: str | None) -> Callable[[], BatchScorer] | None:
    if models and column is not None:
        raise InvalidInput("scores come from a model or from a column: give --model or --trainer-logprobs, not both")
    if column is not None:
        return RecordedColumn(column=column)
    if models:
        from keptset.scripts.audit_scorers import model_folders

        return model_folders(models)
    return None


def _work_folder(paths: list[str], options: AuditOptions) -> Path | None:
    """Where an interrupted audit of these paths with these options waits; whether files changed is checked there."""
    told = "\0".join(path if "://" in path else os.path.abspath(path) for path in paths)
    name = hashlib.blake2b(f"{options.digest()}\0{told}".encode(), digest_size=8).hexdigest()
    try:
        return default_cache() / "audits" / name
    except CheckpointError:
        print("keptset: nothing is kept to go on from: there is no home folder, and no XDG_CACHE_HOME", file=sys.stderr)
        return None


def _forget(work: Path | None) -> None:
    if work is not None:
        checkpoint.remove(work)
        with contextlib.suppress(OSError):  # not there, or another audit's work lies in it
            work.rmdir()


def _run(paths: list[str], options: AuditOptions, ray: str | None) -> AuditReport:
    try:
        with _progress() as tell:
            options = replace(options, progress=tell)
            report = audit(paths, options) if ray is None else audit_on_ray(paths, options, ray)
    except KeyboardInterrupt:
        kept = options.work is not None and checkpoint.is_kept(options.work)
        again = "the same command goes on from there" if kept else "nothing of it was kept"
        print(f"keptset: interrupted; {again}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    return report


def _decoded(report: AuditReport, tokenizer: Path | None, models: list[str]) -> AuditReport:
    """With text, if there is a tokenizer."""
    from keptset.rollout.tokenizer import Tokenizer
    from keptset.scripts.audit_decoded import recorded_otherwise, tokenizer_folder, with_text

    folder = tokenizer_folder(tokenizer, models)
    if folder is None or (tokenizer is None and find_spec("tokenizers") is None):
        return report
    reader = Tokenizer.from_folder(folder)
    if recorded_otherwise(report, reader):
        print(f"keptset: the rollouts were recorded with another tokenizer than {folder}'s", file=sys.stderr)
    return with_text(report, reader)


@contextmanager
def sharing_cores(processes: int) -> Iterator[None]:
    """What is started meanwhile computes on its part of the cores, unless the user said how many threads it has.

    Models in several processes that each take all cores run many times slower than one.
    """
    threads = str(max(1, usable_cores() // processes))
    ours = {name: threads for name in _THREADS if name not in os.environ and processes > 1}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; in a pipe only what has to be told."""
    console = Console(stderr=True)

    def note(told: Progress) -> None:
        if told.note is not None:
            print(f"keptset: {told.note}", file=sys.stderr)

    if not console.is_terminal:
        yield note
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("looking at the files", total=None)

        def tell(told: Progress) -> None:
            note(told)
            done = f"{told.tokens:,} tokens"
            bars.update(task, description=done, completed=told.units_done, total=told.units_total)

        yield tell
