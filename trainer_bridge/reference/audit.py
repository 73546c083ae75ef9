"""What an audit computes: draw tests, explanations of a wrong b, and the decision over all tests.

u = mass of the members more probable than y (ties by lower id) + v p(y),  uniform for an honest sampler
z = sum(-b - H) / sqrt(sum Var(log p)),  standard normal for an honest sampler
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.findings import FindingKind
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.reference.kept_set import Float64, process
from keptset.trainer_bridge.reference.score import score, structural_finding

_PIT_KEY = b"keptset probability integral transform"


def pit_uniform(rollout_id: str, position: int) -> float:
    """v in [0, 1): number `position` of a SplitMix64 stream that a keyed hash of rollout_id begins.

    No sampler draws from this stream. SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014.
    """
    key = hashlib.blake2b(rollout_id.encode(), digest_size=8, key=_PIT_KEY).digest()
    z = (int.from_bytes(key, "little") + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return ((z ^ z >> 31) >> 11) * 2.0**-53


def pit(kept_ids: ArrayLike, kept_logprobs: ArrayLike, token: int, v: float) -> float:
    """Place of the sampled token in its kept distribution, in probability order."""
    ids, logp = np.asarray(kept_ids, np.int64), np.asarray(kept_logprobs, np.float64)
    (at,) = np.flatnonzero(ids == token)
    before = (logp > logp[at]) | ((logp == logp[at]) & (ids < token))
    return float(np.exp(logp[before]).sum() + v * np.exp(logp[at]))


def kolmogorov_smirnov(u: ArrayLike) -> tuple[float, float]:
    """D of the values against the uniform distribution on [0, 1], and its p-value (Stephens' approximation)."""
    u = np.sort(np.asarray(u, np.float64))
    n = len(u)
    above, below = np.arange(1, n + 1) / n - u, u - np.arange(n) / n
    d = float(max(above.max(), below.max()))
    x = d * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    if x < 0.2:  # the series below converges too slowly there, and the p-value is 1 to ten digits
        return d, 1.0
    series = sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return d, min(1.0, max(0.0, 2 * series))


def surprisal_z(b_T: ArrayLike, entropy_T: ArrayLike, logprob_var_T: ArrayLike) -> float:
    """sum(-b - H) / sqrt(sum Var(log p)); nan where nothing varies."""
    variance = float(np.sum(np.asarray(logprob_var_T, np.float64)))
    if variance == 0:
        return math.nan
    return float(np.sum(-np.asarray(b_T, np.float64) - np.asarray(entropy_T, np.float64))) / math.sqrt(variance)


def normal_p_value(z: float) -> float:
    """Two-sided p-value of a standard normal statistic."""
    return math.erfc(abs(z) / math.sqrt(2))


@dataclass(frozen=True, kw_only=True)
class Position:
    """One sampled token with everything from which its behaviour log-probability can be recomputed."""

    logits_V: ArrayLike
    """The model's own, before processors."""
    prompt_ids: ArrayLike
    response_ids: ArrayLike
    """Up to this token, which is not among them."""
    params: SamplingParams
    token: int
    kept_ids: Sequence[int]
    log_kept_mass: float
    neighbour_sets: Sequence[Sequence[int]] = ()
    """Kept sets recorded one position before and after."""
    swapped_sets: Sequence[Sequence[int]] = ()
    """Kept sets recorded at this position in other responses."""
    other_versions: Sequence[ArrayLike] = ()
    """Logits [V] of this position under other weights."""


def honest(at: Position) -> float:
    """The score over the recorded set: what b should be at equal weights."""
    return score(_processed(at, at.logits_V), at.kept_ids, at.token, at.params.temperature)


def explanations(at: Position) -> dict[FindingKind, tuple[float, ...]]:
    """b recomputed under each named fault; several values where a fault has several forms, none where it cannot be.

    A fault needs T > 0 and, where another set takes the place of K, the token in it.
    """
    params, token, temperature = at.params, at.token, at.params.temperature
    z_V = _processed(at, at.logits_V)
    if temperature == 0:
        return {}
    untempered = score(z_V, at.kept_ids, token, 1.0)
    return {
        FindingKind.FULL_VOCABULARY: (score(z_V, None, token, temperature),),
        FindingKind.RAW_LOGITS: (score(at.logits_V, None, token, 1.0),),
        FindingKind.RENORMALISED_TWICE: (score(z_V, at.kept_ids, token, temperature) - at.log_kept_mass,),
        FindingKind.TEMPERATURE_MISSING: (untempered,),
        FindingKind.TEMPERATURE_ON_LOGPROBS: (untempered / temperature,),
        FindingKind.PROCESSORS_MISSING: (score(at.logits_V, at.kept_ids, token, temperature),)
        if params.changes_values
        else (),
        FindingKind.MASK_SHIFTED: tuple(score(z_V, s, token, temperature) for s in at.neighbour_sets if token in s),
        FindingKind.MASK_SWAPPED: tuple(score(z_V, s, token, temperature) for s in at.swapped_sets if token in s),
        FindingKind.WRONG_VERSION: tuple(
            score(_processed(at, other_V), at.kept_ids, token, temperature) for other_V in at.other_versions
        ),
    }


def _processed(at: Position, logits_V: ArrayLike) -> Float64:
    """Value-changing processors only: bans need no replay, the kept set carries them."""
    return process(logits_V, at.prompt_ids, at.response_ids, _without_bans(at.params))


def _without_bans(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
    )


def better_explanation(residual_T: ArrayLike, explained: Mapping[FindingKind, ArrayLike]) -> FindingKind | None:
    """The fault whose recomputed b fits best, if it at least halves the median |residual|; None otherwise.

    `residual_T` is |b - honest score|, `explained` maps each fault to its |b - recomputed b| [T] on the same tokens.
    """
    if not explained:
        return None
    now = float(np.median(np.abs(residual_T)))
    medians = {kind: float(np.median(np.abs(r_T))) for kind, r_T in explained.items()}
    best = min(medians, key=lambda kind: medians[kind])
    return best if now > 0 and medians[best] <= now / 2 else None


def audit_token(
    logits_V: ArrayLike, kept_ids: Sequence[int], token: int, b: float, temperature: float, *, floor: float
) -> FindingKind | None:
    """A structural fault of one token, or `logprob_mismatch` where b is off by more than the path floor."""
    kind = structural_finding(kept_ids, token, len(np.asarray(logits_V)))
    if kind is None and abs(score(logits_V, kept_ids, token, temperature) - b) > floor:
        return FindingKind.LOGPROB_MISMATCH
    return kind


def holm(p_values: ArrayLike, family_level: float) -> NDArray[np.bool_]:
    """Which hypotheses Holm's step-down procedure rejects at this family-wise level."""
    p = np.asarray(p_values, np.float64)
    rejected = np.zeros(len(p), bool)
    for step, index in enumerate(np.argsort(p, kind="stable")):
        if p[index] > family_level / (len(p) - step):
            break
        rejected[index] = True
    return rejected
