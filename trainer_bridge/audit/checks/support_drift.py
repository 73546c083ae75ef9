"""The trainer's mass on the recorded kept sets, beside the mass that was recorded.

    drift = mean(exp(l_full - l) - exp(m))        over tokens with a listed set of which both are known

Tokens drawn by the same weights and those of other versions are looked at apart. With the same weights the two are
equal up to what paths differ by; with others mass leaves the sets, or comes, and no gradient over the sets sees it.
Each is a test, z = sum / sqrt(sum of squares), and a warning where it is rejected and the mean differs by DRIFT or
more. Cannot see mass that moves within the sets.

Legend: T sampled tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Evidence, HypothesisTest, NotTested, Outcome
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.examples import FirstExamples, order_of
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.version_table import VersionTable
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION

DRIFT = 0.02
"""Of the mean kept mass."""
SHOWN = 0.1
"""Difference of a token's kept mass from which it serves as an example."""


@dataclass
class _Group:
    recorded: ExactSum = field(default_factory=ExactSum)
    moved: ExactSum = field(default_factory=ExactSum)
    squares: ExactSum = field(default_factory=ExactSum)
    responses: int = 0
    examples: FirstExamples = field(default_factory=FirstExamples)

    def add(self, mass: NDArray[np.float64], moved: NDArray[np.float64]) -> None:
        self.recorded.add(mass)
        self.moved.add(moved)
        self.squares.add(moved * moved)

    def merge(self, other: _Group) -> None:
        self.recorded.merge(other.recorded)
        self.moved.merge(other.moved)
        self.squares.merge(other.squares)
        self.responses += other.responses
        self.examples.merge(other.examples)

    def test(self, name: str) -> HypothesisTest:
        """Whether the mean difference is 0."""
        squares = self.squares.total
        z = self.moved.total / math.sqrt(squares) if squares else 0.0
        return HypothesisTest(
            name=name,
            statistic=z,
            p_value=math.erfc(abs(z) / math.sqrt(2)),
            effect=abs(self.moved.mean or 0.0),
            effect_name="|difference of the mean kept mass|",
            effect_bound=DRIFT,
            count=self.moved.count,
        )


class SupportDrift(Check):
    """Kept mass, recorded and by the trainer."""

    name = "support drift"

    def __init__(self, options: AuditOptions) -> None:
        self.same, self.others = _Group(), _Group()
        self.versions = VersionTable(_Group)

    def add(self, batch: AuditedBatch) -> None:
        scores, tokens = batch.scores, batch.tokens
        self.versions.see(tokens.policy_versions_T)
        if scores is None or scores.full_T is None:
            return
        mass_T = np.exp(tokens.log_kept_mass_T.astype(np.float64))
        moved_T = np.exp(scores.full_T - scores.kept_T) - mass_T
        known_T = np.isfinite(moved_T) & ~tokens.full_T
        rows = np.flatnonzero(batch.counted_B)
        for group, of_group_T in ((self.same, scores.same_version_T), (self.others, ~scores.same_version_T)):
            at = np.flatnonzero(known_T & of_group_T)
            group.add(mass_T[at], moved_T[at])
            group.responses += len(np.unique(tokens.row_T[at]))
            for token in at[np.abs(moved_T[at]) >= SHOWN][:3].tolist():
                rollout_id, position = tokens.locate(token)
                detail = f"kept mass {mass_T[token]:.3f} recorded, {mass_T[token] + moved_T[token]:.3f} by the trainer"
                example = Example(rollout_id=rollout_id, position=position, detail=detail)
                group.examples.add(order_of(batch, int(rows[tokens.row_T[token]]), position), example)
        mass, moved = mass_T[known_T], moved_T[known_T]
        for of_version, where in self.versions.groups(tokens.policy_versions_T[known_T]):
            of_version.add(mass[where], moved[where])

    def merge(self, other: SupportDrift) -> None:
        self.same.merge(other.same)
        self.others.merge(other.others)
        self.versions.merge(other.versions)

    def outcome(self) -> Outcome:
        if not self.same.moved.count + self.others.moved.count:
            reason = (
                "it needs a model and recorded kept mass: l over the vocabulary is not at hand, or log_kept_mass is "
                "not recorded"
            )
            return Outcome(not_tested=(NotTested(check=self.name, reason=reason),))
        first, last, most = max(self.versions.rows(), key=lambda row: abs(row[2].moved.mean or 0.0))
        named = f"of versions {first} to {last}" if first < last else f"of version {first}"
        named = "of unknown version" if first == UNKNOWN_VERSION else named
        told = f"most for tokens {named}, {_mass(most)}"
        evidence, tests = [], []
        for group, whose in self._groups():
            if not group.moved.count:
                continue
            test = group.test(f"{self.name}, {whose}")
            tests.append(test)
            evidence.append(
                Evidence(
                    kind=FindingKind.SUPPORT_DRIFT,
                    severity=Severity.WARNING,
                    count=group.moved.count,
                    responses=group.responses,
                    summary=f"the trainer's mass on the kept sets differs from the recorded one: {_mass(group)} over "
                    f"{group.moved.count:,} tokens drawn by {whose}; {told}",
                    advice=ADVICE[FindingKind.SUPPORT_DRIFT].act,
                    examples=group.examples.examples,
                    test=test.name,
                )
            )
        return Outcome(evidence=tuple(evidence), tests=tuple(tests))

    def _groups(self) -> tuple[tuple[_Group, str], ...]:
        return (self.same, "the same weights"), (self.others, "other weights")


def _mass(group: _Group) -> str:
    recorded = group.recorded.mean or 0.0
    return f"{recorded:.3f} recorded, {recorded + (group.moved.mean or 0.0):.3f} by the trainer"
