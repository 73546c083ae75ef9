"""Whether the mean of exp(d) is 1: mergeable sums, and the test of them.

    for y drawn from pi_b over K:   E[exp(l - b)] = 1   whatever the trainer's weights
    z = (mean - 1) / se,   se = sqrt(sum (w - 1)^2) / n

A mean that a few tokens carry is not normal at any z, and far from its tail falls short of 1 for honest draws: where
the ratios vary so much the test is not made.
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
"""Of the mean: sum (w - 1)^3 / (sum (w - 1)^2)^1.5. Five standard errors out the tail is then off by a factor of 8."""
MIN_ESS = 0.25
"""Effective share of the tokens, (sum w)^2 / (n sum w^2)."""
_ROUNDING = 2.0**-32
"""Of each number in an ExactSum."""
LARGEST = 50.0
"""Nats; exp beyond is counted as this: the sums say all the same that the test cannot be made."""


@dataclass
class MeanRatio:
    """Sums over w - 1."""

    e: ExactSum = field(default_factory=ExactSum)
    e2: ExactSum = field(default_factory=ExactSum)
    e3: ExactSum = field(default_factory=ExactSum)

    def add(self, log_ratios: NDArray[np.float64]) -> None:
        """Count finite log ratios."""
        e = np.expm1(np.minimum(log_ratios, LARGEST))
        self.e.add(e)
        self.e2.add(e * e)
        self.e3.add(e * e * e)

    def merge(self, other: MeanRatio) -> None:
        self.e.merge(other.e)
        self.e2.merge(other.e2)
        self.e3.merge(other.e3)

    @property
    def count(self) -> int:
        return self.e.count

    @property
    def mean(self) -> float | None:
        return None if self.e.mean is None else 1 + self.e.mean

    @property
    def std_error(self) -> float | None:
        return math.sqrt(self.e2.total) / self.count if self.count else None

    @property
    def _squares(self) -> float:
        """sum (w - 1)^2 and what its rounding may have taken away, which is all of it where paths differ by 1e-6."""
        return self.e2.total + self.count * _ROUNDING

    def obstacle(self) -> str | None:
        """Why the test cannot be made; None where it can."""
        if not self.count:
            return "no token has a score"
        weights, squares = self.count + self.e.total, self.count + 2 * self.e.total + self.e2.total
        ess = weights**2 / (self.count * squares) if squares > 0 else 0.0
        skew = abs(self.e3.total) / self._squares**1.5
        reached = abs(self.e.total) >= EFFECT_BOUND * self.count  # else nothing is found whatever the tail
        if ess < MIN_ESS or (skew > MAX_SKEW and reached):
            return (
                f"a few of the {self.count} tokens carry the mean ratio (effective share {ess:.2g}, skew {skew:.2g}): "
                f"more tokens or fresher weights would make the test possible"
            )
        return None

    def test(self, name: str) -> HypothesisTest:
        """The test; only where there is no obstacle."""
        mean = 1 + self.e.total / self.count
        z = self.e.total / math.sqrt(self._squares)
        return HypothesisTest(
            name=name,
            statistic=z,
            p_value=math.erfc(abs(z) / math.sqrt(2)),
            effect=abs(mean - 1),
            effect_name="|mean ratio - 1|",
            effect_bound=EFFECT_BOUND,
            count=self.count,
        )
