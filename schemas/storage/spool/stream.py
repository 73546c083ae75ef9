"""Batches in an open spool file: how one is written, and how the whole ones are read back.

An open file is an Arrow IPC stream without its end: the schema message, then batches. Each batch carries in its custom
metadata the crc32 of its content and of the schema message; what is behind the last whole batch was never acknowledged.
Open files are read with plain reads, never mapped: a writer may cut off a batch that did not get through, and a mapping
would then fault.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from keptset.schemas.columns import Identity
from keptset.schemas.errors import DamagedFile, SchemaError
from keptset.schemas.storage.spool.checksum import content_crc32

CONTENT_CRC, HEADER_CRC = b"keptset.crc32", b"keptset.header_crc32"
WRITER, TIME = b"keptset.writer", b"keptset.time_ns"
_CONTINUATION = b"\xff\xff\xff\xff"
_PREFIX = 8
_LARGEST_HEADER = 2**26
"""No schema message is as large; a longer one is a damaged length."""

Metadata = dict[bytes, bytes]


@dataclass(frozen=True)
class StoredBatch:
    """A batch whose bytes are what was written, and where it ends in its stream."""

    arrow: pa.RecordBatch
    metadata: Metadata
    end: int


def encode_header(schema: pa.Schema) -> bytes:
    """The schema message that a stream begins with."""
    header: bytes = schema.serialize().to_pybytes()
    return header


def encode_batch(batch: pa.RecordBatch, header: bytes, writer: str) -> pa.Buffer:
    """The message of one batch, to be appended to a stream with that header. Errors: SchemaError as `content_crc32`."""
    compact = as_read(batch)
    metadata = {
        CONTENT_CRC: f"{content_crc32(compact):08x}".encode(),
        HEADER_CRC: f"{zlib.crc32(header):08x}".encode(),
        WRITER: writer.encode(),
        TIME: str(time.time_ns()).encode(),
    }
    encoded = _stream(compact, metadata)
    assert encoded.slice(0, len(header)).equals(pa.py_buffer(header)), "Arrow wrote another schema message"
    return encoded.slice(len(header))


def as_read(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same content in the buffers that IPC gives it, which is what its checksum is of."""
    return pa.ipc.open_stream(_stream(batch, None)).read_next_batch()


def _stream(batch: pa.RecordBatch, metadata: Metadata | None) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, batch.schema)
    writer.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue()  # without the end-of-stream marker that closing the writer would add


def read_whole_batches(file: int, path: Path, start: int = 0) -> Iterator[StoredBatch]:
    """The whole batches of an open file from byte `start` (0, or the end of a batch), up to the first that is not.

    `file` is a descriptor open for reading; `path` is for messages. Errors: DamagedFile where the bytes of a batch are
    all there and wrong; SchemaError for another schema version; OSError from the system.
    """
    header = _read_header(file, path)
    if header is None:
        return
    source = _Spliced(file, header, max(start, len(header)))
    try:
        reader = pa.ipc.open_stream(pa.PythonFile(source, mode="r"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedFile(f"{path} does not begin with an Arrow schema: {error}") from error
    while True:
        try:
            batch, found = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        except (pa.ArrowException, OSError, ValueError) as error:
            if source.failure is not None:
                raise source.failure from None
            if source.ran_out:
                return
            raise DamagedFile(f"{path} is damaged behind byte {source.end}: {error}") from error
        metadata = dict(found or {})
        told = metadata.get(HEADER_CRC)
        if told != f"{zlib.crc32(header):08x}".encode():
            raise DamagedFile(f"{path} is damaged: its schema is not the one that its batches were written with")
        require_version(batch.schema, str(path))
        verify_batch(batch, metadata, f"{path}, batch before byte {source.end}")
        yield StoredBatch(batch, metadata, source.end)


def require_version(schema: pa.Schema, where: str) -> None:
    """Errors: SchemaError for data of another schema version, or none."""
    try:
        Identity.from_metadata(schema.metadata)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from error


def verify_batch(batch: pa.RecordBatch, metadata: Metadata, where: str) -> None:
    """Checksum first, which reads nothing but buffers within their bounds, then Arrow's own structure.

    In the other order damaged offsets can take the process down. Errors: DamagedFile.
    """
    told = metadata.get(CONTENT_CRC)
    if told is None:
        raise DamagedFile(f"{where}: no {CONTENT_CRC.decode()} in its metadata, so no spool writer wrote it")
    found = f"{content_crc32(batch):08x}"
    if told != found.encode():
        raise DamagedFile(f"{where}: crc32 of the content is {found}, {told.decode('ascii', 'replace')} was written")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DamagedFile(f"{where}: not valid Arrow data: {error}") from error


def _read_header(file: int, path: Path) -> bytes | None:
    """The schema message; None while it is not whole. Errors: DamagedFile where there cannot be one."""
    prefix = os.pread(file, _PREFIX, 0)
    if len(prefix) < _PREFIX:
        return None
    (length,) = struct.unpack("<i", prefix[4:])
    if prefix[:4] != _CONTINUATION or not 0 < length <= _LARGEST_HEADER:
        raise DamagedFile(f"{path} does not begin with an Arrow schema message")
    header = os.pread(file, _PREFIX + length, 0)
    return header if len(header) == _PREFIX + length else None


class _Spliced:
    """The header, then the file from some byte on, as one stream for Arrow to read."""

    closed = False

    def __init__(self, file: int, header: bytes, start: int) -> None:
        self._file, self._rest = file, header
        self.end = start
        """First byte of the file that was not read yet."""
        self.ran_out = False
        """Whether something was asked for that the file does not hold."""
        self.failure: OSError | None = None

    def read(self, size: int) -> bytes:
        """Called by Arrow."""
        if self._rest:
            piece, self._rest = self._rest[:size], self._rest[size:]
            return piece
        try:
            wanted = min(size, max(os.fstat(self._file).st_size - self.end, 0))
            pieces = []
            while wanted > 0 and (piece := os.pread(self._file, wanted, self.end)):
                pieces.append(piece)
                self.end += len(piece)
                size, wanted = size - len(piece), wanted - len(piece)
        except OSError as error:
            self.failure = error
            raise
        self.ran_out = self.ran_out or size > 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
