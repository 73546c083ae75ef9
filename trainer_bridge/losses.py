"""Policy-gradient losses from importance ratios: PPO-clip, dual-clip, GRPO, GSPO, CISPO.

    ppo_clip    J = min(r A, clip(r, 1 - e, 1 + e') A)
    dual_clip   J = max(ppo_clip, c A) where A < 0
    grpo        ppo_clip of token ratios, mean over each response first, advantages from groups
    gspo        ppo_clip of the geometric ratio, once per response
    cispo       J = min(r, 1 + e') A d, the first factor a constant: the ratio weighs, never stops, the gradient

A loss is -w J, reduced; w are the constant weights of a correction (1 without). Sources: Schulman et al. 2017; Ye et
al. 2020 (dual clip); Shao et al. 2024 (GRPO); Zheng et al. 2025 (GSPO); MiniMax 2025 (CISPO).

Legend: T sampled tokens, B responses, C entries: tokens at token level, responses at the others.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.corrections import Corrected
from keptset.trainer_bridge.loss_report import Loss, LossReport
from keptset.trainer_bridge.objectives import Rule, clipped, weighed
from keptset.trainer_bridge.ratios import Level, LogRatios
from keptset.trainer_bridge.reduction import (
    LARGEST_GRADIENT,
    Entries,
    Floats,
    Reduce,
    differentiable,
    entries_of,
    per_entry,
)

AdvantagePer = Literal["response", "token"]


def ppo_clip_loss(
    ratios: LogRatios,
    advantages: ArrayLike,
    *,
    clip_lower: float = 0.2,
    clip_upper: float = 0.2,
    level: Level = "token",
    advantages_per: AdvantagePer = "response",
    weights: Corrected | None = None,
    reduce: Reduce = "token_mean",
    denominator: float | None = None,
) -> Loss:
    """-min(r A, clip(r, 1 - clip_lower, 1 + clip_upper) A).

    `advantages` are one per response [B], or one per sampled token [T] with `advantages_per` = `token`. `weights`
    multiply each entry and are not clipped. `denominator` replaces the count that the reduction divides by: with the
    count of the whole batch there, losses of its parts add up to that of the whole.

    Errors: InvalidInput where shapes, names or bounds do not fit, an advantage that counts is not finite, or an
    unbounded ratio overflows.

    >>> from keptset.trainer_bridge.ratios import log_ratios
    >>> d = log_ratios(np.array([0.5, 0.5]), [0.0, 0.0], [0, 1])
    >>> float(ppo_clip_loss(d, [1.0, -1.0], reduce="sum").value.round(4))
    0.4487
    """
    return _loss(
        "ppo_clip",
        clipped(clip_lower, clip_upper),
        ratios,
        advantages,
        level=level,
        advantages_per=advantages_per,
        weights=weights,
        reduce=reduce,
        denominator=denominator,
    )


def dual_clip_loss(
    ratios: LogRatios,
    advantages: ArrayLike,
    *,
    clip_lower: float = 0.2,
    clip_upper: float = 0.2,
    dual: float = 3.0,
    level: Level = "token",
    advantages_per: AdvantagePer = "response",
    weights: Corrected | None = None,
    reduce: Reduce = "token_mean",
    denominator: float | None = None,
) -> Loss:
    """PPO-clip whose objective does not fall below `dual` * A where A < 0: there no ratio, however large, overflows.

    Arguments and errors: as `ppo_clip_loss`; InvalidInput where `dual` is not above 1 + clip_upper.
    """
    if not 1 + clip_upper < dual < math.inf:
        raise InvalidInput(f"dual is {dual}; it must be finite and above 1 + clip_upper = {1 + clip_upper}")
    return _loss(
        "dual_clip",
        clipped(clip_lower, clip_upper, dual),
        ratios,
        advantages,
        level=level,
        advantages_per=advantages_per,
        weights=weights,
        reduce=reduce,
        denominator=denominator,
    )


def grpo_loss(
    ratios: LogRatios,
    advantages_B: ArrayLike,
    *,
    clip_lower: float = 0.2,
    clip_upper: float = 0.2,
    weights: Corrected | None = None,
    reduce: Reduce = "response_mean",
    denominator: float | None = None,
) -> Loss:
    """PPO-clip of token ratios with one advantage per response, each response's mean first.

    Advantages come from `group_advantages`. Without its length and deviation biases ("Dr. GRPO"): advantages that are
    not scaled, `reduce` = `sum`, and a constant `denominator`. Arguments and errors: as `ppo_clip_loss`.
    """
    return _loss(
        "grpo",
        clipped(clip_lower, clip_upper),
        ratios,
        advantages_B,
        level="token",
        advantages_per="response",
        weights=weights,
        reduce=reduce,
        denominator=denominator,
    )


def gspo_loss(
    ratios: LogRatios,
    advantages_B: ArrayLike,
    *,
    clip_lower: float = 3e-4,
    clip_upper: float = 4e-4,
    weights: Corrected | None = None,
    reduce: Reduce = "response_mean",
    denominator: float | None = None,
) -> Loss:
    """PPO-clip of the geometric ratio exp(mean d), once per response. Bounds are the paper's: this ratio stays near 1.

    Arguments and errors: as `ppo_clip_loss`; `weights` must be the same for all tokens of a response.
    """
    return _loss(
        "gspo",
        clipped(clip_lower, clip_upper),
        ratios,
        advantages_B,
        level="geometric",
        advantages_per="response",
        weights=weights,
        reduce=reduce,
        denominator=denominator,
    )


def cispo_loss(
    ratios: LogRatios,
    advantages: ArrayLike,
    *,
    clip_lower: float | None = None,
    clip_upper: float = 0.2,
    level: Level = "token",
    advantages_per: AdvantagePer = "response",
    weights: Corrected | None = None,
    reduce: Reduce = "token_mean",
    denominator: float | None = None,
) -> Loss:
    """-clip(r) A d with clip(r) = min(r, 1 + clip_upper) a constant; bounded below only where `clip_lower` says so.

    d = l - b stands for the log-probability l itself: b is a constant, so the gradient is the published one, and the
    value is 0 at equal weights. Arguments and errors: as `ppo_clip_loss`.
    """
    return _loss(
        "cispo",
        weighed(clip_lower, clip_upper),
        ratios,
        advantages,
        level=level,
        advantages_per=advantages_per,
        weights=weights,
        reduce=reduce,
        denominator=denominator,
    )


def _loss(
    name: str,
    rule: Rule,
    ratios: LogRatios,
    advantages: ArrayLike,
    *,
    level: Level,
    advantages_per: AdvantagePer,
    weights: Corrected | None,
    reduce: Reduce,
    denominator: float | None,
) -> Loss:
    entries = entries_of(ratios, level, weights)
    advantage_C = per_entry("advantages", advantages, advantages_per, ratios, entries)
    objective = rule(entries.log_ratio_C, advantage_C)
    live_C = entries.weight_C > 0
    factor_C = np.where(live_C, -entries.weight_C * entries.scale_C(reduce, denominator), 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        value_C = np.where(live_C, factor_C * objective.value_C, 0.0)
        slope_C = np.where(live_C, factor_C * objective.slope_C, 0.0)
    _check_finite(name, entries, value_C, slope_C)
    gradient_T = entries.on_tokens(slope_C, ratios.row_T)
    value = float(value_C.sum())
    return Loss(
        value=differentiable(ratios.delta_T, ratios.host_delta_T, value, gradient_T),
        gradient_T=gradient_T,
        report=LossReport.of(
            name,
            ratios,
            entries,
            weights,
            reduce=reduce,
            value=value,
            clipped_above=int((objective.above_C & live_C).sum()),
            clipped_below=int((objective.below_C & live_C).sum()),
            clipped_dual=int((objective.dual_C & live_C).sum()),
        ),
    )


def _check_finite(name: str, entries: Entries, value_C: Floats, slope_C: Floats) -> None:
    large_C = ~(np.maximum(np.abs(value_C), np.abs(slope_C)) <= LARGEST_GRADIENT)
    if large_C.any():
        at = int(np.argmax(large_C))
        raise InvalidInput(
            f"{name}: the {entries.level} ratio of response {entries.row_C[at]} is exp({entries.log_ratio_C[at]:.1f}), "
            f"and nothing bounds it where the advantage is negative: use dual_clip_loss, or mask or reject such ratios"
        )
