"""Two recordings of the same rollouts, matched by rollout_id: where they part, and since when.

Rows of both are dealt out to pieces by a digest of their id, in temporary files, so that what belongs together meets in
one piece and memory does not grow with the recordings. A piece that is still too large is read several times.

Legend: R rows of one side of a piece.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput
from keptset.schemas.findings import Example
from keptset.schemas.ragged import Ragged
from keptset.trainer_bridge.audit.comparison import AspectRow, Comparison, Share
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.examples import FirstExamples
from keptset.trainer_bridge.audit.partings import ASPECTS, COLUMNS, NOWHERE, Pairs, Parted
from keptset.trainer_bridge.audit.reading.files import read, scan
from keptset.trainer_bridge.audit.reading.inputs import InputFile, find_inputs
from keptset.trainer_bridge.audit.reading.row_keys import keys_of
from keptset.trainer_bridge.sketch import LogHistogram, SizeHistogram

TOLERANCE = 1e-4
"""Nats; float32 paths over the same weights rarely differ by more."""
PIECE_BYTES = 1 << 26
MAX_PIECES = 64
EXPANSION = 4
"""Bytes in memory for one in a file, about."""
ORDER_PARTS = 20
KEY, ORDER = "key", "order"
Ints = NDArray[np.int64]


def compare(
    paths: Sequence[str | Path],
    other_paths: Sequence[str | Path],
    *,
    tolerance: float = TOLERANCE,
    unguarded: bool = False,
    piece_bytes: int = PIECE_BYTES,
) -> Comparison:
    """Compare the recording at `paths` with the one at `other_paths`. b and m differ where they do by more than
    `tolerance` nats.

    Errors: those of finding and reading files; InvalidInput for a tolerance that is none, and for recordings that have
    no rollout_id in common.
    """
    if not (tolerance >= 0 and np.isfinite(tolerance)):
        raise InvalidInput(f"tolerance is {tolerance}; it must be a finite number of nats >= 0")
    sides = [find_inputs(paths), find_inputs(other_paths)]
    size = max(sum(file.size for file in files) for files in sides)
    pieces = int(np.clip(-(-size * EXPANSION // piece_bytes), 1, MAX_PIECES))
    with tempfile.TemporaryDirectory(prefix="keptset-") as folder:
        dealt = [_deal(files, Path(folder) / name, pieces, unguarded) for name, files in zip("ab", sides, strict=True)]
        found = _Found(rows=dealt[0].rows, tolerance=tolerance)
        for number in range(pieces):
            largest = max(side.bytes_of[number] for side in dealt)
            rounds = max(1, -(-largest // (4 * piece_bytes)))
            for turn in range(rounds):
                found.add(*(_piece(side.paths[number], turn, rounds) for side in dealt))
    comparison = found.comparison()
    if not comparison.matched:
        raise InvalidInput(
            f"no rollout_id is in both recordings: {comparison.only_here:,} are only here, {comparison.only_there:,} "
            "only there; a comparison needs the same rollouts, replayed or stored under their ids"
        )
    return comparison


@dataclass(frozen=True, kw_only=True)
class _Dealt:
    """One recording, dealt out."""

    rows: int
    paths: list[Path]
    bytes_of: list[int]


def _deal(files: Sequence[InputFile], folder: Path, pieces: int, unguarded: bool) -> _Dealt:
    folder.mkdir()
    paths = [folder / str(number) for number in range(pieces)]
    writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
    bytes_of, rows = [0] * pieces, 0
    with ExitStack() as closing:
        for batch in _batches(files, unguarded):
            keys_R2, _ = keys_of(batch, "rollout_id")
            numbered = batch.append_column(KEY, pa.array(keys_R2[:, 1])).append_column(
                ORDER, pa.array(np.arange(rows, rows + batch.num_rows))
            )
            rows += batch.num_rows
            number_R = (keys_R2[:, 0] % np.uint64(pieces)).astype(np.int64)
            for number in np.unique(number_R).tolist():
                part = numbered if pieces == 1 else numbered.filter(pa.array(number_R == number))
                if number not in writers:
                    sink = closing.enter_context(pa.OSFile(str(paths[number]), "wb"))
                    writers[number] = closing.enter_context(pa.ipc.new_stream(sink, part.schema))
                writers[number].write_batch(part)
                bytes_of[number] += part.nbytes
    return _Dealt(rows=rows, paths=paths, bytes_of=bytes_of)


def _batches(files: Sequence[InputFile], unguarded: bool) -> Iterator[pa.RecordBatch]:
    for file in files:
        parts = sum(1 for _ in scan(file, ("rollout_id",), unguarded=unguarded))
        for batch in read(file, 0, parts, unguarded=unguarded):
            yield batch.arrow.select(list(COLUMNS)).replace_schema_metadata(None)


def _piece(path: Path, turn: int, rounds: int) -> pa.Table | None:
    """The rows of a piece whose turn it is; None where there are none."""
    if not path.exists():
        return None
    kept = []
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        for batch in reader:
            mine = batch.column(KEY).to_numpy() % np.uint64(rounds) == turn
            kept.append(batch if mine.all() else batch.filter(pa.array(mine)))
    return pa.Table.from_batches(kept).combine_chunks() if kept else None


@dataclass
class _Aspect:
    responses: int = 0
    places: int = 0
    compared: int = 0
    first: SizeHistogram = field(default_factory=SizeHistogram)
    least: int = NOWHERE
    distance: ExactSum = field(default_factory=ExactSum)
    sketch: LogHistogram = field(default_factory=LogHistogram)
    largest: float = 0.0
    examples: FirstExamples = field(default_factory=FirstExamples)
    by_order: Ints = field(default_factory=lambda: np.zeros(ORDER_PARTS, np.int64))
    by_version: dict[int | None, int] = field(default_factory=dict)


class _Found:
    """Everything counted so far."""

    def __init__(self, *, rows: int, tolerance: float) -> None:
        self._rows, self._tolerance = rows, tolerance
        self._aspects = {aspect: _Aspect() for aspect in ASPECTS}
        self._matched = self._only_here = self._only_there = self._repeated = 0
        self._by_order = np.zeros(ORDER_PARTS, np.int64)
        self._by_version: dict[int | None, int] = {}

    def add(self, here: pa.Table | None, there: pa.Table | None) -> None:
        """One piece of each recording."""
        here_rows, there_rows = self._once(here), self._once(there)
        matched = [rollout_id for rollout_id in here_rows if rollout_id in there_rows]
        self._matched += len(matched)
        self._only_here += len(here_rows) - len(matched)
        self._only_there += len(there_rows) - len(matched)
        if here is None or there is None or not matched:
            return
        a = here.take(pa.array([here_rows[rollout_id] for rollout_id in matched]))
        b = there.take(pa.array([there_rows[rollout_id] for rollout_id in matched]))
        order_R = a.column(ORDER).to_numpy()
        part_R = order_R * ORDER_PARTS // max(self._rows, 1)
        versions = _first_versions(a)
        self._by_order += np.bincount(part_R, minlength=ORDER_PARTS)
        _count(self._by_version, versions)
        pairs = Pairs(a, b, self._tolerance)
        for aspect in ASPECTS:
            self._add(aspect, pairs.parted(aspect), matched, order_R, part_R, versions)

    def _once(self, rows: pa.Table | None) -> dict[str, int]:
        """Row of each id, the first one."""
        found: dict[str, int] = {}
        if rows is None:
            return found
        for row, rollout_id in enumerate(rows.column("rollout_id").to_pylist()):
            found.setdefault(rollout_id, row)
        self._repeated += rows.num_rows - len(found)
        return found

    def _add(
        self, aspect: str, parted: Parted, ids: list[str], order_R: Ints, part_R: Ints, versions: list[int | None]
    ) -> None:
        sums = self._aspects[aspect]
        rows = np.flatnonzero(parted.first_R != NOWHERE)
        sums.responses += len(rows)
        sums.places += int(parted.differing_R.sum())
        sums.compared += int(parted.compared_R.sum())
        sums.first.add(parted.first_R[rows])
        sums.least = min(sums.least, int(parted.first_R[rows].min(initial=NOWHERE)))
        sums.by_order += np.bincount(part_R[rows], minlength=ORDER_PARTS)
        _count(sums.by_version, [versions[row] for row in rows.tolist()])
        if parted.distance_D is not None:
            sums.distance.add(parted.distance_D)
            sums.sketch.add(parted.distance_D)
            sums.largest = max(sums.largest, float(parted.distance_D.max(initial=0.0)))
        for row in rows[np.argsort(order_R[rows], kind="stable")][:3].tolist():
            position, order = int(parted.first_R[row]), int(order_R[row])
            detail = f"row {order:,}, position {position}" + (
                "" if versions[row] is None else f", version {versions[row]}"
            )
            sums.examples.add((0, order, position), Example(rollout_id=ids[row], position=position, detail=detail))

    def comparison(self) -> Comparison:
        """What it amounts to."""
        return Comparison(
            matched=self._matched,
            only_here=self._only_here,
            only_there=self._only_there,
            repeated=self._repeated,
            tolerance=self._tolerance,
            aspects=tuple(self._row(aspect, sums) for aspect, sums in self._aspects.items()),
        )

    def _row(self, aspect: str, sums: _Aspect) -> AspectRow:
        examples = sums.examples.examples
        versions = sorted(self._by_version, key=lambda version: -1 if version is None else version)
        return AspectRow(
            aspect=aspect,
            responses=sums.responses,
            places=sums.places,
            compared=sums.compared,
            first_position=None if sums.least == NOWHERE else sums.least,
            median_first_position=sums.first.quantile(0.5),
            mean_abs=sums.distance.mean,
            p99_abs=sums.sketch.quantile(0.99),
            max_abs=sums.largest if sums.distance.count else None,
            since=examples[0] if examples else None,
            examples=examples,
            by_order=tuple(
                Share(responses=all_of, parted=parted)
                for all_of, parted in zip(self._by_order.tolist(), sums.by_order.tolist(), strict=True)
            ),
            by_version={
                version: Share(responses=self._by_version[version], parted=sums.by_version.get(version, 0))
                for version in versions
            },
        )


def _count(into: dict[int | None, int], versions: Sequence[int | None]) -> None:
    for version in versions:
        into[version] = into.get(version, 0) + 1


def _first_versions(rows: pa.Table) -> list[int | None]:
    """Version of the first token that has one, per row."""
    column = Ragged.from_arrow(rows.column("policy_versions").combine_chunks())
    known = np.flatnonzero(column.values >= 0)
    at = np.searchsorted(known, column.offsets[:-1])
    found = []
    for row, index in enumerate(at.tolist()):
        inside = index < len(known) and known[index] < column.offsets[row + 1]
        found.append(int(column.values[known[index]]) if inside else None)
    return found
