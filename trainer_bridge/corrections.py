"""Importance weights as constants that multiply a loss, bounded by corrections that name their level and bounds.

    w = exp(log ratio of the level)     Truncate     min(w, upper)                              (TIS)
                                        Mask         0 outside [lower, upper]                   (IcePop)
                                        Reject       0 in a response whose ratio is outside     (MIS)
                                        Veto         0 in a response with one extreme ratio
                                        BatchNormalise  w / mean of what is left

`StalenessWeights` are a step too. Steps look at the ratios as they were, act in the order given on what the ones before
left, and count what they did. Sources: truncated importance
sampling, Ionides 2008, and Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025;
IcePop, Ling Team 2025; masked importance sampling, Liu et al., "When speed kills stability", 2025.

Legend: T sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.correction_report import CorrectionReport, StepReport, WeightLevel
from keptset.trainer_bridge.ratios import Level, LogRatios, check_log_ratios, runs
from keptset.trainer_bridge.sampled_tokens import Bools
from keptset.trainer_bridge.staleness import StalenessWeights

LARGEST_LOG_WEIGHT = math.log(float(np.finfo(np.float32).max))
"""Larger weights overflow a float32: such a batch has no loss, and no bound was asked for that would give it one."""


@dataclass(frozen=True, kw_only=True)
class Truncate:
    """w <- min(w, upper)."""

    level: Level
    """That of the weights."""
    upper: float

    def __post_init__(self) -> None:
        _check_bounds(self, 0.0, self.upper)


@dataclass(frozen=True, kw_only=True)
class Mask:
    """w <- 0 where the ratio of the level lies outside [lower, upper]."""

    level: Level
    """`token` masks tokens; the others mask every token of the response."""
    lower: float = 0.0
    upper: float = math.inf

    def __post_init__(self) -> None:
        _check_bounds(self, self.lower, self.upper)


@dataclass(frozen=True, kw_only=True)
class Reject:
    """w <- 0 in the whole response, where its ratio lies outside [lower, upper]."""

    level: Level
    """`sequence` or `geometric` look at the response's one ratio; `token` at every token's, as `Veto` does."""
    lower: float = 0.0
    upper: float = math.inf

    def __post_init__(self) -> None:
        _check_bounds(self, self.lower, self.upper)


@dataclass(frozen=True, kw_only=True)
class Veto:
    """w <- 0 in the whole response, where a single token's ratio lies outside [lower, upper]."""

    lower: float = 1e-4
    """A token ten thousand times less likely to the trainer than to the sampler speaks against the whole response."""
    upper: float = math.inf
    level: Level = field(default="token", init=False)

    def __post_init__(self) -> None:
        _check_bounds(self, self.lower, self.upper)


@dataclass(frozen=True, kw_only=True)
class BatchNormalise:
    """w <- w / mean, over the tokens (level `token`) or the responses (the others) that are still in."""

    level: Level
    """That of the weights."""
    mean: float | None = None
    """The mean to divide by, where this call sees a part of the batch only: add up `weight_sum` and `weight_count` of
    the parts' reports. None: the mean of this call."""

    def __post_init__(self) -> None:
        if self.mean is not None and not 0 < self.mean < math.inf:
            raise InvalidInput(f"mean is {self.mean}; it must be finite and > 0")


Correction = Truncate | Mask | Reject | Veto | BatchNormalise | StalenessWeights


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """A constant weight for each sampled token, and how it came about."""

    weights_T: NDArray[np.float64]
    """0 where dropped, excluded, or outside `ratio_over`."""
    counted_T: Bools
    """Tokens that entered. A dropped one still counts, in the denominator of a mean too; an excluded one does not."""
    report: CorrectionReport


