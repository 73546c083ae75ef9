"""Findings in the making: what was seen where, counted in whole and shown in part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keptset.schemas.findings import Example, Finding, FindingKind, Severity

Indices = npt.NDArray[np.integer]

STRUCTURAL = (
    FindingKind.LENGTHS,
    FindingKind.NULLS,
    FindingKind.RANGE,
    FindingKind.SORTED,
    FindingKind.EMPTY_SET,
    FindingKind.MEMBER,
    FindingKind.LOGPROB,
    FindingKind.MASS,
    FindingKind.SET_SIZE,
    FindingKind.VERSION_ORDER,
    FindingKind.PROMPT,
    FindingKind.CONFLICT,
    FindingKind.DUPLICATE,
    FindingKind.SEED_REUSED,
    FindingKind.SUPPORT_ABSENT,
    FindingKind.DISTRIBUTION,
)
"""The kinds that the recorded data alone can show; the others take a model."""
SEVERITIES = {
    FindingKind.SET_SIZE: Severity.WARNING,
    FindingKind.DUPLICATE: Severity.WARNING,
    FindingKind.SEED_REUSED: Severity.WARNING,
    FindingKind.SUPPORT_ABSENT: Severity.WARNING,
}
"""Severity of a kind where it is no error: data that can be used by whoever knows. All other kinds are errors."""

_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO)


@dataclass
class _Seen:
    count: int = 0
    rows: list[Indices] = field(default_factory=list)
    shown: list[tuple[int, int | None, str]] = field(default_factory=list)


def always(text: str) -> Callable[[int], str]:
    """The same detail for each violation."""
    return lambda i: text


class Collector:
    """Takes violations by row and position; gives findings with totals and the first few places of each kind."""

    def __init__(self, rollout_ids: pa.Array, examples: int) -> None:
        self._rollout_ids = rollout_ids
        self._examples = examples
        self._seen: dict[FindingKind, _Seen] = {}

    def add(
        self,
        kind: FindingKind,
        rows: Indices,
        positions: Indices | None,
        detail: Callable[[int], str],
    ) -> None:
        """Violations at `rows` (and token `positions`); `detail(i)` tells the numbers of the i-th of them."""
        if not len(rows):
            return
        seen = self._seen.setdefault(kind, _Seen())
        seen.count += len(rows)
        seen.rows.append(np.unique(rows))
        for i in range(min(self._examples, len(rows))):
            seen.shown.append((int(rows[i]), None if positions is None else int(positions[i]), detail(i)))
        seen.shown = sorted(seen.shown, key=lambda at: (at[0], -1 if at[1] is None else at[1]))[: self._examples]

    def findings(self) -> list[Finding]:
        """Errors first, then in the order of `FindingKind`."""
        made = [self._finding(kind, self._seen[kind]) for kind in FindingKind if kind in self._seen]
        return sorted(made, key=lambda finding: _ORDER.index(finding.severity))

    def rows(self) -> dict[FindingKind, Indices]:
        """Every row in which a kind was seen, ascending."""
        return {kind: np.unique(np.concatenate(seen.rows)) for kind, seen in self._seen.items()}

    def _finding(self, kind: FindingKind, seen: _Seen) -> Finding:
        return Finding(
            kind=kind,
            severity=SEVERITIES.get(kind, Severity.ERROR),
            count=seen.count,
            responses=len(np.unique(np.concatenate(seen.rows))),
            examples=tuple(
                Example(rollout_id=self._name(row), position=position, detail=detail)
                for row, position, detail in seen.shown
            ),
        )

    def _name(self, row: int) -> str:
        name = self._rollout_ids[row].as_py()
        return f"(row {row}, without rollout_id)" if name is None else str(name)
