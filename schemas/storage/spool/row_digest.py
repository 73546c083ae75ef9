"""16 bytes per response: of its rollout_id, and of everything recorded about it.

A response has the same digest in whichever batch it lies, whatever its neighbours' nulls made of the buffers. Its
identity counts, and so do the caller's own columns, as far as they are not null: numbers by value, since Arrow picks
their width and kind for the batch as a whole.

Legend: B responses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keptset.schemas.columns import BY_NAME
from keptset.schemas.ragged import AnyArray, BoolArray, IntArray, NestedRagged, Ragged, is_list_like
from keptset.schemas.rollout_batch import RolloutBatch

SIZE = 16
"""Two of 10^12 responses share a digest with probability 1e-15."""


def id_digests(batch: RolloutBatch) -> list[bytes | None]:
    """Digest of each rollout_id, [B]; None where it is null.

    Two batches name the same response where these are equal.
    """
    return [None if name is None else _digest(name.encode()) for name in batch.rollout_ids]


def content_digests(batch: RolloutBatch) -> list[bytes]:
    """Digest of all that each row holds, rollout_id included, [B]."""
    identity = repr(sorted(batch.identity.to_metadata().items()))
    told: list[tuple[str, list[Any]]] = []
    parts: list[Part] = []
    for name in sorted(batch.arrow.schema.names):
        array = batch.column(name)
        if array.null_count == len(array):
            continue
        own = name not in BY_NAME
        depth = _depth(array.type)
        if depth:
            parts += (_parts_of_list if depth == 1 else _parts_of_lists)(name, array, widened=own)
            told.append((name, pc.list_value_length(array).to_pylist()))
        else:
            told.append((name, _own_values(array) if own else array.to_pylist()))
    digests = []
    for row in range(len(batch)):
        header: list[tuple[str, Any]] = [(name, values[row]) for name, values in told if values[row] is not None]
        pieces = []
        for part in parts:
            start, stop = part.bounds[row], part.bounds[row + 1]
            if stop > start:
                header.append((part.name, stop - start))
                pieces.append(part.data[start:stop])
        state = hashlib.blake2b(repr((identity, header)).encode(errors="surrogatepass"), digest_size=SIZE)
        for piece in pieces:
            state.update(piece)
        digests.append(state.digest())
    return digests


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SIZE).digest()


def _depth(kind: pa.DataType) -> int:
    """1 for lists and 2 for lists of lists of what NumPy holds; 0 for all that is taken value by value."""
    depth = 0
    while depth < 2 and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        kind, depth = kind.value_type, depth + 1
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return depth if number and not is_list_like(kind) else 0


_NO_PYTHON_VALUE = (ValueError, OverflowError)
"""Of Arrow's conversion, for nanoseconds and for years that Python's dates do not have."""


def _own_values(array: pa.Array) -> list[Any]:
    try:
        values = array.to_pylist()
    except _NO_PYTHON_VALUE:
        values = [_own_value(array.slice(row, 1)) for row in range(len(array))]
    return [_plain(value) for value in values]


def _own_value(one: pa.Array) -> object:
    try:
        return one[0].as_py()
    except _NO_PYTHON_VALUE:
        return pa.record_batch([one], ["value"]).serialize().to_pybytes()


def _plain(value: object) -> object:
    """Whole floats as integers: the caller's 1 is 1.0 in a batch that holds a 1.5 as well."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Part:
    """Bytes of a whole column."""

    name: str
    data: memoryview
    bounds: list[int]
    """[B + 1], where each row's begin."""


def _part(name: str, values: AnyArray, offsets_B1: IntArray) -> Part:
    flat = np.ascontiguousarray(values)
    bounds = np.asarray(offsets_B1, np.int64) * flat.itemsize
    return Part(name, flat.view(np.uint8).data, bounds.tolist())


def _values(name: str, ragged: Ragged, offsets_B1: IntArray, *, widened: bool) -> Iterator[Part]:
    """Values, and where within its row each null stands: nothing where none does."""
    yield _part(name, ragged.values.astype(np.float64) if widened else ragged.values, offsets_B1)
    yield from _nulls(name, ragged.valid, offsets_B1)


def _nulls(name: str, valid: BoolArray | None, offsets_B1: IntArray) -> Iterator[Part]:
    if valid is None:
        return
    items = np.flatnonzero(~valid)
    rows = np.searchsorted(offsets_B1, items, side="right") - 1
    within = items - np.asarray(offsets_B1, np.int64)[rows]
    yield _part(f"{name} nulls", within, np.searchsorted(items, offsets_B1))


def _parts_of_list(name: str, array: pa.Array, *, widened: bool) -> Iterator[Part]:
    ragged = Ragged.from_arrow(array)
    yield from _values(name, ragged, ragged.offsets, widened=widened)


def _parts_of_lists(name: str, array: pa.Array, *, widened: bool) -> Iterator[Part]:
    nested = NestedRagged.from_arrow(array)
    inner = nested.inner
    yield from _values(name, inner, np.asarray(inner.offsets)[nested.row_offsets], widened=widened)
    yield _part(f"{name} lengths", np.asarray(inner.lengths, np.int64), nested.row_offsets)
    yield from _nulls(f"{name} lists", inner.row_valid, nested.row_offsets)
