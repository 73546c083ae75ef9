"""Responses that could not be taken: whole, with the reason, as JSON lines beside the spool."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from keptset.schemas.adapters.arrays import as_numpy
from keptset.schemas.errors import StorageError
from keptset.schemas.findings import Finding

FOLDER = "rejected"
"""Within the spool. Readers of the spool look at its own files only."""
_DEEPEST = 100
"""Levels of a rejected tree that are written as they are; engines nest about ten."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """One response, or one record that holds none that could be told apart, as the engine gave it."""

    place: str
    """File and line; the number of the record for live objects."""
    path: str
    """Where in the record it stands."""
    rollout_id: str | None
    """None where it could not be read far enough to have one."""
    findings: tuple[Finding, ...]
    error: str | None
    """What was expected, where the layout is not the engine's."""
    record: object
    """The response in the engine's own layout, with what was recorded around it: the adapter would read it again."""

    @property
    def reason(self) -> str:
        """In one line."""
        return self.error or "; ".join(str(finding) for finding in self.findings)

    def to_json(self) -> str:
        """One JSON line. Bytes become base64, tensors lists; what JSON cannot hold becomes its text."""
        findings = [asdict(finding) for finding in self.findings]
        told = {
            "place": self.place,
            "path": self.path,
            "rollout_id": self.rollout_id,
            "findings": findings,
            "error": self.error,
            "record": plain(self.record),
        }
        return json.dumps(told)


def plain(value: Any, depth: int = 0) -> Any:
    """Any value as something that JSON can hold.

    >>> plain({"mask": b"\\x01", 7: (1.5, None)})
    {'mask': {'base64': 'AQ=='}, '7': [1.5, None]}
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if depth > _DEEPEST:
        return repr(type(value))
    if isinstance(value, Mapping):
        return {str(name): plain(entry, depth + 1) for name, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry, depth + 1) for entry in value]
    if isinstance(value, (bytes, bytearray)):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Enum):
        return plain(value.value, depth + 1)
    dense = as_numpy(value)
    if dense is not None:
        return dense.tolist()
    return _fields(value, depth)


def _fields(value: Any, depth: int) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        names: Iterable[str] = value.__dataclass_fields__
    elif hasattr(value, "__struct_fields__"):
        names = value.__struct_fields__
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        names = vars(value)
    elif hasattr(value, "__iter__"):
        return [plain(entry, depth + 1) for entry in value]
    else:
        return repr(value)
    return {name: plain(getattr(value, name, None), depth + 1) for name in names if not name.startswith("_")}


class RejectedWriter:
    """Appends rejected responses to `<spool>/rejected/<name>.jsonl`, which is made with the first of them.

    A context manager; on leaving it what was written is on disk. Errors: StorageError.
    """

    def __init__(self, spool: str | Path, name: str) -> None:
        self.path = Path(spool) / FOLDER / f"{name}.jsonl"
        self.count = 0
        self._file: Any = None

    def write(self, rejected: Iterable[Rejected]) -> None:
        """Append one line for each."""
        try:
            for one in rejected:
                if self._file is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
                self._file.write(one.to_json() + "\n")
                self.count += 1
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            raise StorageError(f"rejected responses cannot be written to {self.path}: {error}") from error

    def __enter__(self) -> RejectedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as failure:
            raise StorageError(f"rejected responses cannot be written to {self.path}: {failure}") from failure
