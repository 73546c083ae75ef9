"""The budget of the full-vocabulary log ratio: signed terms, exact per token, side by side.

    l_full(now) - b = [l_full(now) - l_K(now)]  truncation
                    + [l_K(now) - l_K(v)]       staleness
                    + [l_K(v) - b]              path, and faults

v is the version whose weights drew the token. Without its weights the last two are one term, and labelled so. Means and
mean absolute values are never shares of 100 %: terms of opposite sign cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput

WITH_VERSION = ("truncation", "staleness", "path")
WITHOUT_VERSION = ("truncation", "staleness_and_path")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term over all counted tokens; None stands for "no data"."""

    mean: float | None
    mean_abs: float | None


@dataclass
class Budget:
    """Mergeable sums of the budget's terms.

    >>> budget = Budget()
    >>> budget.add(full_now_T=[-1.3], kept_now_T=[-1.1], kept_version_T=[-1.05], behavior_T=[-1.06])
    >>> {name: round(term.mean, 2) for name, term in budget.report().items()}
    {'truncation': -0.2, 'staleness': -0.05, 'path': 0.01, 'total': -0.24}
    """

    terms: tuple[str, ...] = ()
    count: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    sums_abs: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        *,
        full_now_T: ArrayLike,
        kept_now_T: ArrayLike,
        behavior_T: ArrayLike,
        kept_version_T: ArrayLike | None = None,
    ) -> None:
        """Count tokens, each array [T] in nats; tokens where any of them is no finite number are left out.

        Errors: InvalidInput where some tokens were counted with the version's weights and others without.
        """
        full, kept, b = (np.asarray(x, np.float64) for x in (full_now_T, kept_now_T, behavior_T))
        if kept_version_T is None:
            values = dict(zip(WITHOUT_VERSION, (full - kept, kept - b), strict=True))
        else:
            version = np.asarray(kept_version_T, np.float64)
            values = dict(zip(WITH_VERSION, (full - kept, kept - version, version - b), strict=True))
        values["total"] = full - b
        finite_T = np.all([np.isfinite(v) for v in values.values()], axis=0)
        self._same(tuple(values))
        self.count += int(finite_T.sum())
        for name, value_T in values.items():
            self._count(name, value_T[finite_T])

    def _count(self, name: str, values: NDArray[np.float64]) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())
        self.sums_abs[name] = self.sums_abs.get(name, 0.0) + float(np.abs(values).sum())

    def merge(self, other: Budget) -> None:
        """Add another's sums. InvalidInput where its terms differ."""
        if not other.terms:
            return
        self._same(other.terms)
        self.count += other.count
        for name in other.terms:
            self.sums[name] = self.sums.get(name, 0.0) + other.sums[name]
            self.sums_abs[name] = self.sums_abs.get(name, 0.0) + other.sums_abs[name]

    def report(self) -> dict[str, Term]:
        """Each term and their total, by name."""
        n = self.count
        return {
            name: Term(
                mean=self.sums[name] / n if n else None,
                mean_abs=self.sums_abs[name] / n if n else None,
            )
            for name in self.terms
        }

    def _same(self, terms: tuple[str, ...]) -> None:
        if self.terms and self.terms != terms:
            raise InvalidInput(f"this budget has the terms {self.terms}; {terms} need one of their own")
        self.terms = terms
