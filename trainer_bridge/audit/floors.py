"""Floors: how far honest ways to compute one score lie apart. They are printed, and nothing is judged by them.

path   the same weights in one pass over prompt and response, and token by token through the key-value cache
batch  the same weights and rows in another order and in passes of another size

Legend: T tokens with |K| > 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.ratio_sums import RatioSums

if TYPE_CHECKING:
    from keptset.trainer_bridge.audit.report import Floors


@dataclass
class FloorSums:
    """Mergeable sums of both differences."""

    path: RatioSums = field(default_factory=RatioSums)
    batch: RatioSums = field(default_factory=RatioSums)

    def add(self, *, path_T: NDArray[np.float64] | None, batch_T: NDArray[np.float64]) -> None:
        """Count differences [T] in nats; `path_T` is None where the scorer has no cache to go through."""
        if path_T is not None:
            self.path.add(np.abs(path_T))
        self.batch.add(np.abs(batch_T))

    def merge(self, other: FloorSums) -> None:
        self.path.merge(other.path)
        self.batch.merge(other.batch)

    def report(self) -> Floors | None:
        """Mean and 99th percentile (within 1 %) of each; None where nothing was measured."""
        from keptset.trainer_bridge.audit.report import Floors  # it holds records of checks, and those hold floors

        if not self.batch.count:
            return None
        return Floors(
            path_mean_abs=self.path.report().mean_abs_log_ratio,
            path_p99_abs=self.path.sketch.quantile(0.99),
            batch_mean_abs=self.batch.report().mean_abs_log_ratio,
            batch_p99_abs=self.batch.sketch.quantile(0.99),
            tokens=self.batch.count,
        )
