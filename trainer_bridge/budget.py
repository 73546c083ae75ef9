"""The budget of the full-vocabulary log ratio: signed terms, exact per token, side by side.

    l_full(now) - b = [l_full(now) - l_K(now)]  truncation
                    + [l_K(now) - l_K(v)]       staleness
                    + [l_K(v) - b]              path, and faults

v is the version whose weights drew the token. Without its weights the last two are one term, and labelled so. Means and
mean absolute values are never shares of 100 %: terms of opposite sign cancel.

The value over the whole vocabulary costs more than the one over the kept set, so it may be measured on some tokens
only: NaN there alone is "not measured" and is counted so. Any other value that is no finite number is a violation.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge.violations import (
    NON_FINITE,
    NUM_EXAMPLES,
    Locate,
    OnViolation,
    Violations,
    check_policy,
    locate_by_index,
    raise_violation,
)

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
    """Tokens in the sums."""
    not_measured: int = 0
    """Tokens without a value over the whole vocabulary, and otherwise sound."""
    excluded: dict[str, int] = field(default_factory=dict)
    """Tokens left out as violations, by kind."""
    sums: dict[str, float] = field(default_factory=dict)
    sums_abs: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        *,
        full_now_T: ArrayLike,
        kept_now_T: ArrayLike,
        behavior_T: ArrayLike,
        kept_version_T: ArrayLike | None = None,
        on_violation: OnViolation = "raise",
        locate: Locate = locate_by_index,
    ) -> None:
        """Count tokens, each array [T] in nats. `full_now_T` is NaN where it was not measured.

        Any other value that is no finite number raises, or its token is left out and counted in `excluded`. `locate`
        names a token in messages. Where this raises nothing was counted.

        Errors: ViolationError for values that are no finite numbers; InvalidInput where some tokens were counted with
        the version's weights and others without, or for an unknown policy.
        """
        check_policy(on_violation)
        full, kept, b = (np.asarray(x, np.float64) for x in (full_now_T, kept_now_T, behavior_T))
        given = {"full_now": full, "kept_now": kept, "behavior": b}
        with np.errstate(invalid="ignore"):  # inf - inf: found below, like every other one
            if kept_version_T is None:
                values = dict(zip(WITHOUT_VERSION, (full - kept, kept - b), strict=True))
            else:
                given["kept_version"] = version = np.asarray(kept_version_T, np.float64)
                values = dict(zip(WITH_VERSION, (full - kept, kept - version, version - b), strict=True))
            values["total"] = full - b
        measured_elsewhere_T = np.all([np.isfinite(v) for name, v in given.items() if name != "full_now"], axis=0)
        not_measured_T = np.isnan(full) & measured_elsewhere_T
        finite_T = np.all([np.isfinite(v) for v in values.values()], axis=0)
        bad_T = ~finite_T & ~not_measured_T
        if on_violation == "raise":
            _raise_non_finite(bad_T, given, locate)
        self._same(tuple(values))
        self.count += int(finite_T.sum())
        self.not_measured += int(not_measured_T.sum())
        self._exclude(Violations.none(len(bad_T)).mark(bad_T, NON_FINITE).counts())
        for name, value_T in values.items():
            self._count(name, value_T[finite_T])

    def _exclude(self, counts: dict[str, int]) -> None:
        for kind, number in counts.items():
            self.excluded[kind] = self.excluded.get(kind, 0) + number

    def _count(self, name: str, values: NDArray[np.float64]) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())
        self.sums_abs[name] = self.sums_abs.get(name, 0.0) + float(np.abs(values).sum())

    def merge(self, other: Budget) -> None:
        """Add another's sums. InvalidInput where its terms differ."""
        if not other.terms:
            return
        self._same(other.terms)
        self.count += other.count
        self.not_measured += other.not_measured
        self._exclude(other.excluded)
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


def _raise_non_finite(bad_T: NDArray[np.bool_], given: dict[str, NDArray[np.float64]], locate: Locate) -> None:
    """ViolationError for the marked tokens; of kind `logprob`, with a finding, where what was recorded is at fault."""

    def shown(token: int) -> str:
        return ", ".join(f"{name} {value_T[token]}" for name, value_T in given.items())

    recorded_T = bad_T & ~np.isfinite(given["behavior"])
    raise_violation(FindingKind.LOGPROB, recorded_T, shown, locate, "a term of the budget is no finite number")
    bad = np.flatnonzero(bad_T)
    if len(bad):
        places = "; ".join(f"{locate(t)[0]} token {locate(t)[1]}: {shown(t)}" for t in bad[:NUM_EXAMPLES].tolist())
        raise ViolationError(
            f"a term of the budget is no finite number for {len(bad)} tokens ({places}): score them again, or count "
            "them as excluded with on_violation='exclude'; only full_now may be NaN, where it was not measured"
        )
