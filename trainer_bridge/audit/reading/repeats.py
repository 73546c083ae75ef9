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
from keptset.trainer_bridge.audit.reading.key_table import KeyTable

EXAMPLES = 3
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
    order = np.argsort(copies)
    copies, firsts = copies[order], firsts[order]
    contents = reader.contents(np.union1d(copies, firsts)) if len(copies) else {}
    same = np.array([contents[c] == contents[f] for c, f in zip(copies.tolist(), firsts.tolist(), strict=True)], bool)

    of_seed, first_of_seed = _without(*seeds.shared(), copies)
    shared, first_shared = np.sort(of_seed), first_of_seed[np.argsort(of_seed)]
    counts = dict(zip(*(a.tolist() for a in np.unique(first_shared, return_counts=True)), strict=True))

    first = dict(zip(copies.tolist(), firsts.tolist(), strict=True))
    first_of_shared = dict(zip(shared.tolist(), first_shared.tolist(), strict=True))

    def of_copy(row: int) -> str:
        return f"{reader.told(row)}; the first is {reader.told(first[row])}"

    def of_shared(row: int) -> str:
        return f"{reader.told(row)}; its seed is that of {counts[first_of_shared[row]]} rows"

    evidence = (
        *_evidence(FindingKind.CONFLICT, copies[~same], reader, of_copy),
        *_evidence(FindingKind.DUPLICATE, copies[same], reader, of_copy),
        *_evidence(FindingKind.SEED_REUSED, shared, reader, of_shared),
    )
    uncounted = np.union1d(copies, shared[shared != first_shared])
    return Repeats(evidence=evidence, copies=copies, uncounted=uncounted)


def _without(rows: Rows, firsts: Rows, left_out: Rows) -> tuple[Rows, Rows]:
    """The rows of shared keys that are left, each with the first of those that are left, where these are several."""
    keep = ~np.isin(rows, left_out)
    key = firsts[keep]
    rows = rows[keep]
    order = np.lexsort((rows, key))
    rows, key = rows[order], key[order]
    begins = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.zeros(0, np.int64)
    counts = np.diff(begins, append=len(key))
    first = np.repeat(rows[begins], counts)
    several = np.repeat(counts > 1, counts)
    return rows[several], first[several]


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
            found.update(zip(held, batch.rollout_ids, strict=True))
        return found

    def contents(self, rows: Rows) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for held, batch in self._batches(rows):
            found.update(zip(held, content_digests(batch), strict=True))
        return found

    def _batches(self, rows: Rows) -> Iterator[tuple[list[int], RolloutBatch]]:
        """The asked rows, ascending, with a batch of no others."""
        of_part = np.searchsorted(self._first_rows, rows, side="right") - 1
        for number in np.unique(of_part).tolist():
            place, wanted = self._places[number], rows[of_part == number]
            first_row = place.first_row
            for batch in read(place.file, place.part, place.part + 1, start=place.start, unguarded=self._unguarded):
                here = wanted[(wanted >= first_row) & (wanted < first_row + len(batch))]
                if len(here):
                    yield here.tolist(), batch.take(here - first_row)
                first_row += len(batch)
