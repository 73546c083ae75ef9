"""The demo's results on a terminal: two lines a setting, grouped by what the numbers are about.

The upper line answers what a trainer would see, the lower one gives the numbers that decide whether the row passes.
On a wide terminal all groups stand beside each other; on a narrower one they follow one another as two tables, and
where even these do not fit as a list. Output into a pipe is 120 wide and without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from keptset.scripts import number_text
from keptset.scripts.ratio_table import OUTSIDE, RunFacts, SettingResult, judge, verdict_line

PIPE_WIDTH = 120
MIN_NAME = 12
"""Least width of the column of setting names, which wrap at spaces."""

_GAP = 2
"""Spaces between columns, of which the box draws one."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Neighbouring numbers under one heading. Cells are aligned here, so that a group stays or moves as one."""

    title: str
    labels: tuple[tuple[str, int], ...]
    """What the upper line holds, each with its width."""

    @property
    def width(self) -> int:
        return sum(width for _, width in self.labels) + len(self.labels) - 1

    def header(self) -> Text:
        labels = " ".join(label.rjust(width) for label, width in self.labels)
        return Text.assemble((self.title.ljust(self.width), "bold"), "\n", (labels, "dim"))

    def cell(self, numbers: _Numbers) -> Text:
        upper = " ".join(text.rjust(width) for text, (_, width) in zip(numbers.upper, self.labels, strict=True))
        lower = ", ".join(f"{label} {text}" for label, text in numbers.lower)
        return Text.assemble(upper, "\n", (lower.rjust(self.width), "dim"))


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """What a group says about one setting."""

    upper: tuple[str, ...]
    """One text for each label of the group."""
    lower: tuple[tuple[str, str], ...]
    """Label and text."""


_KEPT = _Group(title="kept set", labels=(("mass", 7), ("size", 6), ("median", 6), ("p99", 6)))
_FULL = _Group(title="ratio, full vocabulary", labels=(("mean", 7), ("median", 7), ("outside", 7)))
_OVER_K = _Group(title="ratio, kept set", labels=(("mean", 9), ("error", 7), ("median", 7), ("outside", 7)))
_FLOORS = _Group(title="floors", labels=(("path", 13),))
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
    for split in ([_ALL], [_ALL[:2], _ALL[2:]]):
        if all(MIN_NAME + sum(_GAP + group.width for group in groups) <= width for groups in split):
            tables = [_table(results, groups) for groups in split]
            return Group(tables[0], *(part for table in tables[1:] for part in ("", table)))
    return _list(results)


def _table(results: Sequence[SettingResult], groups: Sequence[_Group]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False, leading=1)
    table.add_column(Text("setting", style="bold"), min_width=MIN_NAME)
    for group in groups:
        table.add_column(group.header(), no_wrap=True, min_width=group.width)
    for result in results:
        table.add_row(_name(result), *(group.cell(_numbers(group, result)) for group in groups))
    return table


def _name(result: SettingResult) -> Text:
    if judge(result).passes:
        return Text(result.name, style="bold")
    return Text(f"{result.name} FAILS", style="bold red")


def _numbers(group: _Group, result: SettingResult) -> _Numbers:
    full, kept = result.full_vocabulary_ratio, result.kept_set_ratio
    if group is _KEPT:
        sizes = (result.kept_size_mean, result.kept_size_median, result.kept_size_p99)
        return _Numbers(
            upper=(number_text.ratio(result.kept_mass_mean), *(number_text.size(size) for size in sizes)),
            lower=(("tokens", f"{result.tokens:,}"), ("|K|=1", number_text.share(result.kept_size_one_share))),
        )
    if group is _FULL:
        return _Numbers(
            upper=(number_text.ratio(full.mean), number_text.ratio(full.median), number_text.share(full.share_outside)),
            lower=(("mean - mass", number_text.small(result.mass_gap, signed=True)),),
        )
    if group is _OVER_K:
        return _Numbers(
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
    return _Numbers(
        upper=(number_text.small(result.path_floor.mean_abs),),
        lower=(("batch", number_text.small(result.batch_floor.mean_abs)),),
    )


def _list(results: Sequence[SettingResult]) -> Table:
    """A label and a value a line: no width is too small for it."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", justify="right")
    for result in results:
        table.add_row(_name(result), "")
        for group in _ALL:
            numbers = _numbers(group, result)
            table.add_row(Text(group.title, style="dim"), "")
            labels = [label for label, _ in group.labels]
            for label, text in [*zip(labels, numbers.upper, strict=True), *numbers.lower]:
                table.add_row(f"  {label}", text)
        table.add_row("", "")
    return table


def _legend() -> str:
    low, high = OUTSIDE
    return (
        f"ratio: exp(trainer's log-probability - recorded one), weights equal. outside: share outside [{low}, {high}]. "
        "error: standard error of the mean. |log|: mean and largest |log ratio| over |K| > 1. "
        "floors: mean |difference| of the same weights in one pass and token by token (path), "
        "and in another batch (batch), over |K| > 1."
    )
