"""`keptset bench wire`: bytes a token in memory, spool and archive beside other formats; rates beside a memory copy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.archive import read_archive, write_archive
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter
from keptset.schemas.validation import validate
from keptset.scripts.bench_wire_encodings import Tried, try_encodings
from keptset.scripts.bench_wire_formats import to_json, to_msgpack, to_pickle
from keptset.scripts.bench_wire_rollouts import made_up_rollouts, real_rollouts, without_distributions
from keptset.scripts.table import open_console
from keptset.scripts.timing import interleaved

SPOOL_GOAL, ARCHIVE_GOAL, VALIDATE_GOAL = 0.55, 0.5, 60e6
"""Of the bytes of msgpack, and kept ids a second."""
MADE_UP_TOKENS = 2**16
JOINED_ROWS = 64
"""Responses in a batch where batches are not taken as they were recorded: on a processor they are of one or two."""
ROUNDS = 5
VALIDATE = "validate"


@dataclass(frozen=True, kw_only=True)
class WireResult:
    """What was measured on one set of responses. Rates are of the Arrow memory that goes in or comes out."""

    responses: int
    tokens: int
    kept_ids: int
    batches: int
    memory_bytes_per_token: float
    spool_bytes_per_token: float
    """Published."""
    archive_bytes_per_token: float
    msgpack_bytes_per_token: float
    pickle_bytes_per_token: float
    json_bytes_per_token: float
    spool_to_msgpack: float
    archive_to_msgpack: float
    bytes_per_second: dict[str, float]
    validate_ids_per_second: float
    mapped_read_copied_bytes: int
    """Bytes allocated in reading a spool that is not compressed, with all views made."""


def command(
    encodings: Annotated[
        bool, typer.Option("--encodings", help="Also measure other encodings of the kept ids, without adopting them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Bytes a token in memory, spool and archive, against msgpack, pickle and JSON; rates against a memory copy.

    Real: responses of the demo's model, sampled once (minutes) and kept in the cache, in batches as recorded. Joined:
    the same, 64 a batch. Distributions: joined, with the whole kept distributions. Zipf, even: made up, ids as frequent
    as words of a text, or all alike, which is the worst case.
    """
    console = Console(stderr=True)
    with console.status("sampling responses") as status:
        recorded = real_rollouts(progress=lambda tokens: status.update(f"sampling responses, {tokens} tokens so far"))
        whole = concat_batches(recorded)
        sets: dict[str, Sequence[RolloutBatch]] = {
            "real": [without_distributions(batch) for batch in recorded],
            "joined": _joined(without_distributions(whole)),
            "distributions": _joined(whole),
            "zipf": [without_distributions(made_up_rollouts(MADE_UP_TOKENS))],
            "even": [without_distributions(made_up_rollouts(MADE_UP_TOKENS, even=True))],
        }
        results = {}
        for name, batches in sets.items():
            status.update(f"measuring: {name}")
            results[name] = measure(batches, ROUNDS)
        tried = try_encodings(whole) if encodings else []
    if as_json:
        print(json.dumps(to_report(results, tried), indent=2))
    else:
        _print(results, tried)


def to_report(results: dict[str, WireResult], tried: Sequence[Tried] = ()) -> dict[str, Any]:
    """The first result's numbers, then all by name, and the goals."""
    first, *_ = results.values()
    report: dict[str, Any] = asdict(first)
    report["goals"] = {
        "spool_to_msgpack": SPOOL_GOAL,
        "archive_to_msgpack": ARCHIVE_GOAL,
        "validate_ids_per_second": VALIDATE_GOAL,
    }
    report["sets"] = {name: asdict(result) for name, result in results.items()}
    if tried:
        report["encodings_bytes_per_token"] = {entry.name: entry.bytes_per_token for entry in tried}
    return report


def measure(batches: Sequence[RolloutBatch], rounds: int) -> WireResult:
    """Sizes and rates of these responses, in a temporary folder."""
    whole = concat_batches(list(batches))
    tokens = whole.num_tokens
    with tempfile.TemporaryDirectory(prefix="keptset-bench-") as temporary:
        folder = Path(temporary)
        spool = _spooled(batches, folder / "spool")
        archived = write_archive(batches, folder / "archive.parquet").size
        copied = mapped_read_copies(whole, folder / "uncompressed")
        seconds = interleaved(_Ways(batches, whole, folder).ways(), rounds)
    memory = whole.arrow.nbytes
    msgpack = len(to_msgpack(whole))
    validate_seconds = seconds.pop(VALIDATE)
    return WireResult(
        responses=len(whole),
        tokens=tokens,
        kept_ids=whole.num_kept_ids,
        batches=len(batches),
        memory_bytes_per_token=memory / tokens,
        spool_bytes_per_token=spool / tokens,
        archive_bytes_per_token=archived / tokens,
        msgpack_bytes_per_token=msgpack / tokens,
        pickle_bytes_per_token=len(to_pickle(whole)) / tokens,
        json_bytes_per_token=len(to_json(whole)) / tokens,
        spool_to_msgpack=spool / msgpack,
        archive_to_msgpack=archived / msgpack,
        bytes_per_second={name: memory / took for name, took in seconds.items()},
        validate_ids_per_second=whole.num_kept_ids / validate_seconds,
        mapped_read_copied_bytes=copied,
    )


