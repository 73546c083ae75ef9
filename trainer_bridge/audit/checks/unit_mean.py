"""Mean ratio: for honest draws E[exp(l - b)] = 1, whatever the trainer's weights are.

Sees whatever moves that mean, at any lag. Cannot see a fault that leaves it where it is, nor tell one from another.
Counts responses without an error, one for each row seed.
"""

from __future__ import annotations

import numpy as np

from keptset.schemas.findings import FindingKind, Severity
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Evidence, NotTested, Outcome
from keptset.trainer_bridge.audit.log_ratios import log_ratios
from keptset.trainer_bridge.audit.mean_ratio import MeanRatio
from keptset.trainer_bridge.audit.options import AuditOptions


class UnitMean(Check):
    """The mean of exp(l - b), and its test."""

    name = "unit mean"

    def __init__(self, options: AuditOptions) -> None:
        self.ratios = MeanRatio()
        self.responses = 0

    def add(self, batch: AuditedBatch) -> None:
        ratios = log_ratios(batch)
        if ratios is None:
            return
        counted_T = ratios.sound_T & ~np.isnan(ratios.kept_T)
        self.ratios.add(ratios.kept_T[counted_T], batch.tokens.behavior_logprobs_T[counted_T].astype(np.float64))
        self.responses += len(np.unique(batch.tokens.row_T[counted_T]))

    def merge(self, other: UnitMean) -> None:
        self.ratios.merge(other.ratios)
        self.responses += other.responses

    def outcome(self) -> Outcome:
        obstacle = self.ratios.obstacle()
        if obstacle is not None:
            return Outcome(not_tested=(NotTested(check=self.name, reason=obstacle),))
        evidence = Evidence(
            kind=FindingKind.UNIT_MEAN,
            severity=Severity.ERROR,
            count=self.ratios.count,
            responses=self.responses,
            summary=f"the mean ratio of {self.ratios.count:,} tokens is {self.ratios.mean:.4f} +- "
            f"{self.ratios.std_error:.2g}, not 1",
            advice=ADVICE[FindingKind.UNIT_MEAN].act,
            test=self.name,
        )
        return Outcome(evidence=(evidence,), tests=(self.ratios.test(self.name),))
