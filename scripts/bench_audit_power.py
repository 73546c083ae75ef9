"""`keptset bench audit-power`: what an audit finds of planted faults, and that it finds nothing in honest rollouts."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import keptset
from keptset.scripts.audit_planting import Plant
from keptset.scripts.bench_audit_power_chance import GRID, INCIDENCES, RUN_FAULTS, Power, RunFault, Size, power, sizes
from keptset.scripts.bench_audit_power_kinds import Planted, names, plant_and_audit
from keptset.scripts.bench_audit_power_material import Drawn
from keptset.scripts.bench_audit_power_rollouts import CACHE_NAME, Progress, Source
from keptset.scripts.bench_audit_power_seeds import Seed, audit_seed

UNIFORM = 1e-3
"""Least p-value of the test that p-values over clean sets are uniform."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much is looked at."""

    responses: int
    clean_sets: int
    repeats: int
    grid: tuple[int, ...]
    seeds: int


FULL = Amounts(responses=1_000, clean_sets=10_000, repeats=40, grid=GRID, seeds=20)
QUICK = Amounts(responses=300, clean_sets=300, repeats=4, grid=GRID[:6], seeds=3)


@dataclass(frozen=True, kw_only=True)
class Found:
    """All that was measured."""

    kinds: tuple[Planted, ...]
    sizes: tuple[Size, ...]
    power: tuple[Power, ...]
    seeds: tuple[Seed, ...]

    def failures(self) -> Iterator[str]:
        """What does not hold that should."""
        for planted in self.kinds:
            if not planted.holds:
                named = ", ".join(planted.named) or "nothing"
                yield f"{planted.kind} in {planted.faulty} of {planted.responses} responses: found was {named}"
        for size in self.sizes:
            if size.p_value < UNIFORM:
                yield f"p-values of {size.test} are not uniform: D = {size.distance:.4f}"
        for seed in self.seeds:
            if seed.findings:
                yield f"seed {seed.seed} is honest, and found was {', '.join(seed.findings)}"


def command(
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face folder of a model; left out: SmolLM2-135M-Instruct.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer responses, sets and seeds, to see that it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for audit_power.json, such as docs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Plant every kind of fault into real responses, one at a time, and audit them; and audit honest ones.

    Rollouts and results stay in the cache while it runs: an interrupted run goes on where it was. Ends with 1 where a
    kind is not the one finding of what it was planted into, or something is found in honest rollouts.
    """
    from keptset.rollout.cpu_threads import configure
    from keptset.scripts.demo_model import default_cache, ensure_demo_model

    configure()
    begin = time.monotonic()
    console = Console(stderr=True)
    with console.status("beginning") as status:

        def progress(doing: str, done: float) -> None:
            status.update(f"{doing}: {done:.0%}")

        folder = model or ensure_demo_model(progress=progress)
        place = (
            default_cache()
            / CACHE_NAME
            / ("" if model is None else hashlib.sha256(str(folder).encode()).hexdigest()[:16])
        )
        found = measure(place, Source.demo(folder), QUICK if quick else FULL, progress, console.print)
    told = {
        "date": date.today().isoformat(),
        "command": " ".join(["keptset", *sys.argv[1:]]),
        "keptset": keptset.__version__,
        "model": folder.name,
        "seconds": round(time.monotonic() - begin),
        **asdict(found),
    }
    if out is not None:
        (out / "audit_power.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(told, indent=1))
    failures = list(found.failures())
    for failure in failures:
        console.print(failure, highlight=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def measure(
    folder: Path, source: Source, amounts: Amounts, progress: Progress, tell: Callable[[str], None] = lambda line: None
) -> Found:
    """Everything, in parts whose results are kept in `folder` until all are there."""
    parts = _Parts(folder / f"results-{_digest(source, amounts)}", tell)
    drawn = Drawn(folder, parts.folder, source, amounts.responses, progress)
    clean = parts.of("clean sets", Size, lambda: sizes(drawn.batch, amounts.clean_sets, progress))
    kinds = [
        planted
        for plant, share in names()
        for planted in parts.of(f"{plant.kind.value} {share:g}", Planted, partial(_planted, drawn, plant, share))
    ]
    powers = [
        of_test
        for fault in RUN_FAULTS
        for incidence in INCIDENCES
        for of_test in parts.of(f"{fault.name} {incidence:g}", Power, partial(_power, drawn, amounts, fault, incidence))
    ]
    seeds = [
        of_seed
        for seed in range(1, amounts.seeds + 1)
        for of_seed in parts.of(f"seed {seed}", Seed, partial(_seed, folder, source, seed, progress))
    ]
    parts.remove()
    return Found(kinds=tuple(kinds), sizes=tuple(clean), power=tuple(powers), seeds=tuple(seeds))


def _planted(drawn: Drawn, plant: Plant, share: float) -> list[Planted]:
    drawn.progress(f"planting {plant.kind.value}", 0.0)
    return [plant_and_audit(plant, share, drawn.material, drawn.responses)]


def _power(drawn: Drawn, amounts: Amounts, fault: RunFault, incidence: float) -> list[Power]:
    drawn.progress(fault.name, incidence)
    masses = drawn.masses if fault.drift else None
    return power(fault, incidence, drawn.batch, masses, repeats=amounts.repeats, grid=amounts.grid)


def _seed(folder: Path, source: Source, seed: int, progress: Progress) -> list[Seed]:
    progress(f"auditing seed {seed}", 0.0)
    return [audit_seed(folder, source, seed, progress)]


class _Parts:
    """Results so far, one file for each part."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.folder, self._tell = folder, tell
        folder.mkdir(parents=True, exist_ok=True)

    def of(self, name: str, kind: Callable[..., Any], compute: Callable[[], list[Any]]) -> list[Any]:
        """The records of a part, computed where they are not there."""
        path = self.folder / f"{name.replace(' ', '-')}.json"
        if not path.exists():
            begin = time.monotonic()
            text = json.dumps([asdict(record) for record in compute()])
            path.with_suffix(".partial").write_text(text, encoding="utf-8")
            path.with_suffix(".partial").rename(path)
            self._tell(f"{name}: {time.monotonic() - begin:.1f} s")
        return [kind(**_tuples(record)) for record in json.loads(path.read_text(encoding="utf-8"))]

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def _digest(source: Source, amounts: Amounts) -> str:
    """Of what results follow from: the code that audits and plants, the model and the amounts."""
    told = repr((_code(), source.model, len(source.prompts), amounts))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _code() -> str:
    """As it was when this process began to measure."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for pattern in ("trainer_bridge/**/*.py", "schemas/**/*.py", "scripts/bench_audit_power*.py", "scripts/audit_*.py"):
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()
