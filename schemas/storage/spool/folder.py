"""Where a spool lies: a folder of this machine, or one in any other file system that Arrow knows.

Elsewhere there are no locks, no appending and, in object stores, no names given in one step: only whole files are
there, each of which appears when its upload is complete. A reader fetches a file once, into a temporary one, and
reads it there as it would any other.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pyarrow import fs

from keptset.schemas.errors import InvalidInput, StorageError
from keptset.schemas.storage.archive.place import Place
from keptset.schemas.storage.spool.locks import hold_lock, still_there
from keptset.schemas.storage.spool.names import PUBLISHED, SpoolFile, listing, places

_CHUNK = 2**22


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.path.exists()

    def names(self) -> list[str]:
        """Files that are, or by their ending claim to be, part of a spool, sorted. Errors: StorageError."""
        return [path.name for path in listing(self.path)]

    def holds(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.path / name).exists()

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """A finished file, to be read. Errors: those of opening it."""
        yield self.path / name


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of another file system."""

    filesystem: fs.FileSystem
    path: str
    """Within the file system."""
    shown: str
    """As the caller wrote it."""

    def __str__(self) -> str:
        return self.shown

    def exists(self) -> bool:
        """Always, where folders are nothing but the beginnings of names."""
        return True

    def names(self) -> list[str]:
        """Published files, sorted; none where there is no such folder. Errors: StorageError."""
        try:
            found = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        except OSError as error:
            raise StorageError(f"cannot list spool folder {self.shown}: {error}") from error
        return sorted(info.base_name for info in found if info.is_file and info.extension == PUBLISHED[1:])

    def holds(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self.filesystem.get_file_info(self._place(name).path).is_file)

    def address(self, name: str) -> str:
        """A file as the caller would write it."""
        return f"{self.shown.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """A copy of a finished file, for as long as the block lasts. Errors: OSError."""
        with tempfile.TemporaryDirectory(prefix="keptset-") as folder:
            path = Path(folder) / name
            with self.filesystem.open_input_stream(self._place(name).path) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
            yield path

    def upload(self, local: Path) -> str:
        """Publish a finished file, then remove it here; returns its address.

        Done once however often and by however many it is asked for: a file that is already there with the same content
        counts as uploaded. Errors: StorageError where it is there with other content, or cannot be uploaded: it stays
        where it is then.
        """
        place = self._place(local.name)
        with place.failures("upload"), _locked(local) as source:
            if source is None:  # another was faster
                if not self.holds(local.name):
                    raise StorageError(f"{local} was removed before it was uploaded to {place.shown}")
                return place.shown
            if not self.holds(local.name):
                self._make()
                with place.writing(overwrite=True) as target:
                    shutil.copyfileobj(source, target, _CHUNK)
            elif not self._has_content(local.name, source):
                raise StorageError(
                    f"{place.shown} is there with other content: another machine writes under the name of this writer; "
                    "give each its own"
                )
            local.unlink()
        return place.shown

    def _make(self) -> None:
        if self.filesystem.get_file_info(self.path).type == fs.FileType.NotFound:
            self.filesystem.create_dir(self.path, recursive=True)

    def _has_content(self, name: str, ours: BinaryIO) -> bool:
        with self.filesystem.open_input_stream(self._place(name).path) as theirs:
            while piece := theirs.read(_CHUNK):  # which may be shorter than what was asked for
                if ours.read(len(piece)) != piece:
                    return False
            return not ours.read(1)

    def _place(self, name: str) -> Place:
        return Place(self.filesystem, f"{self.path.rstrip('/')}/{name}", self.address(name))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO | None]:
    """The file, for this process alone; None where it is gone, or was by the time that it was free."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        hold_lock(file.fileno(), path)
        yield file if still_there(file.fileno(), path) else None


def folder_of(folder: str | Path, filesystem: fs.FileSystem | None = None) -> LocalFolder | RemoteFolder:
    """The folder that a path, a URI such as s3://bucket/run/spool, or a path in `filesystem` names.

    Errors: InvalidInput for a URI that Arrow does not know, StorageError where it cannot be reached.
    """
    if filesystem is None and (isinstance(folder, Path) or "://" not in folder):
        return LocalFolder(Path(folder))
    place = Place.of(folder, filesystem)
    if isinstance(place.filesystem, fs.LocalFileSystem):
        return LocalFolder(Path(place.path))
    return RemoteFolder(place.filesystem, place.path, place.shown)


def local_and_remote(
    folder: LocalFolder | RemoteFolder, staging: str | Path | None
) -> tuple[Path, RemoteFolder | None]:
    """Where a writer appends, and where its published files go from there, if not the same.

    Errors: InvalidInput where a staging folder is missing, or is given and not needed.
    """
    if isinstance(folder, LocalFolder):
        if staging is not None:
            raise InvalidInput(f"staging is {str(staging)!r}, but {folder} is on this machine and needs none")
        return folder.path, None
    if staging is None:
        raise InvalidInput(
            f"{folder} is not on this machine, and files there cannot grow: name a local folder, staging=..., in which "
            "batches are stored until their file is uploaded; give the same one after a crash"
        )
    return Path(staging), folder


def upload_published(staging: Path, remote: RemoteFolder, writer: str | None = None) -> list[tuple[SpoolFile, str]]:
    """Upload the published files that lie in `staging`, of one writer or of all; returns each with its address.

    Errors: StorageError; what did not get through stays in `staging`.
    """
    ready = [place for place in places(staging) if place.suffix == PUBLISHED and writer in (None, place.writer)]
    uploaded = []
    for place in ready:
        try:
            uploaded.append((place, remote.upload(staging / place.name)))
        except StorageError as error:
            raise StorageError(
                f"{error}; {len(ready) - len(uploaded)} published files are safe in {staging}, and go with the next "
                "one or with `recover`"
            ) from error
    return uploaded
