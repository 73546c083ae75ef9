"""KL and entropy summed over whole kept sets: no sampling noise, where the trainer has scored every kept id.

    KL(p || q) = sum over K of p (log p - log q)        H(p) = -sum over K of p log p

p is the policy, renormalised over the recorded set, q the reference over the same set; 0 log 0 is 0. Derivatives by
log p are p (log p - log q + 1) for KL(p || q), -q for KL(q || p), and -p (log p + 1) for H.

Like everything over `kept`, these do not see probability that leaves a set. Tokens drawn from the whole vocabulary list
no set, and are refused; those with one kept id have KL and entropy 0.

Legend: T sampled tokens, N kept ids over them, C tokens that count, M kept ids over those.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from keptset.schemas.errors import InvalidInput, ScoringRefused
from keptset.schemas.ragged import gather_spans, row_index
from keptset.trainer_bridge.corrections import Corrected
from keptset.trainer_bridge.loss_report import Loss, LossReport
from keptset.trainer_bridge.ratios import LogRatios
from keptset.trainer_bridge.reduction import Entries, Floats, Reduce, differentiable, entries_of
from keptset.trainer_bridge.sampled_tokens import Ints, SampledTokens
from keptset.trainer_bridge.scoring.hand import Tensor, hand_for
from keptset.trainer_bridge.scoring.run import Scores

Direction = Literal["policy_reference", "reference_policy"]


def exact_kl_loss(
    policy: Scores,
    reference: Scores,
    tokens: SampledTokens,
    ratios: LogRatios,
    *,
    direction: Direction = "policy_reference",
    weights: Corrected | None = None,
    reduce: Reduce = "token_mean",
    denominator: float | None = None,
) -> Loss:
    """KL(policy || reference), or the other way round, over the kept set of each token that counts in `ratios`.

    Both scores were made with `distribution=True` (`score_aligned_from_hidden`). `weights`, `reduce`, `denominator` as
    in the losses.

    Errors: ScoringRefused where a token was drawn from the whole vocabulary; InvalidInput where a distribution is
    missing or of other sets, a name is unknown, or a KL is infinite.
    """
    spans = _Spans(tokens, ratios, weights)
    log_p_M, log_q_M = spans.of(policy), spans.of(reference)
    if direction not in ("policy_reference", "reference_policy"):
        raise InvalidInput(f"direction is {direction!r}; it must be 'policy_reference' or 'reference_policy'")
    with np.errstate(invalid="ignore"):
        if direction == "policy_reference":
            p_M = np.exp(log_p_M)
            value_M = _product(p_M, log_p_M - log_q_M)
            slope_M = value_M + p_M
        else:
            q_M = np.exp(log_q_M)
            value_M, slope_M = _product(q_M, log_q_M - log_p_M), -q_M
    return spans.loss(f"exact_kl_{direction}", policy, value_M, slope_M, weights, reduce, denominator)


def exact_entropy_loss(
    policy: Scores,
    tokens: SampledTokens,
    ratios: LogRatios,
    *,
    weights: Corrected | None = None,
    reduce: Reduce = "token_mean",
    denominator: float | None = None,
) -> Loss:
    """-H over the kept set of each token that counts in `ratios`, to be minimised.

    Arguments and errors: as `exact_kl_loss`.
    """
    spans = _Spans(tokens, ratios, weights)
    log_p_M = spans.of(policy)
    p_M = np.exp(log_p_M)
    value_M = _product(p_M, log_p_M)
    return spans.loss("exact_entropy", policy, value_M, value_M + p_M, weights, reduce, denominator)


class _Spans:
    """The kept ids of the tokens that count."""

    def __init__(self, tokens: SampledTokens, ratios: LogRatios, weights: Corrected | None) -> None:
        if tokens.num_tokens != ratios.num_tokens:
            raise InvalidInput(f"tokens are {tokens.num_tokens}; the ratios have {ratios.num_tokens}")
        self._ratios = ratios
        self._entries: Entries = entries_of(ratios, "token", weights)
        full = self._entries.token_C[tokens.full_T[self._entries.token_C]]
        if len(full):
            raise ScoringRefused(
                f"{tokens.locate(int(full[0]))[0]} was drawn from the whole vocabulary ({len(full)} tokens), whose "
                f"distribution is not listed: use kl_loss and entropy_loss"
            )
        self._num_kept = len(tokens.kept_ids_N)
        offsets_C1, self._index_M = gather_spans(tokens.kept_offsets_T1, self._entries.token_C)
        self._entry_M: Ints = row_index(offsets_C1)

    def of(self, scores: Scores) -> Floats:
        """Log-probabilities of the kept ids that count."""
        return self._host(self._tensor(scores))[self._index_M]

    def _tensor(self, scores: Scores) -> Tensor:
        logprobs_N = scores.kept_logprobs_N
        if logprobs_N is None:
            raise InvalidInput("these scores hold no distribution; score with distribution=True")
        if len(logprobs_N) != self._num_kept:
            raise InvalidInput(
                f"scores list {len(logprobs_N)} kept ids, the tokens {self._num_kept}: they are of others"
            )
        return logprobs_N

    @staticmethod
    def _host(values: Tensor) -> Floats:
        return hand_for(values).to_host(values)

    def loss(
        self,
        name: str,
        policy: Scores,
        value_M: Floats,
        slope_M: Floats,
        weights: Corrected | None,
        reduce: Reduce,
        denominator: float | None,
    ) -> Loss:
        entries, ratios = self._entries, self._ratios
        infinite_M = ~np.isfinite(value_M)
        if infinite_M.any():
            row = entries.row_C[self._entry_M[np.argmax(infinite_M)]]
            raise InvalidInput(
                f"{name} is infinite in response {row}: one of the two models gives a kept id no probability at all; "
                f"look for logits there that are not finite"
            )
        factor_C = entries.weight_C * entries.scale_C(reduce, denominator)
        value = float(np.sum(factor_C[self._entry_M] * value_M))
        gradient_N = np.zeros(self._num_kept)
        gradient_N[self._index_M] = factor_C[self._entry_M] * slope_M
        logprobs_N = self._tensor(policy)
        return Loss(
            value=differentiable(logprobs_N, self._host(logprobs_N), value, gradient_N),
            gradient_T=np.zeros(ratios.num_tokens),
            gradient_N=gradient_N,
            report=LossReport.of(f"{name}_kept", ratios, entries, weights, reduce=reduce, value=value),
        )


def _product(p_M: Floats, log_M: Floats) -> Floats:
    """p * log, with 0 * inf = 0."""
    with np.errstate(invalid="ignore"):
        return np.where(p_M == 0, 0.0, p_M * log_M)
