"""The demo's results as one HTML file that needs nothing else: no script, no font, no address, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from keptset.scripts import number_text
from keptset.scripts.histogram_svg import HistogramAxes, histogram_svg
from keptset.scripts.html_page import page_environment, write_page
from keptset.scripts.ratio_table import (
    CHOICE_MAX_ABS_LOG,
    CHOICE_MEAN_ABS_LOG,
    HISTOGRAM_EDGES,
    MASS_GAP,
    OUTSIDE,
    RatioSummary,
    RunFacts,
    SettingResult,
    Verdict,
    judge,
    verdict_line,
)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A setting with what the template shows beside its numbers."""

    result: SettingResult
    verdict: Verdict
    full_svg: str
    """Trusted markup: made here, its texts escaped."""
    kept_svg: str


def render_report(run: RunFacts, results: Sequence[SettingResult]) -> str:
    """The page as text. Every value is escaped. Errors: MissingDependency without Jinja or Matplotlib."""
    environment = page_environment()
    environment.filters.update(duration=number_text.duration, moment=_moment)
    summaries = [way for result in results for way in (result.full_vocabulary_ratio, result.kept_set_ratio)]
    axes = HistogramAxes.around([summary.histogram for summary in summaries])
    rows = [_row(number, result, axes) for number, result in enumerate(results)]
    return environment.get_template("report.html.j2").render(
        run=run,
        rows=rows,
        passes=bool(rows) and all(row.verdict.passes for row in rows),
        verdict=verdict_line(results),
        tokens=sum(result.tokens for result in results),
        outside=OUTSIDE,
        bin_width=HISTOGRAM_EDGES[1] - HISTOGRAM_EDGES[0],
        bounds={"mean": CHOICE_MEAN_ABS_LOG, "max": CHOICE_MAX_ABS_LOG, "gap": MASS_GAP},
    )


def write_report(path: Path, run: RunFacts, results: Sequence[SettingResult]) -> Path:
    """Write the page to `path`, whole or not at all, making its folder; returns the absolute path.

    Errors: StorageError where it cannot be written, MissingDependency as `render_report`.
    """
    return write_page(path, render_report(run, results))


def _row(number: int, result: SettingResult, axes: HistogramAxes) -> _Row:
    def svg(way: str, summary: RatioSummary) -> str:
        return histogram_svg(
            summary.histogram,
            ident=f"{way}-{number}",
            title=f"{result.name}: ratio with {way.replace('-', ' ')} scoring",
            description=(
                f"Histogram of {result.tokens:,} token ratios. Mean {number_text.ratio(summary.mean)}, median "
                f"{number_text.ratio(summary.median)}; {number_text.share(summary.share_outside)} lie outside "
                f"[{OUTSIDE[0]}, {OUTSIDE[1]}]."
            ),
            bar_colour=f"var(--{way})",
            axes=axes,
        )

    return _Row(
        result=result,
        verdict=judge(result),
        full_svg=svg("full-vocabulary", result.full_vocabulary_ratio),
        kept_svg=svg("kept-set", result.kept_set_ratio),
    )


def _moment(iso: str) -> str:
    """ISO 8601 as a person writes it.

    >>> _moment("2031-02-03T04:05:06+00:00")
    '3 February 2031, 04:05 UTC'
    """
    moment = datetime.fromisoformat(iso)
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".strip()
