"""How each column is laid out in an archive: encodings, compression, statistics.

m and whole distributions are byte-split, other lists plain: many of b, H and Var(log p) are the zeros of sets of one,
whose runs a split would break. No list has a dictionary: it would grow by one. docs/storage.md has the measurements.
Parquet names the values of a list column `kept_ids.list.element.list.element`, and Arrow silently ignores any other
spelling: names are made here only.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from keptset.schemas.columns import BY_NAME
from keptset.schemas.ragged import is_list_like

COMPRESSION_LEVEL = 9
"""Of zstd. 3 is three times as fast and gives files 7 % larger; 19 saves 5 % at a sixteenth of the speed."""
PAGE_BYTES = 2**23
"""Pages are compressed one by one, and in large ones zstd sees how sets repeat: ids take 6 % less than at 1 MiB."""

BYTE_SPLIT = ("log_kept_mass", "kept_logprobs", "top_logprobs")


def leaf(name: str, kind: pa.DataType) -> str:
    """The name Parquet gives the values of a column.

    >>> leaf("kept_ids", pa.list_(pa.list_(pa.int32())))
    'kept_ids.list.element.list.element'
    """
    while is_list_like(kind):
        name, kind = f"{name}.list.element", kind.value_type
    return name


def writer_options(schema: pa.Schema, compression_level: int = COMPRESSION_LEVEL) -> dict[str, Any]:
    """Settings of `pyarrow.parquet.ParquetWriter` for this schema."""
    scalars = [field.name for field in schema if pa.types.is_primitive(field.type) or _is_text(field.type)]
    return {
        "version": "2.6",
        "data_page_version": "1.0",  # its levels are compressed too, and lists have many
        "data_page_size": PAGE_BYTES,
        "compression": "zstd",
        "compression_level": compression_level,
        "use_dictionary": [field.name for field in schema if _is_text(field.type)],
        "use_byte_stream_split": [leaf(name, BY_NAME[name].type) for name in BYTE_SPLIT],
        "write_statistics": [*scalars, leaf("policy_versions", BY_NAME["policy_versions"].type)],
        "write_page_checksum": True,
        "store_schema": True,
    }


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))
