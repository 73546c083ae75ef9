"""Which rows share a key, among more rows than fit in memory.

A key is 16 bytes, a row its place in the order of reading. What does not fit is spread over files by the first bits of
the key, so that equal keys meet in one of them and each file can be sorted by itself.

Legend: R rows.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

MEMORY_BYTES = 2**26
"""Of rows held; more lie in temporary files."""
_FILES = 64
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])
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
        added["high"], added["low"], added["row"] = keys_R2[:, 0], keys_R2[:, 1], rows_R
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
        number = (held["high"] >> np.uint64(58)).astype(np.int64)
        held = held[np.argsort(number, kind="stable")]
        ends = np.cumsum(np.bincount(number, minlength=_FILES))
        for file, begin, end in zip(self._files, [0, *ends[:-1]], ends, strict=True):
            file.write(held[begin:end].tobytes())
        self._held, self._count = [], 0

    def groups(self) -> Iterator[tuple[Rows, Rows]]:
        """Rows by key, a share of the keys at a time: rows sorted by key and place, and where each key begins."""
        if self._files:
            self._spill()
        for piece in self._pieces():
            if not len(piece):
                continue
            piece = piece[np.lexsort((piece["row"], piece["low"], piece["high"]))]
            changes = (piece["high"][1:] != piece["high"][:-1]) | (piece["low"][1:] != piece["low"][:-1])
            yield piece["row"], np.concatenate([[0], np.flatnonzero(changes) + 1])

    def _pieces(self) -> Iterator[NDArray[np.void]]:
        if not self._files:
            yield np.concatenate(self._held) if self._held else np.zeros(0, _ROW)
            return
        for file in self._files:
            file.seek(0)
            yield np.frombuffer(file.read(), _ROW)
            file.seek(0, 2)

    def shared(self, without: Rows | None = None) -> tuple[Rows, Rows]:
        """Rows whose key occurs more than once, ascending, and for each the first row with that key.

        The rows in `without`, ascending, are left out.
        """
        rows: list[Rows] = [np.zeros(0, np.int64)]
        firsts: list[Rows] = [np.zeros(0, np.int64)]
        for of_key, begins in self.groups():
            if without is not None and len(without):
                of_key, begins = _left(of_key, begins, without)
            counts = np.diff(begins, append=len(of_key))
            many_K = counts > 1
            rows.append(of_key[np.repeat(many_K, counts)])
            firsts.append(np.repeat(of_key[begins[many_K]], counts[many_K]))
        row, first = np.concatenate(rows), np.concatenate(firsts)
        rows.clear()
        firsts.clear()
        order = np.argsort(row)
        return row[order], first[order]

    def sizes(self, without: Rows) -> dict[int, int]:
        """How many keys have so many rows, those in `without`, ascending, left out."""
        found: dict[int, int] = {}
        for of_key, begins in self.groups():
            kept_R = ~among(of_key, without)
            sizes, keys = np.unique(np.add.reduceat(kept_R.astype(np.int64), begins), return_counts=True)
            for size, count in zip(sizes.tolist(), keys.tolist(), strict=True):
                if size:
                    found[size] = found.get(size, 0) + count
        return dict(sorted(found.items()))


def _left(of_key: Rows, begins: Rows, without: Rows) -> tuple[Rows, Rows]:
    """As of `KeyTable.groups`, of the rows that are left."""
    kept_R = ~among(of_key, without)
    kept_K = np.add.reduceat(kept_R.astype(np.int64), begins)
    kept_K = kept_K[kept_K > 0]
    return of_key[kept_R], np.cumsum(kept_K) - kept_K


def among(rows: Rows, others: Rows) -> NDArray[np.bool_]:
    """Whether each is one of the others, which ascend."""
    if not len(others):
        return np.zeros(len(rows), bool)
    found_R: NDArray[np.bool_] = others[np.minimum(np.searchsorted(others, rows), len(others) - 1)] == rows
    return found_R
