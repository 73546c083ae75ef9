"""Two ratios instead of one: how far the trainer stands from the sampler, and how far it has moved since.

    behaviour b  ->  proximal p  ->  current l        exp(l - b) = exp(p - b) * exp(l - p)

p is the log-probability under the weights that a round of updates began with, scored by the trainer itself. exp(p - b)
holds what the sampler did otherwise (kernels, precision, stale weights): a constant, which corrections bound.
exp(l - p) holds what the updates did: it carries the gradient, and is what an objective clips. (Hilton, Cobbe and
Schulman, "Batch size-invariance for policy optimization", 2022.)

Legend: T sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keptset.schemas.errors import ScoringRefused
from keptset.trainer_bridge.ratios import LogRatios, RatioOver, log_ratios
from keptset.trainer_bridge.sampled_tokens import SampledTokens
from keptset.trainer_bridge.scoring.hand import hand_for
from keptset.trainer_bridge.scoring.run import Scores
from keptset.trainer_bridge.violations import OnViolation


@dataclass(frozen=True, kw_only=True)
class DecoupledRatios:
    """Both steps, over the same tokens: one that is excluded from either is excluded from both."""

    proximal_over_behavior: LogRatios
    """p - b, NumPy, without gradient: give it to `correct`."""
    current_over_proximal: LogRatios
    """l - p, with the gradient: give it to a loss."""


def decoupled_log_ratios(
    current: Scores,
    tokens: SampledTokens,
    *,
    proximal: Scores | None = None,
    ratio_over: RatioOver = "trainable",
    on_violation: OnViolation = "raise",
) -> DecoupledRatios:
    """Log ratios of current over proximal and of proximal over behaviour, of a scored batch.

    `proximal` are the scores of the same tokens under the weights before the first update of the round, kept from then
    (its gradient is not used). None: this is the first update, and `current` stands for both: l - p is 0, with l's
    gradient.

    Errors: those of `log_ratios` and of `log_ratios_between`.
    """
    tokens.check_domain()
    proximal = current if proximal is None else proximal
    _check_same_support(current, proximal)
    proximal_T = hand_for(proximal.logprobs_T).to_host(proximal.logprobs_T)
    mismatch = log_ratios(
        proximal_T,
        tokens.behavior_logprobs_T,
        tokens.row_T,
        trainable_T=tokens.trainable_T,
        ratio_over=ratio_over,
        on_violation=on_violation,
        violations=proximal.violations.union(current.violations),
        over=current.over,
        num_responses=tokens.batch.num_responses,
        locate=tokens.locate,
    )
    moved = log_ratios(
        current.logprobs_T,
        proximal_T,
        tokens.row_T,
        trainable_T=tokens.trainable_T,
        ratio_over=ratio_over,
        on_violation=on_violation,
        violations=mismatch.violations,
        over=current.over,
        num_responses=tokens.batch.num_responses,
        locate=tokens.locate,
    )
    return DecoupledRatios(
        proximal_over_behavior=replace(mismatch, violations=moved.violations), current_over_proximal=moved
    )


def log_ratios_between(
    current: Scores,
    other: Scores,
    tokens: SampledTokens,
    *,
    ratio_over: RatioOver = "trainable",
    on_violation: OnViolation = "raise",
) -> LogRatios:
    """l - l' of the same tokens under two models, of which the first carries the gradient; say, policy and reference.

    Errors: those of `log_ratios`; ScoringRefused where one was scored over the kept sets and the other over the
    vocabulary.
    """
    _check_same_support(current, other)
    return log_ratios(
        current.logprobs_T,
        hand_for(other.logprobs_T).to_host(other.logprobs_T),
        tokens.row_T,
        trainable_T=tokens.trainable_T,
        ratio_over=ratio_over,
        on_violation=on_violation,
        violations=current.violations.union(other.violations),
        over=current.over,
        num_responses=tokens.batch.num_responses,
        locate=tokens.locate,
    )


def _check_same_support(current: Scores, other: Scores) -> None:
    if current.over != other.over:
        raise ScoringRefused(
            f"one model was scored over `{current.over}`, the other over `{other.over}`: their ratio would hold the "
            f"kept mass as well; score both over the same"
        )
