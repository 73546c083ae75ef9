"""A checksum over every byte of a published file, so that Arrow never parses a damaged one.

A published file is an ordinary Arrow IPC file with 16 bytes between its end-of-stream marker and its footer:

    ARROW1 | schema, batches | end of stream | `keptset1` + crc32 in 8 hex digits | footer, its length, ARROW1
    \\___________________ covered ___________/                                      \\_______ covered ________/

Readers of Arrow find the footer from the end and the batches from the footer, so they pass the guard by. The checksum
of a batch cannot do this work: names of columns, types and identity lie outside it.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

from keptset.schemas.errors import DamagedFile

MARK = b"keptset1"
_ARROW = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_TAIL = struct.calcsize("<i") + len(_ARROW)
_GUARD = len(MARK) + 8
_CHUNK = 2**20


class GuardedSink:
    """A file for Arrow's IPC file writer that puts the guard in on the way.

    Use: write the batches, call `ending()`, close the Arrow writer, call `finish()`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._crc = 0
        self._end: bytearray | None = None
        self.closed = False

    def write(self, data: bytes) -> int:
        """Called by Arrow."""
        if self._end is not None:
            self._end += data
        else:
            self._crc = zlib.crc32(data, self._crc)
            self._file.write(data)
        return len(data)

    def flush(self) -> None:
        """Called by Arrow."""

    def ending(self) -> None:
        """What comes now is the end-of-stream marker and the footer."""
        self._end = bytearray()

    def finish(self) -> None:
        """Write the end, with the guard in its place."""
        assert self._end is not None, "ending() comes before finish()"
        assert self._end.startswith(_END_OF_STREAM), "Arrow closed the file in a way not known here"
        footer = bytes(self._end[len(_END_OF_STREAM) :])
        crc = zlib.crc32(footer, zlib.crc32(_END_OF_STREAM, self._crc))
        self._file.write(_END_OF_STREAM + MARK + f"{crc:08x}".encode() + footer)


def check_guard(path: Path, shown: str | None = None) -> None:
    """Compare a file with its guard; reads it once, in small pieces. `shown` names it in messages, if not its path.

    Errors: DamagedFile saying whether it was cut off, altered or comes from elsewhere; OSError from the system.
    """
    shown = str(path) if shown is None else shown
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(_ARROW)) != _ARROW:
            raise DamagedFile(f"{shown} is not an Arrow file: it does not begin with {_ARROW.decode()}")
        file.seek(max(size - _TAIL, 0))
        tail = file.read(_TAIL)
        if len(tail) < _TAIL or not tail.endswith(_ARROW):
            raise DamagedFile(
                f"{shown} was cut off or overwritten at its end ({size} bytes, no closing {_ARROW.decode()})"
            )
        (footer,) = struct.unpack_from("<i", tail)
        at = size - _TAIL - footer - _GUARD
        guard = b""
        if footer >= 0 and at > 0:
            file.seek(at)
            guard = file.read(_GUARD)
        if not guard.startswith(MARK):
            raise DamagedFile(
                f"{shown} has no keptset guard before its footer: an Arrow file from elsewhere (then import it, a "
                "spool holds only what its writers wrote), or one that was altered"
            )
        found = _crc32(file, 0, at)
        found = _crc32(file, at + _GUARD, size, found)
        if guard[len(MARK) :] != f"{found:08x}".encode():
            told = guard[len(MARK) :].decode("ascii", "replace")
            raise DamagedFile(f"{shown} is damaged: crc32 of its bytes is {found:08x}, its guard says {told}")


def _crc32(file: BinaryIO, start: int, stop: int, crc: int = 0) -> int:
    file.seek(start)
    while start < stop:
        piece = file.read(min(_CHUNK, stop - start))
        if not piece:
            break
        crc = zlib.crc32(piece, crc)
        start += len(piece)
    return crc
