"""Are sampled tokens draws from their kept distributions?

Each token's place in its distribution, in probability order, is uniform for an honest sampler; a Kolmogorov test says
whether all of them together are. The distribution is the recorded one, else the model's over the recorded set, in
responses whose b agrees with the model. Sees any sampler that prefers some part of the distribution: greedy steps,
another temperature, a filter behind the record. Cannot see what leaves all places uniform, such as a predictable
generator, nor responses of which neither distribution is known. Only positions with more than one kept id say anything.
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
        """With places."""

    def add(self, batch: AuditedBatch) -> None:
        sound = batch.sound
        recorded_B = sound.column("kept_logprobs").is_valid().to_numpy(zero_copy_only=False)
        if recorded_B.any():
            self._add(places_of_draws(sound if recorded_B.all() else sound.filter(recorded_B)), int(recorded_B.sum()))
        if batch.scores is not None and batch.scores.places_T is not None and not recorded_B.all():
            counts_C = batch.sound_B[batch.counted_B]
            counts_C[counts_C] = ~recorded_B
            row_T = batch.tokens.row_T
            known_T = counts_C[row_T] & ~np.isnan(batch.scores.places_T)
            self._add(batch.scores.places_T[known_T], len(np.unique(row_T[known_T])))

    def _add(self, u: NDArray[np.float64], responses: int) -> None:
        self._responses += responses
        if len(u):  # a sum that rounds beyond 1 belongs to the last bin
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
                f"it needs {FEWEST} sampled tokens or more whose whole kept distribution is known, from kept_logprobs "
                f"recorded on a share of the responses or from a model that agrees with b; there are {count} (sets of "
                "one, responses with errors, and repeats of an id or a seed do not count)"
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
            summary=f"places of {count:,} sampled tokens in their kept distributions are not uniform: D = {d:.4f}",
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
