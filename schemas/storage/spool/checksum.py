"""crc32 of a batch's content: the same for a batch in an open stream and in a compressed file, in any Arrow version.

Over the number of rows, then column by column and depth first: validity bits, offsets, values, each little-endian and
cut to the array's logical length. Bytes that carry no meaning (padding, spare bits, the offsets of no list at all)
differ between Arrow versions and do not count.

Reads buffers only, within their bounds, and no value through Arrow: it is safe on damaged data that nothing has
validated yet. Arrays must come straight from IPC, where they start at offset 0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import pyarrow as pa

from keptset.schemas.errors import SchemaError


def content_crc32(batch: pa.RecordBatch) -> int:
    """Checksum of a batch as read from IPC. Errors: SchemaError for a column type that has none."""
    crc = zlib.crc32(struct.pack("<q", batch.num_rows))
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            crc = _add(crc, field.type, batch.num_rows, iter(column.buffers()))
        except _Unsupported as error:
            raise SchemaError(
                f"column {field.name} has type {field.type}; a spool cannot hold {error}: store numbers, strings, "
                "lists, structs or maps of them"
            ) from None
    return crc


class _Unsupported(Exception):
    pass


def _bytes(buffer: pa.Buffer | None, size: int) -> memoryview:
    """At most `size` bytes of a buffer that may be absent or, if damaged, too short."""
    return memoryview(b"") if buffer is None else memoryview(buffer)[: max(size, 0)]


def _add_bits(crc: int, buffer: pa.Buffer | None, count: int) -> int:
    """A bitmap without the spare bits of its last byte; an absent one is not an empty one."""
    if buffer is None:
        return zlib.crc32(b"\0", crc)
    bits = _bytes(buffer, (count + 7) // 8)
    if count % 8 == 0 or not len(bits):
        return zlib.crc32(bits, zlib.crc32(b"\1", crc))
    crc = zlib.crc32(bits[:-1], zlib.crc32(b"\1", crc))
    return zlib.crc32(bytes([bits[-1] & ((1 << count % 8) - 1)]), crc)


def _add_offsets(crc: int, buffer: pa.Buffer | None, count: int, width: int) -> tuple[int, int]:
    """Offsets of `count` lists; also gives the number of items they span."""
    if count == 0:
        return crc, 0
    offsets = _bytes(buffer, (count + 1) * width)
    whole = len(offsets) // width * width
    last = int.from_bytes(offsets[whole - width : whole], "little", signed=True)
    return zlib.crc32(offsets, crc), last


def _add(crc: int, kind: pa.DataType, count: int, buffers: Iterator[pa.Buffer | None]) -> int:
    """Continue `crc` over one array of `count` items, taking its buffers from the front."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _add(crc, kind.storage_type, count, buffers)
    crc = _add_bits(crc, next(buffers), count)
    if types.is_null(kind):
        return crc
    if types.is_boolean(kind):
        return _add_bits(crc, next(buffers), count)
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            crc = _add(crc, kind.field(number).type, count, buffers)
        return crc
    if types.is_fixed_size_list(kind):
        return _add(crc, kind.value_type, count * kind.list_size, buffers)
    if types.is_list(kind) or types.is_large_list(kind):
        crc, items = _add_offsets(crc, next(buffers), count, 8 if types.is_large_list(kind) else 4)
        return _add(crc, kind.value_type, items, buffers)
    if types.is_map(kind):
        crc, items = _add_offsets(crc, next(buffers), count, 4)
        crc = _add_bits(crc, next(buffers), items)
        return _add(_add(crc, kind.key_type, items, buffers), kind.item_type, items, buffers)
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        large = types.is_large_string(kind) or types.is_large_binary(kind)
        crc, items = _add_offsets(crc, next(buffers), count, 8 if large else 4)
        return zlib.crc32(_bytes(next(buffers), items), crc)
    if types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        return zlib.crc32(_bytes(next(buffers), count * kind.bit_width // 8), crc)
    raise _Unsupported(str(kind))
