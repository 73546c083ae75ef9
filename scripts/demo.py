"""`keptset demo`: rollouts of a small real model under five settings, scored twice, judged and reported."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from keptset.rollout.cpu_threads import configure, usable_cores
from keptset.rollout.sampling import row_seed
from keptset.schemas.errors import InvalidInput, MissingDependency, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.scripts.ratio_table import RunFacts, SettingResult, judge, to_json
from keptset.scripts.table import open_console, print_table

SETTINGS = {
    "no truncation": SamplingParams(),
    "top_k 20": SamplingParams(top_k=20),
    "top_p 0.8": SamplingParams(top_p=0.8),
    "top_p 0.95, top_k 512, T 0.7": SamplingParams(temperature=0.7, top_p=0.95, top_k=512),
    "min_p 0.05": SamplingParams(min_p=0.05),
}
"""The control first, then each way to truncate."""

SETTING_COLUMN = "x_setting"
OUT = Path("keptset-demo")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command was asked to do, with every default settled."""

    model: Path
    model_id: str
    """The model's name for people."""
    prompts: Path
    folder: Path
    """Spool, report and results of this run."""
    actors: int
    gpus_per_actor: float
    threads_per_actor: int
    address: str | None
    seed: int
    max_new_tokens: int


def command(
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder of a Llama, Qwen2 or Qwen3 model; left out: SmolLM2-135M-Instruct."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts; left out: 64 that come with keptset.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Each run gets a folder in here, for its spool and report.")] = OUT,
    actors: Annotated[int, typer.Option(help="Ray actors; 0: as many as this machine carries.", min=0)] = 0,
    gpus_per_actor: Annotated[float, typer.Option(help="GPUs of each actor, fractions allowed.", min=0)] = 0.0,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster, such as auto; left out: Ray on this machine.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Base seed of all draws.", min=0)] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest response in tokens.", min=1)] = 48,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Sample a small real model on this machine and score it twice: ratios, table, report.

    Ends with 1 where kept-set ratios differ from 1, or full-vocabulary ratios from the kept mass, by more than float32
    explains.
    """
    started = datetime.now(timezone.utc).astimezone()
    begin = time.monotonic()
    configure()
    _require("paddle", "ray", "tokenizers", "jinja2", "matplotlib")
    console = Console(stderr=True)
    with _progress(console) as bars:
        plan = _settle(model, prompts, out, actors, gpus_per_actor, address, seed, max_new_tokens, started, bars)
        spool = _generate(plan, bars)
        batch, results = _score(plan, spool, bars)
    run = _facts(plan, batch, started, time.monotonic() - begin)
    if as_json:
        print(json.dumps(to_json(run, results), indent=2))
    else:
        print_table(run, results, open_console())
    report = _write(plan, run, results)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
    console.print(f"rollouts: {spool}", highlight=False, soft_wrap=True)
    if not all(judge(result).passes for result in results):
        raise typer.Exit(1)


def _settle(
    model: Path | None,
    prompts: Path | None,
    out: Path,
    actors: int,
    gpus_per_actor: float,
    address: str | None,
    seed: int,
    max_new_tokens: int,
    started: datetime,
    bars: Progress,
) -> Plan:
    from keptset.rollout.pool import local_actors
    from keptset.scripts.demo_model import MODEL_ID, PROMPTS, ensure_demo_model

    model_id = MODEL_ID if model is None else model.resolve().name
    if model is None:
        with _bar(bars, "model", total=1.0) as task:
            model = ensure_demo_model(progress=lambda doing, done: bars.update(task, description=doing, completed=done))
    if not model.is_dir():
        raise InvalidInput(f"--model {model} is no folder; name a Hugging Face folder with config.json and safetensors")
    count = actors or local_actors(sum(file.stat().st_size for file in model.glob("*.safetensors")))
    return Plan(
        model=model,
        model_id=model_id,
        prompts=prompts or PROMPTS,
        folder=out.absolute() / started.strftime("%Y-%m-%dT%H-%M-%S"),
        actors=count,
        gpus_per_actor=gpus_per_actor,
        threads_per_actor=max(1, usable_cores() // count),
        address=address,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )


def _generate(plan: Plan, bars: Progress) -> Path:
    """Every prompt under every setting, into a spool; returns the spool's folder."""
    from keptset.rollout.config import EngineConfig
    from keptset.rollout.models import DecoderConfig
    from keptset.rollout.pool import RolloutPool
    from keptset.rollout.request import Request
    from keptset.rollout.tokenizer import Tokenizer
    from keptset.schemas.storage.spool import SpoolWriter
    from keptset.scripts.prompts import read_prompts

    tokenizer = Tokenizer.from_folder(plan.model)
    prompts = read_prompts(plan.prompts, tokenizer)
    requests = [
        Request(
            prompt_id=prompt.prompt_id,
            group_id=f"{name}/{prompt.prompt_id}",
            rollout_id=f"{name}/{prompt.prompt_id}",
            prompt_token_ids=prompt.token_ids,
            params=replace(
                params,
                max_new_tokens=plan.max_new_tokens,
                stop_token_ids=tokenizer.stop_token_ids,
                seed=row_seed(plan.seed, f"{name}/{prompt.prompt_id}", 0),
            ),
            extra={SETTING_COLUMN: name},
        )
        for prompt in prompts
        for name, params in SETTINGS.items()
    ]
    config = DecoderConfig.from_folder(plan.model)
    for request in requests:
        request.resolved(plan.seed).check(config.vocab_size, config.max_position_embeddings)
    spool = plan.folder / "spool"
    with _bar(bars, f"starting {plan.actors} actors", total=None):
        pool = RolloutPool(
            plan.model,
            EngineConfig(slots=32, base_seed=plan.seed),
            actors=plan.actors,
            gpus_per_actor=plan.gpus_per_actor,
            threads_per_actor=plan.threads_per_actor,
            address=plan.address,
            model_id=plan.model_id,
        )
    with pool, SpoolWriter(spool) as writer, _bar(bars, "sampling responses", total=len(requests)) as task:
        for batch in pool.run(requests):
            writer.append(batch)
            bars.advance(task, len(batch))
    return spool


