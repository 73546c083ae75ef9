"""The responses most worth a look: where they lie, and why. Informational; nothing is found because of them.

With scores those with the largest mean |log ratio| over |K| > 1, without those whose surprisal is the least likely.

Legend: C counted responses, T their sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Outcome
from keptset.trainer_bridge.audit.log_ratios import log_ratios
from keptset.trainer_bridge.audit.options import AuditOptions

NUM_WORST = 5
FEWEST = 8
"""Tokens with a choice, for a response to be compared with others."""


@dataclass(frozen=True, kw_only=True)
class WorstPlace:
    """Where a response lies."""

    unit: int
    row: int
    """In the unit."""
    value: float
    """By which they are compared; the largest is the worst."""
    reason: str


class Worst(Check):
    """The worst few responses."""

    name = "worst"

    def __init__(self, options: AuditOptions) -> None:
        self.places: list[WorstPlace] = []

    def add(self, batch: AuditedBatch) -> None:
        if batch.scores is not None:
            tokens = batch.tokens
            ratios = log_ratios(batch)
            assert ratios is not None, "there are scores"
            d_T = np.abs(ratios.kept_T)
            means = _means(d_T, tokens.row_T, np.isfinite(d_T) & (tokens.kept_sizes_T != 1), len(batch.counted))
            self._take(batch, batch.counted_B, means, "mean |log ratio| {:.3g}, the largest")
            return
        recorded, tokens = batch.recorded, batch.sound_tokens
        known = recorded.surprisal_known_S & (recorded.variance_S > 0)
        row = tokens.row_T[known]
        begins = np.flatnonzero(np.diff(row, prepend=-1))
        if not len(begins):
            return
        enough = np.diff(begins, append=len(row)) >= FEWEST
        excess = np.add.reduceat(recorded.excess_S[known], begins)[enough]
        variance = np.add.reduceat(recorded.variance_S[known], begins)[enough]
        z = np.full(len(batch.sound), np.nan)
        z[row[begins[enough]]] = np.abs(excess) / np.sqrt(variance)
        self._take(batch, batch.counted_B & batch.sound_B, z, "surprisal {:.1f} standard deviations from its mean")

    def _take(self, batch: AuditedBatch, rows_B: NDArray[np.bool_], values_C: NDArray[np.float64], why: str) -> None:
        known = np.flatnonzero(np.isfinite(values_C))
        for index in known[np.argsort(-values_C[known], kind="stable")][:NUM_WORST].tolist():
            row = batch.first_row + int(np.flatnonzero(rows_B)[index])
            value = float(values_C[index])
            self.places.append(WorstPlace(unit=batch.unit, row=row, value=value, reason=why.format(value)))
        self._cut()

    def merge(self, other: Worst) -> None:
        self.places += other.places
        self._cut()

    def _cut(self) -> None:
        self.places = sorted(self.places, key=lambda place: (-place.value, place.unit, place.row))[:NUM_WORST]

    def outcome(self) -> Outcome:
        return Outcome()


def _means(
    values_T: NDArray[np.float64], row_T: NDArray[np.int64], known_T: NDArray[np.bool_], count: int
) -> NDArray[np.float64]:
    sums = np.bincount(row_T[known_T], values_T[known_T], minlength=count)
    counts = np.bincount(row_T[known_T], minlength=count)
    means: NDArray[np.float64] = np.where(counts >= FEWEST, sums / np.maximum(counts, 1), np.nan)
    return means
