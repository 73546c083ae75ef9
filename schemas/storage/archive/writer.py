"""Batches into one Parquet file, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from keptset.schemas.columns import BY_NAME
from keptset.schemas.errors import InvalidInput, SchemaError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.archive.blocks import GuardedSink, python_file
from keptset.schemas.storage.archive.layout import COMPRESSION_LEVEL, writer_options
from keptset.schemas.storage.archive.place import Place

ROW_GROUP_BYTES = 2**26
"""Of Arrow memory. Writer and reader hold one row group; larger ones compress better."""


@dataclass(frozen=True, kw_only=True)
class Archived:
    """What went into an archive."""

    responses: int
    tokens: int
    kept_ids: int
    row_groups: int
    size: int
    """Bytes of the file."""


def write_archive(
    batches: Iterable[RolloutBatch],
    path: str | Path,
    *,
    filesystem: fs.FileSystem | None = None,
    overwrite: bool = False,
    compression_level: int = COMPRESSION_LEVEL,
) -> Archived:
    """Write batches of one identity and equal columns as one Parquet file; rows keep their order, batches are joined.

    `path` is one on this machine, a URI that Arrow knows (s3://, gs://, hdfs://, ...), or a path in `filesystem`. The
    file appears whole or not at all. Holds one row group of ROW_GROUP_BYTES, or one response where that is larger.
    `compression_level` is zstd's, 1 to 22.

    Errors: SchemaError naming what differs between batches, or a column of the caller's own that Parquet cannot give
    back as it was; InvalidInput where there is no batch; StorageError where the file exists or cannot be written.
    """
    place = Place.of(path, filesystem)
    if not 1 <= compression_level <= 22:
        raise InvalidInput(f"compression_level is {compression_level}; it must lie between 1 and 22")
    source = iter(batches)
    first = next(source, None)
    if first is None:
        raise InvalidInput(f"no batch to write to {place.shown}: an archive needs the columns and identity of one")
    responses = tokens = kept_ids = groups = 0
    options = writer_options(first.arrow.schema, compression_level)
    _require_survival(first.arrow.schema)
    with place.writing(overwrite=overwrite) as raw:
        sink = GuardedSink(raw)
        with place.failures("write"):
            writer = pq.ParquetWriter(python_file(sink), first.arrow.schema, **options)
        try:
            for group in _row_groups(_like_first(first, source)):
                with place.failures("write"):
                    table = pa.Table.from_batches([batch.arrow for batch in group])
                    writer.write_table(table, row_group_size=table.num_rows)
                groups += 1
                responses += table.num_rows
                tokens += sum(batch.num_tokens for batch in group)
                kept_ids += sum(batch.num_kept_ids for batch in group)
        except BaseException:
            sink.abandon()
            raise
        else:
            sink.ending()
        finally:
            with place.failures("write"):
                writer.close()
        with place.failures("write"):
            size = sink.finish()
    return Archived(responses=responses, tokens=tokens, kept_ids=kept_ids, row_groups=groups, size=size)


def _like_first(first: RolloutBatch, others: Iterator[RolloutBatch]) -> Iterator[RolloutBatch]:
    """All batches. Errors: SchemaError where one cannot stand in the same file."""
    yield first
    for number, batch in enumerate(others, start=1):
        if batch.identity != first.identity:
            ours, theirs = first.identity.to_metadata(), batch.identity.to_metadata()
            names = sorted(key.decode() for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            raise SchemaError(f"batch {number} differs from the first in {', '.join(names)}; archive them apart")
        if not batch.arrow.schema.equals(first.arrow.schema):
            raise SchemaError(
                f"batch {number} has other columns of the caller's own than the first, or in other types "
                f"({_told(batch)} and {_told(first)}); archive them apart"
            )
        yield batch


def _told(batch: RolloutBatch) -> str:
    columns = [f"{name}: {batch.column(name).type}" for name in batch.extra_columns]
    return ", ".join(columns) or "none"


def _row_groups(batches: Iterator[RolloutBatch]) -> Iterator[list[RolloutBatch]]:
    group: list[RolloutBatch] = []
    held = 0
    for batch in batches:
        for piece in _pieces(batch):
            if group and held + piece.arrow.nbytes > ROW_GROUP_BYTES:
                yield group
                group, held = [], 0
            group.append(piece)
            held += piece.arrow.nbytes
    if group:
        yield group


def _pieces(batch: RolloutBatch) -> Iterator[RolloutBatch]:
    """The batch in slices of at most ROW_GROUP_BYTES, as far as single rows are not larger."""
    if not len(batch):
        return
    if len(batch) == 1 or batch.arrow.nbytes <= ROW_GROUP_BYTES:
        yield batch
        return
    middle = len(batch) // 2
    yield from _pieces(batch.slice(0, middle))
    yield from _pieces(batch.slice(middle))


def _require_survival(schema: pa.Schema) -> None:
    """Errors: SchemaError for a column whose type Parquet does not hold, or gives back as another one."""
    for field in (field for field in schema if field.name not in BY_NAME):
        sink = pa.BufferOutputStream()
        try:
            pq.write_table(pa.table([pa.nulls(1, field.type)], pa.schema([field])), sink)
            back = pq.read_table(pa.BufferReader(sink.getvalue())).schema.field(0).type
        except (pa.ArrowException, OSError) as error:
            raise SchemaError(
                f"column {field.name} has type {field.type}, which Parquet cannot hold: {error}"
            ) from None
        if not back.equals(field.type):
            raise SchemaError(
                f"column {field.name} has type {field.type}, which Parquet would give back as {back}: cast it to that"
            )