def _score(plan: Plan, spool: Path, bars: Progress) -> tuple[RolloutBatch, list[SettingResult]]:
    """Read the spool and measure every setting; returns what was read, too."""
    from keptset.rollout.models import load_decoder
    from keptset.schemas.rollout_batch import concat_batches
    from keptset.schemas.storage.spool import SpoolReader
    from keptset.scripts.measure import measure

    batch = concat_batches(list(SpoolReader(spool)))
    decoder = load_decoder(plan.model)
    names = batch.column(SETTING_COLUMN).to_numpy(zero_copy_only=False)
    with _bar(bars, "scoring tokens", total=batch.num_tokens) as task:
        results = [
            measure(name, params, decoder, batch.filter(names == name), lambda done: bars.advance(task, done))
            for name, params in SETTINGS.items()
        ]
    return batch, results


def _facts(plan: Plan, batch: RolloutBatch, started: datetime, seconds: float) -> RunFacts:
    import keptset

    packages = ("paddlepaddle", "paddlepaddle-gpu", "ray", "numpy", "pyarrow")
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
    return RunFacts(
        model=plan.model_id,
        engine=f"keptset {keptset.__version__} on Ray",
        scorer="the same decoder, in one pass over prompt and response, where the engine went token by token",
        dtype="float32",
        prompts=len(set(batch.column("prompt_id").to_pylist())),
        responses=len(batch),
        actors=plan.actors,
        threads_per_actor=plan.threads_per_actor,
        seed=plan.seed,
        started=started.isoformat(timespec="seconds"),
        seconds=seconds,
        machine=f"{platform.system()} {platform.machine()}, {usable_cores()} cores",
        versions={name: installed[name] for name in packages if name in installed},
        command=shlex.join(["keptset", *sys.argv[1:]]),
    )


def _write(plan: Plan, run: RunFacts, results: list[SettingResult]) -> Path:
    from keptset.scripts.report import write_report

    path = plan.folder / "results.json"
    try:
        path.write_text(json.dumps(to_json(run, results), indent=2), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; the rollouts beside it are whole") from error
    return write_report(plan.folder / "report.html", run, results)


def _require(*packages: str) -> None:
    from importlib.util import find_spec

    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingDependency(
            f"the demo needs {', '.join(missing)}: pip install 'keptset[cpu,demo,report]', or [gpu,...] for a GPU build"
        )


def _progress(console: Console) -> Progress:
    """Bars on a terminal, nothing in a pipe."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


@contextmanager
def _bar(bars: Progress, description: str, *, total: float | None) -> Iterator[TaskID]:
    task = bars.add_task(description, total=total)
    yield task
    bars.update(task, completed=total if total is not None else 1, total=total if total is not None else 1)
