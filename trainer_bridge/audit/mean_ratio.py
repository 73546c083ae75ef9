"""Whether the mean of exp(d) is 1: mergeable sums, and the test of them.

    for y drawn from pi_b over K:   E[w] = 1,   w = exp(l - b),   whatever the trainer's weights
    z = (mean - 1) / se,   se = sqrt(max(sum e^2, sum v)) / n,   e = w - 1

What was drawn says too little of what was not: where one id nearly takes all, hundreds of tokens go by without the rare
ones that bring the mean back to 1. But b and l of the token drawn tell the mass that each side leaves to all others,
and so what e is there on average, and the variance v of a draw that tells only these two apart:

    e' = min((1 - exp l) / (1 - exp b), PLAUSIBLE) - 1         v = p e^2 + (1 - p) e'^2,  p = exp b

What the bound on e' cuts away is the most that rare draws could still bring: a mean below 1 counts by what is left of
it once that is added.

A mean that a few tokens carry is not normal, and in most samples falls short of 1 for honest draws. Then only what is
certain at any tail is tested, on one side: for any fraction f below 1 the product of 1 + f e has expectation 1, so by
Markov's inequality it exceeds 1 / a with probability a at most, and so does the mean of such products. A mean above 1
shows there; one below 1 shows nothing.
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
PLAUSIBLE = 10.0
"""Times as probable as to the sampler: more than this the ids that were not drawn are not taken to be."""
FRACTIONS = (0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""f."""
CAP = 4.0
"""Of ratios in the effect that is told where a few carry the mean."""
FEWEST = 30
"""Tokens."""
_ROUNDING = 2.0**-32
"""Of each number in an ExactSum."""
LARGEST = 50.0
"""Nats; exp beyond is counted as this: the sums say all the same that the test cannot be made."""


@dataclass
class MeanRatio:
    """Sums over e, over what b and l tell of ids that were not drawn, and over the logs of the products' factors."""

    e: ExactSum = field(default_factory=ExactSum)
    e2: ExactSum = field(default_factory=ExactSum)
    e3: ExactSum = field(default_factory=ExactSum)
    variance: ExactSum = field(default_factory=ExactSum)
    unseen: ExactSum = field(default_factory=ExactSum)
    """What PLAUSIBLE cuts away."""
    capped: ExactSum = field(default_factory=ExactSum)
    """min(w, CAP) - 1."""
    products: tuple[ExactSum, ...] = field(default_factory=lambda: tuple(ExactSum() for _ in FRACTIONS))

    def add(self, log_ratios_T: NDArray[np.float64], behavior_T: NDArray[np.float64]) -> None:
        """Count finite log ratios [T], and the b that they are to."""
        e = np.expm1(np.minimum(log_ratios_T, LARGEST))
        p, others = np.exp(behavior_T), -np.expm1(np.minimum(behavior_T, 0.0))
        others_now = -np.expm1(np.minimum(behavior_T + log_ratios_T, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            e_others = np.where(others > 0, np.minimum(others_now / others, PLAUSIBLE) - 1, 0.0)
        for total, values in (
            (self.e, e),
            (self.e2, e * e),
            (self.e3, e * e * e),
            (self.variance, p * e**2 + others * e_others**2),
            (self.unseen, np.where(others > 0, np.maximum(others_now - PLAUSIBLE * others, 0.0), 0.0)),
            (self.capped, np.minimum(e, CAP - 1)),
        ):
            total.add(values)
        for total, fraction in zip(self.products, FRACTIONS, strict=True):
            total.add(np.log1p(fraction * e))

    def merge(self, other: MeanRatio) -> None:
        for name in ("e", "e2", "e3", "variance", "unseen", "capped"):
            getattr(self, name).merge(getattr(other, name))
        for mine, theirs in zip(self.products, other.products, strict=True):
            mine.merge(theirs)

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
        if self._is_normal or self._log_product > 0:
            return None
        return f"a few of the {self.count:,} tokens carry the mean ratio: more tokens or fresher weights are needed"

    @property
    def _variance(self) -> float:
        """Of the sum of e."""
        return max(self.e2.total, self.variance.total) + self.count * _ROUNDING

    @property
    def _told(self) -> float:
        """The sum of e that speaks against 1."""
        return self.e.total if self.e.total > 0 else min(self.e.total + self.unseen.total, 0.0)

    @property
    def _is_normal(self) -> bool:
        n, mean = self.count, self.e.total / self.count
        if abs(self._told) < EFFECT_BOUND * n:
            return True  # nothing is found whatever the tail
        second = self.e2.total - n * mean**2 + n * _ROUNDING
        third = self.e3.total - 3 * mean * self.e2.total + 2 * n * mean**3
        return bool(abs(third) <= MAX_SKEW * second**1.5)

    @property
    def _log_product(self) -> float:
        """Of the mean over FRACTIONS."""
        logs = [total.total for total in self.products]
        top = max(logs)
        return top + math.log(sum(math.exp(one - top) for one in logs) / len(logs))

    def test(self, name: str) -> HypothesisTest:
        """The test; only where there is no obstacle."""
        if self._is_normal:
            z = self._told / math.sqrt(self._variance)
            p_value, effect, effect_name = math.erfc(abs(z) / math.sqrt(2)), abs(self._told), "|mean ratio - 1|"
        else:
            z = self._log_product
            p_value, effect = min(1.0, math.exp(-z)), max(self.capped.total, 0.0)
            effect_name = f"mean ratio, none above {CAP:g}, - 1"
        return HypothesisTest(
            name=name,
            statistic=z,
            p_value=p_value,
            effect=effect / self.count,
            effect_name=effect_name,
            effect_bound=EFFECT_BOUND,
            count=self.count,
        )
