"""Kolmogorov's test of uniformity, from counts in fine bins.

D = max over bin edges |share below - edge|     at most one bin's width below the D of the numbers themselves
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def distance(counts: NDArray[np.int64]) -> float:
    """D of numbers in [0, 1] counted in bins of equal width, at least one of them."""
    n, bins = int(counts.sum()), len(counts)
    below = np.cumsum(counts) / n
    return float(np.abs(below - np.arange(1, bins + 1) / bins).max())


def p_value(d: float, n: int) -> float:
    """Of D over n numbers: Kolmogorov's series at Stephens' effective argument."""
    x = d * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    if x < 0.2:  # 1 to ten digits, and the series converges slowly there
        return 1.0
    total, sign = 0.0, 1.0
    for k in range(1, 101):
        total += sign * math.exp(-2 * k * k * x * x)
        sign = -sign
    return min(1.0, max(0.0, 2 * total))
