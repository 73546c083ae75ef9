import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from keptset.scripts.table import PIPE_WIDTH, open_console, print_table


def printed(run, results, width: int, **options) -> str:
    file = io.StringIO()
    print_table(run, results, Console(file=file, width=width, highlight=False, **options))
    return file.getvalue()


@pytest.fixture
def results(make_result):
    return [
        make_result(name="no truncation", kept_size_mean=49152.0, kept_size_median=49152.0, kept_size_p99=49152.0),
        make_result(name="top_p 0.95 top_k 512 T 0.7", tokens=123456),
    ]


@pytest.mark.parametrize("width", [160, 120, 100, 80, 60, 40])
def test_no_line_is_wider_than_the_terminal(run_facts, results, width):
    assert max(len(line) for line in printed(run_facts, results, width).splitlines()) <= width


def test_each_number_stands_in_its_own_column(run_facts, make_result):
    result = make_result(name="top_p", choice_mass_gap=0.0)
    full, kept = result.full_vocabulary_ratio, result.kept_set_ratio
    lines = printed(run_facts, [result], 120).splitlines()
    (at,) = (index for index, line in enumerate(lines) if line.startswith("top_p "))
    assert lines[at].split() == [
        "top_p", f"{result.kept_mass_mean:.5f}", "6.2", "2", "41",
        f"{full.mean:.5f}", f"{full.median:.5f}", f"{full.share_outside:.1%}".replace("100.0%", "100%"),
        f"{kept.mean:.7f}", f"{kept.std_error:.1e}", f"{kept.median:.5f}", "0%", "3.1e-06",
    ]  # fmt: skip
    assert lines[at + 1].split() == [
        "tokens", "400,", "|K|=1", "25.0%", "mean", "-", "mass", f"{result.mass_gap:+.1e}",
        "|log|", f"{kept.choice_abs_log_mean:.1e},", "max", f"{kept.choice_abs_log_max:.1e}", "batch", "1.2e-06",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [160, 120, 100, 80, 60, 40])
def test_every_number_is_shown_whole_at_every_width(run_facts, results, width):
    text = printed(run_facts, results, width)
    result = results[1]
    for number in (
        f"{result.kept_mass_mean:.5f}",
        f"{result.full_vocabulary_ratio.mean:.5f}",
        f"{result.kept_set_ratio.mean:.7f}",
        f"{result.kept_set_ratio.std_error:.1e}",
        f"{result.kept_set_ratio.choice_abs_log_mean:.1e}",
        f"{result.kept_set_ratio.choice_abs_log_max:.1e}",
        f"{result.mass_gap:+.1e}" if result.mass_gap else "0",
        "123,456",
        "49,152",
        "6.2",
        "41",
        "25.0%",
        "100%" if result.full_vocabulary_ratio.share_outside == 1 else "50.0%",
        "3.1e-06",
        "1.2e-06",
    ):
        assert number in text, number


def test_a_wide_table_has_one_header_and_a_narrow_one_two(run_facts, results):
    headers = {width: len(re.findall(r"^setting ", printed(run_facts, results, width), re.M)) for width in (120, 80)}
    assert headers == {120: 1, 80: 2}


def test_a_setting_that_fails_is_marked_without_colour_and_its_reason_given(run_facts, make_result):
    text = printed(run_facts, [make_result(name="good"), make_result(name="bad", noise=1e-2)], 120)
    assert "bad FAILS" in text
    assert "good FAILS" not in text
    assert "bad: mean |log ratio| of kept-set scoring is 1.00e-02; the bound is 2e-05" in text


def test_the_verdict_and_what_scored_are_said(run_facts, results):
    text = printed(run_facts, results, 200)
    assert "All 2 settings pass" in text
    assert "scored by the same decoder, one pass, float32" in text


def test_missing_numbers_read_as_a_dash(run_facts, make_result):
    result = make_result()
    nothing = replace(result, kept_size_mean=math.nan, kept_mass_mean=math.nan)
    text = printed(run_facts, [nothing], 120)
    assert "nan" not in text
    assert re.search(r" - +- +2 ", text)


def test_markup_in_names_is_shown_not_obeyed(run_facts, make_result):
    assert "[red]x[/red]" in printed(replace(run_facts, model="[bold]m"), [make_result(name="[red]x[/red]")], 120)
    assert "[bold]m" in printed(replace(run_facts, model="[bold]m"), [make_result()], 120)


def test_a_pipe_gets_a_fixed_width_and_no_colour(run_facts, results, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    file = io.StringIO()
    print_table(run_facts, results, open_console(file))
    text = file.getvalue()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) == PIPE_WIDTH


def test_a_terminal_that_cannot_show_more_than_ascii_gets_ascii(run_facts, results):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    print_table(run_facts, results, Console(file=file, width=120, highlight=False))
    file.flush()
    assert b"49,152" in file.buffer.getvalue()
