"""Which rows share a key, among more rows than fit in memory.

A key is 16 bytes, a row its place in the order of reading. What does not fit is spread over files by some bits of the
key, so that equal keys meet in one of them. A file is read in pieces, since all rows may have one key.

Legend: R rows, K distinct keys.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

MEMORY_BYTES = 2**24
"""Of rows held; more lie in temporary files."""
_FILES = 64
_TOP_BYTE = 7
"""Of a key: the best mixed of its first number."""
_KEY = np.dtype("S16")
_ROW = np.dtype([("key", _KEY), ("row", "<i8")])
_PIECE = 2**19
"""Rows of a file that are read at once."""
Rows = NDArray[np.int64]


class KeyTable:
    """Rows with their keys. Close it, or use it as a context manager."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._limit = max(memory_bytes // _ROW.itemsize, 1)
        self._held: list[NDArray[np.void]] = []
        self._count = 0
        self._closing = contextlib.ExitStack()
        self._files: list[BinaryIO] = []

    def __enter__(self) -> KeyTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the temporary files."""
        self._closing.close()

    def add(self, keys_R2: NDArray[np.uint64], rows_R: Rows) -> None:
        """Take rows [R] with their keys [R, 2]."""
        added = np.empty(len(rows_R), _ROW)
        added["key"], added["row"] = np.ascontiguousarray(keys_R2, "<u8").view(_KEY)[:, 0], rows_R
        self._held.append(added)
        self._count += len(added)
        if self._count > self._limit:
            self._spill()

    def _spill(self) -> None:
        if not self._held:
            return
        if not self._files:
            folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="keptset-")))
            self._files = [self._closing.enter_context((folder / str(n)).open("w+b")) for n in range(_FILES)]
        held = np.concatenate(self._held)
        number = held.view(np.uint8).reshape(len(held), -1)[:, _TOP_BYTE] % _FILES
        held = held[np.argsort(number, kind="stable")]
        ends = np.cumsum(np.bincount(number, minlength=_FILES))
        for file, begin, end in zip(self._files, [0, *ends[:-1]], ends, strict=True):
            file.write(held[begin:end].tobytes())
        self._held, self._count = [], 0

    def shared(self, without: Rows | None = None) -> tuple[Rows, Rows]:
        """Rows whose key occurs more than once, ascending, and for each the first row with that key.

        The rows in `without`, ascending, are left out.
        """
        rows: list[Rows] = [np.zeros(0, np.int64)]
        firsts: list[Rows] = [np.zeros(0, np.int64)]
        for file in self._shares():
            repeated = _Keys.of(self._pieces(file, without)).repeated()
            for piece in self._pieces(file, without) if len(repeated.first_K) else ():
                row_R, first_R = repeated.rows_in(piece)
                rows.append(row_R)
                firsts.append(first_R)
        row = np.concatenate(rows)
        rows.clear()
        order = np.argsort(row)
        return row[order], np.concatenate(firsts)[order]

    def sizes(self, without: Rows) -> dict[int, int]:
        """How many keys have so many rows, those in `without`, ascending, left out."""
        found: dict[int, int] = {}
        for file in self._shares():
            sizes, keys = np.unique(_Keys.of(self._pieces(file, without)).count_K, return_counts=True)
            for size, count in zip(sizes.tolist(), keys.tolist(), strict=True):
                found[size] = found.get(size, 0) + count
        return dict(sorted(found.items()))

    def _shares(self) -> Iterator[BinaryIO | None]:
        """Equal keys lie in one of these; None: what is held."""
        if not self._files:
            yield None
            return
        self._spill()
        yield from self._files

    def _pieces(self, file: BinaryIO | None, without: Rows | None) -> Iterator[NDArray[np.void]]:
        if file is None:
            pieces = iter([np.concatenate(self._held)] if self._held else [])
        else:
            file.seek(0)
            pieces = (np.frombuffer(data, _ROW) for data in iter(lambda: file.read(_PIECE * _ROW.itemsize), b""))
        for piece in pieces:
            yield piece if without is None or not len(without) else piece[~among(piece["row"], without)]


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """Distinct keys, ascending, with their first row and how many they have."""

    key_K: NDArray[np.bytes_]
    first_K: Rows
    count_K: Rows

    @classmethod
    def of(cls, pieces: Iterable[NDArray[np.void]]) -> _Keys:
        none = np.zeros(0, np.int64)
        found = cls(key_K=np.zeros(0, _KEY), first_K=none, count_K=none)
        for piece in pieces:
            if len(piece):
                found = found._with(piece["key"], piece["row"])
        return found

    def _with(self, key_R: NDArray[np.bytes_], row_R: Rows) -> _Keys:
        key = np.concatenate([self.key_K, key_R])
        order = np.argsort(key)
        key = key[order]
        begins = np.concatenate([[0], np.flatnonzero(key[1:] != key[:-1]) + 1])
        count = np.concatenate([self.count_K, np.ones(len(row_R), np.int64)])
        return _Keys(
            key_K=key[begins],
            first_K=np.minimum.reduceat(np.concatenate([self.first_K, row_R])[order], begins),
            count_K=np.add.reduceat(count[order], begins),
        )

    def repeated(self) -> _Keys:
        """Those with several rows."""
        several_K = self.count_K > 1
        return _Keys(key_K=self.key_K[several_K], first_K=self.first_K[several_K], count_K=self.count_K[several_K])

    def rows_in(self, piece: NDArray[np.void]) -> tuple[Rows, Rows]:
        """Rows with one of these keys, and the first row of each."""
        order = np.argsort(piece["key"])
        key_R = piece["key"][order]
        begin_K, end_K = (np.searchsorted(key_R, self.key_K, side=side) for side in ("left", "right"))
        counts = end_K - begin_K
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return piece["row"][order[np.repeat(begin_K, counts) + within]], np.repeat(self.first_K, counts)


def among(rows: Rows, others: Rows) -> NDArray[np.bool_]:
    """Whether each is one of the others, which ascend."""
    if not len(others):
        return np.zeros(len(rows), bool)
    found_R: NDArray[np.bool_] = others[np.minimum(np.searchsorted(others, rows), len(others) - 1)] == rows
    return found_R
