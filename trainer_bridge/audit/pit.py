"""Places of sampled tokens in their recorded kept distributions, in probability order.

    u = mass of the members more probable than y (ties by lower id) + v p(y)

Legend: T tokens, N kept ids, C tokens of a block, M ids of a block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.ragged import offsets_of, row_index
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.validation.kept_sets import blocks
from keptset.trainer_bridge.audit.uniforms import stream_starts, stream_uniforms

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]


def places_of_draws(batch: RolloutBatch) -> Floats:
    """u of every sampled token with more than one kept id, in the order of the batch.

    Each response must be sound and have its whole kept distribution.
    """
    ids, logprobs = batch.kept_ids, batch.kept_logprobs
    if ids is None or logprobs is None:
        return np.zeros(0)
    offsets_T1 = ids.inner.offsets
    row_T = row_index(batch.token_ids.offsets)
    position_T = np.arange(len(row_T)) - np.asarray(batch.token_ids.offsets, np.int64)[row_T]
    v_T = stream_uniforms(stream_starts(batch.rollout_ids)[row_T], position_T)
    tokens_T = batch.token_ids.values
    found = [
        _block(offsets_T1, ids.inner.values, logprobs.inner.values, tokens_T, v_T, begin, end)
        for begin, end in blocks(offsets_T1)
    ]
    return np.concatenate([np.zeros(0), *found])


def _block(
    offsets_T1: Ints, ids_N: Ints, logp_N: NDArray[np.float32], tokens_T: Ints, v_T: Floats, begin: int, end: int
) -> Floats:
    low, high = int(offsets_T1[begin]), int(offsets_T1[end])
    lengths_C = np.diff(offsets_T1[begin : end + 1])
    # A set of one is the token itself and says nothing; an empty one was not sampled.
    ids_M, logp_M = ids_N[low:high], logp_N[low:high]
    hits_M = np.repeat(tokens_T[begin:end], lengths_C) == ids_M
    hit_H = np.flatnonzero(hits_M)  # one for each set that is not empty
    held_C = lengths_C > 0
    lengths_H = lengths_C[held_C]
    starts_H = offsets_of(lengths_H)[:-1]
    own_H = logp_M[hit_H]
    own_M = np.repeat(own_H, lengths_H)
    before_M = logp_M > own_M
    equal_M = logp_M == own_M
    if np.count_nonzero(equal_M) != len(hit_H):
        before_M |= equal_M & (
            np.arange(len(ids_M)) < np.repeat(hit_H, lengths_H)
        )  # ids ascend, so lower ones come first
    if not len(starts_H):
        return np.zeros(0)
    p_M = np.exp(logp_M)
    mass_H = np.add.reduceat(p_M * before_M, starts_H, dtype=np.float64)
    u_H = mass_H + v_T[begin:end][held_C] * p_M[hit_H]
    return u_H[lengths_H > 1]
