"""Keys and values of the sequences in flight: fixed slots, written in place.

A layer holds keys as [S, K, D, A] and values as [S, K, A, D], the orders in which decoding's two products read them
fastest. A grows up to the cache's capacity as sequences do. Attention reads a run of slots whole, without a copy; where
that would read much for little, it gathers the blocks of `BLOCK` positions that are needed.

Dims: T tokens, N slots of one read, S slots, K key-value heads, D head size, A allocated positions, W positions read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from keptset.schemas.errors import InvalidInput

BLOCK = 64
"""Positions; storage is allocated and gathered in whole blocks."""

# Storage grows by at least a quarter, so that growing stays rare; at most that much of it idles after growing.
_GROWTH = 1.25


@dataclass(frozen=True, kw_only=True)
class CacheWrite:
    """Where one call's tokens go, the same in every layer."""

    key_items: paddle.Tensor
    """Item of the keys for each [T, K, D], int64, flat."""
    value_rows: paddle.Tensor
    """Row of D values for each [T, K], int64, flat."""


@dataclass(frozen=True, kw_only=True)
class CacheRead:
    """Which part of the storage one attention group reads, the same in every layer."""

    slots: int
    """Slots read, N."""
    width: int
    """Positions read of each, W."""
    run: slice
    """The slots, where they are read whole."""
    key_blocks: paddle.Tensor | None = None
    """Blocks of `BLOCK` items for each [N, K, D, W / BLOCK], int64, flat; None: read `run` whole."""
    value_blocks: paddle.Tensor | None = None
    """Blocks of `BLOCK` rows for each [N, K, W / BLOCK], int64, flat."""


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
        self.num_layers, self.slots, self.capacity = layers, slots, capacity
        self.kv_heads, self.head_dim, self.place = kv_heads, head_dim, place
        self.lengths_S = np.zeros(slots, dtype=np.int64)
        self.allocated = BLOCK
        empty = np.zeros(slots * kv_heads * BLOCK * head_dim, dtype=np.float32)
        self._keys = [paddle.to_tensor(empty, place=place).astype(dtype) for _ in range(layers)]
        self._values = [key.clone().reshape([-1, head_dim]) for key in self._keys]

    @property
    def nbytes(self) -> int:
        """Bytes now allocated."""
        return sum(int(stored.size) * stored.element_size() for stored in (*self._keys, *self._values))

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens.

        Errors: InvalidInput above the capacity.
        """
        if length > self.capacity:
            raise InvalidInput(f"a sequence of {length} tokens does not fit a cache of capacity {self.capacity}")
        if length <= self.allocated:
            return
        grown = whole_blocks(max(length, min(int(self.allocated * _GROWTH), self.capacity)))
        for i in range(self.num_layers):
            self._keys[i] = _longer(self._keys[i].reshape([-1, self.allocated]), grown).reshape([-1])
            longer = _longer(self._values[i].reshape([-1, self.allocated * self.head_dim]), grown * self.head_dim)
            self._values[i] = longer.reshape([-1, self.head_dim])
        self.allocated = grown

    def plan_write(self, slots_T: np.ndarray, positions_T: np.ndarray) -> CacheWrite:
        """Where tokens at these positions of these slots go."""
        heads_TK = np.add.outer(slots_T * self.kv_heads, np.arange(self.kv_heads))
        dims_TKD = np.add.outer(heads_TK * self.head_dim, np.arange(self.head_dim))
        return CacheWrite(
            key_items=self._index(dims_TKD * self.allocated + positions_T[:, None, None]),
            value_rows=self._index(heads_TK * self.allocated + positions_T[:, None]),
        )

    def write(self, layer: int, plan: CacheWrite, keys_TKD: paddle.Tensor, values_TKD: paddle.Tensor) -> None:
        """Store one layer's keys and values, in place."""
        paddle.scatter_(self._keys[layer], plan.key_items, keys_TKD.reshape([-1]))
        paddle.scatter_(self._values[layer], plan.value_rows, values_TKD.reshape([-1, self.head_dim]))

    def plan_run(self, first: int, slots: int) -> CacheRead:
        """Read a run of slots whole: every allocated position, without a copy."""
        return CacheRead(slots=slots, width=self.allocated, run=slice(first, first + slots))

    def plan_gather(self, slots_N: np.ndarray, length: int) -> CacheRead:
        """Read at least the first `length` positions of some slots, copying them."""
        heads_NK = np.add.outer(slots_N * self.kv_heads, np.arange(self.kv_heads))
        dims_NKD = np.add.outer(heads_NK * self.head_dim, np.arange(self.head_dim))
        width = whole_blocks(length)
        needed, held = np.arange(width // BLOCK), self.allocated // BLOCK
        return CacheRead(
            slots=len(slots_N),
            width=width,
            run=slice(0, 0),
            key_blocks=self._index(np.add.outer(dims_NKD * held, needed)),
            value_blocks=self._index(np.add.outer(heads_NK * held, needed)),
        )

    def read(self, layer: int, plan: CacheRead) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Keys [N, K, D, W] and values [N, K, W, D] of one layer."""
        keys, values = self._keys[layer], self._values[layer]
        if plan.key_blocks is not None:
            keys = paddle.gather(keys.reshape([-1, BLOCK]), plan.key_blocks)
            values = paddle.gather(values.reshape([-1, BLOCK * self.head_dim]), plan.value_blocks)
        keys = keys.reshape([-1, self.kv_heads, self.head_dim, plan.width])
        values = values.reshape([-1, self.kv_heads, plan.width, self.head_dim])
        return (keys[plan.run], values[plan.run]) if plan.key_blocks is None else (keys, values)

    def copy_slot(self, source: int, targets: Sequence[int]) -> None:
        """Give `targets` what `source` holds: a prompt computed once serves a group."""
        items, rows = (self.kv_heads * self.allocated * n for n in (self.head_dim, 1))
        key_items = self._index(np.add.outer(np.asarray(targets) * items, np.arange(items)))
        value_rows = self._index(np.add.outer(np.asarray(targets) * rows, np.arange(rows)))
        for i in range(self.num_layers):
            keys = self._keys[i][source * items : (source + 1) * items]
            values = self._values[i][source * rows : (source + 1) * rows]
            paddle.scatter_(self._keys[i], key_items, paddle.tile(keys, [len(targets)]))
            paddle.scatter_(self._values[i], value_rows, paddle.tile(values, [len(targets), 1]))
        self.lengths_S[np.asarray(targets)] = self.lengths_S[source]

    def clear(self, slots: Sequence[int]) -> None:
        """Leave nothing of these sequences: a hidden NaN or infinity would still spoil the products, as 0 times it."""
        rows = self.kv_heads * self.allocated
        value_rows = np.add.outer(np.asarray(slots) * rows, np.arange(rows)).reshape(-1)
        key_items = np.add.outer(value_rows * self.head_dim, np.arange(self.head_dim)).reshape(-1)
        keys, values = self._index(key_items), self._index(value_rows)
        for i in range(self.num_layers):
            paddle.scatter_(self._keys[i], keys, _zeros(self._keys[i], len(key_items)))
            nothing = _zeros(self._values[i], len(key_items)).reshape([-1, self.head_dim])
            paddle.scatter_(self._values[i], values, nothing)
        self.lengths_S[np.asarray(slots)] = 0

    def take_over(self, other: KVCache, rows: Sequence[int]) -> None:
        """Hold what slots `rows` of another cache hold, in the first slots of this empty one."""
        index = np.asarray(rows, np.int64)
        if not len(index):
            return
        self.reserve(int(other.lengths_S[index].max()))
        width, columns = min(self.allocated, other.allocated), self.kv_heads * self.head_dim
        for i in range(self.num_layers):
            keys = other._keys[i].reshape([other.slots, columns, other.allocated])
            values = other._values[i].reshape([other.slots, self.kv_heads, other.allocated, self.head_dim])
            moved_keys = paddle.gather(keys, self._index(index))[:, :, :width].reshape([-1, width])
            moved_values = paddle.gather(values, self._index(index))[:, :, :width].reshape([-1, width * self.head_dim])
            keys = _longer(moved_keys, self.allocated).reshape([-1])
            values = _longer(moved_values, self.allocated * self.head_dim).reshape([-1])
            empty = _zeros(keys, (self.slots - len(rows)) * columns * self.allocated)
            self._keys[i] = paddle.concat([keys, empty])
            self._values[i] = paddle.concat([values, empty]).reshape([-1, self.head_dim])
        self.lengths_S[: len(rows)] = other.lengths_S[index]

    def _index(self, index: np.ndarray) -> paddle.Tensor:
        return paddle.to_tensor(index.reshape(-1), place=self.place)


def whole_blocks(length: int) -> int:
    """`length` rounded up to a multiple of `BLOCK`."""
    return -(-length // BLOCK) * BLOCK


def _longer(rows: paddle.Tensor, columns: int) -> paddle.Tensor:
    """Rows continued with zeros."""
    number, extra = rows.shape[0], columns - rows.shape[1]
    return paddle.concat([rows, _zeros(rows, number * extra).reshape([number, extra])], axis=1)


def _zeros(like: paddle.Tensor, count: int) -> paddle.Tensor:
    """So many zeros of a tensor's dtype, where it is: `paddle.zeros` would put them on the current device."""
    first = like.flatten()[:1]
    return paddle.zeros_like(first).expand([count]) if count else first[:0]
