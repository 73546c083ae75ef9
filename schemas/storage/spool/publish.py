"""An open stream becomes a published file: joined, compressed and guarded, then given its name in one step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from keptset.schemas.storage.spool.guard import GuardedSink
from keptset.schemas.storage.spool.join import JOINED_BYTES, joined
from keptset.schemas.storage.spool.stream import StoredBatch

Compression = Literal["zstd", "none"]
_BUFFER = 2**20


@dataclass(frozen=True)
class Written:
    """What went into a published file."""

    batches: int
    """That were appended."""
    end: int
    """Byte of the stream behind the last of them."""


def publish(
    batches: Iterator[StoredBatch],
    path: Path,
    *,
    fsync: bool,
    compression: Compression = "zstd",
    joined_bytes: int = JOINED_BYTES,
) -> Written:
    """Write the batches as `path`, which appears whole or not at all; nothing is written where there are none.

    Holds one joined batch at a time. With `fsync` file and folder are on the device before this returns. Errors: what
    `batches` raises, OSError from the system; a file half written is removed.
    """
    # On the calling thread: batches of a few MiB gain nothing from Arrow's pool, and a rollout's cores have other work.
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression, use_threads=False)
    temporary = path.with_name(f".{path.name}.tmp")
    written = Written(0, 0)
    try:
        with temporary.open("wb", buffering=_BUFFER) as file:
            sink = GuardedSink(file)
            writer = None
            for batch in joined(batches, joined_bytes):
                if writer is None:
                    writer = pa.ipc.new_file(pa.PythonFile(sink, mode="w"), batch.arrow.schema, options=options)
                writer.write_batch(batch.arrow, custom_metadata=batch.metadata)
                written = Written(written.batches + batch.batches, batch.end)
            if writer is not None:
                sink.ending()
                writer.close()
                sink.finish()
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        if written.batches:
            os.replace(temporary, path)
            if fsync:
                sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return written


def sync_folder(folder: Path) -> None:
    """Make the folder's list of names durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
