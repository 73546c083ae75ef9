"""A batch in pieces that one forward pass of a model can take."""

from __future__ import annotations

from collections.abc import Iterator

from keptset.schemas.rollout_batch import RolloutBatch

POSITIONS_PER_PASS = 2048
"""Tokens of prompt and response in one forward pass."""


def in_passes(batch: RolloutBatch, positions: int = POSITIONS_PER_PASS) -> Iterator[RolloutBatch]:
    """Consecutive rows of at most this many positions together, but always one."""
    prompt = batch.prompt_token_ids
    lengths = batch.token_ids.lengths + (0 if prompt is None else prompt.lengths)
    begin, held = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > begin and held + length > positions:
            yield batch.slice(begin, row - begin)
            begin, held = row, 0
        held += length
    if begin < len(batch):
        yield batch.slice(begin, len(batch) - begin)
