"""What files of a spool are called: `<writer>-<seq>.open` while written, `<writer>-<seq>.arrow` once published.

The listing of the folder is the spool's only manifest.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keptset.schemas.errors import InvalidInput, StorageError

OPEN, PUBLISHED, DAMAGED = ".open", ".arrow", ".open.damaged"

_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(r"(?P<writer>[A-Za-z0-9][A-Za-z0-9._-]*)-(?P<seq>\d{8,})(?P<suffix>\.arrow|\.open|\.open\.damaged)")


@dataclass(frozen=True, order=True)
class SpoolFile:
    """One file's place in the spool. Sorts by writer, then in the order of writing.

    >>> SpoolFile.of(Path("spool/actor-3-00000012.arrow"))
    SpoolFile(writer='actor-3', seq=12, suffix='.arrow')
    """

    writer: str
    seq: int
    suffix: str

    @classmethod
    def of(cls, path: Path) -> SpoolFile | None:
        """The place a path names; None for a name no writer of a spool would give."""
        match = _NAME.fullmatch(path.name)
        if match is None:
            return None
        place = cls(match["writer"], int(match["seq"]), match["suffix"])
        return place if place.name == path.name else None

    @property
    def name(self) -> str:
        return f"{self.writer}-{self.seq:08d}{self.suffix}"

    def with_suffix(self, suffix: str) -> SpoolFile:
        """The same place in another state."""
        return SpoolFile(self.writer, self.seq, suffix)


def listing(folder: Path) -> list[Path]:
    """Files of the folder that are, or by their ending claim to be, part of a spool; by name.

    Errors: StorageError where the folder cannot be listed.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in (OPEN, PUBLISHED))
    except OSError as error:
        raise StorageError(f"cannot list spool folder {folder}: {error.strerror or error}") from error


def places(folder: Path) -> list[SpoolFile]:
    """The open and published files of a folder in reading order; other files are passed over."""
    return sorted(place for path in listing(folder) if (place := SpoolFile.of(path)) is not None)


def next_seq(names: Iterable[str], writer: str) -> int:
    """The number after the last one this writer used, as far as its files are among `names`."""
    found = (SpoolFile.of(Path(name)) for name in names)
    return max((place.seq + 1 for place in found if place is not None and place.writer == writer), default=0)


def check_writer(writer: str) -> str:
    """Errors: InvalidInput where the name cannot stand in a file name."""
    if _WRITER.fullmatch(writer) is None:
        raise InvalidInput(
            f"writer is {writer!r}; it must be made of letters, digits, '.', '_' and '-', and begin with one of the "
            "first two"
        )
    return writer


def unique_writer() -> str:
    """A name no other writer has: host, process and chance."""
    host = re.sub(r"[^A-Za-z0-9.]+", "", socket.gethostname()).lstrip(".") or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
