"""Rows that repeat others: the same rollout_id again, with the same content or with other; the same row seed again.

The first row of a rollout_id, in the order of reading, is the response; those after it are copies or conflicts. Of the
rows that are no such repeats, all that share a seed are found, and the first of them stands for all.

Legend: R repeated rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool.row_digest import content_digests
from keptset.schemas.validation import SEVERITIES
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.check import Evidence
from keptset.trainer_bridge.audit.reading.files import read
from keptset.trainer_bridge.audit.reading.inputs import InputFile
from keptset.trainer_bridge.audit.reading.key_table import KeyTable, among

EXAMPLES = 3
FIRSTS_AT_ONCE = 2**20
"""Responses whose content is held beside their copies': 16 bytes each."""
_DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])
Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PartPlace:
    """Where a part of a file stands in the order of reading."""

    file: InputFile
    part: int
    start: int
    """Its byte in an open spool file."""
    first_row: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """What is repeated."""

    evidence: tuple[Evidence, ...]
    """`conflict`, `duplicate`, `seed_reused`, as far as they occur."""
    copies: Rows
    """Rows whose rollout_id came before, ascending."""
    uncounted: Rows
    """Those, and all but the first row of each shared seed, ascending."""


def find_repeats(ids: KeyTable, seeds: KeyTable, places: Sequence[PartPlace], *, unguarded: bool) -> Repeats:
    """Compare what shares a key. Errors: as `read`, for files that changed since they were scanned."""
    reader = _RowReader(places, unguarded)
    of_id, first_of_id = ids.shared()
    again = of_id != first_of_id
    copies, firsts = of_id[again], first_of_id[again]
    del of_id, first_of_id, again
    same = _same_content(copies, firsts, reader)
    shared, first_shared = seeds.shared(without=copies)

    def of_copy(row: int) -> str:
        return f"{reader.told(row)}; the first is {reader.told(int(firsts[np.searchsorted(copies, row)]))}"

    def of_shared(row: int) -> str:
        count = np.count_nonzero(first_shared == first_shared[np.searchsorted(shared, row)])
        return f"{reader.told(row)}; its seed is that of {count} rows"

    evidence = (
        *_evidence(FindingKind.CONFLICT, copies[~same], reader, of_copy),
        *_evidence(FindingKind.DUPLICATE, copies[same], reader, of_copy),
        *_evidence(FindingKind.SEED_REUSED, shared, reader, of_shared),
    )
    uncounted = np.sort(np.concatenate([copies, shared[shared != first_shared]]))
    return Repeats(evidence=evidence, copies=copies, uncounted=uncounted)


def _same_content(copies: Rows, firsts: Rows, reader: _RowReader) -> NDArray[np.bool_]:
    """Whether each copy, ascending, holds what the first of its rollout_id holds.

    So many firsts at a time, each with all its copies, so that their digests fit in memory.
    """
    same = np.zeros(len(copies), bool)
    distinct = np.unique(firsts)
    for begin in range(0, len(distinct), FIRSTS_AT_ONCE):
        held = distinct[begin : begin + FIRSTS_AT_ONCE]
        of_held = np.flatnonzero((firsts >= held[0]) & (firsts <= held[-1]))
        copies_H, first_H = copies[of_held], np.searchsorted(held, firsts[of_held])
        digests = np.zeros(len(held), _DIGEST)
        # A first comes before its copies, so its digest is known when they are read.
        for rows, found in reader.contents(np.sort(np.concatenate([held, copies_H]))):
            is_copy = among(rows, copies_H)
            digests[np.searchsorted(held, rows[~is_copy])] = found[~is_copy]
            at = np.searchsorted(copies_H, rows[is_copy])
            same[of_held[at]] = found[is_copy] == digests[first_H[at]]
    return same


def _evidence(kind: FindingKind, rows: Rows, reader: _RowReader, detail: Callable[[int], str]) -> Iterator[Evidence]:
    if not len(rows):
        return
    shown = rows[:EXAMPLES].tolist()
    names = reader.names(shown)
    yield Evidence(
        kind=kind,
        severity=SEVERITIES.get(kind, Severity.ERROR),
        count=len(rows),
        responses=len(rows),
        summary=f"{len(rows):,} responses: {kind.meaning}",
        advice=ADVICE[kind].act,
        examples=tuple(Example(rollout_id=names[row], position=None, detail=detail(row)) for row in shown),
    )


class _RowReader:
    """Single rows, read again where they lie."""

    def __init__(self, places: Sequence[PartPlace], unguarded: bool) -> None:
        self._places, self._unguarded = places, unguarded
        self._first_rows = [place.first_row for place in places]

    def _place(self, row: int) -> PartPlace:
        return self._places[bisect_right(self._first_rows, row) - 1]

    def told(self, row: int) -> str:
        """Where a row lies, for people."""
        place = self._place(row)
        return f"{place.file.shown} part {place.part} row {row - place.first_row}"

    def names(self, rows: Iterable[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        for held, batch in self._batches(np.array(sorted(rows), np.int64)):
            found.update(zip(held.tolist(), batch.rollout_ids, strict=True))
        return found

    def contents(self, rows: Rows) -> Iterator[tuple[Rows, NDArray[np.void]]]:
        """The asked rows, ascending, with digests of what they hold, as they are read."""
        for held, batch in self._batches(rows):
            yield held, np.frombuffer(b"".join(content_digests(batch)), _DIGEST)

    def _batches(self, rows: Rows) -> Iterator[tuple[Rows, RolloutBatch]]:
        """The asked rows, ascending, with a batch of no others."""
        begins = np.searchsorted(rows, self._first_rows)
        for place, begin, end in zip(self._places, begins, np.append(begins[1:], len(rows)), strict=True):
            if begin == end:
                continue
            first_row = place.first_row
            for batch in read(place.file, place.part, place.part + 1, start=place.start, unguarded=self._unguarded):
                here = slice(*(begin + np.searchsorted(rows[begin:end], [first_row, first_row + len(batch)])))
                if len(rows[here]):
                    yield rows[here], batch.take(rows[here] - first_row)
                first_row += len(batch)
