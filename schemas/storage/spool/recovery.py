"""What crashed writers left open is closed at its last whole batch and published; files of live writers stay."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from keptset.schemas.errors import DamagedFile, SchemaError, StorageError
from keptset.schemas.storage.spool.folder import folder_of, local_and_remote, upload_published
from keptset.schemas.storage.spool.guard import check_guard
from keptset.schemas.storage.spool.join import count_appended
from keptset.schemas.storage.spool.locks import still_there, try_lock
from keptset.schemas.storage.spool.names import DAMAGED, OPEN, PUBLISHED, SpoolFile, places
from keptset.schemas.storage.spool.publish import publish, sync_folder
from keptset.schemas.storage.spool.stream import StoredBatch, read_whole_batches


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What became of one orphaned open file."""

    writer: str
    seq: int
    published: Path | str | None
    """None where it held no whole batch; an address where the spool is in another file system."""
    batches: int
    dropped_bytes: int
    """Behind the last whole batch: of a batch that was never acknowledged, unless `damage` says otherwise."""
    damage: str | None = None
    """Why reading ended before the file did, where it was not just cut off. The file is then kept, see `set_aside`."""
    set_aside: Path | None = None
    """Where a damaged open file is kept."""


def recover(
    folder: str | Path,
    *,
    fsync: bool = True,
    filesystem: fs.FileSystem | None = None,
    staging: str | Path | None = None,
) -> list[Recovered]:
    """Publish what crashed writers left in `folder`, and say what that was.

    For a spool in another file system (a URI, or `filesystem`) that is what lies in their `staging` folder, files that
    were published and not uploaded included. Safe beside live writers and other recoveries: a file is touched only
    under its lock. Errors: InvalidInput where a staging folder is missing or not needed; StorageError where the folder
    or a file cannot be read or written; what was recovered before stays recovered.
    """
    local, remote = local_and_remote(folder_of(folder, filesystem), staging)
    waiting = [] if remote is None else [place for place in places(local) if place.suffix == PUBLISHED]
    tried = [recover_file(local, place, fsync=fsync) for place in places(local) if place.suffix == OPEN]
    found = [recovered for recovered in tried if recovered is not None]
    if remote is None:
        return found
    of_open = {(recovered.writer, recovered.seq) for recovered in found}
    for place in waiting:
        if (place.writer, place.seq) not in of_open:
            found.append(_told(place, local / place.name, _count_published(local / place.name) or 0, 0))
    address = {(place.writer, place.seq): address for place, address in upload_published(local, remote)}
    return [replace(one, published=address.get((one.writer, one.seq), one.published)) for one in found]


def recover_file(folder: Path, place: SpoolFile, *, fsync: bool) -> Recovered | None:
    """Recover one open file; None where its writer is alive, or where it is gone. Errors: StorageError."""
    path = folder / place.name
    try:
        with path.open("r+b", buffering=0) as file:
            if not try_lock(file.fileno(), path) or not still_there(file.fileno(), path):
                return None
            return _recover_locked(file.fileno(), path, place, fsync=fsync)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"cannot recover {path}: {error.strerror or error}; its whole batches are safe there: free space or grant "
            "access, then recover again"
        ) from error


def _recover_locked(file: int, path: Path, place: SpoolFile, *, fsync: bool) -> Recovered:
    target = path.with_name(place.with_suffix(PUBLISHED).name)
    set_aside = path.with_name(place.with_suffix(DAMAGED).name)
    size = os.fstat(file).st_size
    damage: list[str] = []

    def keep_damaged(reason: str) -> None:
        _keep(path, set_aside, fsync=fsync)
        damage.append(reason)

    whole = _until_damage(read_whole_batches(file, path), keep_damaged)
    published = _count_published(target)
    try:
        if published is not None:  # whoever published died before removing the open file
            batches, end = _count_and_end(whole)
            if batches != published and not damage:
                keep_damaged(f"{path} holds {batches} whole batches, and {target.name} was published with {published}")
        else:
            written = publish(whole, target, fsync=fsync)
            batches, end = written.batches, written.end
    except SchemaError as error:
        return _told(place, None if published is None else target, published or 0, 0, damage=f"left as it is: {error}")
    path.unlink()
    return _told(
        place,
        target if published or batches else None,
        batches if published is None else published,
        size - end,
        damage=damage[0] if damage else None,
        set_aside=set_aside if damage else None,
    )


def _until_damage(batches: Iterator[StoredBatch], keep_damaged: Callable[[str], None]) -> Iterator[StoredBatch]:
    """The sound batches. The damaged file is kept before these end, and so before they can be published: a recovery
    that dies in between leaves it to the next one."""
    try:
        yield from batches
    except DamagedFile as error:
        keep_damaged(str(error))


def _keep(path: Path, set_aside: Path, *, fsync: bool) -> None:
    """Give the file a second name, under which it stays, or a copy where the file system has no such names."""
    temporary = set_aside.with_name(f".{set_aside.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(path, temporary)
        except OSError:
            with path.open("rb") as source, temporary.open("wb") as copy:
                shutil.copyfileobj(source, copy)
                copy.flush()
                os.fsync(copy.fileno())
        os.replace(temporary, set_aside)  # of two names of one file it leaves both
    finally:
        temporary.unlink(missing_ok=True)
    if fsync:
        sync_folder(set_aside.parent)


def _count_and_end(batches: Iterator[StoredBatch]) -> tuple[int, int]:
    count = end = 0
    for stored in batches:
        count, end = count + 1, stored.end
    return count, end


def _count_published(path: Path) -> int | None:
    """Batches of the published file; None where there is none, or none that is whole."""
    try:
        check_guard(path)
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            return count_appended(reader, str(path))
    except (FileNotFoundError, DamagedFile):
        return None


def _told(
    place: SpoolFile,
    published: Path | None,
    batches: int,
    dropped_bytes: int,
    damage: str | None = None,
    set_aside: Path | None = None,
) -> Recovered:
    return Recovered(
        writer=place.writer,
        seq=place.seq,
        published=published,
        batches=batches,
        dropped_bytes=dropped_bytes,
        damage=damage,
        set_aside=set_aside,
    )
