"""Batches of a size to work on: small ones joined, large ones in slices. Rows and their order stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from keptset.schemas.errors import KeptsetError
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches

JOIN_BYTES = 2**21
"""Of Arrow memory; up to so much is joined."""
SLICE_IDS = 2**20
"""Kept ids, or tokens; a response with more stays whole."""


def pieces(batches: Iterable[RolloutBatch]) -> Iterator[RolloutBatch]:
    """The same rows in batches neither tiny nor huge. What comes before an error of `batches` comes here too."""
    held: list[RolloutBatch] = []
    size = 0
    failure: KeptsetError | None = None
    try:
        for batch in batches:
            if held and (size + batch.arrow.nbytes > JOIN_BYTES or not _alike(held[0], batch)):
                yield from _slices(concat_batches(held))
                held, size = [], 0
            held.append(batch)
            size += batch.arrow.nbytes
    except KeptsetError as error:
        failure = error
    if held:
        yield from _slices(concat_batches(held))
    if failure is not None:
        raise failure


def _alike(one: RolloutBatch, other: RolloutBatch) -> bool:
    return one.identity == other.identity and bool(one.arrow.schema.equals(other.arrow.schema))


def _slices(batch: RolloutBatch) -> Iterator[RolloutBatch]:
    if max(batch.num_kept_ids, batch.num_tokens) <= SLICE_IDS:
        yield batch
        return
    sets = batch.kept_ids
    ends_B = np.asarray(batch.token_ids.offsets, np.int64)
    if sets is not None:
        ends_B = ends_B + np.asarray(sets.inner.offsets, np.int64)[sets.row_offsets]
    begin = 0
    while begin < len(batch):
        end = int(np.searchsorted(ends_B, ends_B[begin] + SLICE_IDS, side="right")) - 1
        end = min(max(end, begin + 1), len(batch))
        yield batch.slice(begin, end - begin)
        begin = end
