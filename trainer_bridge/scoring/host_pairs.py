"""Pairs of a position and a row of a table, on the host: NumPy on the tensors' own memory, a thread for each core.

    z_m = h_row(m) . W_id(m)          G_row = sum over its pairs of d_m W_id(m)

Positions with equally many pairs go together, in one batched product without padding. A batch is small enough for a
cache; what takes the time is to read rows at random places, which one thread alone does not keep busy.

Legend: M pairs, P pieces (the pairs of a position, or a part of them where they are many), B pieces of a batch, K pairs
of each, R positions, V rows of the table, H hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Ints = NDArray[np.int64]

_BATCH_BYTES = 1 << 19
"""Rows of a batch: a core's cache holds them (1 MiB takes a tenth longer, 2 MiB a quarter)."""
_BATCHES_PER_THREAD = 8
"""Fewer are not worth another thread."""


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """Consecutive pairs of a position each."""

    rows_P: Ints
    starts_P: Ints
    sizes_P: Ints
    is_first_P: NDArray[np.bool_]
    """Of its position."""

    @property
    def pairs_BK(self) -> Ints:
        """Where the pairs of pieces of one size are."""
        return self.starts_P[:, None] + np.arange(self.sizes_P[0])

    def take(self, which: NDArray[np.generic]) -> _Pieces:
        """Some of them."""
        return _Pieces(
            rows_P=self.rows_P[which],
            starts_P=self.starts_P[which],
            sizes_P=self.sizes_P[which],
            is_first_P=self.is_first_P[which],
        )


def host_threads() -> int:
    """As many as MKL_NUM_THREADS says, else one for each core of this process.

    OMP_NUM_THREADS is not asked: Paddle and Ray set it to 1 unasked."""
    asked = os.environ.get("MKL_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(asked))) if asked.isdecimal() else cores


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """In which dtype, with how much."""

    dtype: type[np.float32] | type[np.float64]
    """Of sums and results; rows are widened to it."""
    scratch_bytes: int
    """Working memory at most, over all threads."""
    threads: int

    def pairs_at_once(self, table_VH: Array) -> int:
        """Of one thread: a row each as it is read, and as it is widened."""
        row_bytes = int(table_VH.shape[1]) * np.dtype(self.dtype).itemsize
        return max(1, min(_BATCH_BYTES, self.scratch_bytes // (2 * self.threads)) // row_bytes)


def dots(hidden_RH: Array, table_VH: Array, rows_M: Ints, ids_M: Ints, how: HostWork) -> Array:
    """z [M]. Equal `rows_M` stand together."""
    dtype = how.dtype
    z_M = np.empty(len(ids_M), dtype)

    def work(pieces: _Pieces) -> None:
        at_BK = pieces.pairs_BK
        table_BKH = table_VH[ids_M[at_BK]].astype(dtype, copy=False)
        hidden_BH1 = hidden_RH[pieces.rows_P].astype(dtype, copy=False)[:, :, None]
        z_M[at_BK] = np.matmul(table_BKH, hidden_BH1)[:, :, 0]

    most = how.pairs_at_once(table_VH)
    _on_threads(work, _batches(_pieces(rows_M, most), most), how.threads)
    return z_M


def weighted_rows(table_VH: Array, rows_M: Ints, ids_M: Ints, weight_M: Array, num_rows: int, how: HostWork) -> Array:
    """G [R, H], exactly 0 for rows without a pair. Equal `rows_M` stand together."""
    weight_M = weight_M.astype(how.dtype, copy=False)
    sums_RH = np.zeros((num_rows, table_VH.shape[1]), how.dtype)

    def product_BH(pieces: _Pieces) -> Array:
        at_BK = pieces.pairs_BK
        table_BKH = table_VH[ids_M[at_BK]].astype(how.dtype, copy=False)
        return np.asarray(np.matmul(weight_M[at_BK][:, None, :], table_BKH)[:, 0])

    def work(pieces: _Pieces) -> None:
        sums_RH[pieces.rows_P] = product_BH(pieces)

    most = how.pairs_at_once(table_VH)
    pieces = _pieces(rows_M, most)
    _on_threads(work, _batches(pieces.take(pieces.is_first_P), most), how.threads)
    for further in _batches(pieces.take(~pieces.is_first_P), most):  # of positions that have had one: not side by side
        np.add.at(sums_RH, further.rows_P, product_BH(further))
    return sums_RH


def _pieces(rows_M: Ints, most: int) -> _Pieces:
    """The pairs of each position, cut where they are more than `most`."""
    bounds = np.append(np.flatnonzero(np.append(True, rows_M[1:] != rows_M[:-1])), len(rows_M))
    sizes = np.diff(bounds)
    num = -(-sizes // most)
    within = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    starts_P = np.repeat(bounds[:-1], num) + within * most
    ends_P = np.minimum(starts_P + most, np.repeat(bounds[1:], num))
    return _Pieces(rows_P=rows_M[starts_P], starts_P=starts_P, sizes_P=ends_P - starts_P, is_first_P=within == 0)


def _batches(pieces: _Pieces, most: int) -> list[_Pieces]:
    """Pieces of one size each, at most so many pairs together."""
    if not len(pieces.sizes_P):
        return []
    ordered = pieces.take(np.argsort(pieces.sizes_P, kind="stable"))
    sizes = ordered.sizes_P
    bounds = np.append(np.flatnonzero(np.append(True, sizes[1:] != sizes[:-1])), len(sizes))
    batches = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        step = max(1, most // int(sizes[begin]))
        batches += [ordered.take(np.arange(at, min(at + step, end))) for at in range(begin, end, step)]
    return batches


def _on_threads(work: Callable[[_Pieces], None], batches: list[_Pieces], threads: int) -> None:
    threads = max(1, min(threads, len(batches) // _BATCHES_PER_THREAD))

    def share(number: int) -> None:
        for pieces in batches[number::threads]:
            work(pieces)

    if threads == 1:
        share(0)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="keptset-pairs") as pool:
        for done in [pool.submit(share, number) for number in range(threads)]:
            done.result()
