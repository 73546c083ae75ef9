"""Small batches lie joined in published files: an IPC batch of 33 columns costs 5 KiB, whatever is in it.

Beside a joined batch stand the rows of each that it is made of, and which of the file's it begins with. So what was
appended is what is counted, in positions too, and what readers are given. Files of the first release know no joining:
there each batch is one that was appended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from keptset.schemas.errors import DamagedFile, SchemaError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool.checksum import content_crc32
from keptset.schemas.storage.spool.stream import (
    CONTENT_CRC,
    HEADER_CRC,
    Metadata,
    StoredBatch,
    as_read,
    verify_batch,
)

FIRST, ROWS = b"keptset.first_batch", b"keptset.batch_rows"
JOINED_BYTES = 2**22
"""Of Arrow memory, to which batches are joined; one that is larger stays as it is."""


@dataclass(frozen=True)
class JoinedBatch:
    """What is written as one batch of a published file."""

    arrow: pa.RecordBatch
    metadata: Metadata
    batches: int
    """That were appended."""
    end: int
    """Byte of the stream behind the last of them."""


def joined(batches: Iterator[StoredBatch], limit: int = JOINED_BYTES) -> Iterator[JoinedBatch]:
    """Batches of one stream, joined in their order up to `limit` bytes each, which is what this holds.

    Errors: those of `batches`.
    """
    group: list[StoredBatch] = []
    held = first = 0
    for stored in batches:
        if group and held + stored.arrow.nbytes > limit:
            yield _join(group, first)
            first += len(group)
            group, held = [], 0
        group.append(stored)
        held += stored.arrow.nbytes
    if group:
        yield _join(group, first)


def _join(group: list[StoredBatch], first: int) -> JoinedBatch:
    metadata = {key: value for key, value in group[0].metadata.items() if key != HEADER_CRC}
    arrow = group[0].arrow
    if len(group) > 1:
        (one,) = pa.Table.from_batches([stored.arrow for stored in group]).combine_chunks().to_batches()
        arrow = as_read(one)
        metadata[CONTENT_CRC] = f"{content_crc32(arrow):08x}".encode()
    metadata[FIRST] = str(first).encode()
    metadata[ROWS] = ",".join(str(stored.arrow.num_rows) for stored in group).encode()
    return JoinedBatch(arrow, metadata, len(group), group[-1].end)


def appended_batches(file: pa.ipc.RecordBatchFileReader, start: int, shown: str) -> Iterator[RolloutBatch]:
    """The batches of a published file as they were appended, from number `start` on, each a slice of what holds it.

    Holds one joined batch. Errors: DamagedFile, before a value is touched; SchemaError for what is no rollout.
    """
    numbers = range(file.num_record_batches)
    begin = max(bisect_right(numbers, start, key=lambda number: _told(file, number, shown)[2]) - 1, 0) if start else 0
    due: int | None = None if begin else 0
    for number in numbers[begin:]:
        arrow, metadata, first, rows = _told(file, number, shown)
        if due not in (None, first):
            raise DamagedFile(f"{shown}, batch {first}: it begins with another number than {due}")
        verify_batch(arrow, metadata, f"{shown}, batch {first}")
        if sum(rows) != len(arrow) or min(rows) < 0:
            raise DamagedFile(f"{shown}, batch {first}: it has {len(arrow)} rows, and {rows} were joined")
        batch = viewed(arrow, shown)
        at = 0
        for behind, count in enumerate(rows):
            if first + behind >= start:
                yield batch.slice(at, count)
            at += count
        due = first + len(rows)


def viewed(arrow: pa.RecordBatch, shown: str) -> RolloutBatch:
    """As rollouts. Errors: SchemaError naming the file too."""
    try:
        return RolloutBatch.from_arrow(arrow)
    except SchemaError as error:
        raise SchemaError(f"{shown}: {error}") from error


def count_appended(file: pa.ipc.RecordBatchFileReader, shown: str) -> int:
    """How many batches were appended to what is now this file. Errors: DamagedFile."""
    if not file.num_record_batches:
        return 0
    _, _, first, rows = _told(file, file.num_record_batches - 1, shown)
    return first + len(rows)


def _told(
    file: pa.ipc.RecordBatchFileReader, number: int, shown: str
) -> tuple[pa.RecordBatch, Metadata, int, list[int]]:
    """A batch of the file, of which nothing is checked yet, and what it says of those it is made of."""
    arrow, found = file.get_batch_with_custom_metadata(number)
    metadata: Metadata = dict(found or {})
    if ROWS not in metadata:
        return arrow, metadata, number, [len(arrow)]
    try:
        return arrow, metadata, int(metadata[FIRST]), [int(count) for count in metadata[ROWS].split(b",")]
    except (KeyError, ValueError) as error:
        raise DamagedFile(f"{shown}: its batch {number} does not say what it was joined from: {error}") from error
