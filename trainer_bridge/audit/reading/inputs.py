"""What the paths of an audit mean: spool folders, single files, folders of either at any depth, globs, addresses.

A file goes by its name: `<writer>-<number>.arrow` and `.open` are a spool's, `.parquet` an archive, other `.arrow`,
`.feather`, `.ipc` and `.arrows` plain Arrow files. One that is named outright may be called anything. A spool file that
is open and published counts as published.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pyarrow import fs

from keptset.schemas.errors import InvalidInput, StorageError
from keptset.schemas.storage.archive.place import Place
from keptset.schemas.storage.spool.names import OPEN, PUBLISHED, SpoolFile


class Format(str, Enum):
    """How a file is read."""

    PUBLISHED = "published"
    """A spool's, finished."""
    OPEN = "open"
    """A spool's, still being written."""
    PARQUET = "parquet"
    ARROW = "arrow"
    """An IPC file or stream under another name than a spool's, or of another writer."""


_BY_SUFFIX = {
    ".parquet": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".arrows": Format.ARROW,
    ".feather": Format.ARROW,
    ".ipc": Format.ARROW,
}


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file to be audited."""

    shown: str
    """As messages and reports name it: a path, or an address."""
    format: Format
    size: int
    mtime_ns: int
    remote: bool = False

    @property
    def path(self) -> Path:
        """On this machine."""
        return Path(self.shown)

    @property
    def stream(self) -> str:
        """Who recorded it: files of one spool writer follow each other in time."""
        place = SpoolFile.of(self.path) if self.format in (Format.PUBLISHED, Format.OPEN) else None
        return self.shown if place is None else f"{os.path.dirname(self.shown)}/{place.writer}"


def find_inputs(paths: Sequence[str | Path]) -> list[InputFile]:
    """The files that these paths mean, each once, those of a folder by name.

    Errors: StorageError for a path that is not there, that cannot be listed, or under which there is nothing to audit;
    InvalidInput for an address that Arrow does not know, or where no path is given.
    """
    if not paths:
        raise InvalidInput("there is nothing to audit: name spool folders, archives or files")
    found: dict[str, InputFile] = {}
    for path in paths:
        files = list(_of_path(str(path)))
        if not files:
            raise StorageError(
                f"{path} holds nothing to audit: neither spool files nor Parquet or Arrow files; `keptset import` "
                "makes a spool of an engine's own output"
            )
        for file in _without_superseded(files):
            found.setdefault(file.shown if file.remote else os.path.realpath(file.shown), file)
    return list(found.values())


def _of_path(path: str) -> Iterator[InputFile]:
    if "://" in path:
        yield from _of_address(path)
    elif os.path.isdir(path):
        yield from _of_folder(path)
    elif os.path.exists(path):
        yield _local(path, _format(path) or Format.ARROW)
    elif glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise StorageError(f"nothing matches {path}; quote it if the shell is not meant to read it")
        for match in matches:
            if os.path.isdir(match):
                yield from _of_folder(match)
            elif _format(match) is not None:
                yield _local(match, _format(match) or Format.ARROW)
    else:
        raise StorageError(f"{path} is not there; name spool folders, archives, files, or a glob of them")


def _of_folder(folder: str) -> Iterator[InputFile]:
    def refuse(error: OSError) -> None:
        raise StorageError(f"cannot list {error.filename}: {error.strerror or error}") from error

    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            kind = None if name.startswith(".") else _format(name)
            if kind is not None:
                yield _local(os.path.join(here, name), kind)


def _format(name: str) -> Format | None:
    path = Path(name)
    if path.suffix in (OPEN, PUBLISHED) and SpoolFile.of(path) is not None:
        return Format.OPEN if path.suffix == OPEN else Format.PUBLISHED
    return _BY_SUFFIX.get(path.suffix)


def _local(path: str, kind: Format) -> InputFile:
    try:
        status = os.stat(path)
    except OSError as error:  # it may have been published, or removed, since it was listed
        raise StorageError(f"cannot read {path}: {error.strerror or error}; run again") from error
    return InputFile(shown=path, format=kind, size=status.st_size, mtime_ns=status.st_mtime_ns)


def _of_address(address: str) -> Iterator[InputFile]:
    place = Place.of(address)
    if isinstance(place.filesystem, fs.LocalFileSystem):
        yield from _of_path(place.path)
        return
    with place.failures("list"):
        info = place.filesystem.get_file_info(place.path)
        if info.is_file:
            yield _remote(address, info, _format(address) or Format.ARROW)
            return
        infos = place.filesystem.get_file_info(fs.FileSelector(place.path, allow_not_found=True, recursive=True))
    for info in sorted(infos, key=lambda info: info.path):
        kind = _format(info.path)
        if info.is_file and kind not in (None, Format.OPEN):
            inside = info.path[len(place.path.rstrip("/")) :].lstrip("/")
            yield _remote(f"{address.rstrip('/')}/{inside}", info, kind or Format.ARROW)


def _remote(address: str, info: fs.FileInfo, kind: Format) -> InputFile:
    return InputFile(shown=address, format=kind, size=int(info.size), mtime_ns=int(info.mtime_ns or 0), remote=True)


def _without_superseded(files: Iterable[InputFile]) -> list[InputFile]:
    """An open file whose published successor is there too is about to be removed by its writer."""
    listed = list(files)
    published = {file.shown for file in listed if file.format is Format.PUBLISHED}
    return [
        file
        for file in listed
        if file.format is not Format.OPEN or file.shown.removesuffix(OPEN) + PUBLISHED not in published
    ]
