"""An audit's sampling settings as a table: what was kept, and the ratios under both ways of scoring."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from keptset.scripts import number_text
from keptset.scripts.audit_words import given, small_number, visible
from keptset.scripts.grouped_table import Group, Numbers, Row, grouped_table
from keptset.scripts.ratio_table import OUTSIDE
from keptset.trainer_bridge.audit.report import RatioRow, SettingRow

_KEPT = Group(title="kept set", labels=(("mass", 7), ("size", 7), ("median", 7), ("p99", 7)))
_FULL = Group(title="ratio, full vocabulary", labels=(("mean", 7), ("median", 7), ("outside", 7)))
_OVER_K = Group(title="ratio, kept set", labels=(("mean", 9), ("error", 7), ("median", 7), ("outside", 7)))
_NOTHING = RatioRow(mean=None, std_error=None, median=None, share_outside=None, mean_abs_log=None, max_abs_log=None)


def scored(settings: Sequence[SettingRow]) -> bool:
    """Whether there are ratios at all: without a model or recorded scores there are none."""
    return any(row.kept_ratio is not None or row.full_ratio is not None for row in settings)


def settings_table(settings: Sequence[SettingRow], width: int) -> RenderableType:
    """The settings laid out for `width` columns; without ratios where there are none."""
    groups = (_KEPT, _FULL, _OVER_K) if scored(settings) else (_KEPT,)
    rows = [Row(name=Text(visible(row.name), style="bold"), numbers=_numbers(row)[: len(groups)]) for row in settings]
    return grouped_table("setting", rows, groups, split=2, width=width)


def settings_legend(settings: Sequence[SettingRow]) -> str:
    """What the words of the table mean."""
    kept = "mass: mean probability of the kept set before it was renormalised. size, median, p99: of |K|."
    if not scored(settings):
        return kept
    low, high = OUTSIDE
    return (
        f"{kept} ratio: exp(l - b). outside: share outside [{low}, {high}]. error: standard error of the mean if it "
        "is 1. |log|: mean and largest |log ratio| over |K| > 1."
    )


def _numbers(row: SettingRow) -> tuple[Numbers, ...]:
    full, kept = row.full_ratio or _NOTHING, row.kept_ratio or _NOTHING
    sizes = (row.kept_size_mean, row.kept_size_median, row.kept_size_p99)
    return (
        Numbers(
            upper=(number_text.ratio(given(row.kept_mass_mean)), *(number_text.size(given(size)) for size in sizes)),
            lower=(("tokens", f"{row.tokens:,}"), ("|K|=1", number_text.share(given(row.kept_size_one_share)))),
        ),
        Numbers(
            upper=(
                number_text.ratio(given(full.mean)),
                number_text.ratio(given(full.median)),
                number_text.share(given(full.share_outside)),
            ),
            lower=_sizes_of_log(full),
        ),
        Numbers(
            upper=(
                number_text.ratio(given(kept.mean), 7),
                number_text.small(given(kept.std_error)),
                number_text.ratio(given(kept.median)),
                number_text.share(given(kept.share_outside)),
            ),
            lower=_sizes_of_log(kept),
        ),
    )


def _sizes_of_log(ratios: RatioRow) -> tuple[tuple[str, str], ...]:
    return (
        ("|log|", small_number(given(ratios.mean_abs_log))),
        ("max", small_number(given(ratios.max_abs_log))),
    )
