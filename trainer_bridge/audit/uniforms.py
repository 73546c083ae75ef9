"""The numbers v that spread a token's place over its probability: a counter-based hash of (rollout_id, position).

A keyed hash of the rollout_id begins a SplitMix64 stream (Steele, Lea, Flood 2014), of which each position takes one
number. No sampler draws from it, and any token's number can be had alone.

Legend: B responses, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_KEY = b"keptset probability integral transform"
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def stream_starts(rollout_ids: Sequence[str]) -> NDArray[np.uint64]:
    """Where the stream of each response begins, [B]."""
    digests = [hashlib.blake2b(name.encode(), digest_size=8, key=_KEY).digest() for name in rollout_ids]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def stream_uniforms(starts_T: NDArray[np.uint64], positions_T: NDArray[np.int64]) -> NDArray[np.float64]:
    """The number in [0, 1) of each token, [T], given where its response's stream begins."""
    z_T = starts_T + (positions_T.astype(np.uint64) + np.uint64(1)) * _STEP
    z_T = (z_T ^ (z_T >> np.uint64(30))) * _FIRST
    z_T = (z_T ^ (z_T >> np.uint64(27))) * _SECOND
    z_T ^= z_T >> np.uint64(31)
    uniforms_T: NDArray[np.float64] = (z_T >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniforms_T
