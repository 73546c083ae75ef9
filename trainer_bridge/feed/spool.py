"""Batches from rollouts to trainers through a spool folder: both ends.

The rollout's end appends; what is acknowledged outlives both processes. The trainer's end follows the folder and gets a
batch as soon as it is acknowledged, once, in the order of each writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import Position, SpoolReader, SpoolWriter

__all__ = ["SpoolWriter", "follow"]


def follow(
    folder: str | Path,
    *,
    position: Mapping[str, Sequence[int]] | None = None,
    seen: str | Path | None = None,
    finished: Callable[[], bool] = lambda: False,
    poll_seconds: float = 0.2,
) -> Iterator[tuple[RolloutBatch, Position]]:
    """The trainer's end: each batch with the position behind it, waiting for more until `finished()` is true.

    Save the position after a batch was dealt with and give it back after a restart: no batch is lost, and only what
    was not dealt with comes again. A response that was stored twice comes once, in one run of the trainer, or in all
    that name the same file as `seen`. Once `finished()` is true, what the folder holds by then still comes. The folder
    need not be there yet. For more (damage set aside, other file systems, findings) use `SpoolReader(follow=True)`
    itself. Errors: those of `SpoolReader`.
    """
    reader = SpoolReader(folder, position=position, seen=seen, follow=True, stop=finished, poll_seconds=poll_seconds)
    with reader:
        for batch in reader:
            yield batch, reader.position
