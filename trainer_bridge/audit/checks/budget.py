"""The signed budget of the full-vocabulary log ratio: truncation, staleness, path. Shown, not judged.

Three terms where the weights that drew them are known for all tokens, and two where they are not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Outcome
from keptset.trainer_bridge.audit.log_ratios import log_ratios
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.report import AuditReport
from keptset.trainer_bridge.budget import Budget


class BudgetTable(Check):
    """Sums of the terms."""

    name = "budget"

    def __init__(self, options: AuditOptions) -> None:
        self.three, self.two = Budget(), Budget()
        self.told = True

    def add(self, batch: AuditedBatch) -> None:
        ratios, scores = log_ratios(batch), batch.scores
        if ratios is None or scores is None or scores.full_T is None:
            return
        counted = np.flatnonzero(~np.isnan(ratios.full_T) & ~np.isnan(ratios.kept_T))
        b_T = batch.tokens.behavior_logprobs_T.astype(np.float64)
        self.two.add(full_now_T=scores.full_T[counted], kept_now_T=scores.kept_T[counted], behavior_T=b_T[counted])
        self.told &= scores.versions_told
        if scores.expected_T is not None:
            known = counted[np.isfinite(scores.expected_T[counted])]
            self.three.add(
                full_now_T=scores.full_T[known],
                kept_now_T=scores.kept_T[known],
                kept_version_T=scores.expected_T[known],
                behavior_T=b_T[known],
            )

    def merge(self, other: BudgetTable) -> None:
        self.two.merge(other.two)
        self.three.merge(other.three)
        self.told &= other.told

    def outcome(self) -> Outcome:
        return Outcome()

    def contribute(self, report: AuditReport) -> AuditReport:
        if not self.two.count:
            return report
        all_known = self.three.count == self.two.count and (self.told or len(report.versions) == 1)
        return replace(report, budget=(self.three if all_known else self.two).report())
