"""The figures of an audit's page, each from one record of the report; None where there is nothing to draw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from keptset.scripts import number_text
from keptset.scripts.audit_words import (
    TERMS,
    given,
    plural,
    small_number,
    version_name,
    versions_together,
    visible,
)
from keptset.scripts.chart_svg import Axis, Chart, Ticks, linear_ticks, power_ticks
from keptset.scripts.ratio_table import OUTSIDE
from keptset.trainer_bridge.audit.report import HeatMap, Histogram, VersionRow
from keptset.trainer_bridge.budget import Term

_RATIO_TICKS: tuple[tuple[float, ...], ...] = (
    (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
    (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0, 5.0, 10.0),
    (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6),
)
"""The first of these that reaches the ends of the axis is taken."""
_LEAST_RANGE = (-0.25, 0.15)
"""Log ratios that the ratio axis always shows."""
_FAINTEST, _LEAST_SHARE = 0.08, 1e-3
"""A heat map's cell with a token is at least this opaque; at or below this share of its column it is that."""
_STANDARD_ERRORS = 3


def ratios(histogram: Histogram | None, *, ident: str, way: str, colour: str, beside: Histogram | None) -> str | None:
    """Log ratios on a logarithmic axis of shares, so that single tokens show; `beside` shares the axes."""
    if histogram is None or not sum(histogram.counts):
        return None
    both: list[Histogram] = [drawn for drawn in (histogram, beside) if drawn is not None and sum(drawn.counts) > 0]
    used = [edge for drawn in both for edge in _used_edges(drawn)]
    low, high = min(*used, _LEAST_RANGE[0]), max(*used, _LEAST_RANGE[1])
    floor = 0.4 / max(sum(drawn.counts) for drawn in both)
    total = sum(histogram.counts)
    chart = Chart(
        ident=ident,
        title=f"Ratios, {way}",
        description=(
            f"Histogram of {total:,} token ratios; {_beyond(histogram)} lie outside [{OUTSIDE[0]}, {OUTSIDE[1]}]."
        ),
        x=Axis(low=low, high=high, label="ratio (log scale)", ticks=_ratio_ticks(low, high)),
        y=Axis(
            low=floor,
            high=1.4,
            label="share of tokens (log scale)",
            ticks=power_ticks(floor, 1, percent=True),
            log=True,
        ),
    )
    chart.box(math.log(OUTSIDE[0]), math.log(OUTSIDE[1]), floor, 1.4, colour="--band")
    chart.line([(0, floor), (0, 1.4)], colour="--muted", dashed=True)
    _bars(chart, histogram, floor, colour, lambda a, b: f"ratio {math.exp(a):.3f} to {math.exp(b):.3f}")
    return chart.svg()


def kept_sizes(histogram: Histogram | None, *, ident: str) -> str | None:
    """|K|, on a logarithmic axis where it spans more than one power of ten."""
    if histogram is None or not sum(histogram.counts):
        return None
    edges = _used_edges(histogram)
    low, high = max(min(edges), 1e-9 if min(edges) > 0 else 0.0), max(edges)
    log = low > 0 and high > 20 * low
    top = max(histogram.counts) / sum(histogram.counts)
    label = "ids in the kept set" + (" (log scale)" if log else "")
    chart = Chart(
        ident=ident,
        title="Size of the kept sets",
        description=f"Histogram of |K| over {sum(histogram.counts):,} sampled tokens, from {low:,g} to {high:,g}.",
        x=Axis(
            low=low, high=high, label=label, ticks=_size_ticks(low, high) if log else linear_ticks(low, high), log=log
        ),
        y=Axis(low=0, high=top * 1.05, label="share of tokens", ticks=_percent_ticks(top)),
    )
    _bars(chart, histogram, 0, "--kept-set", _sizes_told)
    return chart.svg()


