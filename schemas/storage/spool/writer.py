"""The rollout's end of the spool: one writer, one open file at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal

import pyarrow as pa
from pyarrow import fs

from keptset.schemas.errors import InvalidInput, KeptsetError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool.folder import folder_of, local_and_remote, upload_published
from keptset.schemas.storage.spool.locks import still_there, try_lock
from keptset.schemas.storage.spool.names import (
    OPEN,
    PUBLISHED,
    SpoolFile,
    check_writer,
    next_seq,
    places,
    unique_writer,
)
from keptset.schemas.storage.spool.publish import Compression, publish, sync_folder
from keptset.schemas.storage.spool.recovery import Recovered, recover_file
from keptset.schemas.storage.spool.stream import StoredBatch, encode_batch, encode_header, read_whole_batches

Fsync = Literal["never", "rotate", "batch"]
ROTATE_BYTES = 256 * 2**20
PATIENCE_SECONDS = 5.0
"""How long a new writer waits for whoever has the open file of its name: a recovery ends, a live writer stays."""
_POLL_SECONDS = 0.02


class SpoolWriter:
    """Appends batches to a folder, where they stay whatever becomes of this process.

    A batch is acknowledged, and safe from a crash of the process, once `append` returns. Against loss of power `fsync`
    decides what is on the device: `never` leaves that to the system, `rotate` holds it for published files, `batch` for
    every acknowledged batch. A full file is published when the next batch comes, and at `rotate` and `close`; readers
    see acknowledged batches before that.

    A writer belongs to one thread of one process, and owns its name in the folder: a second live writer of the same
    name is refused. What a crashed one left is published first, see `recovered`. Close it, or use it as a context
    manager: leaving the block publishes, also where an error ends it.

    In another file system (S3, GCS, HDFS, ...) batches are acknowledged in a `staging` folder of this machine, and full
    files are published by one upload each. Names of writers must differ between machines; one without a name gets such
    a one.
    """

    def __init__(
        self,
        folder: str | Path,
        writer: str | None = None,
        *,
        fsync: Fsync = "rotate",
        rotate_bytes: int = ROTATE_BYTES,
        rotate_seconds: float | None = None,
        compression: Compression = "zstd",
        filesystem: fs.FileSystem | None = None,
        staging: str | Path | None = None,
    ) -> None:
        """Open the spool in `folder`, which is made if need be. `writer` names this writer; None makes a unique name.

        A file is published once it holds `rotate_bytes` or is `rotate_seconds` old. Published files are compressed, or
        with `compression="none"` some two to four times larger and read without a copy.

        `folder` is a path, a URI that Arrow knows, or a path in `filesystem`. Elsewhere than on this machine `staging`
        names a local folder for what was not uploaded yet: give the same one after a crash, here or to `recover`.

        Errors: InvalidInput for a setting that cannot be; StorageError where the folder cannot be written or the name
        is in use.
        """
        if fsync not in ("never", "rotate", "batch"):
            raise InvalidInput(f"fsync is {fsync!r}; it must be never, rotate or batch")
        if rotate_bytes < 1 or (rotate_seconds is not None and rotate_seconds <= 0):
            raise InvalidInput(f"rotate_bytes is {rotate_bytes}, rotate_seconds {rotate_seconds}; both must be above 0")
        if compression not in ("zstd", "none"):
            raise InvalidInput(f"compression is {compression!r}; it must be zstd or none")
        self.folder, self._remote = local_and_remote(folder_of(folder, filesystem), staging)
        self.writer = check_writer(unique_writer() if writer is None else writer)
        self._fsync, self._rotate_bytes, self._rotate_seconds = fsync, rotate_bytes, rotate_seconds
        self._compression = compression
        self._file: FileIO | None = None
        self.recovered: list[Recovered] = []
        self._closed = False
        self._broken: str | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make spool folder {self.folder}: {error.strerror or error}") from error
        for place in places(self.folder):
            if place.writer == self.writer and place.suffix == OPEN:
                self._take_over(place)
        # A number is given once, also where published files are uploaded, or removed as soon as they were read. Here
        # comes first: what another uploads meanwhile is there before it is gone from here.
        here = [place.name for place in places(self.folder)]
        elsewhere = [] if self._remote is None else self._remote.names()
        self._next_seq = next_seq([*here, *elsewhere], self.writer)
        self._upload()
        self._start()

    def _take_over(self, place: SpoolFile) -> None:
        """Recover what a crashed writer of our name left. Errors: StorageError where it is alive."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            recovered = recover_file(self.folder, place, fsync=self._fsync != "never")
            if recovered is not None:
                self.recovered.append(recovered)
                return
            if not (self.folder / place.name).exists():
                return
            if time.monotonic() >= deadline:
                raise self._name_in_use(place)
            time.sleep(_POLL_SECONDS)

    @property
    def path(self) -> Path:
        """The open file."""
        return self.folder / self._place.name

    @property
    def position(self) -> tuple[int, int]:
        """Number of the open file, and of the batches acknowledged in it."""
        return self._place.seq, self._batches

    def append(self, batch: RolloutBatch) -> None:
        """Store a batch; it is acknowledged when this returns. A batch without rows is nothing to store.

        Errors: StorageError where it could not be stored: the message names the file and what is safe, this batch is
        not stored, and once there is room it may be appended again. SchemaError for a column of the caller's own that a
        spool cannot hold.
        """
        self._require_open()
        if not len(batch):
            return
        arrow = _plain(batch.arrow)
        header = encode_header(arrow.schema)
        encoded = encode_batch(arrow, header, self.writer)
        if self._batches and self._is_due(arrow.schema):
            self.rotate()
        if self._file is None:
            self._start()
        first = self._batches == 0
        self._write(header if first else b"", encoded)
        if first:
            self._schema, self._started = arrow.schema, time.monotonic()
        self._batches += 1

    def rotate(self) -> Path | str | None:
        """Publish what was appended since the last time; returns the file (elsewhere: its address), None for nothing.

        Errors: StorageError; what was acknowledged is safe then, and rotating may be tried again.
        """
        self._require_open()
        published = self._publish()
        if published is not None:
            self._start()
        self._upload()
        return published if published is None or self._remote is None else self._remote.address(published.name)

    def close(self) -> None:
        """Publish, and end this writer. Closing twice is no error.

        Errors: StorageError; what was acknowledged is safe then, for `recover`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._publish() is None:
                self._drop()
        finally:
            self._release()
        self._upload()

    def __enter__(self) -> SpoolWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise StorageError(f"spool writer {self.writer} of {self.folder} is closed")
        if self._broken is not None:
            raise StorageError(f"{self._broken}; close this writer, then recover {self.folder} and open another")

    def _is_due(self, schema: pa.Schema) -> bool:
        """Whether the open file must not take another batch, or not one of this schema."""
        if self._end >= self._rotate_bytes or not self._schema.equals(schema, check_metadata=True):
            return True
        return self._rotate_seconds is not None and time.monotonic() - self._started >= self._rotate_seconds

    def _start(self) -> None:
        """Make and lock the next open file, so that the name stays ours between files."""
        self._end = self._batches = 0
        try:
            while True:
                seq = max(self._next_seq, next_seq(os.listdir(self.folder), self.writer))
                self._place, self._next_seq = SpoolFile(self.writer, seq, OPEN), seq + 1
                self._file = FileIO(self.path, "x+")
                # A recovery may have taken the empty file for an orphan's in between; then there is another number.
                if try_lock(self._file.fileno(), self.path) and still_there(self._file.fileno(), self.path):
                    break
                self._release()
            if self._fsync == "batch":
                sync_folder(self.folder)
        except FileExistsError as error:
            raise self._name_in_use(self._place) from error
        except (OSError, StorageError) as error:
            self._drop()
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot make {self.path}: {error.strerror or error}") from error

    def _name_in_use(self, place: SpoolFile) -> StorageError:
        return StorageError(
            f"{self.folder / place.name} belongs to another live writer named {self.writer}; give each its own name"
        )

    def _write(self, *pieces: pa.Buffer | bytes) -> None:
        """Put the pieces behind the last whole batch, or leave the file as it was."""
        assert self._file is not None
        end = self._end
        try:
            for piece in pieces:
                view = memoryview(piece)
                while len(view):
                    count = os.pwrite(self._file.fileno(), view, end)
                    view, end = view[count:], end + count
        except OSError as error:
            self._cut_back()
            raise self._failure("write", error) from error
        if self._fsync == "batch":
            try:
                os.fsync(self._file.fileno())
            except OSError as error:  # what the device holds is unknown now, and a second fsync would not tell
                self._cut_back()
                failure = self._failure("fsync", error)
                self._broken = str(failure)
                raise failure from error
        self._end = end

    def _cut_back(self) -> None:
        assert self._file is not None
        try:
            os.ftruncate(self._file.fileno(), self._end)
        except OSError as error:
            self._broken = f"cannot cut {self.path} back to its last whole batch: {error.strerror or error}"

    def _failure(self, what: str, error: OSError) -> StorageError:
        return StorageError(
            f"cannot {what} {self.path}: {error.strerror or error}; the {self._batches} batches acknowledged before "
            f"({self._end} bytes) are safe there, this one is not stored: free space, then append it again"
        )

    def _publish(self) -> Path | None:
        """Publish the open file and let go of it; None, and nothing done, where it holds nothing."""
        if self._file is None or not self._batches:
            return None
        target = self.folder / self._place.with_suffix(PUBLISHED).name
        try:
            publish(self._acknowledged(), target, fsync=self._fsync != "never", compression=self._compression)
        except (OSError, KeptsetError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise StorageError(
                f"cannot publish {target}: {reason}; the {self._batches} batches acknowledged so far stay in "
                f"{self.path.name}, and no batch was added: free space, then try again"
            ) from error
        # Where this fails the published file counts: readers pass the open one by, and recovery removes it.
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._release()
        return target

    def _upload(self) -> None:
        """Put published files where the spool is, if that is elsewhere; also those that did not get through before."""
        if self._remote is not None:
            upload_published(self.folder, self._remote, self.writer)

    def _acknowledged(self) -> Iterator[StoredBatch]:
        """All batches of the open file. Errors: StorageError where some are not there any more."""
        assert self._file is not None
        count = 0
        for count, stored in enumerate(read_whole_batches(self._file.fileno(), self.path), start=1):  # noqa: B007
            yield stored
        if count != self._batches:
            raise StorageError(f"{count} of its {self._batches} batches are whole, so something else changed the file")

    def _drop(self) -> None:
        """Let go of an open file in which nothing was acknowledged."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(arrow: pa.RecordBatch) -> pa.RecordBatch:
    """The caller's own dictionary columns as plain values: an IPC file cannot take a second batch's dictionary."""
    for number, field in enumerate(arrow.schema):
        if pa.types.is_dictionary(field.type):
            plain = arrow.column(number).dictionary_decode()
            arrow = arrow.set_column(number, field.with_type(plain.type), plain)
    return arrow
