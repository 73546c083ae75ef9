"""Checksums over blocks of a Parquet file, so that Arrow never parses a damaged one.

Parquet's own checksums cover the pages' content, not their headers and not the footer, and damage there can take the
process down. An archive is ordinary Parquet with a guard before its footer, where readers of Parquet do not look:

    PAR1 | row groups | guard | footer, its length, PAR1
    guard: a crc32 for each block of the bytes before it | where it begins, size of a block | crc32 of all from where it
           begins to the end of the file, less itself | `keptset1`

Numbers are little-endian. A reader checks guard and footer once, then each block when something in it is asked for, so
that neither a large file nor a few columns of it cost more than is read.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections import OrderedDict
from typing import Any

import pyarrow as pa

from keptset.schemas.errors import DamagedFile

MARK = b"keptset1"
BLOCK = 2**18
_PARQUET = b"PAR1"
_PLACE = struct.Struct("<QI")
_SEAL = struct.Struct("<I8s")
_TAIL = struct.Struct("<I4s")
_CACHED_BLOCKS = 16
"""Columns are read side by side, and a short one shares its block with its neighbours."""


class GuardedSink:
    """A file for Arrow's Parquet writer that puts the guard in on the way.

    Use: write the row groups, call `ending()`, close the Arrow writer, call `finish()`.
    """

    def __init__(self, raw: pa.NativeFile) -> None:
        self._raw = raw
        self._size = 0
        self._crc, self._filled = 0, 0
        self._crcs: list[int] = []
        self._end: bytearray | None = None
        self._abandoned = False
        self.closed = False

    def write(self, data: bytes) -> int:
        """Called by Arrow."""
        if self._abandoned:
            return len(data)
        if self._end is not None:
            self._end += data
        else:
            self._raw.write(data)
            self._add(memoryview(data))
        return len(data)

    def tell(self) -> int:
        """Called by Arrow."""
        return self._size + (0 if self._end is None else len(self._end))

    def flush(self) -> None:
        """Called by Arrow."""

    def ending(self) -> None:
        """What comes now ends with the footer."""
        self._end = bytearray()

    def abandon(self) -> None:
        """Nothing more goes to the file: an Arrow writer that is closed writes a footer even after an error."""
        self._abandoned = True

    def finish(self) -> int:
        """Write the end, with the guard in its place; returns the size of the file."""
        assert self._end is not None, "ending() comes before finish()"
        length, magic = _TAIL.unpack(self._end[-_TAIL.size :])
        assert magic == _PARQUET, "Arrow closed the file in a way not known here"
        cut = len(self._end) - _TAIL.size - length
        before, footer = bytes(self._end[:cut]), bytes(self._end[cut:])
        self._end = None
        self.write(before)
        if self._filled:
            self._crcs.append(self._crc)
        guard = struct.pack(f"<{len(self._crcs)}I", *self._crcs) + _PLACE.pack(self._size, BLOCK)
        guard += _SEAL.pack(zlib.crc32(footer, zlib.crc32(MARK, zlib.crc32(guard))), MARK)
        self._raw.write(guard + footer)
        return self._size + len(guard) + len(footer)

    def _add(self, data: memoryview) -> None:
        self._size += len(data)
        while len(data):
            piece = data[: BLOCK - self._filled]
            self._crc, self._filled = zlib.crc32(piece, self._crc), self._filled + len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK:
                self._crcs.append(self._crc)
                self._crc, self._filled = 0, 0


class GuardedSource:
    """A Parquet file for Arrow to read, of which every byte handed out was checked."""

    def __init__(self, raw: pa.NativeFile, shown: str) -> None:
        """Check guard and footer of `raw`, a random access file; `shown` names it in messages.

        Errors: DamagedFile saying whether it was cut off, altered or comes from elsewhere; OSError from the system.
        """
        self._raw, self._shown = raw, shown
        self._size = int(raw.size())
        self._covered, self._block, self._crcs, self._rest = self._check_end()
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._at = 0
        self.closed = False
        self.failure: OSError | DamagedFile | None = None
        """What went wrong when Arrow last read."""

    def read(self, size: int = -1) -> bytes:
        """Called by Arrow."""
        start = self._at
        stop = self._size if size is None or size < 0 else min(start + size, self._size)
        try:
            data = self._covered_bytes(start, min(stop, self._covered))
        except (OSError, DamagedFile) as error:
            self.failure = error
            raise
        if stop > self._covered:
            data += self._rest[max(start - self._covered, 0) : stop - self._covered]
        self._at = max(start, stop)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Called by Arrow."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Called by Arrow."""
        return self._at

    def close(self) -> None:
        """Called by Arrow. The file stays its opener's."""

    def _raw_bytes(self, start: int, stop: int) -> bytes:
        self._raw.seek(start)
        data: bytes = self._raw.read(stop - start)
        if len(data) != stop - start:
            raise DamagedFile(f"{self._shown} became shorter while it was read")
        return data

    def _check_end(self) -> tuple[int, int, tuple[int, ...], bytes]:
        """Bytes covered by blocks, size of a block, their checksums, and guard and footer as they are in the file."""
        head = self._raw_bytes(0, min(len(_PARQUET), self._size))
        if head != _PARQUET:
            raise DamagedFile(f"{self._shown} is not a Parquet file: it does not begin with {_PARQUET.decode()}")
        tail = self._raw_bytes(max(self._size - _TAIL.size, 0), self._size)
        length, magic = _TAIL.unpack(tail) if len(tail) == _TAIL.size else (0, b"")
        if magic != _PARQUET:
            raise DamagedFile(
                f"{self._shown} was cut off or overwritten at its end ({self._size} bytes, no closing "
                f"{_PARQUET.decode()})"
            )
        footer = self._size - _TAIL.size - length
        fixed = _PLACE.size + _SEAL.size
        if footer < len(_PARQUET) + fixed:
            raise DamagedFile(f"{self._shown} is damaged: its footer would begin before the file")
        place = self._raw_bytes(footer - fixed, footer)
        covered, block = _PLACE.unpack_from(place)
        told, mark = _SEAL.unpack_from(place, _PLACE.size)
        if mark != MARK:
            raise DamagedFile(
                f"{self._shown} has no keptset guard before its footer: a Parquet file from elsewhere (then say that "
                "it has none, guarded=False), or one that was altered"
            )
        blocks = -(-covered // block) if block else -1
        if covered + 4 * blocks + fixed != footer:
            raise DamagedFile(f"{self._shown} is damaged: its guard and its size do not agree")
        rest = self._raw_bytes(covered, self._size)
        sealed = 4 * blocks + _PLACE.size
        found = zlib.crc32(rest[sealed + _SEAL.size :], zlib.crc32(mark, zlib.crc32(rest[:sealed])))
        if found != told:
            raise DamagedFile(
                f"{self._shown} is damaged: crc32 of its footer is {found:08x}, its guard says {told:08x}"
            )
        return covered, block, struct.unpack_from(f"<{blocks}I", rest), rest

    def _covered_bytes(self, start: int, stop: int) -> bytes:
        """Bytes before the guard, out of blocks that were checked."""
        if start >= stop:
            return b""
        numbers = range(start // self._block, -(-stop // self._block))
        held = {number: self._cache[number] for number in numbers if number in self._cache}
        missing = [number for number in numbers if number not in held]
        if missing:  # with what is held among them, in one go
            first, last = missing[0], missing[-1] + 1
            held = {number: block for number, block in held.items() if not first <= number < last}
            held[first] = self._fetch(first, last)
        blocks = b"".join(held[number] for number in sorted(held))
        return blocks[start - numbers.start * self._block : stop - numbers.start * self._block]

    def _fetch(self, first: int, last: int) -> bytes:
        """Blocks [first, last), each checked; the outer ones are kept for the next read."""
        blocks = self._raw_bytes(first * self._block, min(last * self._block, self._covered))
        view = memoryview(blocks)
        for number in range(first, last):
            block = view[(number - first) * self._block : (number - first + 1) * self._block]
            if zlib.crc32(block) != self._crcs[number]:
                begin = number * self._block
                raise DamagedFile(
                    f"{self._shown} is damaged between bytes {begin} and {begin + len(block)}: crc32 of them is "
                    f"{zlib.crc32(block):08x}, {self._crcs[number]:08x} was written"
                )
            if number in (first, last - 1):
                self._cache[number] = bytes(block)
                self._cache.move_to_end(number)
        while len(self._cache) > _CACHED_BLOCKS:
            self._cache.popitem(last=False)
        return blocks


def python_file(file: GuardedSink | GuardedSource) -> Any:
    """The file as Arrow takes it."""
    return pa.PythonFile(file, mode="w" if isinstance(file, GuardedSink) else "r")
