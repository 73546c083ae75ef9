"""Are sampled tokens draws from the kept distributions recorded with them?

Each token's place in its distribution, in probability order, is uniform for an honest sampler; a Kolmogorov test says
whether all of them together are. Sees any sampler that prefers some part of the distribution: greedy steps, another
temperature, a filter behind the record. Cannot see what leaves all places uniform, such as a predictable generator, nor
responses whose whole distribution was not recorded. Only positions with more than one kept id say anything.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.findings import FindingKind, Severity
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Evidence, HypothesisTest, NotTested, Outcome
from keptset.trainer_bridge.audit.kolmogorov import distance, p_value
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.pit import places_of_draws
from keptset.trainer_bridge.audit.report import AuditReport, Histogram

NAME = "draws"
EFFECT_BOUND = 0.005
FEWEST = 100
BINS = 2**16
SHOWN_BINS = 64


class Draws(Check):
    """The draw test over the run."""

    name = NAME

    def __init__(self, options: AuditOptions) -> None:
        self._counts: NDArray[np.int64] | None = None
        self._responses = 0
        """With their whole distribution."""

    def add(self, batch: AuditedBatch) -> None:
        sound = batch.sound
        recorded_B = sound.column("kept_logprobs").is_valid().to_numpy(zero_copy_only=False)
        if not recorded_B.any():
            return
        self._responses += int(recorded_B.sum())
        u = places_of_draws(sound if recorded_B.all() else sound.filter(recorded_B))
        # A sum that rounds beyond 1 belongs to the last bin.
        self._count(np.bincount(np.minimum((u * BINS).astype(np.int64), BINS - 1), minlength=BINS))

    def _count(self, counts: NDArray[np.int64]) -> None:
        self._counts = counts if self._counts is None else self._counts + counts

    def merge(self, other: Draws) -> None:
        if other._counts is not None:
            self._count(other._counts)
        self._responses += other._responses

    def outcome(self) -> Outcome:
        count = 0 if self._counts is None else int(self._counts.sum())
        if self._counts is None or count < FEWEST:
            reason = (
                "it needs whole kept distributions (kept_logprobs, recorded on a share of the responses) with at least "
                f"{FEWEST} sampled tokens that had a choice, in responses without an error that repeat no other's id "
                f"or seed; there are {count}"
            )
            return Outcome(not_tested=(NotTested(check=NAME, reason=reason),))
        d = distance(self._counts)
        test = HypothesisTest(
            name=NAME,
            statistic=d,
            p_value=p_value(d, count),
            effect=d,
            effect_name="D",
            effect_bound=EFFECT_BOUND,
            count=count,
        )
        evidence = Evidence(
            kind=FindingKind.DRAWS,
            severity=Severity.ERROR,
            count=count,
            responses=self._responses,
            summary=f"places of {count:,} sampled tokens in their recorded distributions are not uniform: D = {d:.4f}",
            advice=ADVICE[FindingKind.DRAWS].act,
            test=NAME,
        )
        return Outcome(evidence=(evidence,), tests=(test,))

    def contribute(self, report: AuditReport) -> AuditReport:
        if self._counts is None:
            return report
        counts = self._counts.reshape(SHOWN_BINS, -1).sum(axis=1)
        edges = np.linspace(0, 1, SHOWN_BINS + 1)
        return replace(report, pit=Histogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist())))