def _joined(whole: RolloutBatch) -> list[RolloutBatch]:
    return [whole.slice(start, JOINED_ROWS) for start in range(0, len(whole), JOINED_ROWS)]


def _spooled(batches: Sequence[RolloutBatch], folder: Path) -> int:
    """Bytes of the published files."""
    with SpoolWriter(folder, "bench", fsync="never") as writer:
        for batch in batches:
            writer.append(batch)
    return sum(path.stat().st_size for path in folder.iterdir())


def mapped_read_copies(batch: RolloutBatch, folder: Path) -> int:
    """Bytes that Arrow allocates when the batch comes back from a spool without compression and every view is made."""
    with SpoolWriter(folder, "bench", compression="none") as writer:
        writer.append(batch)
    before = pa.total_allocated_bytes()
    (mapped,) = SpoolReader(folder)
    for view in ("token_ids", "behavior_logprobs", "log_kept_mass", "kept_ids", "kept_logprobs"):
        getattr(mapped, view)
    return int(pa.total_allocated_bytes() - before)


class _Ways:
    """Each way to write or read these responses, to be taken in turn: what one has written the next reads."""

    def __init__(self, batches: Sequence[RolloutBatch], whole: RolloutBatch, folder: Path) -> None:
        self.batches, self.whole, self.folder = batches, whole, folder
        found = [buffer for column in whole.arrow.columns for buffer in column.buffers()]
        self.buffers = [np.frombuffer(buffer, np.uint8) for buffer in found if buffer is not None]
        self.spools = 0

    def ways(self) -> dict[str, Callable[[], object]]:
        return {
            "memory copy": lambda: [buffer.copy() for buffer in self.buffers],
            "spool append": self.append,
            "spool publish": lambda: self.writer.close(),
            "spool read": lambda: [len(batch) for batch in SpoolReader(self.writer.folder)],
            "archive write": lambda: write_archive(self.batches, self.archive, overwrite=True),
            "archive read": lambda: [len(batch) for batch in read_archive(self.archive)],
            "msgpack write": lambda: to_msgpack(self.whole),
            VALIDATE: lambda: validate(self.whole),
        }

    @property
    def archive(self) -> Path:
        return self.folder / "timed.parquet"

    def append(self) -> None:
        self.spools += 1
        self.writer = SpoolWriter(self.folder / f"spool-{self.spools}", "bench", fsync="never")
        for batch in self.batches:
            self.writer.append(batch)


_SIZES = {
    "memory": "memory_bytes_per_token",
    "spool": "spool_bytes_per_token",
    "archive": "archive_bytes_per_token",
    "msgpack, packed": "msgpack_bytes_per_token",
    "pickle, lists": "pickle_bytes_per_token",
    "JSON, lists": "json_bytes_per_token",
}


def _print(results: dict[str, WireResult], tried: Sequence[Tried]) -> None:
    console = open_console()
    sizes = Table("bytes a token", *results, title="Size")
    for label, name in _SIZES.items():
        cells = [
            f"{getattr(result, name):.1f} ({getattr(result, name) / result.msgpack_bytes_per_token:.2f})"
            for result in results.values()
        ]
        sizes.add_row(label, *cells)
    sizes.caption = f"In brackets: of msgpack. Goals: spool {SPOOL_GOAL}, archive {ARCHIVE_GOAL}."
    rates = Table("MB/s of Arrow memory", *results, title="Speed")
    for name in next(iter(results.values())).bytes_per_second:
        rates.add_row(name, *(f"{result.bytes_per_second[name] / 1e6:,.0f}" for result in results.values()))
    rates.add_row(
        "validation, million kept ids/s", *(f"{r.validate_ids_per_second / 1e6:.0f}" for r in results.values())
    )
    rates.add_row("bytes copied, spool not compressed", *(str(r.mapped_read_copied_bytes) for r in results.values()))
    console.print(sizes, rates)
    if tried:
        table = Table("encoding", "bytes a token", title="Other encodings of kept sets")
        for entry in tried:
            table.add_row(entry.name, f"{entry.bytes_per_token:.2f}")
        console.print(table)
    for name, r in results.items():
        kept = f"{r.kept_ids / r.tokens:.2f} kept ids each"
        console.print(f"{name}: {r.tokens} tokens, {kept}, in {r.responses} responses, {r.batches} batches")
