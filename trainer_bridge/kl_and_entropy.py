"""KL to a reference policy and entropy, as terms of a loss that say what they are over.

With D = l - l' (policy over reference) of a token drawn from the policy:

    estimator   value              gradient passed on     expectation of that gradient
    k1          D                  D grad l               gradient of KL(policy || reference)
    k2          D^2 / 2            D grad l               the same
    k3          exp(-D) - 1 + D    (1 - exp(-D)) grad l   gradient of KL(reference || policy)
    entropy     H                  -(l + H) grad l        gradient of the policy's entropy

k1 is passed on as a score function: its own derivative, grad l, is 0 on average and would hold nothing. (Schulman,
"Approximating KL divergence", 2020; Tang and Munos, "On a few pitfalls in KL divergence gradient estimation", 2025.)

Over `kept`, both distributions are those over the recorded sets: probability that leaves a set has no gradient here, so
such a KL can stay small while the policy walks out of K (`trainer_kept_mass` shows it). Over `full`, the ids outside K
were never drawn: their share of the gradient, and of k1, k2, k3, is missing.

Expectations hold for tokens drawn from the policy itself; for others give `weights` of the policy over the sampler.
Without sampling noise, from whole kept distributions: `exact_kl_and_entropy`.

Legend: T sampled tokens, C those that count.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.corrections import Corrected
from keptset.trainer_bridge.loss_report import Loss, LossReport
from keptset.trainer_bridge.ratios import LogRatios
from keptset.trainer_bridge.reduction import LARGEST_GRADIENT, Entries, Floats, Reduce, differentiable, entries_of
from keptset.trainer_bridge.scoring.hand import hand_for
from keptset.trainer_bridge.scoring.run import Scores

Estimator = Literal["k1", "k2", "k3"]


def kl_loss(
    policy_over_reference: LogRatios,
    *,
    estimator: Estimator = "k3",
    weights: Corrected | None = None,
    reduce: Reduce = "token_mean",
    denominator: float | None = None,
) -> Loss:
    """KL to the reference, to be minimised, from `log_ratios_between(policy, reference, tokens)`.

    Over what both were scored over, which the report names; `weights`, `reduce` and `denominator` as in the losses.

    Errors: InvalidInput where a name is unknown or weights do not fit, or k3 overflows because the policy gives a token
    next to no probability.

    >>> from keptset.trainer_bridge.ratios import log_ratios
    >>> d = log_ratios(np.array([-1.0]), [-1.5], [0])
    >>> [round(float(kl_loss(d, estimator=k).value), 4) for k in ("k1", "k2", "k3")]
    [0.5, 0.125, 0.1065]
    """
    entries = entries_of(policy_over_reference, "token", weights)
    d_C = entries.log_ratio_C
    if estimator == "k1":
        value_C, slope_C = d_C, d_C
    elif estimator == "k2":
        value_C, slope_C = d_C**2 / 2, d_C
    elif estimator == "k3":
        with np.errstate(over="ignore"):  # met below
            value_C, slope_C = np.expm1(-d_C) + d_C, -np.expm1(-d_C)
    else:
        raise InvalidInput(f"estimator is {estimator!r}; it must be 'k1', 'k2' or 'k3'")
    too_large_C = np.abs(value_C) > LARGEST_GRADIENT
    if too_large_C.any():
        at = int(np.argmax(too_large_C))
        raise InvalidInput(
            f"k3 overflows in response {entries.row_C[at]}: the policy gives a token exp({d_C[at]:.1f}) of the "
            f"reference's probability; use k1 or k2"
        )
    return _term(f"kl_{estimator}", policy_over_reference, entries, value_C, slope_C, weights, reduce, denominator)


def entropy_loss(
    scores: Scores,
    ratios: LogRatios,
    *,
    weights: Corrected | None = None,
    reduce: Reduce = "token_mean",
    denominator: float | None = None,
) -> Loss:
    """-H, to be minimised: with a positive coefficient it keeps the policy's entropy up.

    H is exact at every token's position, its gradient an estimate from the token drawn there. `scores` were made with
    `entropy=True`; `ratios` are theirs, and say which tokens count.

    Errors: InvalidInput where the scores hold no entropy, are of other tokens, or weights do not fit.
    """
    if scores.entropy_T is None:
        raise InvalidInput("these scores hold no entropy; score with entropy=True")
    if len(scores.logprobs_T) != ratios.num_tokens:
        raise InvalidInput(f"scores are of {len(scores.logprobs_T)} tokens; the ratios have {ratios.num_tokens}")
    entries = entries_of(ratios, "token", weights)
    entropy_C = hand_for(scores.entropy_T).to_host(scores.entropy_T)[entries.token_C]
    logprob_C = hand_for(scores.logprobs_T).to_host(scores.logprobs_T)[entries.token_C]
    return _term("entropy", ratios, entries, -entropy_C, logprob_C + entropy_C, weights, reduce, denominator)


def _term(
    name: str,
    ratios: LogRatios,
    entries: Entries,
    value_C: Floats,
    slope_C: Floats,
    weights: Corrected | None,
    reduce: Reduce,
    denominator: float | None,
) -> Loss:
    factor_C = entries.weight_C * entries.scale_C(reduce, denominator)
    value = float(np.sum(factor_C * value_C))
    gradient_T = entries.on_tokens(factor_C * slope_C, ratios.row_T)
    return Loss(
        value=differentiable(ratios.delta_T, ratios.host_delta_T, value, gradient_T),
        gradient_T=gradient_T,
        report=LossReport.of(f"{name}_{ratios.over}", ratios, entries, weights, reduce=reduce, value=value),
    )
