"""What there is: how responses ended, and what their log-probabilities are said to be over. Shown, not judged.

Sees the share that was cut off at its length, which biases whatever rewards a whole answer. Cannot see whether the
recorded words are true; the better explanations of a model can, for b.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pyarrow.compute as pc

from keptset.schemas.columns import LogprobDomain
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, NotTested, Outcome
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.report import AuditReport


class Responses(Check):
    """Words of whole responses, counted."""

    name = "responses"

    def __init__(self, options: AuditOptions) -> None:
        self._finish: Counter[str] = Counter()
        self._domains: Counter[str] = Counter()

    def add(self, batch: AuditedBatch) -> None:
        for counter, name in ((self._finish, "finish_reason"), (self._domains, "logprob_domain")):
            for entry in pc.value_counts(batch.batch.column(name)).to_pylist():
                counter["null" if entry["values"] is None else entry["values"]] += entry["counts"]

    def merge(self, other: Responses) -> None:
        self._finish.update(other._finish)
        self._domains.update(other._domains)

    def outcome(self) -> Outcome:
        others = {word: n for word, n in sorted(self._domains.items()) if word != LogprobDomain.KEPT.value}
        if not others:
            return Outcome()
        told = ", ".join(f"`{word}` in {count:,} responses" for word, count in others.items())
        reason = (
            f"b is over {told} of {sum(self._domains.values()):,}: no ratio over a kept set can be formed of it; have "
            "the engine return log-probabilities after filtering"
        )
        return Outcome(not_tested=(NotTested(check="b over the kept set", reason=reason),))

    def contribute(self, report: AuditReport) -> AuditReport:
        return replace(report, finish_reasons=_sorted(self._finish), logprob_domains=_sorted(self._domains))


def _sorted(counter: Counter[str]) -> dict[str, int]:
    """Most frequent first."""
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0])))
