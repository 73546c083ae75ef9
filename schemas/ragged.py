"""Ragged columns as (offsets, values): the only place that touches Arrow list offsets.

Arrow's traps are handled here once: a sliced list array keeps its parent's values and offsets that do not start at
0, a null list may still span values, and the slots behind null items hold whatever memory held. Values are views of
the Arrow buffers wherever no null forces a copy; behind a null, floats read NaN, integers -1 and booleans False.

Legend: R lists, N items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

IntArray = npt.NDArray[np.integer]
AnyArray = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]


def _arrow_to_numpy(array: pa.Array) -> tuple[AnyArray, BoolArray | None]:
    """Values and validity of a primitive array; `None` where nothing is null."""
    if array.null_count == 0:
        return array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type)), None
    if pa.types.is_floating(array.type):
        filler: float | int | bool = float("nan")
    else:
        filler = False if pa.types.is_boolean(array.type) else -1
    valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
    filled = pc.fill_null(array, pa.scalar(filler, array.type))
    return filled.to_numpy(zero_copy_only=False), valid


def _list_parts(array: pa.ListArray) -> tuple[IntArray, pa.Array, BoolArray | None]:
    """Offsets starting at 0, the items they index, and which lists are not null."""
    if len(array) == 0:
        return np.zeros(1, np.int32), array.flatten(), None
    offsets = array.offsets.to_numpy(zero_copy_only=True)
    row_valid = None
    if array.null_count:
        row_valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
        lengths = np.diff(offsets)
        if lengths[~row_valid].any():  # a null list that spans values: Arrow's flatten copies the others
            return offsets_of(np.where(row_valid, lengths, 0)), array.flatten(), row_valid
    items = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return (offsets if offsets[0] == 0 else offsets - offsets[0]), items, row_valid


def _is_list_view(kind: pa.DataType) -> bool:
    if not hasattr(pa.types, "is_list_view"):
        return False
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def is_list_like(kind: pa.DataType) -> bool:
    """Whether this is any of Arrow's list layouts."""
    types = pa.types
    plain = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(plain or _is_list_view(kind))


def holds_list_view(kind: pa.DataType) -> bool:
    """Whether a list view stands at any level of this type."""
    while is_list_like(kind):
        if _is_list_view(kind):
            return True
        kind = kind.value_type
    return False


def without_list_views(array: pa.Array) -> pa.Array:
    """The same lists in offset layout at every level. (Arrow's own cast of a list view leaves a buffer too short.)"""
    if not is_list_like(array.type):
        return array
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    row_valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
    return _list_array(offsets_of(lengths), without_list_views(array.flatten()), row_valid)


