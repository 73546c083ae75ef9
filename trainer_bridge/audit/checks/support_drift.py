"""The trainer's mass on the recorded kept sets, beside the mass that was recorded.

    drift = mean(exp(l_full - l) - exp(m))        over tokens with a listed set of which both are known

Tokens drawn by the same weights and those of other versions are looked at apart. With the same weights the two are
equal up to what paths differ by; with others mass leaves the sets, or comes, and no gradient over the sets sees it. A
warning is given where the mean differs by DRIFT or more, and by so many standard errors that it is no accident. Cannot
see mass that moves within the sets.

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
from keptset.trainer_bridge.audit.check import Check, Evidence, NotTested, Outcome
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.examples import FirstExamples, order_of
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION

DRIFT = 0.02
"""Of the mean kept mass."""
STANDARD_ERRORS = 6.0
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

    @property
    def drifts(self) -> bool:
        mean = self.moved.mean
        if mean is None:
            return False
        return abs(mean) >= DRIFT and abs(self.moved.total) >= STANDARD_ERRORS * math.sqrt(self.squares.total)


class SupportDrift(Check):
    """Kept mass, recorded and by the trainer."""

    name = "support drift"

    def __init__(self, options: AuditOptions) -> None:
        self.same, self.others = _Group(), _Group()
        self.versions: dict[int, _Group] = {}

    def add(self, batch: AuditedBatch) -> None:
        scores, tokens = batch.scores, batch.tokens
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
        for version in np.unique(tokens.policy_versions_T[known_T]).tolist():
            at = np.flatnonzero(known_T & (tokens.policy_versions_T == version))
            self.versions.setdefault(version, _Group()).add(mass_T[at], moved_T[at])

    def merge(self, other: SupportDrift) -> None:
        self.same.merge(other.same)
        self.others.merge(other.others)
        for version, group in other.versions.items():
            self.versions.setdefault(version, _Group()).merge(group)

    def outcome(self) -> Outcome:
        if not self.same.moved.count + self.others.moved.count:
            reason = (
                "it needs a model and recorded kept mass: l over the vocabulary is not at hand, or log_kept_mass is "
                "not recorded"
            )
            return Outcome(not_tested=(NotTested(check=self.name, reason=reason),))
        drifting = [(group, whose) for group, whose in self._groups() if group.drifts]
        if not drifting:
            return Outcome()
        most = max(self.versions, key=lambda version: abs(self.versions[version].moved.mean or 0.0))
        worst = self.versions[most]
        name = "of unknown version" if most == UNKNOWN_VERSION else f"of version {most}"
        told = "; ".join(
            f"{_mass(group)} over {group.moved.count:,} tokens drawn by {whose}" for group, whose in drifting
        )
        examples = FirstExamples()
        for group, _ in drifting:
            examples.merge(group.examples)
        return Outcome(
            evidence=(
                Evidence(
                    kind=FindingKind.SUPPORT_DRIFT,
                    severity=Severity.WARNING,
                    count=sum(group.moved.count for group, _ in drifting),
                    responses=sum(group.responses for group, _ in drifting),
                    summary=f"the trainer's mass on the kept sets differs from the recorded one: {told}; most for "
                    f"tokens {name}, {_mass(worst)}",
                    advice=ADVICE[FindingKind.SUPPORT_DRIFT].act,
                    examples=examples.examples,
                ),
            )
        )

    def _groups(self) -> tuple[tuple[_Group, str], ...]:
        return (self.same, "the same weights"), (self.others, "other weights")


def _mass(group: _Group) -> str:
    recorded = group.recorded.mean or 0.0
    return f"{recorded:.3f} recorded, {recorded + (group.moved.mean or 0.0):.3f} by the trainer"
