"""Keys of rows: of the response, of its seed, of its group.

Legend: R rows.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from keptset.schemas.columns import BY_NAME
from keptset.schemas.errors import SchemaError

KEY_COLUMNS = ("rollout_id", "seed", "group_id")
Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]
# Odd, with its bits well mixed: 2^64 over the golden ratio.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def keys_of(columns: pa.RecordBatch, name: str) -> tuple[Keys, Mask]:
    """16 bytes for each row, [R, 2], equal where the values are, and whether there is a value, [R].

    Errors: SchemaError where the column holds something else than its type.
    """
    if name not in columns.schema.names:
        return np.zeros((columns.num_rows, 2), np.uint64), np.zeros(columns.num_rows, bool)
    column, kind = columns.column(name), BY_NAME[name].type
    try:
        column = column if column.type == kind else column.cast(kind)
    except pa.ArrowException as error:
        raise SchemaError(f"column {name} has type {column.type} where {kind} is needed: {error}") from error
    return _of_numbers(column) if pa.types.is_integer(kind) else _of_texts(column)


def _of_texts(column: pa.Array) -> tuple[Keys, Mask]:
    texts = column.to_pylist()
    digests = [
        b"\0" * 16 if text is None else hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts
    ]
    known_R = np.array([text is not None for text in texts], bool)
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2), known_R


def _of_numbers(column: pa.Array) -> tuple[Keys, Mask]:
    known_R = column.is_valid().to_numpy(zero_copy_only=False)
    value_R = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.uint64)
    return np.stack([value_R * _SPREAD, value_R], axis=1), known_R