def offsets_of(lengths_R: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Offsets [R + 1] of lists with these lengths.

    >>> offsets_of([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    lengths = np.asarray(lengths_R)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def row_index(offsets_R1: IntArray) -> npt.NDArray[np.int64]:
    """For each item the index of its list.

    >>> row_index(np.array([0, 2, 2, 5])).tolist()
    [0, 0, 2, 2, 2]
    """
    return np.repeat(np.arange(len(offsets_R1) - 1), np.diff(offsets_R1))


def span_index(starts_R: npt.NDArray[np.int64], lengths_R: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Index of every item of the spans [start, start + length), in their order.

    >>> span_index(np.array([5, 1]), np.array([2, 3])).tolist()
    [5, 6, 1, 2, 3]
    """
    offsets = offsets_of(lengths_R)
    return np.arange(offsets[-1]) + np.repeat(starts_R - offsets[:-1], lengths_R)


def gather_spans(offsets_R1: IntArray, rows: IntArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """New offsets and item index that pick whole lists `rows`, in that order, without a loop over them.

    >>> offsets, index = gather_spans(np.array([0, 2, 2, 5]), np.array([2, 0]))
    >>> offsets.tolist(), index.tolist()
    ([0, 3, 5], [2, 3, 4, 0, 1])
    """
    starts = np.asarray(offsets_R1[:-1], np.int64)[rows]
    lengths = np.diff(offsets_R1).astype(np.int64)[rows]
    return offsets_of(lengths), span_index(starts, lengths)


@dataclass(frozen=True)
class Ragged:
    """One list column.

    >>> Ragged.from_arrow(pa.array([[9], [1, 2], [], None, [3]]).slice(1)).offsets.tolist()
    [0, 2, 2, 2, 3]
    """

    offsets: IntArray
    """[R + 1], starts at 0."""
    values: AnyArray
    """[N]; NaN, -1 or False behind a null."""
    valid: BoolArray | None = None
    """[N], False where an item is null; None where no item is."""
    row_valid: BoolArray | None = None
    """[R], False where the whole list is null; None where no list is."""

    @property
    def lengths(self) -> IntArray:
        """Items per list, [R]; 0 for a null list."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> AnyArray:
        """Values of one list, a view."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"list {row} of {len(self)}")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @classmethod
    def from_arrow(cls, array: pa.ListArray) -> Ragged:
        """View of an Arrow list array of numbers or booleans."""
        offsets, items, row_valid = _list_parts(array)
        values, valid = _arrow_to_numpy(items)
        return cls(offsets, values, valid, row_valid)

    @classmethod
    def from_map_keys(cls, array: pa.MapArray) -> Ragged:
        """The keys of an Arrow map array, a list per row.

        >>> Ragged.from_map_keys(pa.array([[(1, 2)], None, [(3, 4), (5, 6)]], pa.map_(pa.int32(), pa.int32()))).offsets
        array([0, 1, 1, 3])
        """
        offsets = array.offsets.to_numpy(zero_copy_only=True) if len(array) else np.zeros(1, np.int32)
        row_valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
        offsets, index = gather_spans(offsets, np.flatnonzero(row_valid))
        keys, _ = _arrow_to_numpy(array.keys.take(pa.array(index)))
        lengths_R = np.zeros(len(row_valid), np.int64)
        lengths_R[row_valid] = np.diff(offsets)
        return cls(offsets_of(lengths_R), keys, None, row_valid)

    def to_arrow(self, item_type: pa.DataType) -> pa.ListArray:
        """Arrow list array of `item_type`; nulls as `valid` and `row_valid` say."""
        mask = None if self.valid is None else ~self.valid
        return _list_array(self.offsets, pa.array(self.values, item_type, mask=mask), self.row_valid)


@dataclass(frozen=True)
class NestedRagged:
    """A list column of lists: rows hold tokens, tokens hold items.

    >>> nested = NestedRagged.from_arrow(pa.array([[[7]], [[1, 2], None], None]).slice(1))
    >>> nested.row_offsets.tolist(), nested.inner.offsets.tolist(), nested.inner.row_valid.tolist()
    ([0, 2, 2], [0, 2, 2], [True, False])
    """

    row_offsets: IntArray
    """[R + 1] into the tokens, starts at 0."""
    inner: Ragged
    """One list per token."""
    row_valid: BoolArray | None = None
    """[R], False where the whole row is null; None where no row is."""

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    @classmethod
    def from_arrow(cls, array: pa.ListArray) -> NestedRagged:
        """View of an Arrow list array of list arrays."""
        offsets, items, row_valid = _list_parts(array)
        return cls(offsets, Ragged.from_arrow(items), row_valid)

    def to_arrow(self, item_type: pa.DataType) -> pa.ListArray:
        """Arrow list array of lists of `item_type`."""
        return _list_array(self.row_offsets, self.inner.to_arrow(item_type), self.row_valid)


def _list_array(offsets: IntArray, items: pa.Array, row_valid: BoolArray | None) -> pa.ListArray:
    mask = None if row_valid is None or row_valid.all() else pa.array(~row_valid)
    arrow_offsets = pa.array(np.asarray(offsets), pa.int32())
    return pa.ListArray.from_arrays(arrow_offsets, items, pa.list_(items.type), mask=mask)
