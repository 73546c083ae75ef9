"""Whether the mean of exp(d) is 1: mergeable sums, and the test of them.

    for y drawn from pi_b over K:   E[w] = 1,   w = exp(l - b),   whatever the trainer's weights
    z = (mean - 1) / se,   se = sqrt(sum (w - 1)^2) / n

A mean that a few tokens carry is not normal, and in most samples falls short of 1 for honest draws. Then only what is
certain at any tail is tested, on one side:  E[min(w, C)] <= 1,  so that a larger mean of these bounded numbers shows a
fault; a smaller one shows nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.audit.check import HypothesisTest
from keptset.trainer_bridge.audit.exact_sum import ExactSum

EFFECT_BOUND = 0.002
"""|mean ratio - 1| below which nothing is found."""
MAX_SKEW = 0.1
"""Of the mean, by the third central moment. Five standard errors out the normal tail is then off by a factor of 8."""
CAP = 4.0
"""C."""
FEWEST = 30
"""Tokens."""
_ROUNDING = 2.0**-32
"""Of each number in an ExactSum."""
LARGEST = 50.0
"""Nats; exp beyond is counted as this: the sums say all the same that the test cannot be made."""


@dataclass
class MeanRatio:
    """Sums over e = w - 1, and over min(w, C) - 1."""

    e: ExactSum = field(default_factory=ExactSum)
    e2: ExactSum = field(default_factory=ExactSum)
    e3: ExactSum = field(default_factory=ExactSum)
    capped: ExactSum = field(default_factory=ExactSum)
    capped2: ExactSum = field(default_factory=ExactSum)

    def add(self, log_ratios: NDArray[np.float64]) -> None:
        """Count finite log ratios."""
        e = np.expm1(np.minimum(log_ratios, LARGEST))
        capped = np.minimum(e, CAP - 1)
        for total, values in (
            (self.e, e),
            (self.e2, e * e),
            (self.e3, e * e * e),
            (self.capped, capped),
            (self.capped2, capped * capped),
        ):
            total.add(values)

    def merge(self, other: MeanRatio) -> None:
        for name in ("e", "e2", "e3", "capped", "capped2"):
            getattr(self, name).merge(getattr(other, name))

    @property
    def count(self) -> int:
        return self.e.count

    @property
    def mean(self) -> float | None:
        return None if self.e.mean is None else 1 + self.e.mean

    @property
    def std_error(self) -> float | None:
        return math.sqrt(self.e2.total) / self.count if self.count else None

    def obstacle(self) -> str | None:
        """Why the test cannot be made; None where it can."""
        if self.count < FEWEST:
            return f"{self.count} tokens are too few for their mean ratio to say anything; {FEWEST} would do"
        if self._is_normal or self.capped.total > 0:
            return None
        return f"a few of the {self.count:,} tokens carry the mean ratio: more tokens or fresher weights are needed"

    @property
    def _is_normal(self) -> bool:
        n, mean = self.count, self.e.total / self.count
        if abs(mean) < EFFECT_BOUND:
            return True  # nothing is found whatever the tail
        second = self.e2.total - n * mean**2 + n * _ROUNDING
        third = self.e3.total - 3 * mean * self.e2.total + 2 * n * mean**3
        return bool(abs(third) <= MAX_SKEW * second**1.5)

    def test(self, name: str) -> HypothesisTest:
        """The test; only where there is no obstacle."""
        two_sided = self._is_normal
        total, squares = (self.e, self.e2) if two_sided else (self.capped, self.capped2)
        z = total.total / math.sqrt(squares.total + self.count * _ROUNDING)
        return HypothesisTest(
            name=name,
            statistic=z,
            p_value=math.erfc(abs(z) / math.sqrt(2)) if two_sided else math.erfc(z / math.sqrt(2)) / 2,
            effect=abs(total.total) / self.count if two_sided else max(total.total, 0.0) / self.count,
            effect_name="|mean ratio - 1|" if two_sided else f"mean ratio, none above {CAP:g}, - 1",
            effect_bound=EFFECT_BOUND,
            count=self.count,
        )
