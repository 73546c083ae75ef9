"""Are sampled tokens as probable, on average, as draws from what was recorded?

    z = sum(-b - H) / sqrt(sum Var(log p))     about standard normal for an honest sampler: see `surprisal_tail`

Sees a sampler whose draws are too sharp or too flat, from columns that are always there. Cannot see what leaves the
mean of log p where it is; `draws` sees more, where whole distributions are recorded. Tokens whose b is over the kept
set count, with H and Var recorded, of sound responses. The effect is the mean of -b - H over tokens that had a choice,
in nats; below 0.005 nothing is found.
"""

from __future__ import annotations

import math

import numpy as np

from keptset.schemas.findings import FindingKind, Severity
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Evidence, HypothesisTest, NotTested, Outcome
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.surprisal_tail import JumpVariance

NAME = "surprisal"
EFFECT_BOUND = 0.005
"""Nats: as a factor on probabilities, half a percent."""
FEWEST = 100
"""Tokens with a choice; for fewer the tail is not near enough to what is known of it."""


class Surprisal(Check):
    """The surprisal test over the run."""

    name = NAME

    def __init__(self, options: AuditOptions) -> None:
        self._excess, self._variance, self._jumps = ExactSum(), ExactSum(), JumpVariance()
        self._choices = self._responses = 0
        """Tokens with Var > 0, and responses with such tokens."""

    def add(self, batch: AuditedBatch) -> None:
        recorded = batch.recorded
        known_S = recorded.surprisal_known_S
        self._excess.add(recorded.excess_S[known_S])
        variance = recorded.variance_S[known_S]
        self._variance.add(variance)
        choice = variance > 0
        self._jumps.add(recorded.entropy_S[known_S][choice], variance[choice])
        rows = recorded.tokens.row_T[known_S][choice]
        self._choices += len(rows)
        self._responses += int(np.count_nonzero(np.diff(rows, prepend=-1)))

    def merge(self, other: Surprisal) -> None:
        self._excess.merge(other._excess)
        self._variance.merge(other._variance)
        self._jumps.merge(other._jumps)
        self._choices += other._choices
        self._responses += other._responses

    def outcome(self) -> Outcome:
        if self._choices < FEWEST:
            reason = (
                f"it needs at least {FEWEST} sampled tokens with a choice whose b is over the kept set and whose H and "
                f"Var(log p) are recorded, in responses without an error that repeat no other's id or seed; there are "
                f"{self._choices}"
            )
            return Outcome(not_tested=(NotTested(check=NAME, reason=reason),))
        z = self._excess.total / math.sqrt(self._variance.total)
        mean = self._excess.total / self._choices
        test = HypothesisTest(
            name=NAME,
            statistic=z,
            p_value=self._jumps.p_value(self._excess.total, self._variance.total),
            effect=abs(mean),
            effect_name="|mean of -b - H|",
            effect_bound=EFFECT_BOUND,
            count=self._choices,
        )
        direction = "less" if mean > 0 else "more"
        evidence = Evidence(
            kind=FindingKind.SURPRISAL,
            severity=Severity.ERROR,
            count=self._choices,
            responses=self._responses,
            summary=f"sampled tokens are {direction} probable than draws from the recorded distributions: mean -b - H "
            f"is {mean:+.4f} nats over {self._choices:,} tokens (z = {z:.1f})",
            advice=ADVICE[FindingKind.SURPRISAL].act,
            test=NAME,
        )
        return Outcome(evidence=(evidence,), tests=(test,))
