"""How far out a sum of surprisals lies, where rare draws surprise by many nats.

    S = sum(X - H),  X = -log p,  E[X] = H,  Var(X) = V_t     for each token, X drawn by p itself

Where one id nearly takes all, the upper tail of S is that of a Poisson distribution, far heavier than a normal one.
Only H and V_t are recorded, and they bound the third moment from below: E[X] E[X^3] >= E[X^2]^2, with equality where X
is 0 or one other number. Above 0 the tail is therefore taken from jumps of the size c that gives this variance and
third moment: S counts as many standard deviations out as the square root of twice its deviance,

    V = sum V_t,   c = sum M_t / V,   u = c S / V,   z = sqrt(2 V / c^2 ((1 + u) log(1 + u) - u))

which is S / sqrt(V) where jumps are small. Below 0 the normal tail is the heavier one, and stays.

Legend: S sampled tokens.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_SMALL = 1e-3
"""u below which both tails are one."""


def least_third_moment(entropy_S: NDArray[np.float64], variance_S: NDArray[np.float64]) -> NDArray[np.float64]:
    """M_t: the least third central moment of X in nats^3; 0 where that is negative, or H is no entropy."""
    second_S = variance_S + entropy_S**2
    with np.errstate(divide="ignore", invalid="ignore"):
        third_S = second_S**2 / entropy_S - 3 * entropy_S * second_S + 2 * entropy_S**3
    return np.where((entropy_S > 0) & (third_S > 0) & np.isfinite(third_S), third_S, 0.0)


def p_value(excess: float, variance: float, third: float) -> float:
    """Of both sides, for the sums of X - H, V_t > 0 and M_t.

    >>> round(p_value(-2.0, 1.0, 0.0), 4), round(p_value(2.0, 1.0, 0.0), 4), round(p_value(2.0, 1.0, 3.0), 4)
    (0.0455, 0.0455, 0.1931)
    """
    z = excess / math.sqrt(variance)
    jump = third / variance
    u = jump * excess / variance
    if u > _SMALL:
        z = math.sqrt(2 * variance * ((1 + u) * math.log1p(u) - u)) / jump
    return math.erfc(abs(z) / math.sqrt(2))
