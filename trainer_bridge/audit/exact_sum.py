"""Sums that do not depend on the order in which they are added up, so neither on files, batches nor processes.

Each number is rounded to a multiple of 2^-32, and integers are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
_BITS = 32
_LARGEST = 2.0**10
_BLOCK = 2**20
"""So many numbers below _LARGEST cannot overflow 63 bits."""


def _units(values: Floats) -> int:
    """Sum of finite numbers in units of 2^-32."""
    exact: NDArray[np.float64] = np.asarray(values, np.float64)
    large = np.abs(exact) >= _LARGEST
    if large.any():  # as Python's integers, which do not overflow
        return sum(int(value * 2**_BITS) for value in exact[large].tolist()) + _units(exact[~large])
    total = 0
    for begin in range(0, len(exact), _BLOCK):
        total += int(np.rint(exact[begin : begin + _BLOCK] * 2.0**_BITS).astype(np.int64).sum())
    return total


@dataclass
class ExactSum:
    """Count and sum of finite numbers.

    >>> one, two = ExactSum(), ExactSum()
    >>> one.add(np.array([0.1, 0.2]))
    >>> two.add(np.array([0.2])); two.add(np.array([0.1]))
    >>> one == two, round(one.total, 9)
    (True, 0.3)
    """

    count: int = 0
    units: int = 0

    def add(self, values: Floats) -> None:
        """Count finite numbers."""
        self.count += len(values)
        self.units += _units(values)

    def add_known(self, values: Floats) -> None:
        """Count the finite ones among these numbers."""
        finite = np.isfinite(values)
        self.add(values if finite.all() else values[finite])

    def merge(self, other: ExactSum) -> None:
        self.count += other.count
        self.units += other.units

    @property
    def total(self) -> float:
        return float(self.units / 2**_BITS)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None