def pit(histogram: Histogram | None, *, ident: str) -> str | None:
    """u of every token with a choice, as a density: 1 everywhere for an honest sampler."""
    if histogram is None or not sum(histogram.counts):
        return None
    total, edges = sum(histogram.counts), histogram.edges
    span = edges[-1] - edges[0]
    widths = [(b - a) / span for a, b in itertools.pairwise(edges)]
    density = [count / total / width for count, width in zip(histogram.counts, widths, strict=True)]
    error = _STANDARD_ERRORS * max(math.sqrt((1 - w) / (w * total)) for w in widths)
    low, high = min(*density, 1 - 1.3 * error), max(*density, 1 + 1.3 * error)
    low = 0.0 if low < 0.5 else low - 0.1 * (high - low)
    high += 0.05 * (high - low)
    chart = Chart(
        ident=ident,
        title="Place of the sampled token in its distribution (PIT)",
        description=(
            f"Density of u over {total:,} tokens, from {min(density):.3f} to {max(density):.3f}; an honest sampler "
            "gives 1 everywhere."
        ),
        x=Axis(
            low=edges[0],
            high=edges[-1],
            label="u: 0 is the most probable end of the kept set",
            ticks=linear_ticks(0, 1),
        ),
        y=Axis(low=low, high=high, label="density", ticks=linear_ticks(low, high, 4)),
    )
    chart.box(edges[0], edges[-1], 1 - error, 1 + error, colour="--band")
    for a, b, value, count in zip(edges, edges[1:], density, histogram.counts, strict=False):
        chart.box(
            a,
            b,
            low,
            value,
            colour="--kept-set",
            told=f"u {a:.2f} to {b:.2f}: density {value:.3f}, {plural(count, 'token')}",
        )
    chart.line([(edges[0], 1), (edges[-1], 1)], colour="--ink", dashed=True)
    return chart.svg()


def budget(terms: Mapping[str, Term] | None, *, ident: str) -> str | None:
    """Signed bars of each term's mean, before a pale bar of its mean absolute value to either side."""
    known = [(name, given(term.mean), given(term.mean_abs)) for name, term in (terms or {}).items()]
    known = [entry for entry in known if not math.isnan(entry[1]) and not math.isnan(entry[2])]
    if not known:
        return None
    reach = max(max(abs(mean), mean_abs) for _, mean, mean_abs in known) * 1.08 or 1.0
    names = tuple((len(known) - row - 0.5, _short(name)) for row, (name, _, _) in enumerate(known))
    chart = Chart(
        ident=ident,
        title="Signed budget of the log ratio over the whole vocabulary",
        description="; ".join(f"{_term(n)}: mean {m:+.3g}, mean absolute {a:.3g}" for n, m, a in known),
        x=Axis(low=-reach, high=reach, label="nats a token", ticks=linear_ticks(-reach, reach, 4)),
        y=Axis(low=0, high=len(known), label="", ticks=names),
        margin=74.0,
    )
    for row, (name, mean, mean_abs) in enumerate(known):
        middle = len(known) - row - 0.5
        told = f"{_term(name)}: mean {small_number(mean, signed=True)}, mean absolute {small_number(mean_abs)}"
        colour = "--ink" if name == "total" else "--full-vocabulary" if mean < 0 else "--above"
        chart.box(-mean_abs, mean_abs, middle - 0.36, middle + 0.36, colour=colour, told=told, alpha=0.16)
        chart.box(0, mean, middle - 0.22, middle + 0.22, colour=colour, told=told)
    chart.line([(0, 0), (0, len(known))], colour="--muted")
    return chart.svg()


def drift(
    versions: Sequence[VersionRow],
    value: Callable[[VersionRow], float | None],
    *,
    ident: str,
    title: str,
    honest: float | None = None,
    error: Callable[[VersionRow], float | None] = lambda row: None,
) -> str | None:
    """One number by policy version; `honest` is where it belongs. None with fewer than two versions that have it."""
    known = [
        (row, (row.version + (row.last_version or 0)) / 2, given(value(row)), 2 * given(error(row)))
        for row in versions
        if row.version is not None
    ]
    known = [(row, x, y, 0.0 if math.isnan(e) else e) for row, x, y, e in known if not math.isnan(y)]
    if len(known) < 2:
        return None
    reached = [y + side * e for _, _, y, e in known for side in (-1, 1)] + ([] if honest is None else [honest])
    margin = 0.08 * (max(reached) - min(reached)) or abs(reached[0]) * 0.01 or 1.0
    low, high = min(reached) - margin, max(reached) + margin
    first, last = known[0][1], known[-1][1]
    begin, end = known[0][0].version, known[-1][0].last_version
    together = versions_together([row for row, *_ in known])
    chart = Chart(
        ident=ident,
        title=f"{title} by policy version",
        description=(
            f"{len(known)} {'groups of ' if together else ''}versions, {begin} to {end}: "
            f"{known[0][2]:.4g} at the first, {known[-1][2]:.4g} at the last."
        ),
        x=Axis(low=first, high=last, label="policy version", ticks=_whole(linear_ticks(first, last, 6))),
        y=Axis(low=low, high=high, label=title, ticks=linear_ticks(low, high, 4)),
    )
    if honest is not None:
        chart.line([(first, honest), (last, honest)], colour="--muted", dashed=True)
    chart.line([(x, y) for _, x, y, _ in known], colour="--kept-set")
    for row, x, y, bar in known:
        told = (
            f"{'version' if row.version == row.last_version else 'versions'} {version_name(row)}: {small_number(y)}"
            + (f" ± {small_number(bar)}" if bar else "")
            + f", {plural(row.tokens, 'token')}"
        )
        chart.dot(x, y, colour="--kept-set", told=told, error=bar)
    return chart.svg()


