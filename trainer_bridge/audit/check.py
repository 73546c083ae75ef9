"""What an audit is made of: checks that count batches, merge, and say what they found.

A check is a mergeable aggregate. Batches are added to it wherever they are read (a process, a Ray task); the aggregates
of all units of work are merged in the order of the units; then each is asked once for its outcome. What a check holds
does not grow with the number of tokens.

Legend: B responses, T sampled tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch

if TYPE_CHECKING:
    from typing_extensions import Self

    from keptset.trainer_bridge.audit.options import AuditOptions
    from keptset.trainer_bridge.audit.report import AuditReport


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One fault that a check saw, before the verdict weighs it against the others."""

    kind: FindingKind
    severity: Severity
    count: int
    """Places: tokens, or responses for kinds about whole responses."""
    responses: int
    """Distinct responses among them."""
    summary: str
    """What was seen, in one sentence with its numbers."""
    advice: str
    """What to do about it."""
    examples: tuple[Example, ...] = ()
    test: str | None = None
    """Name of the statistical test that it stands on; None for what is certain. It counts only if the test is
    rejected at the family level and its effect reaches the bound."""
    together: Mapping[frozenset[FindingKind], int] = field(default_factory=dict)
    """Its responses by what else is seen in each of them; empty where that is not known."""


@dataclass(frozen=True, kw_only=True)
class HypothesisTest:
    """A statistical test of the run; Holm's procedure goes over all of them."""

    name: str
    statistic: float
    p_value: float
    effect: float
    effect_name: str
    """What the effect is, such as "D" or "|mean ratio - 1|"."""
    effect_bound: float
    """Below this nothing is found, however small the p-value."""
    count: int
    """Independent tokens, or clusters, in the statistic."""


@dataclass(frozen=True, kw_only=True)
class NotTested:
    """A check that could not be made."""

    check: str
    reason: str
    """Why, and what would make it possible."""
    asked_for: bool = True
    """False where it was left out because nobody asked for it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one check has to say."""

    evidence: tuple[Evidence, ...] = ()
    tests: tuple[HypothesisTest, ...] = ()
    not_tested: tuple[NotTested, ...] = ()


class Check(ABC):
    """One idea of what can be wrong. Instances are aggregates: picklable, cheap when empty, bounded in size."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, options: AuditOptions) -> None:
        """An aggregate that has counted nothing."""

    @abstractmethod
    def add(self, batch: AuditedBatch) -> None:
        """Count a batch. Errors: none for anything a batch can hold; bad rows are left to the structural check."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Count what another aggregate of the same kind has counted, as if its batches had come after this one's."""

    def settle(self) -> None:  # noqa: B027
        """Let go of what only batches before those that were counted could change: there are none.

        Called on the sum of all units from the first on; what comes after is merged into it, not it into others.
        """

    @abstractmethod
    def outcome(self) -> Outcome:
        """What all that was counted amounts to."""

    def contribute(self, report: AuditReport) -> AuditReport:
        """The report with this check's own part filled in, by `dataclasses.replace`; as it is where there is none.

        Called in the order of the checks, after all outcomes were judged.
        """
        return report
