"""Everything the diagnostics of one level are computed from, as sums that can be added.

    k1 = mean(-d)   k3 = mean(e - d)   chi2 = mean(w^2) - 1 = mean(e^2) + 2 mean(e)   with w = exp(d), e = w - 1
    mean ratio = 1 + mean(e), standard error sqrt(sum e^2) / n      ESS fraction = (sum w)^2 / (n sum w^2)

Sums run over e rather than w: near ratio 1, where they matter most, w^2 - 1 would lose every digit. Those of the ESS
are shifted by the largest log weight, so that sequence weights cannot overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.sketch import LogHistogram

LOWER, UPPER = 0.9, 1.1
"""Ratios outside are counted as far from 1."""


@dataclass(frozen=True, kw_only=True)
class LevelReport:
    """Diagnostics of one level before any clipping; None stands for "no data"."""

    count: int
    """Tokens at token level, responses at the others: each counts once."""
    k1: float | None
    k3: float | None
    chi2: float | None
    ess_fraction: float | None
    mean_ratio: float | None
    mean_ratio_se: float | None
    median_ratio: float | None
    """From the sketch: the log ratio within 1 %."""
    share_outside: float | None
    """Share of ratios outside [0.9, 1.1]."""
    mean_abs_log_ratio: float | None
    max_abs_log_ratio: float | None


@dataclass
class RatioSums:
    """Sums over the log ratios of one level."""

    count: int = 0
    sum_d: float = 0.0
    sum_abs_d: float = 0.0
    max_abs_d: float = 0.0
    sum_k3: float = 0.0
    sum_e: float = 0.0
    sum_e2: float = 0.0
    num_outside: int = 0
    shift: float = -math.inf
    """The largest log weight so far."""
    sum_w: float = 0.0
    """Sum of exp(d - shift)."""
    sum_w2: float = 0.0
    sketch: LogHistogram = field(default_factory=LogHistogram)

    def add(self, log_ratios_C: NDArray[np.float64]) -> None:
        """Count finite log ratios."""
        if not len(log_ratios_C):
            return
        d = log_ratios_C
        with np.errstate(over="ignore"):  # a ratio too large for a float64 makes its sums infinite, and that is said
            e = np.expm1(d)
            squares = float(np.sum(e * e))
        shift = float(d.max())
        shifted = np.exp(d - shift)
        other = RatioSums(
            count=len(d),
            sum_d=float(d.sum()),
            sum_abs_d=float(np.abs(d).sum()),
            max_abs_d=float(np.abs(d).max()),
            sum_k3=float(np.sum(e - d)),
            sum_e=float(e.sum()),
            sum_e2=squares,
            num_outside=int(np.sum((d < math.log(LOWER)) | (d > math.log(UPPER)))),
            shift=shift,
            sum_w=float(shifted.sum()),
            sum_w2=float(np.sum(shifted * shifted)),
        )
        other.sketch.add(d)
        self.merge(other)

    def merge(self, other: RatioSums) -> None:
        """Add another's sums, as if its log ratios had been added here."""
        shift = max(self.shift, other.shift)
        if shift > -math.inf:
            mine, theirs = math.exp(self.shift - shift), math.exp(other.shift - shift)
            self.sum_w = self.sum_w * mine + other.sum_w * theirs
            self.sum_w2 = self.sum_w2 * mine**2 + other.sum_w2 * theirs**2
        self.shift = shift
        self.count += other.count
        self.sum_d += other.sum_d
        self.sum_abs_d += other.sum_abs_d
        self.max_abs_d = max(self.max_abs_d, other.max_abs_d)
        self.sum_k3 += other.sum_k3
        self.sum_e += other.sum_e
        self.sum_e2 += other.sum_e2
        self.num_outside += other.num_outside
        self.sketch.merge(other.sketch)

    def report(self) -> LevelReport:
        """The diagnostics; all None where nothing was counted."""
        n = self.count
        median = self.sketch.quantile(0.5)
        with np.errstate(over="ignore"):
            median_ratio = None if median is None else float(np.exp(median))

        def mean(total: float) -> float | None:
            return total / n if n else None

        return LevelReport(
            count=n,
            k1=mean(-self.sum_d),
            k3=mean(self.sum_k3),
            chi2=mean(self.sum_e2 + 2 * self.sum_e),
            ess_fraction=self.sum_w**2 / (n * self.sum_w2) if n else None,
            mean_ratio=1 + self.sum_e / n if n else None,
            mean_ratio_se=math.sqrt(self.sum_e2) / n if n else None,
            median_ratio=median_ratio,
            share_outside=mean(self.num_outside),
            mean_abs_log_ratio=mean(self.sum_abs_d),
            max_abs_log_ratio=self.max_abs_d if n else None,
        )
