"""Files as batches, each checked before a value of it is touched, whole or a few columns of it.

Parts of a file are numbered: batches of a spool or Arrow file, row groups of an archive.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa

from keptset.schemas.errors import DamagedFile, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.archive import count_rows, read_archive, read_columns
from keptset.schemas.storage.archive.place import Place
from keptset.schemas.storage.spool.guard import check_guard
from keptset.schemas.storage.spool.join import appended_batches, viewed
from keptset.schemas.storage.spool.names import OPEN, PUBLISHED
from keptset.schemas.storage.spool.stream import read_whole_batches, require_version, verify_batch
from keptset.trainer_bridge.audit.reading.inputs import Format, InputFile

_COPY_BYTES = 2**22
_IPC_FILE = b"ARROW1"
_IPC_STREAM = b"\xff\xff\xff\xff"
_FOREIGN = "no keptset guard"
"""What an error says of a file that may be another writer's."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A numbered part of a file, of which some columns were read."""

    number: int
    rows: int
    columns: pa.RecordBatch
    start: int = 0
    """Of an open file: the byte at which it begins."""


def scan(file: InputFile, columns: Sequence[str], *, unguarded: bool) -> Iterator[Part]:
    """Every part of a file with these columns alone, once the file as a whole was checked as far as its kind allows.

    Errors: DamagedFile, SchemaError, StorageError.
    """
    with _told(file.shown), _otherwise_unguarded(file):
        if not file.size and file.format is not Format.OPEN:
            raise DamagedFile(f"{file.shown} is empty")
        if file.format is Format.PARQUET:
            rows = count_rows(file.shown, guarded=not unguarded)
            batches = read_columns(file.shown, columns, guarded=not unguarded)
            for number, (count, batch) in enumerate(zip(rows, batches, strict=True)):
                yield Part(number=number, rows=count, columns=batch)
        elif file.format is Format.OPEN:
            yield from _scan_open(file, columns)
        else:
            yield from _scan_ipc(file, columns, unguarded=unguarded)


def read(file: InputFile, first: int, last: int, *, start: int = 0, unguarded: bool = False) -> Iterator[RolloutBatch]:
    """The batches of parts [first, last). Errors: DamagedFile, SchemaError, StorageError."""
    with _told(file.shown):
        if file.format is Format.PARQUET:
            yield from read_archive(file.shown, guarded=not unguarded, row_groups=range(first, last))
            return
        yield from _open_batches(file, first, last, start) if file.format is Format.OPEN else _ipc(file, first, last)


@contextlib.contextmanager
def _otherwise_unguarded(file: InputFile) -> Iterator[None]:
    """An error about a file that may be of another writer says how such a file is taken; a spool holds none."""
    try:
        yield
    except DamagedFile as error:
        if _FOREIGN not in str(error) or file.format in (Format.PUBLISHED, Format.OPEN):
            raise
        raise DamagedFile(f"{error}; --unguarded takes files of other writers, unchecked") from error


