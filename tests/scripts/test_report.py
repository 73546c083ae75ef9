import html
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from keptset.schemas.errors import MissingDependency, StorageError
from keptset.scripts.histogram_svg import HistogramAxes, histogram_svg
from keptset.scripts.ratio_table import HISTOGRAM_EDGES
from keptset.scripts.report import render_report, write_report

VOID = {"meta", "col", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Text, ids, references and nesting of a page; a tag closed out of order fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag in {"td", "th"}:
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.cells[-1] += data

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]

    def row(self, name: str) -> list[str]:
        """Texts of the first table row whose header begins with `name`."""
        at = next(i for i, cell in enumerate(self.cells) if cell.split("\n")[0].strip() == name)
        return [cell.strip() for cell in self.cells[at : at + 13]]


def number(text: str) -> float:
    """A number as the page writes it."""
    superscripts = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹−", "-0123456789-")
    text = text.replace("\N{NO-BREAK SPACE}", " ").replace(",", "").replace(" × 10", "e").translate(superscripts)
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


@pytest.fixture
def results(make_result):
    return [make_result(name="control"), make_result(name="top_p 0.7", tokens=1200)]


@pytest.fixture
def page(run_facts, results) -> str:
    return render_report(run_facts, results)


def test_the_table_holds_the_numbers_it_was_given(page, results):
    result = results[1]
    row = Page(page).row("top_p 0.7")
    full, kept = result.full_vocabulary_ratio, result.kept_set_ratio
    kept_mean, kept_error = row[10].split("±")
    shown = [number(text) for text in (*row[1:10], kept_mean, kept_error, *row[11:13])]
    given = [
        result.tokens,
        result.kept_mass_mean,
        result.kept_size_mean,
        result.kept_size_median,
        result.kept_size_p99,
        result.kept_size_one_share,
        full.mean,
        full.median,
        full.share_outside,
        kept.mean,
        kept.std_error,
        kept.median,
        kept.share_outside,
    ]
    tolerances = [0, 5e-6, 0.05, 0, 0.5, 5e-4, 5e-6, 5e-6, 5e-4, 5e-8, kept.std_error * 0.05, 5e-6, 5e-4]
    for got, want, tolerance in zip(shown, given, tolerances, strict=True):
        assert abs(got - want) <= tolerance * 1.000001


def test_floors_and_run_facts_are_on_the_page(page, run_facts):
    text = html.unescape(re.sub(r"<[^>]+>", " ", page)).replace("\N{NO-BREAK SPACE}", " ")
    for fact in (
        "3.1 × 10⁻⁶",
        "1.2 × 10⁻⁶",
        run_facts.model,
        run_facts.engine,
        run_facts.scorer,
        run_facts.command,
        run_facts.machine,
        "numpy 2.4.0, ray 2.60.0",
        "3 February 2031, 04:05 UTC",
        "2 min 17 s",
        "1,320 responses",
        "1,600 sampled tokens",
        "All 2 settings pass",
    ):
        assert fact in text, fact


def test_the_page_loads_nothing_and_names_no_address(page):
    assert not re.search(r"[a-z]+://", page, re.IGNORECASE)
    parsed = Page(page)
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
    assert parsed.attributes("src") == []
    assert all(reference.startswith("#") for reference in parsed.attributes("href"))
    assert not re.search(r"@import|url\((?!#)", page)


def test_there_is_a_pair_of_titled_figures_per_setting(page, results):
    parsed = Page(page)
    figures = [attrs for tag, attrs in parsed.tags if tag == "svg"]
    assert len(figures) == 2 * len(results)
    ids = parsed.attributes("id")
    assert len(ids) == len(set(ids)), "ids must be unique in a page"
    for attrs in figures:
        assert attrs["role"] == "img"
        assert set((attrs["aria-labelledby"] or "").split()) <= set(ids)
    for reference in [*parsed.attributes("href"), *re.findall(r"url\((#[^)]+)\)", page)]:
        assert reference[1:] in ids


def test_header_cells_say_what_they_head(page):
    assert all(attrs.get("scope") in {"col", "row", "colgroup"} for tag, attrs in Page(page).tags if tag == "th")


def test_figures_take_their_colours_from_the_page_in_light_and_dark(page):
    figures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b", figures)
    assert "font-family" not in figures
    variables = set(re.findall(r"var\((--[a-z-]+)\)", page))
    _, light, dark, *_ = page.split(":root {")
    for variable in variables:
        assert f"{variable}:" in light.split("}")[0]
        assert f"{variable}:" in dark.split("}")[0]


def test_hostile_text_is_escaped_wherever_it_goes(run_facts, make_result):
    evil = '"><script>alert(1)</script>&'
    run = replace(run_facts, **dict.fromkeys(("model", "engine", "scorer", "machine", "command", "dtype"), evil))
    run = replace(run, versions={evil: evil})
    page = render_report(run, [make_result(name=evil, sampling=evil, noise=1e-2)])
    assert "<script" not in page
    assert not any(tag == "script" for tag, _ in Page(page).tags)


def test_a_failed_setting_is_named_with_its_reason(run_facts, make_result):
    page = render_report(run_facts, [make_result(name="good"), make_result(name="off", noise=1e-2)])
    assert "1 of 2 settings break a bound: off." in page
    assert "off: mean |log ratio| of kept-set scoring is 1.00e-02" in html.unescape(page)


def test_a_run_without_results_is_still_a_page(run_facts):
    assert "Nothing was measured." in render_report(run_facts, [])


def test_equal_results_give_equal_pages(run_facts, results, page):
    assert render_report(run_facts, results) == page


def test_bars_stand_where_the_tokens_are():
    counts = [0] * (len(HISTOGRAM_EDGES) - 1)
    counts[10] = 1
    axes = HistogramAxes.around([counts])
    assert axes.lowest_log_ratio <= HISTOGRAM_EDGES[10]
    figure = histogram_svg(counts, ident="x", title="t", description="d", bar_colour="var(--bar)", axes=axes)
    (bars,) = re.findall(r'<path d="([^"]+)"[^>]*fill: var\(--bar\)', figure)
    points = [tuple(map(float, pair.split()[1:])) for pair in re.findall(r"[ML] [\d.]+ [\d.]+", bars)]
    base = max(y for _, y in points)
    raised = sorted({x for x, y in points if y < base - 1})
    left, width = 45.864, 301.644
    scale = width / (HISTOGRAM_EDGES[-1] - axes.lowest_log_ratio)
    wanted = [left + (edge - axes.lowest_log_ratio) * scale for edge in HISTOGRAM_EDGES[10:12]]
    assert raised == pytest.approx(wanted, abs=0.01)


def test_a_report_replaces_an_older_one_whole_and_leaves_no_temporary_file(run_facts, results, tmp_path):
    target = tmp_path / "new folder" / "report.html"
    assert write_report(target, run_facts, results) == target
    write_report(target, run_facts, results[:1])
    assert target.read_text(encoding="utf-8") == render_report(run_facts, results[:1])
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_says_where_and_leaves_nothing(run_facts, results, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write the report to .*file/report\.html"):
        write_report(tmp_path / "file" / "report.html", run_facts, results)


def test_a_failed_replacement_leaves_the_older_report(run_facts, results, tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("older")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(StorageError, match="No space left on device"):
        write_report(target, run_facts, results)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert target.read_text() == "older"


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_its_extra(run_facts, results, monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingDependency, match=r"keptset\[report\]"):
        render_report(run_facts, results)
