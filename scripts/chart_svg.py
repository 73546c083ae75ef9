"""Small charts as inline SVG: real text, a title with the numbers on every mark, colours and font from the page.

Colours are CSS custom properties of the page, so that one drawing serves light and dark. Nothing is loaded and nothing
runs: what a mark stands for is its `<title>`, which browsers show where the pointer rests.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 400.0, 224.0
"""Of the drawing's own coordinates: text of 11 units is readable on a phone, which shows it about this wide."""
_RIGHT, _TOP, _BOTTOM = 8.0, 8.0, 38.0
_TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

Ticks = tuple[tuple[float, str], ...]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """From values to places along a side of the chart."""

    low: float
    high: float
    label: str
    ticks: Ticks
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, 0 at `low` and 1 at `high`; beyond the ends: at the end.

        >>> Axis(low=1, high=100, label="", ticks=(), log=True).at(10)
        0.5
        """
        scale = _log if self.log else float
        low, high = scale(self.low), scale(self.high)
        place = (scale(min(max(value, self.low), self.high)) - low) / (high - low) if high > low else 0.5
        return min(max(place, 0.0), 1.0)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def linear_ticks(low: float, high: float, count: int = 5) -> Ticks:
    """Round numbers between two values, about `count` of them.

    >>> linear_ticks(0, 0.23)
    ((0.0, '0'), (0.05, '0.05'), (0.1, '0.1'), (0.15, '0.15'), (0.2, '0.2'))
    """
    if not high > low:
        return ((low, f"{low:g}"),)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * step for step in _TICK_STEPS if power * step >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    values = [round(number * step, digits) + 0.0 for number in range(first, last + 1)]
    return tuple((value, f"{value:,g}" if abs(value) < 1e6 else f"{value:.0e}") for value in values)


def power_ticks(low: float, high: float, *, percent: bool = False) -> Ticks:
    """Powers of ten between two positive values.

    >>> power_ticks(0.004, 1, percent=True)
    ((0.01, '1%'), (0.1, '10%'), (1.0, '100%'))
    """
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    step = 1 + (len(powers) - 1) // 6
    values = [10.0**power for power in powers][::-1][::step][::-1]
    return tuple((value, f"{100 * value:g}%" if percent else f"{value:,g}") for value in values)


@dataclass(kw_only=True)
class Chart:
    """Marks are drawn in the order in which they are added."""

    ident: str
    """Unique in the page; letters, digits and hyphens."""
    title: str
    description: str
    """What the chart shows, for those who do not see it."""
    x: Axis
    y: Axis
    margin: float = 50.0
    """Room for the labels to the left."""
    _marks: list[str] = field(default_factory=list)

    def left(self, value: float) -> float:
        return self.margin + self.x.at(value) * (WIDTH - self.margin - _RIGHT)

    def top(self, value: float) -> float:
        return _TOP + (1 - self.y.at(value)) * (HEIGHT - _TOP - _BOTTOM)

    def box(self, x0: float, x1: float, y0: float, y1: float, *, colour: str, told: str = "", alpha: float = 1) -> None:
        """A rectangle between values of both axes; `told` is what it says where the pointer rests."""
        left, right = sorted((self.left(x0), self.left(x1)))
        top, bottom = sorted((self.top(y0), self.top(y1)))
        title = f"<title>{html.escape(told)}</title>" if told else ""
        opacity = "" if alpha == 1 else f' fill-opacity="{alpha:.3f}"'
        self._marks.append(
            f'<rect x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{bottom - top:.2f}" '
            f'fill="var({colour})"{opacity} shape-rendering="crispEdges"' + (f">{title}</rect>" if title else "/>")
        )

    def line(self, points: Sequence[tuple[float, float]], *, colour: str, dashed: bool = False) -> None:
        """A line through values of both axes."""
        path = " ".join(f"{self.left(x):.2f},{self.top(y):.2f}" for x, y in points)
        dashes = ' stroke-dasharray="3 3"' if dashed else ""
        width = 1 if dashed else 1.6
        self._marks.append(
            f'<polyline points="{path}" fill="none" stroke="var({colour})" stroke-width="{width}"{dashes}/>'
        )

    def dot(self, x: float, y: float, *, colour: str, told: str, error: float = 0.0) -> None:
        """A point, with a bar of `error` to either side."""
        at, title = self.left(x), f"<title>{html.escape(told)}</title>"
        bar = ""
        if error > 0:
            bar = (
                f'<line x1="{at:.2f}" x2="{at:.2f}" y1="{self.top(y - error):.2f}" y2="{self.top(y + error):.2f}" '
                f'stroke="var({colour})" stroke-width="1.2"/>'
            )
        circle = f'<circle cx="{at:.2f}" cy="{self.top(y):.2f}" r="3.2" fill="var({colour})"/>'
        # The larger, unseen circle is what a pointer can hit.
        reach = f'<circle cx="{at:.2f}" cy="{self.top(y):.2f}" r="9" fill="transparent"/>'
        self._marks.append(f"<g>{title}{bar}{circle}{reach}</g>")

    def svg(self) -> str:
        """The `<svg>` element."""
        names = f"{self.ident}-title {self.ident}-desc"
        return (
            f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-labelledby="{names}" font-size="11">'
            f'<title id="{self.ident}-title">{html.escape(self.title)}</title>'
            f'<desc id="{self.ident}-desc">{html.escape(self.description)}</desc>'
            f"{self._frame()}{''.join(self._marks)}</svg>"
        )

    def _frame(self) -> str:
        left, right, bottom = self.margin, WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = []
        for value, text in self.y.ticks:
            at = self.top(value)
            parts.append(f'<line x1="{left:g}" x2="{right:g}" y1="{at:.2f}" y2="{at:.2f}" stroke="var(--rule)"/>')
            parts.append(_text(text, left - 6, at + 3.8, anchor="end"))
        for value, text in self.x.ticks:
            at = self.left(value)
            parts.append(
                f'<line x1="{at:.2f}" x2="{at:.2f}" y1="{bottom:g}" y2="{bottom + 4:g}" stroke="var(--muted)"/>'
            )
            parts.append(_text(text, min(at, WIDTH - 3 * len(text)), bottom + 15))
        parts.append(f'<line x1="{left:g}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}" stroke="var(--muted)"/>')
        middle = (left + right) / 2
        parts.append(_text(self.x.label, middle, HEIGHT - 6))
        turned = f'transform="rotate(-90 10 {(_TOP + bottom) / 2:g})"'
        parts.append(_text(self.y.label, 10, (_TOP + bottom) / 2, extra=turned))
        return f'<g fill="var(--muted)">{"".join(parts)}</g>'


def _text(text: str, x: float, y: float, *, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" {extra}>{html.escape(text)}</text>'
