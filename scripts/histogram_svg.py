"""One log-ratio histogram as inline SVG that takes its colours and its font from the page around it.

Matplotlib draws; what it writes is then made fit for embedding: no XML prologue, no style sheet of its own (it would
apply to the whole page), no address of any kind, ids that stay unique when many figures share a page, colours as CSS
custom properties, so that one drawing serves light and dark.
"""

from __future__ import annotations

import html
import io
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import MissingDependency
from keptset.scripts.ratio_table import HISTOGRAM_EDGES, OUTSIDE

_COLOURS = {"#010101": "var(--ink)", "#020202": "var(--muted)", "#030303": "var(--rule)", "#040404": "var(--band)"}
_INK, _MUTED, _RULE, _BAND = _COLOURS
_BARS = "#050505"
_RATIO_TICKS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
_FONT_PT = 8.5
_FEWEST_SHOWN = 0.4
"""Lower end of the share axis in tokens: below one, so that a bin with a single token has a height."""
_MARGIN = 0.03
"""Empty log ratio to the left of the lowest bar."""
_LEAST_RANGE = -0.25
"""The ratio axis begins here or below, however narrow the data."""


@dataclass(frozen=True, kw_only=True)
class HistogramAxes:
    """What figures that are to be compared have in common."""

    lowest_log_ratio: float
    lowest_share: float

    @classmethod
    def around(cls, histograms: Sequence[Sequence[int]]) -> HistogramAxes:
        """Axes on which every bin with a token shows, and a single token has a height.

        >>> HistogramAxes.around([[0] * 161 + [4] + [0] * 19]).lowest_share
        0.1
        """
        counts = np.asarray(histograms, np.int64).reshape(-1, len(HISTOGRAM_EDGES) - 1)
        used = np.flatnonzero(counts.any(axis=0))
        lowest = HISTOGRAM_EDGES[used[0]] - _MARGIN if len(used) else 0.0
        return cls(
            lowest_log_ratio=max(HISTOGRAM_EDGES[0], min(lowest, _LEAST_RANGE)),
            lowest_share=_FEWEST_SHOWN / max(int(counts.sum(axis=1).max(initial=0)), 1),
        )


def histogram_svg(
    counts: Sequence[int], *, ident: str, title: str, description: str, bar_colour: str, axes: HistogramAxes
) -> str:
    """An `<svg>` element of the shares per bin of `HISTOGRAM_EDGES`, on a logarithmic share axis.

    `ident` is unique in the page and made of letters, digits and hyphens; `bar_colour` is a CSS colour. Errors:
    MissingDependency without Matplotlib.
    """
    svg = _draw(np.asarray(counts, np.float64), axes)
    return _embeddable(svg, ident=ident, title=title, description=description, bar_colour=bar_colour)


def _draw(counts: NDArray[np.float64], limits: HistogramAxes) -> str:
    # Its first run makes a list of fonts and says so, where another library has made the root logger talk.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator
    except ImportError as error:
        raise MissingDependency("the report's histograms need Matplotlib: pip install 'keptset[report]'") from error

    lowest = limits.lowest_share
    shares = counts / max(counts.sum(), 1)
    ticks = [ratio for ratio in _RATIO_TICKS if math.log(ratio) >= limits.lowest_log_ratio]
    settings = {"svg.fonttype": "none", "font.size": _FONT_PT, "svg.hashsalt": "keptset", "text.color": _INK}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.9, 2.7))
        figure.subplots_adjust(left=0.13, right=0.985, top=0.97, bottom=0.17)
        axes = figure.add_subplot()
        axes.axvspan(math.log(OUTSIDE[0]), math.log(OUTSIDE[1]), color=_BAND, linewidth=0, zorder=0)
        axes.axvline(0.0, color=_MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0.5)
        axes.stairs(np.maximum(shares, lowest), HISTOGRAM_EDGES, baseline=lowest, fill=True, color=_BARS, linewidth=0)
        axes.set_xlim(limits.lowest_log_ratio, HISTOGRAM_EDGES[-1])
        axes.set_yscale("log")
        axes.set_ylim(lowest, 1.6)
        axes.xaxis.set_major_locator(FixedLocator([math.log(ratio) for ratio in ticks]))
        axes.xaxis.set_major_formatter(FixedFormatter([f"{ratio:g}" for ratio in ticks]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
        axes.set_xlabel("ratio (log scale)", color=_MUTED)
        axes.set_ylabel("share of tokens (log scale)", color=_MUTED)
        axes.grid(axis="y", color=_RULE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(color=_RULE, labelcolor=_MUTED, length=3)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_MUTED)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _embeddable(svg: str, *, ident: str, title: str, description: str, bar_colour: str) -> str:
    body = svg[svg.index("<svg") :].strip()
    opening, body = body.split(">", 1)
    (view_box,) = re.findall(r'viewBox="[^"]*"', opening)
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'\bid="', f'id="{ident}-', body)
    body = re.sub(r'xlink:href="#', f'href="#{ident}-', body)
    body = re.sub(r"url\(#", f"url(#{ident}-", body)
    body = re.sub(r"font-family: [^;\"]*(; )?", "", body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r">\s+<", "><", body)
    for colour, variable in {**_COLOURS, _BARS: bar_colour}.items():
        body = body.replace(colour, variable)
    names = f"{ident}-title {ident}-desc"
    return (
        f'<svg {view_box} role="img" aria-labelledby="{names}">'
        f'<title id="{ident}-title">{html.escape(title)}</title>'
        f'<desc id="{ident}-desc">{html.escape(description)}</desc>{body}'
    )
