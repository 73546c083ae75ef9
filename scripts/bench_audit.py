"""`keptset bench audit`: kept ids a second of an audit, beside a plain read and a loop in Python, and its memory."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer
from rich.console import Console

from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter
from keptset.scripts.bench_wire_rollouts import made_up_rollouts, without_distributions
from keptset.scripts.timing import interleaved, print_numbers
from keptset.trainer_bridge.audit import AuditOptions, audit
from keptset.trainer_bridge.usable_cores import usable_cores

GOAL, GOAL_DRAWS, GOAL_PEAK_MB = 20e6, 10e6, 600
"""Kept ids a second on two cores, without and with the draw test; resident memory of all processes."""
TOKENS = 10_000_000
PATTERN_TOKENS = 2**18
"""Made up once; they come again under other names, since what they hold does not change how long it takes."""
LOOP_ROWS = 4
ROUNDS = 3
POLL_SECONDS = 0.02
_AUDIT = """
import sys
from keptset.trainer_bridge.audit import AuditOptions, audit
audit([sys.argv[1]], AuditOptions(workers=int(sys.argv[2])))
"""


@dataclass(frozen=True, kw_only=True)
class AuditBench:
    """What was measured."""

    tokens: int
    kept_ids: int
    workers: int
    ids_per_second: float
    """The whole audit of files without whole distributions: structure, repeats, surprisal, tables."""
    ids_per_second_draws: float
    """The same with the kept distribution of every token: also compared with b and H, and the draw test."""
    read_ids_per_second: float
    """Baseline: the files without distributions read and checked for damage by one process, and nothing else."""
    loop_ids_per_second: float
    """Baseline: sets in order, and tokens in their sets, by a loop in Python over rows as Python objects."""
    peak_mb: float
    """Resident memory of all processes at its highest, pages that they share counted once; with distributions."""


def command(
    tokens: Annotated[int, typer.Option(help="How many to audit.")] = TOKENS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Rates and memory of an audit over a spool of made-up rollouts, on all usable cores."""
    busy = Console(stderr=True).status("writing and auditing rollouts")
    with tempfile.TemporaryDirectory(prefix="keptset-bench-") as folder, busy:
        result = measure(Path(folder), tokens, ROUNDS)
    if as_json:
        goals = {"ids_per_second": GOAL, "ids_per_second_draws": GOAL_DRAWS, "peak_mb": GOAL_PEAK_MB}
        print(json.dumps({**asdict(result), "goals": goals}, indent=2))
    else:
        print_numbers("keptset bench audit", asdict(result))


def measure(folder: Path, tokens: int, rounds: int) -> AuditBench:
    """Write two spools in `folder`, without and with whole distributions, and audit both."""
    pattern = made_up_rollouts(min(tokens, PATTERN_TOKENS))
    copies = max(tokens // pattern.num_tokens, 1)
    plain, whole = folder / "plain", folder / "whole"
    with SpoolWriter(plain, "bench", fsync="never") as one, SpoolWriter(whole, "bench", fsync="never") as other:
        for number in range(copies):
            batch = _renamed(pattern, number)
            one.append(without_distributions(batch))
            other.append(batch)
    workers = usable_cores()
    options = AuditOptions(workers=workers)
    seconds = interleaved(
        {
            "audit": lambda: audit([plain], options),
            "draws": lambda: audit([whole], options),
            "read": lambda: sum(len(batch) for batch in SpoolReader(plain, duplicates="keep")),
            "loop": lambda: loop(pattern.slice(0, LOOP_ROWS)),
        },
        rounds,
    )
    kept_ids = copies * pattern.num_kept_ids
    peak_mb = peak_of([sys.executable, "-c", _AUDIT, str(whole), str(workers)])
    return AuditBench(
        tokens=copies * pattern.num_tokens,
        kept_ids=kept_ids,
        workers=workers,
        ids_per_second=kept_ids / seconds["audit"],
        ids_per_second_draws=kept_ids / seconds["draws"],
        read_ids_per_second=kept_ids / seconds["read"],
        loop_ids_per_second=pattern.slice(0, LOOP_ROWS).num_kept_ids / seconds["loop"],
        peak_mb=peak_mb,
    )


def _renamed(batch: RolloutBatch, number: int) -> RolloutBatch:
    arrow = batch.arrow
    for name, values in (
        ("rollout_id", pa.array([f"{number}-{rollout_id}" for rollout_id in batch.rollout_ids])),
        ("seed", pa.array(range(number * len(batch), (number + 1) * len(batch)), pa.int64())),
    ):
        place = arrow.schema.get_field_index(name)
        arrow = arrow.set_column(place, arrow.schema.field(place), values)
    return RolloutBatch.from_arrow(arrow)


def loop(batch: RolloutBatch) -> int:
    """Faults of the sets, token by token."""
    faults = 0
    for row in batch.arrow.select(["token_ids", "kept_ids"]).to_pylist():
        for token, ids in zip(row["token_ids"], row["kept_ids"], strict=True):
            faults += token not in ids or any(one >= other for one, other in itertools.pairwise(ids))
    return faults


def peak_of(command: list[str]) -> float:
    """Megabytes that a command and its children hold at the most."""
    process = subprocess.Popen(command)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, sum(_resident_mb(pid) for pid in _tree(process.pid)))
        time.sleep(POLL_SECONDS)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")
    return peak


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _resident_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
