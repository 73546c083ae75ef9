"""Ratios, their corrections and the diagnostics of one batch, from d = l - b.

token exp(d_t), sequence exp(sum d), geometric exp(mean d). T: tokens, S: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from keptset.trainer_bridge.reference.kept_set import Float64

Level = Literal["token", "sequence", "geometric"]
NON_FINITE = "non_finite"


def deltas(trainer_logprobs_T: ArrayLike, behavior_logprobs_T: ArrayLike) -> tuple[Float64, str | None]:
    """d_t = l_t - b_t, and "non_finite" if any of them is no finite number."""
    with np.errstate(invalid="ignore"):
        d_T = np.asarray(trainer_logprobs_T, np.float64) - np.asarray(behavior_logprobs_T, np.float64)
    return d_T, None if np.isfinite(d_T).all() else NON_FINITE


def log_ratio(delta_T: ArrayLike, level: Level) -> Float64:
    """Log ratio of one response: [T] at token level, [1] for the whole response at the other levels."""
    d_T = np.asarray(delta_T, np.float64)
    if level == "token":
        return d_T
    return np.array([d_T.sum() if level == "sequence" else d_T.mean()])


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What is left of a batch after exclusion, and what was excluded."""

    log_ratios: Float64
    """Log ratios of what is counted: tokens at token level, responses at the others."""
    excluded_tokens: int
    excluded_sequences: int


def exclude_non_finite(delta_per_sequence: Sequence[ArrayLike], level: Level) -> Counted:
    """Token level drops the token; at sequence and geometric level one bad token drops the sequence.

    A response without tokens has no ratio and counts nowhere.
    """
    kept: list[Float64] = []
    bad_tokens = bad_sequences = 0
    for delta_T in delta_per_sequence:
        d_T = np.asarray(delta_T, np.float64)
        good_T = np.isfinite(d_T)
        bad_tokens += int((~good_T).sum())
        bad_sequences += int(not good_T.all())
        if level == "token":
            kept.append(d_T[good_T])
        elif good_T.all() and len(d_T):
            kept.append(log_ratio(d_T, level))
    return Counted(
        log_ratios=np.concatenate(kept) if kept else np.zeros(0),
        excluded_tokens=bad_tokens,
        excluded_sequences=0 if level == "token" else bad_sequences,
    )


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Weights of the tokens of one response after a correction."""

    weights_T: Float64
    dropped_tokens: int
    dropped_sequences: int


def correct(
    delta_T: ArrayLike,
    *,
    correction: Literal["none", "truncate", "mask", "reject"],
    level: Level,
    lower: float = 0.0,
    upper: float = np.inf,
) -> Corrected:
    """truncate: min(w, upper). mask: 0 outside [lower, upper]. reject: the whole response 0 if its ratio lies outside.

    A ratio of the whole response is the weight of each of its tokens; `reject` at token level looks at the extremes.
    """
    d_T = np.asarray(delta_T, np.float64)
    w_T = np.broadcast_to(np.exp(log_ratio(d_T, level)), d_T.shape).copy()
    outside_T = (w_T < lower) | (w_T > upper)
    if correction == "truncate":
        w_T = np.minimum(w_T, upper)
    elif correction == "mask":
        w_T[outside_T] = 0.0
    elif correction == "reject" and outside_T.any():
        w_T[:] = 0.0
    return Corrected(
        weights_T=w_T,
        dropped_tokens=int(outside_T.sum()) if correction == "mask" else 0,
        dropped_sequences=int(outside_T.any()) if correction == "reject" else 0,
    )


def k1(delta: ArrayLike) -> float:
    """mean(-d): estimates KL(behaviour || trainer) over the same support."""
    return float(np.mean(-np.asarray(delta, np.float64)))


def k3(delta: ArrayLike) -> float:
    """mean(exp(d) - 1 - d) >= 0: the same expectation, less noise."""
    d = np.asarray(delta, np.float64)
    return float(np.mean(np.expm1(d) - d))


def chi2(log_weights: ArrayLike) -> float:
    """mean(w^2) - 1."""
    return float(np.mean(np.exp(2 * np.asarray(log_weights, np.float64))) - 1)


def ess_fraction(log_weights: ArrayLike) -> float:
    """(sum w)^2 / (n sum w^2), weights before any clipping, shifted by the largest; one weight per counted thing."""
    log_w = np.asarray(log_weights, np.float64)
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (len(w) * np.sum(w**2)))


def mean_ratio(log_weights: ArrayLike) -> tuple[float, float]:
    """Mean ratio and its standard error sqrt(sum (w - 1)^2) / n."""
    excess = np.expm1(np.asarray(log_weights, np.float64))
    return float(1 + excess.mean()), float(np.sqrt(np.sum(excess**2)) / len(excess))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """l_full(now) - b, in signed terms that add up exactly; each [T]."""

    truncation: Float64
    """l_full(now) - l_K(now): the kept mass."""
    staleness: Float64
    """l_K(now) - l_K(v): the weights moved since v."""
    path: Float64
    """l_K(v) - b: kernels, precision, and faults."""

    @property
    def total(self) -> Float64:
        return self.truncation + self.staleness + self.path


def budget(full_now_T: ArrayLike, kept_now_T: ArrayLike, kept_version_T: ArrayLike, b_T: ArrayLike) -> Budget:
    """The three terms of l_full(now) - b, per token."""
    full, kept, version, b = (np.asarray(x, np.float64) for x in (full_now_T, kept_now_T, kept_version_T, b_T))
    return Budget(truncation=full - kept, staleness=kept - version, path=version - b)