@contextlib.contextmanager
def _local_copy(file: InputFile) -> Iterator[Path]:
    """The file on this machine; one from elsewhere is fetched for as long as the block lasts."""
    if not file.remote:
        yield file.path
        return
    place = Place.of(file.shown)
    with tempfile.TemporaryDirectory(prefix="keptset-") as folder:
        path = Path(folder) / "file"
        with place.failures("fetch"), place.filesystem.open_input_stream(place.path) as source, path.open("wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BYTES)
        yield path


def _scan_ipc(file: InputFile, columns: Sequence[str], *, unguarded: bool) -> Iterator[Part]:
    with _local_copy(file) as path:
        with path.open("rb") as beginning:
            head = beginning.read(len(_IPC_FILE))
        if head.startswith(_IPC_STREAM) and file.format is Format.ARROW:
            if not unguarded:
                raise DamagedFile(f"{file.shown} is an Arrow stream, which has {_FOREIGN}")
        elif head != _IPC_FILE or file.format is Format.PUBLISHED or not unguarded:
            check_guard(path, file.shown)
        with _reader(path, file, columns) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                yield Part(number=number, rows=batch.num_rows, columns=batch)


def _ipc(file: InputFile, first: int, last: int) -> Iterator[RolloutBatch]:
    _require_unchanged(file)
    with _local_copy(file) as path, _reader(path, file, None) as reader:
        for number in range(first, last):
            if file.format is Format.PUBLISHED:
                batch, metadata = reader.get_batch_with_custom_metadata(number)
                verify_batch(batch, dict(metadata or {}), f"{file.shown}, batch {number}")
            else:
                batch = reader.get_batch(number)
                batch.validate(full=True)
            yield viewed(batch, file.shown)


def _require_unchanged(file: InputFile) -> None:
    """What was checked when the file was scanned must be what is read now. Errors: DamagedFile, OSError."""
    if file.remote:
        return
    status = file.path.stat()
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DamagedFile(f"{file.shown} changed while it was audited; run again once nothing writes to it")


class _Stream:
    """An IPC stream, read as the files are: its batches by number, in ascending order."""

    def __init__(self, reader: pa.ipc.RecordBatchStreamReader, num_record_batches: int) -> None:
        self.schema, self._reader = reader.schema, reader
        self.num_record_batches, self._at = num_record_batches, 0

    def get_batch(self, number: int) -> pa.RecordBatch:
        while True:
            batch = self._reader.read_next_batch()
            self._at += 1
            if self._at > number:
                return batch


@contextlib.contextmanager
def _reader(path: Path, file: InputFile, columns: Sequence[str] | None) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """A reader of these columns, where the file has them; None: of all. Errors: SchemaError for another version."""
    with path.open("rb") as head:
        is_file = head.read(len(_IPC_FILE)) == _IPC_FILE
    open_it = pa.ipc.open_file if is_file else pa.ipc.open_stream
    with pa.memory_map(str(path)) as source:
        with open_it(source) as reader:
            schema = reader.schema
        require_version(schema, file.shown)
    wanted = None if columns is None else [schema.names.index(name) for name in columns if name in schema.names]
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=wanted)
    if is_file:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source, options=options) as reader:
            yield reader
        return
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as counted:
        count = sum(1 for _ in counted)
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source, options=options) as reader:
        yield _Stream(reader, count)


def _scan_open(file: InputFile, columns: Sequence[str]) -> Iterator[Part]:
    start = 0
    for number, (arrow, end) in enumerate(_stored(file, 0)):
        wanted = [name for name in columns if name in arrow.schema.names]
        yield Part(number=number, rows=arrow.num_rows, columns=arrow.select(wanted), start=start)
        start = end


def _open_batches(file: InputFile, first: int, last: int, start: int) -> Iterator[RolloutBatch]:
    """Batches of an open file; from its published successor where its writer has finished it meanwhile."""
    try:
        for arrow, _ in islice(_stored(file, start), last - first):
            yield viewed(arrow, file.shown)
    except FileNotFoundError:
        path = Path(file.shown.removesuffix(OPEN) + PUBLISHED)
        check_guard(path)
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            yield from islice(appended_batches(reader, first, str(path)), last - first)


def _stored(file: InputFile, start: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    with file.path.open("rb", buffering=0) as source:
        for stored in read_whole_batches(source.fileno(), file.path, start):
            yield stored.arrow, stored.end


@contextlib.contextmanager
def _told(shown: str) -> Iterator[None]:
    """What goes wrong while a file is read, as our errors."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise DamagedFile(f"{shown} is not what Arrow wrote: {error}") from error
    except OSError as error:
        if error.errno is None:  # Arrow's own, about what it read; the system's have a number
            raise DamagedFile(f"{shown} is not what Arrow wrote: {error}") from error
        raise StorageError(f"cannot read {shown}: {error.strerror or error}") from error