def correct(
    ratios: LogRatios,
    *steps: Correction,
    weights: WeightLevel | None = None,
) -> Corrected:
    """Weights of the sampled tokens under these corrections.

    `weights` is the level of the weights; None: that of the steps, which must then agree. A violation that `ratios`
    excluded takes its token out, and its response where a level is `sequence` or `geometric`.

    Errors: InvalidInput where levels or lengths do not fit, or a weight stays so large that a float32 cannot hold it.

    >>> from keptset.trainer_bridge.ratios import log_ratios
    >>> d = log_ratios(np.array([0.5, -0.2, 1.5]), [0.0, 0.0, 0.0], [0, 0, 0])
    >>> correct(d, Truncate(level="token", upper=2.0)).weights_T.round(4).tolist()
    [1.6487, 0.8187, 2.0]
    >>> correct(d, Reject(level="sequence", lower=0.5, upper=2.0), weights="one").weights_T.tolist()
    [0.0, 0.0, 0.0]
    """
    check_log_ratios(ratios)
    level = _weight_level(steps, weights)
    at_responses = bool({level, *_levels(steps)} & {"sequence", "geometric"})
    counted_T = ratios.whole_T if at_responses else ratios.counted_T
    work = _Work(ratios, counted_T, level)
    reports = tuple(work.apply(step) for step in steps)
    return Corrected(
        weights_T=work.weights_T(),
        counted_T=counted_T,
        report=work.report(reports, ratios.excluded_responses() if at_responses else {}),
    )


class _Work:
    """Log weights on the way through the steps; -inf is out."""

    def __init__(self, ratios: LogRatios, counted_T: Bools, level: WeightLevel) -> None:
        self._ratios, self._counted_T, self._level = ratios, counted_T, level
        self._log_T = np.where(counted_T, 0.0, -np.inf)
        if level != "one":
            self._log_T[counted_T] = ratios.log_ratios_T(level)[counted_T]
        self._before_normalising: NDArray[np.float64] | None = None

    @property
    def _in_T(self) -> Bools:
        in_T: Bools = self._log_T > -np.inf
        return in_T

    def apply(self, step: Correction) -> StepReport:
        rows_T = self._ratios.row_T
        lower, upper = getattr(step, "lower", 0.0), getattr(step, "upper", math.inf)
        if isinstance(step, BatchNormalise):
            hit_T = self._normalise(step)
        elif isinstance(step, StalenessWeights):
            hit_T = self._weigh(step)
        elif isinstance(step, Truncate):
            hit_T = self._log_T > math.log(upper)
            self._log_T[hit_T] = math.log(upper)
        else:
            log_T = self._ratios.log_ratios_T(step.level)
            with np.errstate(invalid="ignore"):  # NaN at tokens that do not count
                outside_T = self._counted_T & ((log_T < _log(lower)) | (log_T > _log(upper)))
            if not isinstance(step, Mask):
                # Tokens that a step before took out speak against their response all the same.
                outside_T = np.isin(rows_T, rows_T[outside_T])
            hit_T = self._in_T & outside_T
            self._log_T[hit_T] = -np.inf
        return StepReport(
            name=_name(step),
            lower=lower,
            upper=upper,
            tokens=int(hit_T.sum()),
            responses=len(np.unique(rows_T[hit_T])),
        )

    def _weigh(self, step: StalenessWeights) -> Bools:
        if step.weights_T.shape != self._log_T.shape:
            raise InvalidInput(f"staleness weighs {len(step.weights_T)} tokens; the ratios have {len(self._log_T)}")
        hit_T = self._in_T & (step.weights_T < 1)
        with np.errstate(divide="ignore"):
            self._log_T = self._log_T + np.log(step.weights_T)
        if self._level in ("sequence", "geometric"):
            rows, log_C = self._ratios.row_T[self._in_T], self._log_T[self._in_T]
            if ((np.diff(rows) == 0) & (np.diff(log_C) != 0)).any():
                raise InvalidInput(
                    f"staleness weighs tokens of a response differently, but the weights are of level {self._level!r}: "
                    f"weigh it with per='response'"
                )
        return hit_T

    def _entries(self) -> NDArray[np.float64]:
        """Log weights that are left: of tokens, or one of each response."""
        in_T = self._in_T
        if self._level in ("token", "one"):
            return self._log_T[in_T]
        _, first, _ = runs(self._ratios.row_T[in_T])
        return self._log_T[in_T][first]

    def _normalise(self, step: BatchNormalise) -> Bools:
        log_C = self._entries()
        if self._before_normalising is None:
            self._before_normalising = log_C
        if len(log_C):
            top = log_C.max()
            mean_log = top + np.log(np.mean(np.exp(log_C - top))) if step.mean is None else math.log(step.mean)
            self._log_T = self._log_T - mean_log
        return np.zeros(len(self._log_T), bool)

    def weights_T(self) -> NDArray[np.float64]:
        largest = int(np.argmax(self._log_T)) if len(self._log_T) else 0
        if len(self._log_T) and self._log_T[largest] > LARGEST_LOG_WEIGHT:
            raise InvalidInput(
                f"the weight of token {largest} of the call, in response {self._ratios.row_T[largest]}, is "
                f"exp({self._log_T[largest]:.1f}), more than a float32 can hold: truncate, mask or reject such ratios"
            )
        return np.exp(self._log_T)

    def report(self, steps: tuple[StepReport, ...], excluded_responses: dict[str, int]) -> CorrectionReport:
        rows_T, in_T, counted_T = self._ratios.row_T, self._in_T, self._counted_T
        log_C = self._entries()
        before_C = log_C if self._before_normalising is None else self._before_normalising
        with np.errstate(over="ignore"):  # a sum that overflows is infinite, and that is said
            weight_sum = float(np.sum(np.exp(before_C)))
        return CorrectionReport(
            weights=self._level,
            ratio_over=self._ratios.ratio_over,
            over=self._ratios.over,
            counted_tokens=int(counted_T.sum()),
            steps=steps,
            dropped_tokens=int((counted_T & ~in_T).sum()),
            dropped_responses=len(np.setdiff1d(rows_T[counted_T], rows_T[in_T])),
            weight_sum=weight_sum,
            weight_count=len(before_C),
            largest_weight=float(np.exp(log_C.max())) if len(log_C) else None,
            excluded_tokens=self._ratios.violations.counts(),
            excluded_responses=excluded_responses,
        )


