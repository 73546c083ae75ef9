"""What validation says of each batch, added up; and which kinds stand together in one response.

Sees every structural kind but what is repeated across files. Cannot see a value that is wrong and plausible.

Legend: B responses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from keptset.schemas.findings import FindingKind, Severity
from keptset.schemas.validation import SEVERITIES
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Evidence, Outcome
from keptset.trainer_bridge.audit.examples import FirstExamples
from keptset.trainer_bridge.audit.options import AuditOptions

_KINDS = tuple(FindingKind)


@dataclass
class _Seen:
    count: int = 0
    responses: int = 0
    examples: FirstExamples = field(default_factory=FirstExamples)


class Structure(Check):
    """Findings of validation."""

    name = "structure"

    def __init__(self, options: AuditOptions) -> None:
        self._seen: dict[FindingKind, _Seen] = {}
        self._together: Counter[int] = Counter()
        """Responses by their kinds, as bits in the order of `FindingKind`."""

    def add(self, batch: AuditedBatch) -> None:
        codes_B = np.zeros(len(batch.batch), np.int64)
        for finding in batch.structure:
            rows = batch.rows_by_kind[finding.kind]
            codes_B[rows] |= 1 << _KINDS.index(finding.kind)
            seen = self._seen.setdefault(finding.kind, _Seen())
            seen.count += finding.count
            seen.responses += finding.responses
            for number, example in enumerate(finding.examples):
                # Examples are in order, and their rows are not told: what comes first in the unit comes first here.
                seen.examples.add((batch.unit, batch.first_row, number), example)
        if batch.structure:
            codes, counts = np.unique(codes_B[codes_B > 0], return_counts=True)
            self._together.update(dict(zip(codes.tolist(), counts.tolist(), strict=True)))

    def merge(self, other: Structure) -> None:
        for kind, theirs in other._seen.items():
            ours = self._seen.setdefault(kind, _Seen())
            ours.count += theirs.count
            ours.responses += theirs.responses
            ours.examples.merge(theirs.examples)
        self._together.update(other._together)

    def outcome(self) -> Outcome:
        return Outcome(evidence=tuple(self._evidence(kind) for kind in _KINDS if kind in self._seen))

    def _evidence(self, kind: FindingKind) -> Evidence:
        seen = self._seen[kind]
        bit = 1 << _KINDS.index(kind)
        together: Counter[frozenset[FindingKind]] = Counter()
        for code, count in self._together.items():
            if code & bit:
                others = frozenset(k for n, k in enumerate(_KINDS) if code >> n & 1 and k is not kind)
                together[others] += count
        return Evidence(
            kind=kind,
            severity=SEVERITIES.get(kind, Severity.ERROR),
            count=seen.count,
            responses=seen.responses,
            summary=f"{seen.count:,} places in {seen.responses:,} responses: {kind.meaning}",
            advice=ADVICE[kind].act,
            examples=seen.examples.examples,
            together=dict(together),
        )
