"""Batches from rollouts to trainers through a spool folder: both ends.

The rollout's end appends; what is acknowledged outlives both processes. The trainer's end follows the folder and gets a
batch as soon as it is acknowledged, once, in the order of each writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from keptset.schemas.errors import InvalidInput
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import Position, SpoolReader, SpoolWriter

__all__ = ["SpoolWriter", "follow"]


def follow(
    folder: str | Path,
    *,
    position: Mapping[str, Sequence[int]] | None = None,
    finished: Callable[[], bool] = lambda: False,
    poll_seconds: float = 0.2,
) -> Iterator[tuple[RolloutBatch, Position]]:
    """The trainer's end: each batch with the position behind it, waiting for more until `finished()` is true.

    Save the position after a batch was dealt with and give it back after a restart: no batch is lost, and only what
    was not dealt with comes again. Once `finished()` is true, what the folder holds by then still comes. The folder
    need not be there yet. Errors: those of `SpoolReader`.
    """
    if poll_seconds <= 0:
        raise InvalidInput(f"poll_seconds is {poll_seconds}; it must be above 0")
    reader = SpoolReader(folder, position=position)
    while True:
        last = finished()
        if reader.folder.exists() or last:
            for batch in reader:
                yield batch, reader.position
        if last:
            return
        time.sleep(poll_seconds)
