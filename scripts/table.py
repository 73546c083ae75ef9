"""The demo's results on a terminal: two lines a setting, grouped by what the numbers are about.

The upper line answers what a trainer would see, the lower one gives the numbers that decide whether the row passes.
Output into a pipe is 120 wide and without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from keptset.scripts import number_text
from keptset.scripts.grouped_table import Group, Numbers, Row, grouped_table
from keptset.scripts.ratio_table import OUTSIDE, RunFacts, SettingResult, judge, verdict_line

PIPE_WIDTH = 120

_KEPT = Group(title="kept set", labels=(("mass", 7), ("size", 6), ("median", 6), ("p99", 6)))
_FULL = Group(title="ratio, full vocabulary", labels=(("mean", 7), ("median", 7), ("outside", 7)))
_OVER_K = Group(title="ratio, kept set", labels=(("mean", 9), ("error", 7), ("median", 7), ("outside", 7)))
_FLOORS = Group(title="floors", labels=(("path", 13),))
_ALL = (_KEPT, _FULL, _OVER_K, _FLOORS)


def open_console(file: TextIO | None = None) -> Console:
    """A console for `file` (None: standard output); a pipe gets a fixed width and no colour."""
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=PIPE_WIDTH, no_color=True)


def print_table(run: RunFacts, results: Sequence[SettingResult], console: Console) -> None:
    """The table for the console's width, the verdict, and what the words mean."""
    console.print(ratio_table(results, console.width))
    console.print()
    passes = bool(results) and all(judge(result).passes for result in results)
    console.print(Text(verdict_line(results), style="bold green" if passes else "bold red"))
    for result in results:
        for reason in judge(result).reasons:
            console.print(Text(f"  {result.name}: {reason}", style="red"))
    console.print(Text(f"{run.model}, sampled by {run.engine}, scored by {run.scorer}.\n{_legend()}", style="dim"))


def ratio_table(results: Sequence[SettingResult], width: int) -> RenderableType:
    """The results laid out for `width` columns."""
    rows = [Row(name=_name(result), numbers=tuple(_numbers(group, result) for group in _ALL)) for result in results]
    return grouped_table("setting", rows, _ALL, split=2, width=width)


def _name(result: SettingResult) -> Text:
    if judge(result).passes:
        return Text(result.name, style="bold")
    return Text(f"{result.name} FAILS", style="bold red")


def _numbers(group: Group, result: SettingResult) -> Numbers:
    full, kept = result.full_vocabulary_ratio, result.kept_set_ratio
    if group is _KEPT:
        sizes = (result.kept_size_mean, result.kept_size_median, result.kept_size_p99)
        return Numbers(
            upper=(number_text.ratio(result.kept_mass_mean), *(number_text.size(size) for size in sizes)),
            lower=(("tokens", f"{result.tokens:,}"), ("|K|=1", number_text.share(result.kept_size_one_share))),
        )
    if group is _FULL:
        return Numbers(
            upper=(number_text.ratio(full.mean), number_text.ratio(full.median), number_text.share(full.share_outside)),
            lower=(("mean - mass", number_text.small(result.mass_gap, signed=True)),),
        )
    if group is _OVER_K:
        return Numbers(
            upper=(
                number_text.ratio(kept.mean, 7),
                number_text.small(kept.std_error),
                number_text.ratio(kept.median),
                number_text.share(kept.share_outside),
            ),
            lower=(
                ("|log|", number_text.small(kept.choice_abs_log_mean)),
                ("max", number_text.small(kept.choice_abs_log_max)),
            ),
        )
    return Numbers(
        upper=(number_text.small(result.path_floor.mean_abs),),
        lower=(("batch", number_text.small(result.batch_floor.mean_abs)),),
    )


def _legend() -> str:
    low, high = OUTSIDE
    return (
        f"ratio: exp(trainer's log-probability - recorded one), weights equal. outside: share outside [{low}, {high}]. "
        "error: standard error of the mean. |log|: mean and largest |log ratio| over |K| > 1. "
        "floors: mean |difference| of the same weights in one pass and token by token (path), "
        "and in another batch (batch), over |K| > 1."
    )
