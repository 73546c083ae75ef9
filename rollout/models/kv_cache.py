"""Keys and values of the sequences in flight: fixed slots, written in place.

One tensor a layer holds rows of D numbers, ordered [2, S, K, A]: keys then values, S slots, K key-value heads,
A positions. A grows up to the cache's capacity as sequences do. Attention reads a run of slots whole, without a copy;
where that would read much for little, it gathers the blocks of `BLOCK` positions that are needed.

Dims: T tokens, S slots, K key-value heads, A allocated positions, D head size, X = 2 * K.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle

from keptset.schemas.errors import InvalidInput

BLOCK = 64
"""Positions; storage is allocated and gathered in whole blocks."""

# Storage grows by at least a quarter, so that growing stays rare; it holds no more than that for nothing.
_GROWTH = 1.25


@dataclass(frozen=True, kw_only=True)
class CacheRead:
    """Which part of the storage one attention group reads, the same in every layer."""

    rows: int
    """Slots read, n."""
    width: int
    """Positions read of each slot, a multiple of `BLOCK`."""
    slots: slice
    """The run of slots that is read whole, where `blocks` is None."""
    blocks: paddle.Tensor | None
    """Blocks to gather, int64 [2 * n * K * width / BLOCK]; None: read `slots` whole."""


class KVCache:
    """Static cache of `slots` sequences of at most `capacity` tokens each.

    `lengths_S` (int64 [slots], host) counts the positions each slot holds; writing at an earlier position drops what
    follows it, so that a slot is reused by starting at 0 again.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "float32",
        place: object = None,
    ) -> None:
        """`place`: where the tensors live; None is Paddle's current place."""
        if slots < 1 or capacity < 1:
            raise InvalidInput(f"a cache of {slots} slots and {capacity} positions; both must be >= 1")
        self.num_layers = layers
        self.slots, self.capacity, self.kv_heads, self.head_dim = slots, capacity, kv_heads, head_dim
        self.place = place
        self.lengths_S = np.zeros(slots, dtype=np.int64)
        self.allocated = BLOCK
        empty = np.zeros((2 * slots * kv_heads * BLOCK, head_dim), dtype=np.float32)
        self._layers = [paddle.to_tensor(empty, place=place).astype(dtype) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        """Bytes now allocated."""
        return sum(int(rows.size) * rows.element_size() for rows in self._layers)

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens.

        Errors: InvalidInput above the capacity.
        """
        if length > self.capacity:
            raise InvalidInput(f"a sequence of {length} tokens does not fit a cache of capacity {self.capacity}")
        if length <= self.allocated:
            return
        grown = min(max(length, int(self.allocated * _GROWTH)), self.capacity)
        grown = whole_blocks(grown)
        for i, rows in enumerate(self._layers):
            old = rows.reshape([-1, self.allocated * self.head_dim])
            room = paddle.zeros([old.shape[0], (grown - self.allocated) * self.head_dim], old.dtype)
            self._layers[i] = paddle.concat([old, room], axis=1).reshape([-1, self.head_dim])
        self.allocated = grown

    def rows_of(self, slots_T: np.ndarray, positions_T: np.ndarray) -> paddle.Tensor:
        """Storage rows of each token's K key heads, then its K value heads, int64 [T * X]."""
        heads_X = np.add.outer(np.arange(2) * self.slots * self.kv_heads, np.arange(self.kv_heads)).reshape(-1)
        rows_TX = np.add.outer(slots_T * self.kv_heads, heads_X) * self.allocated + positions_T[:, None]
        return paddle.to_tensor(rows_TX.reshape(-1), place=self.place)

    def write(self, layer: int, rows: paddle.Tensor, values: paddle.Tensor) -> None:
        """Put `values` [T * X, D] where `rows_of` says."""
        paddle.scatter_(self._layers[layer], rows, values)

    def plan_read(self, slots_N: np.ndarray, length: int, *, whole: bool) -> CacheRead:
        """How to read the first `length` positions of some slots.

        `whole`: read a run of slots, `slots_N` ascending without gaps, as it lies.
        """
        if whole:
            run = slice(int(slots_N[0]), int(slots_N[-1]) + 1)
            return CacheRead(rows=len(slots_N), width=self.allocated, slots=run, blocks=None)
        blocks_per_row = self.allocated // BLOCK
        needed = whole_blocks(length) // BLOCK
        sides = np.arange(2) * self.slots * self.kv_heads
        rows_2NK = np.add.outer(np.add.outer(sides, slots_N * self.kv_heads), np.arange(self.kv_heads))
        blocks = np.add.outer(rows_2NK * blocks_per_row, np.arange(needed)).reshape(-1)
        return CacheRead(
            rows=len(slots_N),
            width=needed * BLOCK,
            slots=slice(0, 0),
            blocks=paddle.to_tensor(blocks, place=self.place),
        )

    def read(self, layer: int, plan: CacheRead) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Keys and values, [n, K, width, D] each."""
        rows = self._layers[layer]
        if plan.blocks is None:
            keys, values = rows.reshape([2, self.slots, self.kv_heads, self.allocated, self.head_dim]).unbind(0)
            return keys[plan.slots], values[plan.slots]
        picked = paddle.gather(rows.reshape([-1, BLOCK * self.head_dim]), plan.blocks)
        keys, values = picked.reshape([2, plan.rows, self.kv_heads, plan.width, self.head_dim]).unbind(0)
        return keys, values


def whole_blocks(length: int) -> int:
    """`length` rounded up to a multiple of `BLOCK`."""
    return -(-length // BLOCK) * BLOCK
