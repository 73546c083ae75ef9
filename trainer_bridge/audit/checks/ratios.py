"""Ratios exp(l - b): the demo's table by setting, the drift by version, histograms, the heat map, the floors.

Nothing is judged here. What could not be scored is told, with its reasons.

Legend: T sampled tokens of the counted rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.columns import LogprobDomain
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, NotTested, Outcome
from keptset.trainer_bridge.audit.checks.settings_table import MAX_SETTINGS, OTHERS
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.floors import FloorSums
from keptset.trainer_bridge.audit.log_ratios import LogRatios, log_ratios
from keptset.trainer_bridge.audit.mean_ratio import LARGEST
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.refusals import add_reasons
from keptset.trainer_bridge.audit.report import AuditReport, HeatMap, Histogram, RatioRow, SettingRow, VersionRow
from keptset.trainer_bridge.audit.settings import setting_names
from keptset.trainer_bridge.audit.version_table import VersionTable
from keptset.trainer_bridge.ratio_sums import RatioSums
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION

LOG_RATIO_EDGES = tuple((2 * k + 1) / 100 for k in range(-81, 41))
"""Of the histograms, in nats: a ratio of 1 falls in the middle of a bin, which rounding does not split over two."""
POSITION_EDGES = (0, *(2**n for n in range(18)))
ABS_EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 1e3)


@dataclass
class _Way:
    """Ratios under one way of scoring."""

    every: RatioSums = field(default_factory=RatioSums)
    choice: ExactSum = field(default_factory=ExactSum)
    """|d| over |K| > 1."""
    largest: float = 0.0

    def add(self, d: NDArray[np.float64], choice: NDArray[np.bool_]) -> None:
        known = ~np.isnan(d)
        self.every.add(d[known])
        of_choice = np.abs(d[known & choice])
        self.choice.add(of_choice)
        self.largest = max(self.largest, float(of_choice.max(initial=0.0)))

    def merge(self, other: _Way) -> None:
        self.every.merge(other.every)
        self.choice.merge(other.choice)
        self.largest = max(self.largest, other.largest)

    def row(self) -> RatioRow | None:
        """None where nothing was scored."""
        if not self.every.count:
            return None
        report = self.every.report()
        return RatioRow(
            mean=report.mean_ratio,
            std_error=report.mean_ratio_se,
            median=report.median_ratio,
            share_outside=report.share_outside,
            mean_abs_log=self.choice.mean,
            max_abs_log=self.largest if self.choice.count else None,
        )


@dataclass
class _Setting:
    kept: _Way = field(default_factory=_Way)
    full: _Way = field(default_factory=_Way)

    def merge(self, other: _Setting) -> None:
        self.kept.merge(other.kept)
        self.full.merge(other.full)


@dataclass
class _Version:
    d: ExactSum = field(default_factory=ExactSum)
    abs_d: ExactSum = field(default_factory=ExactSum)
    e: ExactSum = field(default_factory=ExactSum)
    """Ratio - 1."""
    e2: ExactSum = field(default_factory=ExactSum)

    def merge(self, other: _Version) -> None:
        self.d.merge(other.d)
        self.abs_d.merge(other.abs_d)
        self.e.merge(other.e)
        self.e2.merge(other.e2)


class Ratios(Check):
    """Tables of the ratios."""

    name = "scores"

    def __init__(self, options: AuditOptions) -> None:
        self._settings: dict[str, _Setting] = {}
        self._versions = VersionTable(_Version)
        self._kept = np.zeros(len(LOG_RATIO_EDGES) - 1, np.int64)
        self._full = np.zeros(len(LOG_RATIO_EDGES) - 1, np.int64)
        self._heat = np.zeros((len(ABS_EDGES) - 1, len(POSITION_EDGES) - 1), np.int64)
        self._floors = FloorSums()
        self._refused: dict[str, int] = {}
        self._foreign: dict[str, int] = {}
        self._responses = 0

    def add(self, batch: AuditedBatch) -> None:
        self._versions.see(batch.tokens.policy_versions_T)
        ratios, scores = log_ratios(batch), batch.scores
        if ratios is None or scores is None:
            return
        self._responses += len(batch.counted)
        add_reasons(self._refused, scores.refused)
        domains = [domain for domain in batch.tokens.logprob_domain_B if domain != LogprobDomain.KEPT.value]
        add_reasons(self._foreign, {domain: domains.count(domain) for domain in set(domains)})
        if scores.floors is not None:
            self._floors.merge(scores.floors)
        self._add_settings(batch, ratios)
        self._add_versions(batch, ratios)
        self._kept += _histogram(ratios.kept_T)
        self._full += _histogram(ratios.full_T)
        known = ~np.isnan(ratios.kept_T)
        size = np.clip(np.abs(ratios.kept_T[known]), ABS_EDGES[0], np.nextafter(ABS_EDGES[-1], 0))
        position = np.minimum(batch.tokens.position_T[known], POSITION_EDGES[-1] - 1)
        row = np.searchsorted(ABS_EDGES, size, side="right") - 1
        column = np.searchsorted(POSITION_EDGES, position, side="right") - 1
        np.add.at(self._heat, (row, column), 1)

    def _add_settings(self, batch: AuditedBatch, ratios: LogRatios) -> None:
        names = setting_names(batch.counted)
        distinct = list(dict.fromkeys(names))
        code_T = np.array([distinct.index(name) for name in names], np.int64)[batch.tokens.row_T]
        for code, name in enumerate(distinct):
            here_T = code_T == code
            setting = self._of(name)
            setting.kept.add(ratios.kept_T[here_T], ratios.choice_T[here_T])
            setting.full.add(ratios.full_T[here_T], ratios.choice_T[here_T])

    def _of(self, name: str) -> _Setting:
        if name not in self._settings and len(self._settings) >= MAX_SETTINGS:
            name = OTHERS
        return self._settings.setdefault(name, _Setting())

    def _add_versions(self, batch: AuditedBatch, ratios: LogRatios) -> None:
        known = np.flatnonzero(~np.isnan(ratios.kept_T))
        d_T = ratios.kept_T[known]
        for row, where in self._versions.groups(batch.tokens.policy_versions_T[known]):
            d = d_T[where]
            row.d.add(d)
            row.abs_d.add(np.abs(d))
            e = np.expm1(np.minimum(d, LARGEST))
            row.e.add(e)
            row.e2.add(e * e)

    def merge(self, other: Ratios) -> None:
        for name, theirs in other._settings.items():
            self._of(name).merge(theirs)
        self._versions.merge(other._versions)
        self._kept += other._kept
        self._full += other._full
        self._heat += other._heat
        self._floors.merge(other._floors)
        add_reasons(self._refused, other._refused)
        add_reasons(self._foreign, other._foreign)
        self._responses += other._responses

    @property
    def scored_nothing(self) -> bool:
        """Whether not one response could be scored, where there are any."""
        return bool(self._responses) and sum(self._refused.values()) >= self._responses

    def outcome(self) -> Outcome:
        told = []
        if self._refused:
            reasons = "; ".join(f"{reason} ({number:,})" for reason, number in sorted(self._refused.items()))
            number = sum(self._refused.values())
            told.append(f"{number:,} of {self._responses:,} responses could not be scored: {reasons}")
        if self._foreign:
            number = sum(self._foreign.values())
            domains = ", ".join(f"{domain} ({count:,})" for domain, count in sorted(self._foreign.items()))
            told.append(
                f"{number:,} of {self._responses:,} responses have no ratio: their b is not over the kept set, "
                f"but of domain {domains}; have the engine return it after filtering"
            )
        return Outcome(not_tested=tuple(NotTested(check=self.name, reason=reason) for reason in told))

    def contribute(self, report: AuditReport) -> AuditReport:
        return replace(
            report,
            settings=tuple(self._with_ratios(row) for row in report.settings),
            versions=tuple(self._with_drift(row) for row in report.versions),
            kept_log_ratios=_told(self._kept),
            full_log_ratios=_told(self._full),
            positions=HeatMap(
                position_edges=POSITION_EDGES,
                abs_log_ratio_edges=ABS_EDGES,
                counts=tuple(tuple(row) for row in self._heat.tolist()),
            )
            if self._heat.any()
            else None,
            floors=self._floors.report(),
        )

    def _with_ratios(self, row: SettingRow) -> SettingRow:
        setting = self._settings.get(row.name)
        if setting is None:
            return row
        return replace(row, kept_ratio=setting.kept.row(), full_ratio=setting.full.row())

    def _with_drift(self, row: VersionRow) -> VersionRow:
        drift = self._versions.get(UNKNOWN_VERSION if row.version is None else row.version)
        if drift is None or not drift.d.count:
            return row
        return replace(
            row,
            mean_log_ratio=drift.d.mean,
            mean_abs_log_ratio=drift.abs_d.mean,
            mean_ratio=1 + drift.e.total / drift.e.count,
            ratio_std_error=math.sqrt(drift.e2.total) / drift.e.count,
        )


def _histogram(d_T: NDArray[np.float64]) -> NDArray[np.int64]:
    known = d_T[~np.isnan(d_T)]
    inside = np.clip(known, LOG_RATIO_EDGES[0], LOG_RATIO_EDGES[-1])
    return np.histogram(inside, bins=np.asarray(LOG_RATIO_EDGES))[0].astype(np.int64)


def _told(counts: NDArray[np.int64]) -> Histogram | None:
    return Histogram(edges=LOG_RATIO_EDGES, counts=tuple(counts.tolist())) if counts.any() else None