def _name(step: Correction) -> str:
    if isinstance(step, StalenessWeights):
        return "staleness"
    names = {Truncate: "truncate", Mask: "mask", Reject: "reject", Veto: "veto", BatchNormalise: "batch_normalise"}
    return f"{names[type(step)]}_{step.level}"


def _levels(steps: Sequence[Correction]) -> list[Level]:
    """Each level that a step names, once."""
    return sorted({step.level for step in steps if not isinstance(step, StalenessWeights)})


def _weight_level(steps: Sequence[Correction], asked: WeightLevel | None) -> WeightLevel:
    levels = _levels(steps)
    for level in levels:
        if level not in ("token", "sequence", "geometric"):
            raise InvalidInput(f"level is {level!r}; it must be 'token', 'sequence' or 'geometric'")
    if asked is None:
        if len(levels) > 1:
            raise InvalidInput(
                f"the corrections name the levels {', '.join(levels)}; say by weights which level the weights have, or "
                f"'one' for weights of 1"
            )
        asked = levels[0] if levels else "one"
    if asked not in ("token", "sequence", "geometric", "one"):
        raise InvalidInput(f"weights is {asked!r}; it must be 'token', 'sequence', 'geometric' or 'one'")
    for step in steps:
        if isinstance(step, (Truncate, BatchNormalise)) and step.level != asked:
            raise InvalidInput(
                f"{type(step).__name__} of level {step.level!r} acts on the weights, and theirs is {asked!r}; name that"
            )
    return asked


def _check_bounds(step: object, lower: float, upper: float) -> None:
    if not (0 <= lower < upper):
        raise InvalidInput(f"{type(step).__name__} has the bounds [{lower}, {upper}]; they must ascend from 0 or more")


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
