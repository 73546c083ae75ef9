"""One safetensors file, memory-mapped: a header checked before use, tensors read one at a time as float32.

Layout: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range), then the bytes.
bfloat16 is the upper half of a float32, so it is read without a numpy type for it: ``float32(u16 << 16)``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keptset.schemas.errors import CheckpointError

_LENGTH_BYTES = 8
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_SUPPORTED = "float32 (F32), bfloat16 (BF16) and float16 (F16)"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, from the start of the file."""
    end: int


class SafetensorsFile:
    """Tensors of one file. Nothing is read but the header until `read` asks for a tensor.

    Errors: CheckpointError where the file is absent, truncated, or not safetensors; it names the file and,
    where there is one, the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no such file") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{self.path}: cannot be read ({error})") from error
        self._entries = self._read_header()

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32. A float32 tensor is a read-only view of the mapped file: copy it to change it.

        Errors: CheckpointError for a dtype other than float32, bfloat16 or float16.
        """
        entry = self._entries[name]
        raw = self._bytes[entry.begin : entry.end]
        if entry.dtype == "F32":
            values = _view(raw, "<f4")
        elif entry.dtype == "F16":
            values = _view(raw, "<f2").astype(np.float32)
        elif entry.dtype == "BF16":
            values = (_view(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            raise CheckpointError(f"{self.path}: tensor {name!r} is {entry.dtype}; supported are {_SUPPORTED}")
        return values.reshape(entry.shape)

    def _read_header(self) -> dict[str, _Entry]:
        size = len(self._bytes)
        if size < _LENGTH_BYTES:
            raise self._damaged(f"it holds {size} bytes, less than a header")
        length = int(self._bytes[:_LENGTH_BYTES].view("<u8")[0])
        data_begin = _LENGTH_BYTES + length
        if data_begin > size:
            raise self._damaged(f"its header claims {length} bytes, and the file holds {size}: truncated or foreign")
        try:
            header = json.loads(self._bytes[_LENGTH_BYTES:data_begin].tobytes())
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._damaged("its header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, described, data_begin) for name, described in header.items()}
        expected = data_begin
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != expected:
                raise self._damaged(f"tensor {name!r} begins at byte {entry.begin}, where {expected} is expected")
            expected = entry.end
        if expected != size:
            what = "truncated" if expected > size else "followed by foreign bytes"
            raise self._damaged(f"its tensors end at byte {expected}, and the file holds {size}: {what}")
        return entries

    def _entry(self, name: str, described: object, data_begin: int) -> _Entry:
        try:
            dtype, shape, (begin, end) = described["dtype"], tuple(described["shape"]), described["data_offsets"]  # type: ignore[index]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and isinstance(dtype, str)
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise self._damaged(f"tensor {name!r} lacks a dtype, a shape or a byte range")
        bytes_needed = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
        if end < begin or (dtype in _ITEM_BYTES and end - begin != bytes_needed):
            raise self._damaged(f"tensor {name!r} of shape {shape} and {dtype} spans {end - begin} bytes")
        return _Entry(dtype=dtype, shape=shape, begin=data_begin + begin, end=data_begin + end)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a whole safetensors file; {why}")


def _view(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Reinterpret bytes; a header of odd length leaves them unaligned, and numpy reads those too."""
    return np.frombuffer(raw, dtype=dtype) if len(raw) else np.zeros(0, dtype=dtype)
