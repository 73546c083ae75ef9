"""The same columns in the formats that rollouts are often shipped in, for comparison: msgpack, pickle, JSON.

msgpack gets its best case: a map per response, in it one blob of packed numbers a column, as int32, float32 or bytes,
and for sets one of counts and one of ids. Pickle and JSON get Python lists, as `json.dumps(response)` would have them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keptset.schemas.columns import COLUMNS
from keptset.schemas.errors import MissingDependency
from keptset.schemas.ragged import AnyArray, NestedRagged, Ragged
from keptset.schemas.rollout_batch import RolloutBatch


def to_msgpack(batch: RolloutBatch) -> bytes:
    """All responses one after the other. Errors: MissingDependency without msgpack."""
    try:
        import msgpack
    except ModuleNotFoundError as error:
        raise MissingDependency("the comparison with msgpack needs msgpack: pip install 'keptset[prime-rl]'") from error
    packer = msgpack.Packer()
    return b"".join(packer.pack(row) for row in packed_rows(batch))


def to_pickle(batch: RolloutBatch) -> bytes:
    """A list of dicts of Python lists."""
    return pickle.dumps(batch.arrow.to_pylist(), protocol=pickle.HIGHEST_PROTOCOL)


def to_json(batch: RolloutBatch) -> bytes:
    """A list of objects, without white space."""
    return json.dumps(batch.arrow.to_pylist(), separators=(",", ":")).encode()


def packed_rows(batch: RolloutBatch) -> Iterator[dict[str, Any]]:
    """Each response as a map; columns that are null throughout the batch are left out, nulls within a list are packed
    as bytes of validity beside it."""
    present = [column.name for column in COLUMNS if batch.column(column.name).null_count < len(batch)]
    columns = {name: _packed(batch.column(name)) for name in [*present, *batch.extra_columns]}
    for row in range(len(batch)):
        yield {name: values[row] for name, values in columns.items()}


def _packed(array: pa.Array) -> list[Any]:
    kind = array.type
    if not pa.types.is_list(kind):
        values: list[Any] = array.to_pylist()
        return values
    if pa.types.is_list(kind.value_type):
        nested = NestedRagged.from_arrow(array)
        counts = nested.inner.lengths.astype(np.int32)
        ids = [
            nested.inner.values[nested.inner.offsets[start] : nested.inner.offsets[stop]].tobytes()
            for start, stop in _spans(nested.row_offsets)
        ]
        parts = [counts, *([] if nested.inner.row_valid is None else [nested.inner.row_valid])]
        return _rows(array, [*_cut(nested.row_offsets, parts)], ids)
    ragged = Ragged.from_arrow(array)
    parts = [ragged.values, *([] if ragged.valid is None else [ragged.valid])]
    return _rows(array, [*_cut(ragged.offsets, parts)])


def _spans(offsets: AnyArray) -> Iterator[tuple[int, int]]:
    return zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)


def _cut(offsets: AnyArray, parts: list[AnyArray]) -> Iterator[list[bytes]]:
    for start, stop in _spans(offsets):
        yield [part[start:stop].tobytes() for part in parts]


def _rows(array: pa.Array, blobs: list[list[bytes]], ids: list[bytes] | None = None) -> list[Any]:
    valid = pc.is_valid(array).to_pylist()
    rows = [[*blob, *([] if ids is None else [ids[row]])] for row, blob in enumerate(blobs)]
    return [None if not ok else (row[0] if len(row) == 1 else row) for ok, row in zip(valid, rows, strict=True)]
