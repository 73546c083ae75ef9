"""Quantiles from counts that can be added: log-spaced bins, as in DDSketch (Masson, Rim, Lee, VLDB 2019).

Bin i > 0 holds (s g^(i-1), s g^i], g = (1 + e) / (1 - e), and answers with the value whose relative distance to both
ends is e. A quantile is that of the ceil(q n)-th smallest value, so it is off by at most the factor 1 +- e.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

RELATIVE_ERROR = 0.01
"""Of every quantile between SMALLEST and LARGEST."""
SMALLEST = 1e-9
"""Values not larger count as 0: beyond the resolution of a float32 log-probability."""
LARGEST = 1e6
"""Larger values count as this."""
_LOG_GAMMA = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_NUM_BINS = math.ceil(math.log(LARGEST / SMALLEST) / _LOG_GAMMA)
_EXACT_SIZES = 1024
"""Set sizes up to this are counted one by one, so their quantiles are exact."""


def _zeros(length: int) -> Counts:
    return np.zeros(length, np.int64)


@dataclass
class LogHistogram:
    """Counts of real numbers of either sign.

    >>> histogram = LogHistogram()
    >>> histogram.add(np.array([-2.0, 0.0, 1.0]))
    >>> histogram.quantile(0.5), round(histogram.quantile(1.0), 1)
    (0.0, 1.0)
    """

    counts: Counts = field(default_factory=lambda: _zeros(2 * _NUM_BINS + 1))
    """Ascending by value: negative bins, zero in the middle, positive bins."""

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def add(self, values: NDArray[np.floating]) -> None:
        """Count finite values."""
        magnitude = np.clip(np.abs(values), SMALLEST, LARGEST)
        # A value on the edge of a bin may round to either side of it; both answer within the error.
        bins = np.ceil(np.log(magnitude / SMALLEST) / _LOG_GAMMA).astype(np.int64)
        index = _NUM_BINS + np.sign(values).astype(np.int64) * np.minimum(bins, _NUM_BINS)
        self.counts += np.bincount(index, minlength=len(self.counts))

    def merge(self, other: LogHistogram) -> None:
        self.counts += other.counts

    def quantile(self, q: float) -> float | None:
        """The ceil(q n)-th smallest value, or None where nothing was counted."""
        return None if self.count == 0 else self.value_at_rank(max(1, math.ceil(q * self.count)))

    def value_at_rank(self, rank: int) -> float:
        """The rank-th smallest value, counted from 1."""
        bin_index = int(np.searchsorted(np.cumsum(self.counts), rank)) - _NUM_BINS
        if bin_index == 0:
            return 0.0
        upper = SMALLEST * math.exp(abs(bin_index) * _LOG_GAMMA)
        return math.copysign(upper * (1 - RELATIVE_ERROR), bin_index)


@dataclass
class SizeHistogram:
    """Counts of set sizes: exact up to 1024, log-spaced above, and never beyond the largest.

    >>> sizes = SizeHistogram()
    >>> sizes.add(np.array([1, 1, 5]))
    >>> sizes.quantile(0.5), sizes.share_of(1)
    (1.0, 0.6666666666666666)
    """

    small: Counts = field(default_factory=lambda: _zeros(_EXACT_SIZES + 1))
    large: LogHistogram = field(default_factory=LogHistogram)
    total: int = 0
    """Sum of the sizes."""
    largest: int = 0

    @property
    def count(self) -> int:
        return int(self.small.sum()) + self.large.count

    def add(self, sizes: NDArray[np.int64]) -> None:
        """Count sizes >= 0."""
        is_small = sizes <= _EXACT_SIZES
        self.small += np.bincount(sizes[is_small], minlength=len(self.small))
        self.large.add(sizes[~is_small].astype(np.float64))
        self.total += int(sizes.sum())
        self.largest = max(self.largest, int(sizes.max(initial=0)))

    def merge(self, other: SizeHistogram) -> None:
        self.small += other.small
        self.large.merge(other.large)
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def share_of(self, size: int) -> float | None:
        """Share of one size up to 1024."""
        return int(self.small[size]) / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """The ceil(q n)-th smallest size, or None where nothing was counted."""
        if not self.count:
            return None
        rank, num_small = max(1, math.ceil(q * self.count)), int(self.small.sum())
        if rank <= num_small:
            return float(np.searchsorted(np.cumsum(self.small), rank))
        return min(self.large.value_at_rank(rank - num_small), float(self.largest))
