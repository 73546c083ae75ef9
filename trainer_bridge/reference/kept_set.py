"""From logits to the kept set, one position at a time (float64, full sort).

    s = (z - max z) / T,   w = exp(s),   K = top_p(top_k(min_p(ids)))
    b = s_y - logsumexp(s over K),   m = logsumexp(s over K) - logsumexp(s)

V: vocabulary, N: kept ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput, LogitsError
from keptset.schemas.sampling_params import SamplingParams

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ReferenceKept:
    """What a sampler keeps at one position, and what it records about it."""

    kept_ids: Int64
    """[N] ascending, unique."""
    logprobs: Float64
    """[N] log-probabilities normalised over the kept set, aligned with kept_ids."""
    log_kept_mass: float
    """m <= 0; exactly 0 where every finite logit is kept."""
    entropy: float
    """H of the kept distribution."""
    logprob_var: float
    """Var(log p) under the kept distribution."""


def logsumexp(values: ArrayLike) -> float:
    """log(sum(exp(values))), shifted by the largest; -inf where all are -inf."""
    values = np.asarray(values, np.float64)
    largest = values.max()
    if largest == -np.inf:
        return -np.inf
    return float(largest + np.log(np.sum(np.exp(values - largest))))


def process(
    logits_V: ArrayLike,
    prompt_ids: ArrayLike,
    response_ids: ArrayLike,
    params: SamplingParams,
    *,
    banned_ids: Iterable[int] = (),
) -> Float64:
    """Logits after repetition, frequency and presence penalty, logit bias and the bans, in this order.

    `response_ids` is the response so far. `banned_ids` are those of a grammar, an allow list or banned words.
    InvalidInput where an id lies outside [0, V).
    """
    z_V = np.array(logits_V, np.float64)
    prompt, response = np.asarray(prompt_ids, np.int64), np.asarray(response_ids, np.int64)
    banned = list(banned_ids)
    if len(response) < params.min_new_tokens:
        banned += params.stop_token_ids
    _check_ids("prompt", prompt, len(z_V))
    _check_ids("response", response, len(z_V))
    _check_ids("logit_bias", np.array(list(params.logit_bias), np.int64), len(z_V))
    _check_ids("banned ids", np.array(banned, np.int64), len(z_V))

    seen = np.unique(np.concatenate([prompt, response]))
    r = params.repetition_penalty
    z_V[seen] = np.where(z_V[seen] > 0, z_V[seen] / r, z_V[seen] * r)
    count_V = np.bincount(response, minlength=len(z_V))
    z_V -= params.frequency_penalty * count_V
    z_V -= params.presence_penalty * (count_V > 0)
    for token_id, bias in params.logit_bias.items():
        z_V[token_id] += bias
    z_V[banned] = -np.inf
    return z_V


def _check_ids(name: str, ids: Int64, vocab_size: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise InvalidInput(f"{name} holds an id outside [0, {vocab_size}): {ids.min()} to {ids.max()}")


def tempered(logits_V: ArrayLike, temperature: float) -> Float64:
    """s = (z - max z) / T for T > 0; the largest is exactly 0.

    LogitsError on NaN, +inf, or no finite logit.
    """
    z_V = np.asarray(logits_V, np.float64)
    if np.isnan(z_V).any() or (z_V == np.inf).any() or not np.isfinite(z_V).any():
        raise LogitsError("logits must be finite or -inf, and at least one finite; fix the model or the bans")
    with np.errstate(over="ignore"):  # a very small temperature: probability 0 either way
        s_V: Float64 = (z_V - z_V.max()) / temperature
    return s_V


def truncate(logits_V: ArrayLike, params: SamplingParams) -> ReferenceKept:
    """The kept set of one position from its processed logits.

    LogitsError on NaN, +inf, or no finite logit.

    >>> kept = truncate([1.0, 2.0, 2.0, 2.0, 3.0], SamplingParams(top_k=3))
    >>> kept.kept_ids.tolist(), round(kept.log_kept_mass, 4)
    ([1, 2, 4], -0.2546)
    """
    z_V = np.asarray(logits_V, np.float64)
    if params.temperature == 0:
        tempered(z_V, 1.0)
        return _describe(np.array([np.argmax(z_V)]), np.zeros(1), log_kept_mass=0.0)

    s_V = tempered(z_V, params.temperature)
    w_V = np.exp(s_V)
    finite = np.flatnonzero(np.isfinite(z_V))
    order = finite[np.lexsort((finite, -z_V[finite]))]
    order = order[w_V[order] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        w = w_V[order]
        mass_before = np.concatenate([[0.0], np.cumsum(w)[:-1]])
        keep = mass_before < params.top_p * w.sum()
        keep[0] = True
        order = order[keep]

    kept_ids = np.sort(order)
    all_kept = len(kept_ids) == len(finite)
    return _describe(
        kept_ids, s_V[kept_ids], log_kept_mass=0.0 if all_kept else logsumexp(s_V[kept_ids]) - logsumexp(s_V)
    )


def _describe(kept_ids: Int64, s_N: Float64, *, log_kept_mass: float) -> ReferenceKept:
    logprobs = s_N - logsumexp(s_N) if len(s_N) > 1 else np.zeros(1)
    p = np.exp(logprobs)
    possible = p > 0  # 0 * -inf counts as 0
    p, logp = p[possible], logprobs[possible]
    entropy = float(np.sum(p * -logp))
    return ReferenceKept(
        kept_ids=kept_ids.astype(np.int64),
        logprobs=logprobs,
        log_kept_mass=min(log_kept_mass, 0.0),
        entropy=entropy,
        logprob_var=float(np.sum(p * (logp + entropy) ** 2)),
    )


def draw(kept: ReferenceKept, uniform: float) -> int:
    """The id that the inverse distribution function over K, in ascending id order, gives for a number in [0, 1)."""
    cumulative = np.cumsum(np.exp(kept.logprobs))
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(kept.kept_ids[min(index, len(cumulative) - 1)])
