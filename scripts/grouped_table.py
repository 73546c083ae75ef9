"""A terminal table of two lines a row, whose numbers are grouped by what they are about.

On a wide terminal all groups stand beside each other; on a narrower one they follow one another as two tables, and
where even these do not fit as a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

MIN_NAME = 12
"""Least width of the column of names, which wrap at spaces."""

_GAP = 2
"""Spaces between columns, of which the box draws one."""


@dataclass(frozen=True, kw_only=True)
class Group:
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

    def cell(self, numbers: Numbers) -> Text:
        upper = " ".join(text.rjust(width) for text, (_, width) in zip(numbers.upper, self.labels, strict=True))
        lower = ", ".join(f"{label} {text}" for label, text in numbers.lower)
        return Text.assemble(upper, "\n", (lower.rjust(self.width), "dim"))


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a group says in one row."""

    upper: tuple[str, ...]
    """One text for each label of the group."""
    lower: tuple[tuple[str, str], ...]
    """Label and text."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A name and what each group says of it, in the groups' order."""

    name: Text
    numbers: tuple[Numbers, ...]


def grouped_table(
    heading: str, rows: Sequence[Row], groups: Sequence[Group], *, split: int, width: int
) -> RenderableType:
    """The rows laid out for `width` columns; two tables part before group number `split`."""
    everything = range(len(groups))
    for parts in ([everything], [everything[:split], everything[split:]]):
        if all(MIN_NAME + sum(_GAP + groups[number].width for number in part) <= width for part in parts):
            tables = [_table(heading, rows, groups, part) for part in parts if len(part)]
            return Stack(tables[0], *(piece for table in tables[1:] for piece in ("", table)))
    return _list(rows, groups)


def _table(heading: str, rows: Sequence[Row], groups: Sequence[Group], part: range) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False, leading=1)
    table.add_column(Text(heading, style="bold"), min_width=MIN_NAME)
    for number in part:
        table.add_column(groups[number].header(), no_wrap=True, min_width=groups[number].width)
    for row in rows:
        table.add_row(row.name, *(groups[number].cell(row.numbers[number]) for number in part))
    return table


def _list(rows: Sequence[Row], groups: Sequence[Group]) -> Table:
    """A label and a value a line: no width is too small for it."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", justify="right")
    for row in rows:
        table.add_row(row.name, "")
        for group, numbers in zip(groups, row.numbers, strict=True):
            table.add_row(Text(group.title, style="dim"), "")
            labels = [label for label, _ in group.labels]
            for label, text in [*zip(labels, numbers.upper, strict=True), *numbers.lower]:
                table.add_row(f"  {label}", text)
        table.add_row("", "")
    return table