def heat_map(positions: HeatMap | None, *, ident: str) -> str | None:
    """|log ratio| by position: how opaque a cell is tells its share of the tokens at that position."""
    if positions is None or not any(sum(row) for row in positions.counts):
        return None
    columns, rows = len(positions.position_edges) - 1, len(positions.abs_log_ratio_edges) - 1
    totals = [sum(row[column] for row in positions.counts) for column in range(columns)]
    used_columns = max(column for column in range(columns) if totals[column]) + 1
    used = [row for row in range(rows) if sum(positions.counts[row])]
    bottom, top = min(used), max(used) + 1
    chart = Chart(
        ident=ident,
        title="|log ratio| by position in the response",
        description=(
            f"{sum(totals):,} tokens; largest |log ratio| up to {positions.abs_log_ratio_edges[top]:g}, positions up "
            f"to {positions.position_edges[used_columns] - 1:,}."
        ),
        x=Axis(
            low=0,
            high=used_columns,
            label="position in the response",
            ticks=_edge_ticks(positions.position_edges, 0, used_columns),
        ),
        y=Axis(
            low=bottom, high=top, label="|log ratio|", ticks=_edge_ticks(positions.abs_log_ratio_edges, bottom, top)
        ),
        margin=60.0,
    )
    for row in range(bottom, top):
        a, b = positions.abs_log_ratio_edges[row : row + 2]
        for column in range(used_columns):
            count = positions.counts[row][column]
            if not count:
                continue
            share = count / totals[column]
            strength = 1 + math.log10(max(share, _LEAST_SHARE)) / -math.log10(_LEAST_SHARE)
            start, end = positions.position_edges[column : column + 2]
            told = (
                f"positions {start:,} to {end - 1:,}, |log ratio| {a:g} to {b:g}: {plural(count, 'token')}, "
                f"{number_text.share(share)} of those there"
            )
            alpha = _FAINTEST + (1 - _FAINTEST) * strength
            chart.box(column + 0.03, column + 0.97, row + 0.04, row + 0.96, colour="--heat", told=told, alpha=alpha)
    return chart.svg()


def _bars(chart: Chart, histogram: Histogram, base: float, colour: str, told: Callable[[float, float], str]) -> None:
    total = sum(histogram.counts)
    for a, b, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False):
        if count:
            share = number_text.share(count / total)
            chart.box(a, b, base, count / total, colour=colour, told=f"{told(a, b)}: {plural(count, 'token')}, {share}")


def _used_edges(histogram: Histogram) -> tuple[float, float]:
    used = [number for number, count in enumerate(histogram.counts) if count]
    return histogram.edges[used[0]], histogram.edges[used[-1] + 1]


def _beyond(histogram: Histogram) -> str:
    low, high = math.log(OUTSIDE[0]), math.log(OUTSIDE[1])
    pairs = zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    outside = sum(count for a, b, count in pairs if (a + b) / 2 < low or (a + b) / 2 > high)
    return "about " + number_text.share(outside / sum(histogram.counts))


def _ratio_ticks(low: float, high: float) -> Ticks:
    reaching = (ratios for ratios in _RATIO_TICKS if math.log(ratios[0]) <= low and math.log(ratios[-1]) >= high)
    inside = [ratio for ratio in next(reaching, _RATIO_TICKS[-1]) if low <= math.log(ratio) <= high]
    return tuple((math.log(ratio), f"{ratio:g}") for ratio in inside)


def _size_ticks(low: float, high: float) -> Ticks:
    powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    step = 1 + len(powers) // 8
    return tuple((2.0**power, f"{2**power:,}" if power >= 0 else f"{2.0**power:g}") for power in powers[::step])


def _sizes_told(a: float, b: float) -> str:
    return f"|K| {a:,g}" if b - a <= 1 else f"|K| {a:,g} to {b - 1:,g}"


def _percent_ticks(top: float) -> Ticks:
    return tuple((value, f"{100 * value:g}%") for value, _ in linear_ticks(0, top, 4))


def _whole(ticks: Ticks) -> Ticks:
    return tuple((value, f"{value:,.0f}") for value, _ in ticks if value == int(value))


def _edge_ticks(edges: Sequence[float], first: int, last: int) -> Ticks:
    step = 1 + (last - first) // 9
    return tuple((float(number), f"{edges[number]:g}") for number in range(first, last + 1, step))


def _term(name: str) -> str:
    return TERMS[name][0] if name in TERMS else visible(name)


def _short(term: str) -> str:
    return {"staleness_and_path": "stale+path", "path": "path"}.get(term, visible(term))
