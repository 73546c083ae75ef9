"""The trainer's end of the spool: batches in order, from a position on, as soon as they are acknowledged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import pyarrow as pa
from pyarrow import fs

from keptset.schemas.errors import DamagedFile, InvalidInput, StorageError
from keptset.schemas.findings import Finding
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool.folder import folder_of
from keptset.schemas.storage.spool.guard import check_guard
from keptset.schemas.storage.spool.join import appended_batches, viewed
from keptset.schemas.storage.spool.names import PUBLISHED, SpoolFile
from keptset.schemas.storage.spool.seen import SeenResponses
from keptset.schemas.storage.spool.stream import StoredBatch, read_whole_batches, require_version

Position = dict[str, tuple[int, int]]
"""For each writer the file and the batch in it that come next: what is before them was read."""

SECOND_LOOK_SECONDS = 0.05
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
    since. With `follow` it waits for more instead. `position` is the place behind the last batch handed out: save it
    after a batch was dealt with, give it to a new reader to go on. It can be stored as JSON.

    Batches still in an open file are read up to the last whole one, or not at all (`include_open=False`). Every batch
    is checked against its checksum before a value is touched. One batch is held at a time, in a published file with
    those that it was joined with, up to 4 MiB: who keeps single ones keeps their `compact()`.

    The first response of a rollout_id counts. One that comes under it again is passed over, and `findings` counts it: a
    `duplicate` where it is the same, a `conflict` where it is not.

    A reader belongs to one thread at a time. Close it, or use it as a context manager, to let go of what it remembers.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        position: Mapping[str, Sequence[int]] | None = None,
        include_open: bool = True,
        on_damaged: Literal["raise", "skip"] = "raise",
        duplicates: Literal["skip", "keep"] = "skip",
        seen: str | Path | None = None,
        follow: bool = False,
        stop: Callable[[], bool] = lambda: False,
        timeout: float | None = None,
        poll_seconds: float = 0.2,
        filesystem: fs.FileSystem | None = None,
    ) -> None:
        """Read `folder` from `position`; None: from the beginning.

        `folder` is a path, a URI that Arrow knows (s3://bucket/run/spool, gs://, hdfs://, ...), or a path in
        `filesystem`. Elsewhere than on this machine there are published files only; each is fetched once.

        A damaged or foreign file raises DamagedFile, or with `on_damaged="skip"` is set aside: what is left of it is
        passed over, and `set_aside` names it.

        Ids are remembered as 16-byte digests, in memory up to 64 MiB (some 1,200,000 responses), then in a temporary
        file. `seen` names a file that keeps them, for this reader alone: with it a restarted reader also knows the
        ids before its position. `duplicates="keep"` hands out everything, and remembers nothing.

        With `follow` an iteration looks for more every `poll_seconds`. It ends once `stop()` is true, with all that is
        there by then, or when nothing has come for `timeout` seconds. The folder need not be there yet.

        Errors: InvalidInput for a position or setting that cannot be; StorageError where `seen` cannot be used.
        """
        if on_damaged not in ("raise", "skip"):
            raise InvalidInput(f"on_damaged is {on_damaged!r}; it must be raise or skip")
        if duplicates not in ("skip", "keep"):
            raise InvalidInput(f"duplicates is {duplicates!r}; it must be skip or keep")
        if seen is not None and duplicates == "keep":
            raise InvalidInput(f"seen is {str(seen)!r}, and duplicates are kept: nothing would be remembered in it")
        if poll_seconds <= 0:
            raise InvalidInput(f"poll_seconds is {poll_seconds}; it must be above 0")
        if timeout is not None and timeout < 0:
            raise InvalidInput(f"timeout is {timeout}; it must not be below 0")
        self._folder = folder_of(folder, filesystem)
        self._position = {writer: _pair(writer, at) for writer, at in (position or {}).items()}
        self._include_open = include_open
        self._on_damaged = on_damaged
        self._follow, self._stop, self._timeout, self._poll_seconds = follow, stop, timeout, poll_seconds
        self._seen = None if duplicates == "keep" else SeenResponses(None if seen is None else Path(seen))
        self._offsets: dict[SpoolFile, int] = {}
        self.set_aside: list[SetAside] = []

    @property
    def position(self) -> Position:
        """The place behind the last batch handed out, or passed over as a whole."""
        return dict(self._position)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Kinds `conflict` and `duplicate`: what this reader passed over, with totals and the first examples."""
        return () if self._seen is None else self._seen.findings

    def close(self) -> None:
        """Let go of what was remembered. Closing twice is no error; nothing can be read afterwards."""
        if self._seen is not None:
            self._seen.close()

    def __enter__(self) -> SpoolReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[RolloutBatch]:
        """Errors: StorageError where the folder cannot be read; DamagedFile; SchemaError for another schema version."""
        if not self._follow:
            yield from self._present()
            return
        quiet_since = time.monotonic()
        while True:
            stopped = self._stop()
            overdue = self._timeout is not None and time.monotonic() - quiet_since >= self._timeout
            if stopped or overdue or self._folder.exists():
                for batch in self._present():
                    yield batch
                    quiet_since, overdue = time.monotonic(), False
            if stopped or overdue:
                return
            time.sleep(self._poll_seconds)

    def _present(self) -> Iterator[RolloutBatch]:
        """What the folder holds now, from the position on."""
        for place in self._unread():
            batches = self._published(place) if place.suffix == PUBLISHED else self._open(place)
            try:
                yield from batches
            except DamagedFile as error:
                self._put_aside(place, error)
            except (pa.ArrowException, UnicodeDecodeError) as error:
                self._put_aside(place, DamagedFile(f"{self._shown(place)} is not what Arrow wrote: {error}"))
            except OSError as error:
                if error.errno is None:  # Arrow's own, about what it read; the system's have a number
                    self._put_aside(place, DamagedFile(f"{self._shown(place)} is not what Arrow wrote: {error}"))
                else:
                    raise StorageError(f"cannot read {self._shown(place)}: {error.strerror or error}") from error

    def _unread(self) -> list[SpoolFile]:
        """Files that may hold something new. A place both open and published counts as published."""
        found: dict[tuple[str, int], SpoolFile] = {}
        aside = {entry.name for entry in self.set_aside}
        for name in self._folder.names():
            place = SpoolFile.of(Path(name))
            if name in aside:
                continue
            if place is None:
                told = f"{self._folder}/{name} is not named as spool files are, <writer>-<number>"
                self._put_name_aside(name, DamagedFile(told))
            elif place.suffix == PUBLISHED or self._include_open:
                key = (place.writer, place.seq)
                if key not in found or place.suffix == PUBLISHED:
                    found[key] = place
        return sorted(place for (writer, seq), place in found.items() if seq >= self._position.get(writer, (0, 0))[0])

    def _shown(self, place: SpoolFile) -> str:
        return f"{self._folder}/{place.name}"

    def _put_aside(self, place: SpoolFile, damage: DamagedFile) -> None:
        """What is left of a file is passed over. Errors: the damage, where it is to be raised."""
        self._put_name_aside(place.name, damage)
        if place.suffix == PUBLISHED:
            self._position[place.writer] = (place.seq + 1, 0)

    def _put_name_aside(self, name: str, damage: DamagedFile) -> None:
        if self._on_damaged == "raise":
            raise DamagedFile(f"{damage}; {_way_out(name)}") from damage
        self.set_aside.append(SetAside(name, str(damage)))

    def _next_batch(self, place: SpoolFile) -> int:
        seq, batch = self._position.get(place.writer, (0, 0))
        return batch if seq == place.seq else 0

    def _published(self, place: SpoolFile) -> Iterator[RolloutBatch]:
        shown = self._shown(place)
        with contextlib.ExitStack() as closing:
            try:
                path = closing.enter_context(self._folder.file(place.name))
                check_guard(path, shown)
                source = closing.enter_context(pa.memory_map(str(path)))
            except FileNotFoundError:  # removed since it was listed
                return
            reader = closing.enter_context(pa.ipc.open_file(source, options=_OPTIONS))
            require_version(reader.schema, shown)
            for batch in appended_batches(reader, self._next_batch(place), shown):
                yield from self._next(batch, place)
        self._position[place.writer] = (place.seq + 1, 0)

    def _open(self, place: SpoolFile) -> Iterator[RolloutBatch]:
        path = Path(self._shown(place))
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:  # published, or removed empty, since it was listed
            published = place.with_suffix(PUBLISHED)
            if self._folder.holds(published.name):
                yield from self._published(published)
            return
        with file:
            start = self._offsets.get(place, 0)
            already = 0 if start else self._next_batch(place)
            for number, stored in enumerate(_settled(file.fileno(), path, start)):
                self._offsets = {**self._of_others(place.writer), place: stored.end}
                if number >= already:
                    yield from self._next(viewed(stored.arrow, str(path)), place)

    def _next(self, batch: RolloutBatch, place: SpoolFile) -> Iterator[RolloutBatch]:
        """The batch at the position, which moves on, less what came before under the same ids."""
        number = self._next_batch(place)
        fresh = batch if self._seen is None else self._seen.first_of_their_ids(batch, place, number)
        self._position[place.writer] = (place.seq, number + 1)
        if fresh is not None:
            yield fresh

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
            time.sleep(SECOND_LOOK_SECONDS)


def _way_out(name: str) -> str:
    """What the caller can do about a damaged or foreign file."""
    skip = "read on with on_damaged='skip', which passes over"
    place = SpoolFile.of(Path(name))
    if place is None:
        return f"move it out of the folder, or {skip} it"
    if place.suffix == PUBLISHED:
        return f"put back a copy of it, or {skip} what is left of it"
    return (
        f"recover the folder once its writer has ended, which keeps the whole batches before the damage, or {skip} it"
    )


def _pair(writer: str, at: Sequence[int]) -> tuple[int, int]:
    if len(at) != 2 or not all(isinstance(number, int) and number >= 0 for number in at):
        raise InvalidInput(f"position of writer {writer} is {at!r}; it must be [file number, batches read of it]")
    return at[0], at[1]
