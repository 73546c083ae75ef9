"""What is counted by policy version, in a bounded number of rows: of many versions neighbours share a row.

Versions share a row where version >> k is equal, for the least k that makes at most MAX_ROWS rows of all versions that
were seen. So the rows depend on which versions those are, and not on their order nor on what was merged with what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION

MAX_ROWS = 200
"""And one for tokens of unknown version, which is shared with no other."""
Ints = NDArray[np.int64]
Where = Ints | slice


class _Counts(Protocol):
    def merge(self, other: Any, /) -> None: ...


Counts = TypeVar("Counts", bound=_Counts)


@dataclass
class VersionTable(Generic[Counts]):
    """Counts by version. Tables that saw the same versions have the same rows."""

    kind: type[Counts]
    """What a row holds; made without arguments."""
    _k: int = 0
    _rows: dict[int, Counts] = field(default_factory=dict)
    """By version >> k, UNKNOWN_VERSION among them: that is -1, which no shift changes."""
    _spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """First and last version seen of each row."""

    def see(self, versions: Ints) -> None:
        """Make rows for these versions, before any of them is counted."""
        known = versions[versions != UNKNOWN_VERSION]
        if len(known):
            distinct = known[:1] if known.min() == known.max() else np.unique(known)
            self._see(distinct, distinct)

    def _see(self, first_V: Ints, last_V: Ints) -> None:
        """Ascending spans, none of them wider than a row."""
        rows, k = np.union1d(first_V >> self._k, np.fromiter(self._spans, np.int64)), self._k
        while len(rows) > MAX_ROWS:
            rows, k = np.unique(rows >> 1), k + 1
        self._widen(k)
        row_V = first_V >> k
        begins = np.flatnonzero(np.concatenate([[True], row_V[1:] != row_V[:-1]]))
        lasts = np.maximum.reduceat(last_V, begins)
        for row, first, last in zip(row_V[begins].tolist(), first_V[begins].tolist(), lasts.tolist(), strict=True):
            self._span(row, first, last)

    def _span(self, row: int, first: int, last: int) -> None:
        known = self._spans.get(row, (first, last))
        self._spans[row] = min(first, known[0]), max(last, known[1])

    def _widen(self, k: int) -> None:
        """Put rows together."""
        if k == self._k:
            return
        rows, spans, shift = self._rows, self._spans, k - self._k
        self._rows, self._spans, self._k = {}, {}, k
        for row, (first, last) in spans.items():
            self._span(row >> shift, first, last)
        for row, counts in rows.items():
            self._row(row >> shift).merge(counts)

    def _row(self, row: int) -> Counts:
        if row not in self._rows:
            self._rows[row] = self.kind()
        return self._rows[row]

    def groups(self, versions: Ints) -> Iterator[tuple[Counts, Where]]:
        """Each row that has some of these versions, all of them seen, and where they are."""
        rows = versions >> self._k
        if not len(rows):
            return
        if rows.min() == rows.max():  # as usual: nothing is sorted
            yield self._row(int(rows[0])), slice(None)
            return
        order = np.argsort(rows, kind="stable")
        begins = np.flatnonzero(np.concatenate([[True], np.diff(rows[order]) != 0]))
        for row, where in zip(rows[order[begins]].tolist(), np.split(order, begins[1:]), strict=True):
            yield self._row(row), where

    def merge(self, other: VersionTable[Counts]) -> None:
        """See and count what another has."""
        self._widen(max(self._k, other._k))
        if other._spans:
            self._see(*np.array(sorted(other._spans.values()), np.int64).T)
        for row, counts in other._rows.items():
            self._row(row >> (self._k - other._k)).merge(counts)

    def rows(self) -> Iterator[tuple[int, int, Counts]]:
        """First and last version and counts of each row that has any, ascending; unknown versions first."""
        for row in sorted(self._rows):
            yield *self._spans.get(row, (UNKNOWN_VERSION, UNKNOWN_VERSION)), self._rows[row]

    def get(self, version: int) -> Counts | None:
        """Counts of the row of a version."""
        return self._rows.get(version >> self._k)
