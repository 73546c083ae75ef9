"""How far out a sum of surprisals lies, where rare draws surprise by many nats.

    S = sum(X - H),  X = -log p,  E[X] = H,  Var(X) = V_t     for each token, X drawn by p itself

Where one id nearly takes all, the upper tail of S is that of a Poisson distribution, far heavier than a normal one.
Only H and V_t are recorded, and they bound the third moment from below: E[X] E[X^3] >= E[X^2]^2, with equality where X
is 0 or one other number. So each token's X is taken for jumps of the size that gives this variance and third moment,

    c_t = V_t / H - H        log E exp(theta (X - H)) = V_t / c_t^2 (exp(theta c_t) - 1 - theta c_t)

and S counts as many standard deviations out as the square root of twice its deviance,

    z = sqrt(2 max over theta of (theta S - sum_t log E exp(theta (X - H))))

which is S / sqrt(sum V_t) where jumps are small. Below 0 the normal tail stays: it is the heavier one as far as large
surprises are the rare ones. Tokens are counted by c_t in steps of an eighth, rounded up, so that counts can be merged.

Legend: S sampled tokens, C sizes of a jump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_FIRST, _LAST = 2.0**-6, 2.0**8
"""Nats: smaller jumps count as the first, larger ones as the last."""
_MANTISSA = 20
"""Bits of a float32 below the first three of its fraction: what is left counts the eighths of each doubling."""
_UNIT = 2.0**32
_STEPS = 80
"""Of a bisection."""


def _code(jumps: NDArray[np.float32]) -> NDArray[np.int64]:
    """Steps from zero of positive numbers."""
    return (jumps.view(np.int32) >> _MANTISSA).astype(np.int64)


_OFFSET = int(_code(np.array([_FIRST], np.float32))[0])
_COUNT = int(_code(np.array([_LAST], np.float32))[0]) - _OFFSET + 1
_JUMPS_C = (np.arange(_OFFSET + 1, _OFFSET + _COUNT + 1, dtype=np.int32) << _MANTISSA).view(np.float32).astype(float)
"""The end of each step."""


@dataclass
class JumpVariance:
    """Mergeable: the variance of all tokens, by the size of their jumps."""

    units_C: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_COUNT, np.int64))

    def add(self, entropy_S: NDArray[np.float64], variance_S: NDArray[np.float64]) -> None:
        """Count tokens with V_t > 0. Where H is no entropy, jumps count as the smallest."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            jumps_S = np.where(entropy_S > 0, variance_S / entropy_S - entropy_S, 0.0)
        steps_S = _code(np.clip(jumps_S, _FIRST, _LAST).astype(np.float32)) - _OFFSET
        np.add.at(self.units_C, steps_S, np.rint(variance_S * _UNIT).astype(np.int64))

    def merge(self, other: JumpVariance) -> None:
        self.units_C += other.units_C

    def p_value(self, excess: float, variance: float) -> float:
        """Of both sides, for S and the sum of V_t > 0."""
        z = excess / math.sqrt(variance)
        if z > 0:
            z = math.sqrt(2 * max(self._deviance(excess), 0.0))
        return math.erfc(abs(z) / math.sqrt(2))

    def _deviance(self, excess: float) -> float:
        """max over theta; the slope of what is subtracted grows from 0 at least as fast as theta V."""
        there = np.flatnonzero(self.units_C)
        variance_C, jumps_C = self.units_C[there] / _UNIT, _JUMPS_C[there]
        if not len(there):
            return 0.0
        low, high = 0.0, excess / float(variance_C.sum())
        for _ in range(_STEPS):
            theta = (low + high) / 2
            with np.errstate(over="ignore"):
                slope = float(np.sum(variance_C * np.expm1(theta * jumps_C) / jumps_C))
            low, high = (theta, high) if slope < excess else (low, theta)
        with np.errstate(over="ignore"):
            logs = variance_C / jumps_C**2 * (np.expm1(low * jumps_C) - low * jumps_C)
        return float(low * excess - logs.sum())
