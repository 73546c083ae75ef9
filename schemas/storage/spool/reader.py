"""The trainer's end of the spool: batches in order, from a position on, as soon as they are acknowledged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from keptset.schemas.errors import DamagedFile, InvalidInput, SchemaError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool.guard import check_guard
from keptset.schemas.storage.spool.names import PUBLISHED, SpoolFile, listing
from keptset.schemas.storage.spool.stream import StoredBatch, read_whole_batches, require_version, verify_batch

Position = dict[str, tuple[int, int]]
"""For each writer the file and the batch in it that come next: what is before them was read."""

_SECOND_LOOK_SECONDS = 0.05
# On the calling thread: a buffer at a time is what Arrow's pool would be given, and a trainer's cores have other work.
_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


@dataclass(frozen=True)
class SetAside:
    """A file that was not read to its end because its bytes are not what was written."""

    name: str
    reason: str


class SpoolReader:
    """Iterates over the batches of a spool folder, writer by writer, each in the order of writing.

    An iteration ends where there is nothing more at present; iterating again goes on from there, with what has come
    since. `position` is the place behind the last batch handed out: save it after a batch was dealt with, give it to a
    new reader to go on. It can be stored as JSON.

    Batches still in an open file are read up to the last whole one, or not at all (`include_open=False`). Every batch
    is checked against its checksum before a value is touched. One batch is held at a time.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        position: Mapping[str, Sequence[int]] | None = None,
        include_open: bool = True,
        on_damaged: Literal["raise", "skip"] = "raise",
    ) -> None:
        """Read from `position`; None: from the beginning.

        A damaged or foreign file raises DamagedFile, or with `on_damaged="skip"` is set aside: what is left of it is
        passed over, and `set_aside` names it. Errors: InvalidInput for a position or setting that cannot be.
        """
        if on_damaged not in ("raise", "skip"):
            raise InvalidInput(f"on_damaged is {on_damaged!r}; it must be raise or skip")
        self.folder = Path(folder)
        self._position = {writer: _pair(writer, at) for writer, at in (position or {}).items()}
        self._include_open = include_open
        self._on_damaged = on_damaged
        self._offsets: dict[SpoolFile, int] = {}
        self.set_aside: list[SetAside] = []

    @property
    def position(self) -> Position:
        """The place behind the last batch handed out."""
        return dict(self._position)

    def __iter__(self) -> Iterator[RolloutBatch]:
        """Errors: StorageError where the folder cannot be read; DamagedFile; SchemaError for another schema version."""
        for place in self._unread():
            batches = self._published(place) if place.suffix == PUBLISHED else self._open(place)
            try:
                yield from batches
            except DamagedFile as error:
                self._put_aside(place.name, error)
                if place.suffix == PUBLISHED:
                    self._position[place.writer] = (place.seq + 1, 0)
            except pa.ArrowException as error:
                self._put_aside(place.name, DamagedFile(f"{self.folder / place.name} is not what Arrow wrote: {error}"))
            except OSError as error:
                raise StorageError(f"cannot read {self.folder / place.name}: {error.strerror or error}") from error

    def _unread(self) -> list[SpoolFile]:
        """Files that may hold something new. A place both open and published counts as published."""
        found: dict[tuple[str, int], SpoolFile] = {}
        aside = {entry.name for entry in self.set_aside}
        for path in listing(self.folder):
            place = SpoolFile.of(path)
            if path.name in aside:
                continue
            if place is None:
                self._put_aside(path.name, DamagedFile(f"{path} is not named as spool files are, <writer>-<number>"))
            elif place.suffix == PUBLISHED or self._include_open:
                key = (place.writer, place.seq)
                if key not in found or place.suffix == PUBLISHED:
                    found[key] = place
        return sorted(place for (writer, seq), place in found.items() if seq >= self._position.get(writer, (0, 0))[0])

    def _put_aside(self, name: str, error: DamagedFile) -> None:
        if self._on_damaged == "raise":
            raise error
        self.set_aside.append(SetAside(name, str(error)))

    def _next_batch(self, place: SpoolFile) -> int:
        seq, batch = self._position.get(place.writer, (0, 0))
        return batch if seq == place.seq else 0

    def _published(self, place: SpoolFile) -> Iterator[RolloutBatch]:
        path = self.folder / place.name
        try:
            check_guard(path)
            source = pa.memory_map(str(path))
        except FileNotFoundError:  # removed since it was listed
            return
        with source, pa.ipc.open_file(source, options=_OPTIONS) as reader:
            require_version(reader.schema, path)
            for number in range(self._next_batch(place), reader.num_record_batches):
                arrow, metadata = reader.get_batch_with_custom_metadata(number)
                verify_batch(arrow, dict(metadata or {}), f"{path}, batch {number}")
                batch = _conformed(arrow, path)
                self._position[place.writer] = (place.seq, number + 1)
                yield batch
        self._position[place.writer] = (place.seq + 1, 0)

    def _open(self, place: SpoolFile) -> Iterator[RolloutBatch]:
        path = self.folder / place.name
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:  # published, or removed empty, since it was listed
            published = place.with_suffix(PUBLISHED)
            if (self.folder / published.name).exists():
                yield from self._published(published)
            return
        with file:
            start = self._offsets.get(place, 0)
            already = 0 if start else self._next_batch(place)
            for number, stored in enumerate(_settled(file.fileno(), path, start)):
                self._offsets = {**self._of_others(place.writer), place: stored.end}
                if number < already:
                    continue
                batch = _conformed(stored.arrow, path)
                self._position[place.writer] = (place.seq, self._next_batch(place) + 1)
                yield batch

    def _of_others(self, writer: str) -> dict[SpoolFile, int]:
        return {place: end for place, end in self._offsets.items() if place.writer != writer}


def _settled(file: int, path: Path, start: int) -> Iterator[StoredBatch]:
    """Whole batches of an open file. What looks damaged is looked at again: its writer may be putting a batch in the
    place of one that did not get through."""
    damaged_at = -1
    while True:
        try:
            for stored in read_whole_batches(file, path, start):
                start = stored.end
                yield stored
            return
        except DamagedFile:
            if damaged_at == start:
                raise
            damaged_at = start
            time.sleep(_SECOND_LOOK_SECONDS)


def _conformed(arrow: pa.RecordBatch, path: Path) -> RolloutBatch:
    try:
        return RolloutBatch.from_arrow(arrow)
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error


def _pair(writer: str, at: Sequence[int]) -> tuple[int, int]:
    if len(at) != 2 or not all(isinstance(number, int) and number >= 0 for number in at):
        raise InvalidInput(f"position of writer {writer} is {at!r}; it must be [file number, batches read of it]")
    return at[0], at[1]
