"""Clipped objectives of log ratios and advantages, elementwise, with their derivative by the log ratio.

    J = min(r A, clip(r) A)    d J / d log r = J, and 0 where clip(r) was taken
    J = clip(r) A log r        d J / d log r = clip(r) A, for clip(r) is a constant

Ratios are bounded in log space, before exp.

Legend: C entries, tokens or responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """J of each entry, and what a report counts."""

    value_C: Floats
    slope_C: Floats
    """d J / d log ratio."""
    above_C: Bools
    """Cut at the upper bound."""
    below_C: Bools
    """Cut at the lower bound."""
    dual_C: Bools
    """Cut by the second bound of dual-clip."""


Rule = Callable[[Floats, Floats], Objective]
"""Log ratios and advantages of the entries to their objective."""


def _log_bounds(lower: float, upper: float) -> tuple[float, float]:
    """Bounds of the log ratio."""
    if not (0 <= lower <= 1 and 0 <= upper < math.inf):
        raise InvalidInput(
            f"clip_lower is {lower} and clip_upper {upper}; ratios are clipped to [1 - clip_lower, 1 + clip_upper], so "
            f"the first must lie in [0, 1], the second be finite and >= 0"
        )
    return math.log1p(-lower) if lower < 1 else -math.inf, math.log1p(upper)


def clipped(lower: float, upper: float, dual: float = math.inf) -> Rule:
    """min(r A, clip(r, 1 - lower, 1 + upper) A), and not below dual * A where A < 0."""
    low, high = _log_bounds(lower, upper)
    log_dual = math.log(dual)

    def rule(log_ratio_C: Floats, advantage_C: Floats) -> Objective:
        up_C = advantage_C > 0
        above_C, below_C = up_C & (log_ratio_C > high), ~up_C & (log_ratio_C < low)
        dual_C = ~up_C & (log_ratio_C > log_dual)
        bounded_C = np.clip(log_ratio_C, np.where(up_C, -np.inf, low), np.where(up_C, high, log_dual))
        with np.errstate(over="ignore"):  # met with an error that names the response
            value_C = _product(np.exp(bounded_C), advantage_C)
        cut_C = above_C | below_C | dual_C
        real_C = advantage_C != 0
        return Objective(
            value_C=value_C,
            slope_C=np.where(cut_C, 0.0, value_C),
            above_C=above_C & real_C,
            below_C=below_C & real_C,
            dual_C=dual_C & real_C,
        )

    return rule


def weighed(lower: float | None, upper: float) -> Rule:
    """clip(r) A d, the first factor a constant; `lower` = None bounds it above alone."""
    low, high = _log_bounds(0.0 if lower is None else lower, upper)
    if lower is None:
        low = -math.inf

    def rule(log_ratio_C: Floats, advantage_C: Floats) -> Objective:
        slope_C = np.exp(np.clip(log_ratio_C, low, high)) * advantage_C
        return Objective(
            value_C=slope_C * log_ratio_C,
            slope_C=slope_C,
            above_C=log_ratio_C > high,
            below_C=log_ratio_C < low,
            dual_C=np.zeros(len(log_ratio_C), bool),
        )

    return rule


def _product(factor_C: Floats, advantage_C: Floats) -> Floats:
    """factor * advantage, with 0 * inf = 0: an advantage of 0 asks for no change, whatever the ratio."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(advantage_C == 0, 0.0, factor_C * advantage_C)
