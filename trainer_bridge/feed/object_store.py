"""Batches from rollouts to trainers through Ray's object store: both ends.

The rollout's end stores compact batches: a slice would bring its parent's memory along. The trainer's end gets views of
shared memory: read-only, without a copy on the same machine, alive for as long as something refers to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow as pa

from keptset.schemas.errors import MissingDependency, SchemaError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch

if TYPE_CHECKING:
    from ray import ObjectRef

__all__ = ["as_ready", "get", "put"]


def put(batch: RolloutBatch) -> ObjectRef[pa.RecordBatch]:
    """The rollout's end: store a batch, and get the reference to send. Errors: StorageError where the store is full."""
    ray = _ray()
    try:
        reference: ObjectRef[pa.RecordBatch] = ray.put(batch.compact().arrow)
    except ray.exceptions.ObjectStoreFullError as error:
        raise StorageError(
            f"Ray's object store has no room for {batch!r} ({batch.arrow.nbytes} bytes); drop references to batches "
            "that were dealt with, or give ray.init a larger object_store_memory"
        ) from error
    return reference


def get(reference: ObjectRef[pa.RecordBatch], *, timeout_seconds: float | None = None) -> RolloutBatch:
    """The trainer's end: the batch behind a reference, waiting for it if need be.

    Errors: StorageError where it does not come in time, or is lost with the process or machine that held it;
    SchemaError where the reference is to something else.
    """
    ray = _ray()
    try:
        stored = ray.get(reference, timeout=timeout_seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise StorageError(f"no batch behind {reference} after {timeout_seconds} s; it may still come") from error
    except ray.exceptions.ObjectLostError as error:
        raise StorageError(
            f"the batch behind {reference} is lost with what held it; roll its prompts out again"
        ) from error
    if isinstance(stored, RolloutBatch):
        return stored
    if not isinstance(stored, (pa.RecordBatch, pa.Table)):
        raise SchemaError(f"{reference} refers to {type(stored).__name__}, not to a batch")
    return RolloutBatch.from_arrow(stored)


def as_ready(references: Sequence[ObjectRef[pa.RecordBatch]]) -> Iterator[RolloutBatch]:
    """The trainer's end for many: batches in the order in which they become ready. Errors: as `get`."""
    ray = _ray()
    waiting = list(references)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        for reference in ready:
            yield get(reference)


def _ray() -> ModuleType:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "the object store feed needs Ray; install keptset with the extra [rollout], or use the spool feed"
        ) from error
    module: ModuleType = ray
    return module
