"""An audit as one HTML file that needs nothing else: no script, no font, no address, light and dark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import keptset
from keptset.schemas.findings import Severity
from keptset.scripts import audit_charts, number_text
from keptset.scripts.audit_ratios import scored
from keptset.scripts.audit_tokens import LOG_RATIO_STEPS, SURPRISE_STEPS, response_view
from keptset.scripts.audit_words import (
    DAMAGE_ADVICE,
    TERMS,
    beyond_heading,
    by_reason,
    counted,
    damage_told,
    extent,
    given,
    group_sizes,
    of_severity,
    outcome,
    p_value,
    plural,
    small_number,
    version_name,
    versions_together,
    visible,
    what_was_read,
)
from keptset.scripts.html_page import page_environment, write_page
from keptset.scripts.ratio_table import OUTSIDE
from keptset.trainer_bridge.audit.report import AuditReport


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """Trusted markup: made here, its texts escaped. None where there is nothing to draw."""

    kept_ratios: str | None
    full_ratios: str | None
    kept_sizes: str | None
    pit: str | None
    budget: str | None
    heat_map: str | None
    drift: tuple[str, ...]


def render_audit(report: AuditReport) -> str:
    """The page as text. Every value is escaped. Errors: MissingDependency without Jinja."""
    environment = page_environment()
    environment.filters.update(
        extent=extent,
        beyond_heading=beyond_heading,
        given=given,
        number=_number,
        p_value=lambda value: number_text.typeset(p_value(value)),
        outcome=outcome,
        visible=visible,
        counted=counted,
        plural=plural,
    )
    return environment.get_template("audit.html.j2").render(
        report=report,
        read=what_was_read(report.totals),
        figures=_figures(report),
        not_tested=by_reason([entry for entry in report.not_tested if entry.asked_for]),
        not_asked_for=by_reason([entry for entry in report.not_tested if not entry.asked_for]),
        damaged=[damage_told(file) for file in report.totals.damaged_files],
        damage_advice=DAMAGE_ADVICE,
        severities=[(severity.value, of_severity(report.findings, severity)) for severity in reversed(Severity)],
        scored=scored(report.settings),
        terms=TERMS,
        versions=report.versions,
        version_name=version_name,
        together=versions_together(report.versions),
        groups=group_sizes(report.group_sizes),
        worst=[response_view(response) for response in report.worst],
        steps=[small_number(step) for step in LOG_RATIO_STEPS],
        surprise_steps=[small_number(step) for step in SURPRISE_STEPS],
        outside=OUTSIDE,
        no_data=number_text.NO_DATA,
        keptset_version=keptset.__version__,
    )


def write_audit(path: Path, report: AuditReport) -> Path:
    """Write the page to `path`, whole or not at all, making its folder; returns the absolute path.

    Errors: StorageError where it cannot be written, MissingDependency as `render_audit`.
    """
    return write_page(path, render_audit(report))


def _number(value: float, *, signed: bool = False) -> str:
    return number_text.typeset(small_number(value, signed=signed))


def _figures(report: AuditReport) -> _Figures:
    kept, full = report.kept_log_ratios, report.full_log_ratios
    drifts = [
        audit_charts.drift(
            report.versions,
            lambda row: row.mean_ratio,
            ident="drift-ratio",
            title="mean ratio",
            honest=1.0,
            error=lambda row: row.ratio_std_error,
        ),
        audit_charts.drift(
            report.versions, lambda row: row.mean_abs_log_ratio, ident="drift-log", title="mean |log ratio|", honest=0.0
        ),
        audit_charts.drift(
            report.versions, lambda row: row.surprisal_excess, ident="drift-surprise", title="mean -b - H", honest=0.0
        ),
        audit_charts.drift(report.versions, lambda row: row.kept_mass_mean, ident="drift-mass", title="kept mass"),
    ]
    return _Figures(
        kept_ratios=audit_charts.ratios(kept, ident="kept-ratios", way="kept set", colour="--kept-set", beside=full),
        full_ratios=audit_charts.ratios(
            full, ident="full-ratios", way="full vocabulary", colour="--full-vocabulary", beside=kept
        ),
        kept_sizes=audit_charts.kept_sizes(report.kept_sizes, ident="kept-sizes"),
        pit=audit_charts.pit(report.pit, ident="pit"),
        budget=audit_charts.budget(report.budget, ident="budget-terms"),
        heat_map=audit_charts.heat_map(report.positions, ident="heat-map"),
        drift=tuple(figure for figure in drifts if figure is not None),
    )
