"""The trainer's log-probability of a sampled token.

l = z'_y / T - logsumexp(z' / T over K),  z' the trainer's logits after the value-changing processors.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from keptset.schemas.errors import InvalidInput, ScoringRefused, ViolationError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity
from keptset.trainer_bridge.reference.kept_set import Float64, logsumexp


def structural_finding(kept_ids: ArrayLike, token: int, vocab_size: int) -> FindingKind | None:
    """What is wrong with one recorded kept set, or None."""
    kept = np.asarray(kept_ids, np.int64)
    if len(kept) == 0:
        return FindingKind.EMPTY_SET
    if kept.min() < 0 or kept.max() >= vocab_size:
        return FindingKind.RANGE
    if np.any(np.diff(kept) <= 0):
        return FindingKind.SORTED
    if token not in kept:
        return FindingKind.MEMBER
    return None


def score(logits_V: ArrayLike, kept_ids: ArrayLike | None, token: int, temperature: float | None) -> float:
    """Log-probability of `token` over `kept_ids` (None: the vocabulary), at the recorded temperature.

    ViolationError where the kept set is not one, or does not hold the token; ScoringRefused where the temperature
    is unknown, or is 0 with a set of more than one.

    >>> round(score([2.0, 1.0, 0.0, -1.0], [0, 1], 1, 1.0), 4)
    -1.3133
    """
    z_V = np.asarray(logits_V, np.float64)
    kept = np.arange(len(z_V)) if kept_ids is None else np.asarray(kept_ids, np.int64)
    kind = structural_finding(kept, token, len(z_V))
    if kind is not None:
        example = Example(rollout_id="", position=None, detail=f"token {token}, kept ids {kept[:8].tolist()}")
        finding = Finding(kind=kind, severity=Severity.ERROR, count=1, responses=1, examples=(example,))
        raise ViolationError(f"cannot score token {token}: {kind.meaning}", (finding,))
    if temperature is None or math.isnan(temperature):
        raise ScoringRefused("the temperature is unknown; record it, or state it by name")
    if len(kept) == 1:
        return 0.0
    if temperature == 0:
        raise ScoringRefused("temperature 0 keeps exactly one token, but the kept set has more")
    if temperature < 0 or math.isinf(temperature):
        raise InvalidInput(f"temperature is {temperature}; it must be finite and >= 0")
    shifted_V = (z_V - z_V[kept].max()) / temperature
    return float(shifted_V[token] - logsumexp(shifted_V[kept]))


def score_gradient(logits_V: ArrayLike, kept_ids: ArrayLike | None, token: int, temperature: float) -> Float64:
    """d score / d logits, [V]: ([y] - p over K) / T on the kept ids, exactly 0 elsewhere."""
    z_V = np.asarray(logits_V, np.float64)
    kept = np.arange(len(z_V)) if kept_ids is None else np.asarray(kept_ids, np.int64)
    gradient_V = np.zeros_like(z_V)
    if len(kept) > 1:
        shifted = (z_V[kept] - z_V[kept].max()) / temperature
        gradient_V[kept] = -np.exp(shifted - logsumexp(shifted)) / temperature
        gradient_V[token] += 1 / temperature
    return gradient_V


def trainer_kept_mass(logits_V: ArrayLike, kept_ids: ArrayLike, temperature: float) -> float:
    """log of the trainer's probability on K: logsumexp(z'/T over K) - logsumexp(z'/T)."""
    z_V = np.asarray(logits_V, np.float64)
    s_V = (z_V - z_V.max()) / temperature
    return logsumexp(s_V[np.asarray(kept_ids, np.int64)]) - logsumexp(s_V)
