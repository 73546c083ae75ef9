"""A Parquet file back into batches, in bounded memory, with nothing damaged among them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from keptset.schemas.columns import Identity
from keptset.schemas.errors import DamagedFile, SchemaError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.archive.blocks import GuardedSource, python_file
from keptset.schemas.storage.archive.place import Place
from keptset.schemas.storage.archive.writer import ROW_GROUP_BYTES


def read_archive(
    path: str | Path,
    *,
    filesystem: fs.FileSystem | None = None,
    guarded: bool = True,
    row_groups: Sequence[int] | None = None,
) -> Iterator[RolloutBatch]:
    """The batches of an archive, one row group at a time; `path` and `filesystem` as for `write_archive`.

    `row_groups` picks some of them; None: all.

    Bytes are compared with their checksums before Arrow reads them, and every batch is validated before it is handed
    out. `guarded=False` takes Parquet that something else wrote from an archive's columns and metadata: then only what
    Parquet itself checks is checked, and a damaged file may end the process.

    Errors, while iterating: StorageError where the file cannot be read; DamagedFile where its bytes are not what was
    written; SchemaError where it holds something else than rollouts of this schema version.
    """
    with _opened(Place.of(path, filesystem), guarded) as (file, shown, source):
        for group in range(file.num_row_groups) if row_groups is None else row_groups:
            yield from _row_group(file, group, shown, source)


def count_rows(path: str | Path, *, filesystem: fs.FileSystem | None = None, guarded: bool = True) -> list[int]:
    """Rows of each row group, from the footer alone. Arguments and errors: as `read_archive`."""
    with _opened(Place.of(path, filesystem), guarded) as (file, _, _):
        return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def read_columns(
    path: str | Path, columns: Sequence[str], *, filesystem: fs.FileSystem | None = None, guarded: bool = True
) -> Iterator[pa.RecordBatch]:
    """A few columns of each row group, as far as the file has them. Arguments and errors: as `read_archive`."""
    with _opened(Place.of(path, filesystem), guarded) as (file, shown, source):
        for group in range(file.num_row_groups):
            with _told(f"{shown}, row group {group}", source):
                table = file.read_row_group(group, columns=list(columns), use_threads=False).combine_chunks()
                table.validate(full=True)
                batches = table.to_batches()
                yield batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


@contextlib.contextmanager
def _opened(place: Place, guarded: bool) -> Iterator[tuple[pq.ParquetFile, str, GuardedSource | None]]:
    """The file once its guard and its footer are checked, its name in messages, and what checks the rest."""
    with place.reading() as raw:
        source = GuardedSource(raw, place.shown) if guarded else None
        with _told(place.shown, source):
            file = pq.ParquetFile(raw if source is None else python_file(source), page_checksum_verification=True)
            schema = file.schema_arrow
        with _named(place.shown):
            Identity.from_metadata(schema.metadata)
        yield file, place.shown, source


def _row_group(file: pq.ParquetFile, group: int, shown: str, source: GuardedSource | None) -> Iterator[RolloutBatch]:
    where = f"{shown}, row group {group}"
    with _told(where, source):
        told = file.metadata.row_group(group)
        parts = -(-told.total_byte_size // (2 * ROW_GROUP_BYTES)) or 1
        batches = file.iter_batches(batch_size=max(-(-told.num_rows // parts), 1), row_groups=[group])
    while True:
        with _told(where, source):
            arrow = next(batches, None)
            if arrow is None:
                return
            arrow.validate(full=True)
        with _named(where):
            yield RolloutBatch.from_arrow(arrow)


@contextlib.contextmanager
def _told(where: str, source: GuardedSource | None) -> Iterator[None]:
    """What goes wrong while Arrow reads, as our errors."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, OverflowError, UnicodeDecodeError) as error:
        failure = None if source is None else source.failure
        if failure is not None:
            raise failure from None
        raise DamagedFile(f"{where}: not what was written: {error}") from error


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from error
