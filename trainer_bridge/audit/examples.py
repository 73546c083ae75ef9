"""The first few places of something, in the order of reading, whatever is merged with what."""

from __future__ import annotations

from dataclasses import dataclass, field

from keptset.schemas.findings import Example
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch

NUM_EXAMPLES = 3
Order = tuple[int, int, int]
"""Unit, row in it, position (-1 for the whole response)."""


def order_of(batch: AuditedBatch, row: int, position: int | None) -> Order:
    """Where a place of a batch stands in the order of reading."""
    return batch.unit, batch.first_row + row, -1 if position is None else position


@dataclass
class FirstExamples:
    """At most NUM_EXAMPLES, the first that were seen."""

    places: list[tuple[Order, Example]] = field(default_factory=list)

    def add(self, order: Order, example: Example) -> None:
        self.places.append((order, example))
        if len(self.places) > NUM_EXAMPLES:
            self._cut()

    def merge(self, other: FirstExamples) -> None:
        self.places += other.places
        self._cut()

    def _cut(self) -> None:
        self.places = sorted(self.places, key=lambda place: place[0])[:NUM_EXAMPLES]

    @property
    def examples(self) -> tuple[Example, ...]:
        return tuple(example for _, example in sorted(self.places, key=lambda place: place[0]))
