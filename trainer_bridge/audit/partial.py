"""What is known after some units of work; two of them add up to what one would know after both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from keptset.schemas.columns import Identity
from keptset.schemas.findings import Example
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check
from keptset.trainer_bridge.audit.checks import start_checks
from keptset.trainer_bridge.audit.options import AuditOptions

MAX_IDENTITIES = 100
"""Told apart in a report; more are passed over."""


@dataclass(kw_only=True)
class Partial:
    """The mergeable aggregate of an audit. Picklable; its size does not grow with the number of tokens."""

    checks: list[Check]
    responses: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    kept_ids: int = 0
    identities: dict[Identity, None] = field(default_factory=dict)
    """In the order in which they occurred."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Files that could not be read to their end -> why."""

    @classmethod
    def start(cls, options: AuditOptions) -> Partial:
        """Nothing is known yet."""
        return cls(checks=start_checks(options))

    def add(self, batch: AuditedBatch) -> None:
        """Count a batch."""
        self.responses += len(batch.batch)
        self.tokens += batch.batch.num_tokens
        self.sampled_tokens += int(batch.batch.sampled.values.sum())
        self.kept_ids += batch.batch.num_kept_ids
        self._identify(batch.batch.identity)
        for check in self.checks:
            check.add(batch)

    def _identify(self, identity: Identity) -> None:
        if len(self.identities) < MAX_IDENTITIES:
            self.identities.setdefault(identity)

    def merge(self, other: Partial) -> None:
        """Count what another has counted, as if its batches had come after this one's."""
        self.responses += other.responses
        self.tokens += other.tokens
        self.sampled_tokens += other.sampled_tokens
        self.kept_ids += other.kept_ids
        for identity in other.identities:
            self._identify(identity)
        for name, reason in other.damaged.items():
            self.damaged.setdefault(name, reason)
        for ours, theirs in zip(self.checks, other.checks, strict=True):
            ours.merge(theirs)

    def settle(self) -> None:
        """Nothing comes before what was counted."""
        for check in self.checks:
            check.settle()

    def damaged_files(self) -> Iterator[Example]:
        for name, reason in self.damaged.items():
            yield Example(rollout_id=name, position=None, detail=reason)
