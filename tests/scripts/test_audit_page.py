"""An audit's page, as markup; how a browser shows it is in test_audit_browser."""

import dataclasses
import html
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from keptset.schemas.errors import MissingDependency
from keptset.scripts import audit_charts
from keptset.scripts.audit_page import render_audit, write_audit
from keptset.scripts.audit_tokens import MAX_TOKENS, response_view, token_text
from keptset.scripts.chart_svg import Axis, Chart, linear_ticks
from keptset.trainer_bridge.audit.report import AuditReport, Histogram, ShownResponse, Totals

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, ids and nesting of a page; a tag closed out of order fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


def text_of(page: str) -> str:
    """What a reader sees, on one line."""
    body = page[page.index("<body>") :]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).replace("\N{NO-BREAK SPACE}", " ").split())


def spoilt(value: object, evil: str) -> object:
    """The record with every text replaced."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: spoilt(getattr(value, f.name), evil) for f in dataclasses.fields(value)})
    if isinstance(value, tuple):
        return tuple(spoilt(entry, evil) for entry in value)
    if isinstance(value, dict):
        return {spoilt(key, evil): spoilt(entry, evil) for key, entry in value.items()}
    return evil if type(value) is str else value


@pytest.fixture(scope="module")
def page(audit_report: AuditReport) -> str:
    return render_audit(audit_report)


@pytest.fixture(scope="module")
def bare(audit_report: AuditReport) -> AuditReport:
    """An audit of rollouts about which next to nothing is recorded."""
    empty = {
        field.name: ()
        for field in dataclasses.fields(AuditReport)
        if isinstance(getattr(audit_report, field.name), tuple)
    }
    nothing = dict.fromkeys(
        ("kept_sizes", "pit", "kept_log_ratios", "full_log_ratios", "positions", "budget", "floors", "severity")
    )
    totals = Totals(files=1, damaged_files=(), responses=1, tokens=3, sampled_tokens=3, kept_ids=0, share_read=1.0)
    return replace(
        audit_report,
        **empty,
        **nothing,
        verdict="nothing found",
        totals=totals,
        finish_reasons={},
        group_sizes={},
        logprob_domains={},
    )


def test_everything_the_audit_says_is_on_the_page(page: str, audit_report: AuditReport) -> None:
    text = text_of(page)
    for said in (
        audit_report.verdict,
        "913 places in 20 responses (2.0% of all)",
        *(finding.summary for finding in audit_report.findings),
        *(finding.advice for finding in audit_report.findings),
        *(example.detail for example in audit_report.findings[0].examples),
        audit_report.findings[0].symptoms[0].summary,
        "no kept distributions are recorded; record them",
        "draws, distributions",
        "unit mean −48.2 <1 × 10⁻³⁰⁰ 0.0388 |mean ratio - 1| 0.002 1,000 rejected",
        "0.9999998 ± 7.3 × 10⁻⁸",
        "truncation l over the vocabulary less l over the kept set: the trainer's log kept mass −0.105 0.105",
        "2.3 × 10⁻⁶ on average (p99 1.1 × 10⁻⁵)",
        "1,000 responses, 48,000 tokens (47,512 sampled), 512,345 kept ids in 12 files.",
        "w-00000003.open : batch 4: checksum differs",
        "model_id Tiny-1M, engine keptset, engine_version 9.8.7",
        "stop 903, length 97",
        "largest mean |log ratio|: 0.83",
        "Why is my ratio not 1 although nothing was learned in between?",
    ):
        assert said in text, said


def test_the_page_loads_nothing_runs_nothing_and_names_no_address(page: str) -> None:
    assert not re.search(r"[a-z]+://", page, re.IGNORECASE)
    parsed = Page(page)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
    assert parsed.attributes("src") == []
    assert all(reference.startswith("#") for reference in parsed.attributes("href"))
    assert not re.search(r"@import|url\(", page)
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)


def test_ids_are_unique_and_every_reference_leads_to_one(page: str) -> None:
    parsed = Page(page)
    ids = parsed.attributes("id")
    assert len(ids) == len(set(ids))
    references = [*parsed.attributes("aria-labelledby"), *(href[1:] for href in parsed.attributes("href"))]
    assert {name for reference in references for name in reference.split()} <= set(ids)


def test_each_figure_has_a_title_and_says_what_it_shows(page: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(figures) == 10
    for figure in figures:
        assert 'role="img"' in figure and re.search(r"<title id=[^>]+>[^<]+</title><desc id=[^>]+>[^<]+</desc>", figure)
        assert not re.search(r"#[0-9a-f]{3,6}\b|font-family|nan|inf", figure)


def test_every_colour_is_defined_for_light_and_for_dark(page: str) -> None:
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", page))
    style = page[page.index("<style>") : page.index("</style>")]
    dark = "".join(re.findall(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n\}", style, re.DOTALL))
    light = re.sub(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n\}", "", style, flags=re.DOTALL)
    assert [name for name in used if f"{name}:" not in light or f"{name}:" not in dark] == []


@pytest.mark.parametrize(
    "evil", ['"><script>alert(1)</script>&', "</title></style><img src=x onerror=alert(1)>", "{{ 7 * 7 }}"]
)
def test_hostile_text_is_escaped_wherever_it_goes(audit_report: AuditReport, evil: str) -> None:
    page = render_audit(spoilt(audit_report, evil))  # type: ignore[arg-type]
    assert not {tag for tag, _ in Page(page).tags} & {"script", "img"}
    assert html.escape(evil, quote=False).replace('"', "&#34;") in page
    assert "49" not in re.findall(r"<title>.*?</title>", page)[0]


def test_invisible_characters_are_spelled_out(audit_report: AuditReport) -> None:
    page = render_audit(spoilt(audit_report, "a\u202eb\x00c"))  # type: ignore[arg-type]
    assert not set(page) & {"\u202e", "\x00"}
    assert "a\\u202eb\\x00c" in page


def test_what_has_no_data_says_so_or_is_not_there(bare: AuditReport) -> None:
    page = render_audit(bare)
    text = text_of(page)
    assert "<svg" not in page and "Worst responses" not in text and "Signed budget" not in text
    for said in (
        "Nothing was found by what could be tested",
        "give --model DIR",
        "No kept sets were recorded",
        "no versions",
    ):
        assert said in text, said
    parsed = Page(page)
    assert {href[1:] for href in parsed.attributes("href")} <= set(parsed.attributes("id"))


def test_one_version_is_told_instead_of_drawn(audit_report: AuditReport) -> None:
    page = render_audit(replace(audit_report, versions=audit_report.versions[:1]))
    assert "All tokens are of version 0: there is no drift to show." in text_of(page)


def test_bars_stand_where_the_tokens_are() -> None:
    histogram = Histogram(edges=(-0.2, -0.1, 0.0, 0.1), counts=(0, 100, 0))
    figure = audit_charts.ratios(histogram, ident="x", way="kept set", colour="--kept-set", beside=None)
    assert figure is not None
    (bar,) = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" fill="var\(--kept-set\)', figure
    )
    left, top, width, height = map(float, bar)
    scale = (400 - 50 - 8) / (0.15 + 0.25)
    assert left == pytest.approx(50 + (0.25 - 0.1) * scale, abs=0.02) and width == pytest.approx(0.1 * scale, abs=0.02)
    assert top + height == pytest.approx(224 - 38, abs=0.02)
    low, high = math.log(0.4 / 100), math.log(1.4)
    assert top == pytest.approx(8 + (1 - (0 - low) / (high - low)) * (224 - 46), abs=0.02)
    assert "ratio 0.905 to 1.000: 100 tokens, 100%" in figure


def test_a_heat_map_is_as_dark_as_the_share_of_its_column(audit_report: AuditReport) -> None:
    positions = replace(
        audit_report.positions,
        position_edges=(0, 1, 10),
        abs_log_ratio_edges=(0.0, 0.1, 1.0),
        counts=((10, 999), (0, 1)),
    )  # type: ignore[type-var]
    figure = audit_charts.heat_map(positions, ident="x")
    assert figure is not None
    cells = re.findall(r'<rect [^>]*fill="var\(--heat\)"( fill-opacity="([\d.]+)")?[^>]*><title>([^<]*)', figure)
    assert [(opacity, told) for _, opacity, told in cells] == [
        ("", "positions 0 to 0, |log ratio| 0 to 0.1: 10 tokens, 100% of those there"),
        ("1.000", "positions 1 to 9, |log ratio| 0 to 0.1: 999 tokens, 99.9% of those there"),
        ("0.080", "positions 1 to 9, |log ratio| 0.1 to 1: 1 token, 0.1% of those there"),
    ]


def test_the_plot_of_the_draws_tells_densities_beside_the_band_of_honest_ones() -> None:
    histogram = Histogram(edges=(0.0, 0.25, 0.5, 0.75, 1.0), counts=(1000, 1000, 1500, 500))
    figure = audit_charts.pit(histogram, ident="x")
    assert figure is not None
    told = re.findall(r"<title>u ([\d.]+) to ([\d.]+): density ([\d.]+), ([\d,]+) tokens</title>", figure)
    assert [(float(density), count) for _, _, density, count in told] == [
        (1.0, "1,000"), (1.0, "1,000"), (1.5, "1,500"), (0.5, "500"),
    ]  # fmt: skip
    (band,) = re.findall(r'<rect [^>]*y="([\d.]+)"[^>]*height="([\d.]+)" fill="var\(--band\)', figure)
    (line,) = re.findall(r'points="[\d.]+,([\d.]+) [\d.]+,([\d.]+)" fill="none" stroke="var\(--ink\)"', figure)
    assert line[0] == line[1]
    assert float(band[0]) + float(band[1]) / 2 == pytest.approx(float(line[0]), abs=0.02)
    bars = [
        float(y) for y in re.findall(r'y="([\d.]+)" width="[\d.]+" height="[\d.]+" fill="var\(--kept-set\)', figure)
    ]
    scale = (bars[3] - bars[2]) / 1.0
    assert float(band[1]) == pytest.approx(2 * 3 * math.sqrt(0.25 * 0.75 / 4000) / 0.25 * scale, rel=0.01)


def test_drift_puts_each_version_at_its_place_with_its_error(audit_report: AuditReport) -> None:
    rows = tuple(
        replace(audit_report.versions[0], version=version, last_version=version, mean_ratio=ratio, ratio_std_error=0.01)
        for version, ratio in ((10, 0.9), (12, 1.0), (20, 1.1))
    )
    unknown = replace(rows[0], version=None, mean_ratio=7.0)
    missing = replace(rows[0], version=15, last_version=15, mean_ratio=None)
    figure = audit_charts.drift(
        (unknown, rows[0], rows[1], missing, rows[2]),
        lambda row: row.mean_ratio,
        ident="x",
        title="mean ratio",
        honest=1.0,
        error=lambda row: row.ratio_std_error,
    )
    assert figure is not None
    dots = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="3.2"', figure)]
    assert [x for x, _ in dots] == pytest.approx([50, 50 + 342 * 0.2, 392], abs=0.02)
    assert dots[0][1] - dots[1][1] == pytest.approx(dots[1][1] - dots[2][1], abs=0.02)
    (low, high) = re.findall(r'y1="([\d.]+)" y2="([\d.]+)" stroke="var\(--kept-set\)"', figure)[0]
    assert float(low) - float(high) == pytest.approx((dots[0][1] - dots[1][1]) / 0.1 * 0.04, abs=0.05)
    assert "version 12: 1 ± 0.02" in figure and "version None" not in figure and "groups" not in figure


def test_neighbouring_versions_that_are_counted_together_are_named_with_their_first_and_last(
    audit_report: AuditReport,
) -> None:
    rows = tuple(
        replace(audit_report.versions[0], version=first, last_version=first + 15, mean_ratio=1.0)
        for first in (0, 16, 32)
    )
    page = render_audit(replace(audit_report, versions=rows))
    assert (
        "16 to 31</th>" in page and "<title>versions 16 to 31: 1 " in page and "3 groups of versions, 0 to 47" in page
    )
    assert "neighbours are counted together" in page
    assert "neighbours are counted together" not in render_audit(audit_report)
    assert audit_charts.drift(rows[:1], lambda row: row.mean_ratio, ident="x", title="t") is None


def test_sizes_of_one_are_told_as_one() -> None:
    figure = audit_charts.kept_sizes(Histogram(edges=(1.0, 2.0, 4.0), counts=(3, 1)), ident="x")
    assert figure is not None and "|K| 1: 3 tokens, 75.0%" in figure and "|K| 2 to 3: 1 token, 25.0%" in figure


def test_budget_bars_point_where_their_sign_says(audit_report: AuditReport) -> None:
    figure = audit_charts.budget(audit_report.budget, ident="x")
    assert figure is not None
    bars = re.findall(
        r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="[\d.]+" fill="var\((--[a-z-]+)\)" s', figure
    )
    zero = float(re.findall(r'points="([\d.]+),', figure)[-1])
    ends = [(round(float(x) - zero), round(float(x) + float(width) - zero)) for x, width, _ in bars]
    signs = [-1 if left < 0 and right == 0 else 1 for left, right in ends]
    assert signs == [-1, 1, -1, -1]
    assert "truncation: mean -0.105, mean absolute 0.105" in figure


def test_an_axis_keeps_what_lies_beyond_at_its_end() -> None:
    axis = Axis(low=1.0, high=100.0, label="", ticks=(), log=True)
    assert [axis.at(value) for value in (0.0, 1.0, 10.0, 100.0, 1e9)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert Axis(low=3.0, high=3.0, label="", ticks=()).at(3.0) == 0.5


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0.97, 1.004), (0, 1e-7), (12, 3e6), (5, 5)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    ticks = linear_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    assert all(low - 1e-9 * abs(low) <= value <= high * (1 + 1e-9) for value, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)


def test_a_charts_own_texts_are_escaped() -> None:
    axis = Axis(low=0, high=1, label="<a>", ticks=((0.5, "<b>"),))
    chart = Chart(ident="x", title="<c>", description="<d>", x=axis, y=axis)
    chart.box(0, 1, 0, 1, colour="--ink", told="<e>")
    chart.dot(0, 1, colour="--ink", told="<f>")
    assert not re.search(r"<[a-f]>", chart.svg())


def test_tokens_are_coloured_by_their_log_ratio(audit_report: AuditReport) -> None:
    token = replace(audit_report.worst[0].tokens[0], behavior_logprob=-1.0)
    scores = (-1.0, -1.005, -1.05, -0.8, -2.0, -3.0, 0.6)
    tokens = (*(replace(token, score=score) for score in scores), replace(token, sampled=False))
    view = response_view(replace(audit_report.worst[0], tokens=tokens))
    assert [token.shade for token in view.tokens] == [
        "even", "even", "below-1", "above-2", "below-3", "below-4", "above-4", "forced",
    ]  # fmt: skip
    assert dict(view.tokens[4].facts)["ratio"] == "0.368" and dict(view.tokens[4].facts)["log ratio"] == "−1"


def test_without_scores_tokens_are_coloured_by_their_surprise(audit_report: AuditReport) -> None:
    token = replace(audit_report.worst[0].tokens[0], score=None, entropy=1.0)
    tokens = tuple(replace(token, behavior_logprob=b) for b in (-1.0, -2.5, -10.0))
    shown = replace(audit_report.worst[0], tokens=tokens)
    assert [token.shade for token in response_view(shown).tokens] == ["even", "above-1", "above-4"]
    assert "not scored; surprise" in render_audit(replace(audit_report, worst=(shown,)))


def test_of_a_long_response_the_part_around_its_worst_token_is_shown(audit_report: AuditReport) -> None:
    token = replace(audit_report.worst[0].tokens[0], behavior_logprob=-1.0, score=-1.0)
    tokens = [token] * 3000
    tokens[2000] = replace(token, score=-9.0)
    shown: ShownResponse = replace(audit_report.worst[0], tokens=tuple(tokens))
    view = response_view(shown)
    assert (view.before, len(view.tokens), view.after) == (1800, MAX_TOKENS, 800)
    assert view.tokens[200].position == 2000 and view.tokens[200].shade == "below-4"
    text = text_of(render_audit(replace(audit_report, worst=(shown,))))
    assert "1,800 tokens before …" in text and "… 800 tokens after" in text


def test_a_token_shows_its_kept_set_with_the_drawn_one_marked(page: str, audit_report: AuditReport) -> None:
    view = response_view(audit_report.worst[0])
    token = next(token for token in view.tokens if any(drawn for _, _, drawn in token.kept))
    (text, probability, _) = next(member for member in token.kept if member[2])
    assert f'<span class="drawn"><b>{html.escape(text)}</b> {probability}</span>' in page
    assert page.count('tabindex="0">') >= sum(len(shown.tokens) for shown in audit_report.worst)


def test_tokens_without_text_are_told_by_their_id() -> None:
    assert (token_text(7, None), token_text(7, ""), token_text(7, "\n")) == ("[7]", "∅", "↵\n")


def test_the_page_is_written_whole(audit_report: AuditReport, page: str, tmp_path: Path) -> None:
    target = tmp_path / "new" / "audit.html"
    assert write_audit(target, audit_report) == target
    assert target.read_text(encoding="utf-8") == page
    assert [path.name for path in target.parent.iterdir()] == ["audit.html"]


def test_a_missing_package_is_named_with_its_extra(audit_report: AuditReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(MissingDependency, match=r"keptset\[report\]"):
        render_audit(audit_report)
