"""Pairs of a position and a row of a table, on the host: NumPy on the tensors' own memory, a thread for each core.

    z_m = h_row(m) . W_id(m)          G_row = sum over its pairs of d_m W_id(m)

Positions with about equally many pairs go together, in one batched product: a few sizes to a doubling, so that
batches are few, and a set is filled up with its last pair, whose row was just read. A batch is small enough for a
cache; what takes the time is to read rows at random places.

Legend: M pairs, in the caller's order or (S) by the size of their piece and filled up; P pieces (the pairs of a
position, or a part of them where they are many), B pieces of a batch, K pairs of each; R positions, V rows of the
table, H hidden.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.usable_cores import usable_cores

Array = NDArray[np.floating]
Ints = NDArray[np.int64]

_BATCH_BYTES = 1 << 20
"""Rows of a batch: a core's cache holds them."""
_BATCHES_PER_THREAD = 8
"""Fewer are not worth another thread."""


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """In which dtype, with how much."""

    dtype: type[np.float32] | type[np.float64]
    """Of sums and results; rows are widened to it."""
    scratch_bytes: int
    """Working memory at most, over all threads."""
    threads: int

    def within(self, table_VH: Array) -> tuple[int, int]:
        """Threads, and pairs of one at once: each has a row of both sides as they are read, and as they are widened."""
        pair_bytes = 4 * int(table_VH.shape[1]) * np.dtype(self.dtype).itemsize
        threads = max(1, min(self.threads, self.scratch_bytes // pair_bytes))
        return threads, max(1, min(4 * _BATCH_BYTES, self.scratch_bytes // threads) // pair_bytes)


class _Batch(NamedTuple):
    """Pieces of one size."""

    pieces: slice
    pairs: slice
    """Theirs, in the order by size."""
    shape: tuple[int, int]
    """(B, K)."""


class _Pieces:
    """The pairs of each position, cut where they are more than `most`, filled up, ordered by how many they are."""

    def __init__(self, rows_M: Ints, most: int) -> None:
        bounds = np.append(np.flatnonzero(np.append(True, rows_M[1:] != rows_M[:-1])), len(rows_M))
        starts, own = bounds[:-1], np.diff(bounds)
        is_further = np.zeros(len(starts), bool)
        if own.max() > most:
            num = -(-own // most)
            within = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
            starts, is_further = np.repeat(starts, num) + within * most, within > 0
            own = np.minimum(starts + most, np.repeat(bounds[1:], num)) - starts
        sizes = np.minimum(_filled_up(own), most)
        # Further pieces of a position come last: what is done side by side must be about different ones.
        order = np.lexsort((sizes, is_further))
        starts, own, self._sizes = starts[order], own[order], sizes[order]
        self.rows_P = rows_M[starts]
        self._ends = np.cumsum(self._sizes)
        place_S = np.arange(self._ends[-1]) - np.repeat(self._ends - self._sizes, self._sizes)
        last_S = np.repeat(own - 1, self._sizes)
        self.pairs_S: Ints = np.repeat(starts, self._sizes) + np.minimum(place_S, last_S)
        """Index of each pair among the caller's."""
        self.is_filling_S = place_S > last_S
        self._most, self._num_first = most, len(starts) - int(is_further.sum())

    @cached_property
    def first(self) -> list[_Batch]:
        """All first pieces, at most `most` pairs in each batch."""
        return self._batches(slice(0, self._num_first))

    @cached_property
    def further(self) -> list[_Batch]:
        """All further ones."""
        return self._batches(slice(self._num_first, len(self._sizes)))

    def _batches(self, span: slice) -> list[_Batch]:
        found: list[_Batch] = []
        if span.start == span.stop:
            return found
        sizes = self._sizes[span]
        changes = np.flatnonzero(sizes[1:] != sizes[:-1]) + (span.start + 1)
        bounds = [span.start, *changes.tolist(), span.stop]
        for (begin, end), size in zip(pairwise(bounds), self._sizes[bounds[:-1]].tolist(), strict=True):
            step = max(1, self._most // size)
            stop = int(self._ends[begin]) - size
            for low in range(begin, end, step):
                high = min(low + step, end)
                pairs = slice(stop, stop := stop + (high - low) * size)
                found.append(_Batch(pieces=slice(low, high), pairs=pairs, shape=(high - low, size)))
        return found


def _filled_up(sizes: Ints) -> Ints:
    """The next of 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...: a quarter more at most, a tenth on average."""
    doublings = np.ceil(np.log2(np.maximum(sizes, 8) / 8)).astype(np.int64)
    step = np.maximum(1, 2**doublings)
    return np.asarray(-(-sizes // step) * step)


def host_threads() -> int:
    """As many as MKL_NUM_THREADS says, else one for each core of this process.

    OMP_NUM_THREADS is not asked: Paddle and Ray set it to 1 unasked."""
    asked = os.environ.get("MKL_NUM_THREADS", "")
    cores = usable_cores()
    return max(1, min(cores, int(asked))) if asked.isdecimal() else cores


class HostPairs:
    """M >= 1 pairs, and how they are cut, which forward and backward share. Equal rows stand together."""

    def __init__(self, rows_M: Ints, ids_M: Ints) -> None:
        """`ids_M` lie in [0, V)."""
        self._rows_M, self._ids_M = rows_M, ids_M
        self._cut: dict[int, tuple[_Pieces, Ints]] = {}

    def __len__(self) -> int:
        return len(self._ids_M)

    def without(self, num_rows: int) -> NDArray[np.bool_]:
        """Rows that have none, of so many."""
        without_R = np.ones(num_rows, bool)
        without_R[self._rows_M] = False
        return without_R

    def cut(self, most: int) -> tuple[_Pieces, Ints]:
        """Pieces of at most so many, and the ids of their pairs [S]."""
        if most not in self._cut:
            pieces = _Pieces(self._rows_M, most)
            self._cut[most] = pieces, self._ids_M[pieces.pairs_S]
        return self._cut[most]


def dots(hidden_RH: Array, table_VH: Array, pairs: HostPairs, how: HostWork) -> Array:
    """z [M]."""
    threads, most = how.within(table_VH)
    pieces, ids_S = pairs.cut(most)
    z_S = np.empty(len(ids_S), how.dtype)

    def work(batch: _Batch) -> None:
        table_BKH = _read(table_VH, ids_S[batch.pairs], how).reshape(*batch.shape, -1)
        hidden_BH1 = _read(hidden_RH, pieces.rows_P[batch.pieces], how)[:, :, None]
        np.matmul(table_BKH, hidden_BH1, out=z_S[batch.pairs].reshape(*batch.shape, 1))

    _on_threads(work, pieces.first + pieces.further, threads)
    z_M = np.empty(len(pairs), how.dtype)
    z_M[pieces.pairs_S] = z_S
    return z_M


def weighted_rows(table_VH: Array, pairs: HostPairs, weight_M: Array, num_rows: int, how: HostWork) -> Array:
    """G [R, H], exactly 0 for rows without a pair."""
    sums_RH = np.empty((num_rows, table_VH.shape[1]), how.dtype)
    sums_RH[pairs.without(num_rows)] = 0
    add_weighted_rows(sums_RH, table_VH, pairs, weight_M, how, fresh=True)
    return sums_RH


def add_weighted_rows(
    sums_RH: Array, table_VH: Array, pairs: HostPairs, weight_M: Array, how: HostWork, *, fresh: bool = False
) -> None:
    """Add G into `sums_RH`, in the dtype of the work. Where that is `fresh`, it need not be read first: rows that have
    pairs are overwritten."""
    threads, most = how.within(table_VH)
    pieces, ids_S = pairs.cut(most)
    weight_S = weight_M[pieces.pairs_S].astype(how.dtype, copy=False)
    weight_S[pieces.is_filling_S] = 0

    def sums_BH(batch: _Batch) -> Array:
        num, size = batch.shape
        table_MH, weight_M = _read(table_VH, ids_S[batch.pairs], how), weight_S[batch.pairs]
        if size == 1:  # which a batched product takes several times as long for
            np.multiply(table_MH, weight_M[:, None], out=table_MH)
            return table_MH
        table_BKH = table_MH.reshape(num, size, -1)
        return np.asarray(np.matmul(weight_M.reshape(num, 1, size), table_BKH)[:, 0])

    def put(batch: _Batch) -> None:
        sums_RH[pieces.rows_P[batch.pieces]] = sums_BH(batch)

    def add(batch: _Batch) -> None:
        sums_RH[pieces.rows_P[batch.pieces]] += sums_BH(batch)

    def add_again(batch: _Batch) -> None:
        np.add.at(sums_RH, pieces.rows_P[batch.pieces], sums_BH(batch))

    _on_threads(put if fresh else add, pieces.first, threads)
    _on_threads(add_again, pieces.further, 1)


def _read(table: Array, index: Ints, how: HostWork) -> Array:
    return table.take(index, axis=0).astype(how.dtype, copy=False)


def _on_threads(work: Callable[[_Batch], None], batches: list[_Batch], threads: int) -> None:
    """`work` on every batch, each by whichever thread is free."""
    left = deque(batches)

    def share() -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # states that are no numbers are for the scores to tell
            while True:
                try:
                    batch = left.popleft()
                except IndexError:
                    return
                try:
                    work(batch)
                except BaseException:
                    left.clear()
                    raise

    threads = max(1, min(threads, len(batches) // _BATCHES_PER_THREAD))
    if threads == 1:
        share()
        return
    others = [_helpers().submit(share) for _ in range(threads - 1)]
    try:
        share()  # where a thread only waits for others, one of them may start milliseconds late
    finally:
        # None may write into what the caller has back; one that has not begun would find nothing left.
        wait([done for done in others if not done.cancel()])
    for done in others:
        if not done.cancelled():
            done.result()


@lru_cache(maxsize=1)
def _helpers() -> ThreadPoolExecutor:
    """Threads that stay: to start them takes as long as a few batches."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="keptset-pairs")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # a child has none of its parent's threads
