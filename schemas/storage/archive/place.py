"""Where an archive is, on this machine or in any file system that Arrow knows, and how it appears there whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from keptset.schemas.errors import InvalidInput, StorageError

_OBJECT_STORES = ("s3", "gcs", "abfs")
"""Here a file appears when its upload is complete, and giving it another name would copy it."""


@dataclass(frozen=True)
class Place:
    """One file in one file system."""

    filesystem: fs.FileSystem
    path: str
    """Within the file system."""
    shown: str
    """As the caller wrote it, for messages."""

    @classmethod
    def of(cls, path: str | Path, filesystem: fs.FileSystem | None = None) -> Place:
        """`path` in `filesystem`; without one, a path on this machine or a URI such as s3://bucket/run/rollouts.parquet.

        Errors: InvalidInput for a URI that Arrow does not know, StorageError where it cannot be reached.
        """
        shown = str(path)
        if filesystem is not None:
            return cls(filesystem, shown, shown)
        if "://" not in shown:
            return cls(fs.LocalFileSystem(), os.path.abspath(shown), shown)
        try:
            found, inside = fs.FileSystem.from_uri(shown)
        except pa.ArrowInvalid as error:
            raise InvalidInput(f"{shown} is no address of a file that Arrow can open: {error}") from error
        except OSError as error:
            raise StorageError(f"cannot reach {shown}: {error}") from error
        return cls(found, inside, shown)

    @contextlib.contextmanager
    def failures(self, doing: str) -> Iterator[None]:
        """What the system says went wrong, as a StorageError that names the file."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"cannot {doing} {self.shown}: {getattr(error, 'strerror', None) or error}") from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[pa.NativeFile]:
        """The file, open for random access. Errors: StorageError where it is not there or cannot be read."""
        with self.failures("read"):
            file = self.filesystem.open_input_file(self.path)
        with file:
            yield file

    @contextlib.contextmanager
    def writing(self, *, overwrite: bool) -> Iterator[pa.NativeFile]:
        """A stream whose content becomes the file when the block is left well; after an error nothing is left of it.

        On the device, too, where this is the local file system. Errors: StorageError where there is such a file already
        and `overwrite` is False, or where it cannot be written.
        """
        with self.failures("write"):
            if not overwrite and self.filesystem.get_file_info(self.path).type != fs.FileType.NotFound:
                raise StorageError(f"{self.shown} exists; remove it, allow overwriting, or choose another name")
            unfinished = self._unfinished_path()
            stream = self.filesystem.open_output_stream(unfinished)
        try:
            try:
                yield stream
            finally:
                with self.failures("write"):
                    stream.close()
            with self.failures("publish"):
                self._publish(unfinished)
        except BaseException:
            with contextlib.suppress(OSError):
                self.filesystem.delete_file(unfinished)
            raise

    def _unfinished_path(self) -> str:
        """What the file is called until it is whole."""
        if self.filesystem.type_name in _OBJECT_STORES:
            return self.path
        folder, slash, name = self.path.rpartition("/")
        return f"{folder}{slash}.{name}.{secrets.token_hex(4)}.tmp"

    def _publish(self, unfinished: str) -> None:
        local = isinstance(self.filesystem, fs.LocalFileSystem)
        if local:
            _sync(unfinished, os.O_RDWR)
        if unfinished != self.path:
            self.filesystem.move(unfinished, self.path)
        if local:
            _sync(os.path.dirname(self.path), os.O_RDONLY)


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
