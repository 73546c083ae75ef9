"""An audit on a terminal."""

import dataclasses
import io
import os
import re
from dataclasses import replace

import pytest
from rich.console import Console

from keptset.schemas.findings import Example
from keptset.scripts.audit_text import VERSIONS_SHOWN, print_audit
from keptset.scripts.audit_words import beyond_heading
from keptset.trainer_bridge.audit.check import NotTested
from keptset.trainer_bridge.audit.report import AuditReport, Totals

EMPTY = AuditReport(
    verdict="nothing to find in 0 responses",
    severity=None,
    totals=Totals(files=1, damaged_files=(), responses=0, tokens=0, sampled_tokens=0, kept_ids=0, share_read=1.0),
    identities=(),
    findings=(),
    tests=(),
    not_tested=(),
    settings=(),
    versions=(),
    finish_reasons={},
    group_sizes={},
    logprob_domains={},
    kept_sizes=None,
    pit=None,
    kept_log_ratios=None,
    full_log_ratios=None,
    positions=None,
    budget=None,
    floors=None,
    worst=(),
)


def printed(report: AuditReport, width: int = 120, **options: object) -> str:
    file = io.StringIO()
    print_audit(report, Console(file=file, width=width, highlight=False, **options))
    return file.getvalue()


def test_the_verdict_comes_first_then_what_was_not_tested_then_findings(audit_report: AuditReport) -> None:
    text = printed(audit_report)
    assert text.startswith(audit_report.verdict + "\n")
    titles = [
        "Files not read",
        "Not tested",
        "Findings (3)",
        "Tests",
        "Settings",
        "Signed budget",
        "Floors",
        "Versions",
    ]
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)


def test_checks_that_lack_the_same_thing_are_told_together(audit_report: AuditReport) -> None:
    assert "draws, distributions: no kept distributions are recorded; record them" in printed(audit_report)


def test_a_root_cause_has_its_numbers_examples_symptoms_and_advice_under_it(audit_report: AuditReport) -> None:
    text = printed(audit_report)
    cause = text[text.index("error     mask_shifted") : text.index("warning   seed_reused")]
    finding = audit_report.findings[0]
    assert "913 places in 20 responses (2.0% of all)" in cause
    assert finding.summary in cause and finding.advice in cause
    for example in finding.examples:
        assert f"{example.rollout_id} token {example.position}: {example.detail}" in cause
    assert "explains  unit_mean, 47,512 places in 1,000 responses (100% of all)" in cause
    assert "4 responses (0.4% of all)" in text


def test_a_summary_does_not_say_again_what_the_heading_says(audit_report: AuditReport) -> None:
    finding = replace(audit_report.findings[0], symptoms=(), count=3, responses=2)
    meaning = finding.kind.meaning
    for summary, beyond in (
        (f"3 places in 2 responses: {meaning}", ""),
        (meaning, ""),
        (f"{meaning}: of 9 responses 2 are off", "of 9 responses 2 are off"),
        ("4 places in 2 responses: more", "4 places in 2 responses: more"),
    ):
        told = replace(finding, summary=summary)
        assert beyond_heading(told) == beyond
        assert printed(replace(audit_report, findings=(told,))).count(meaning) == 1


def test_each_test_stands_with_its_outcome(audit_report: AuditReport) -> None:
    lines = printed(audit_report).splitlines()
    (surprisal,) = (line.split() for line in lines if line.startswith("surprisal "))
    assert " ".join(surprisal) == "surprisal 1.31 0.19 |mean of -b - H| 0.0021 0.005 47,512 holds"
    (unit_mean,) = (line.split() for line in lines if line.startswith("unit mean "))
    assert unit_mean[-5:] == ["1|", "0.0388", "0.002", "1,000", "rejected"]
    assert "<1e-300" in unit_mean
    filtered = replace(audit_report.tests[1], informational=True)
    assert "not judged" in printed(replace(audit_report, tests=(filtered,)))


def test_settings_budget_floors_and_versions_hold_their_numbers(audit_report: AuditReport) -> None:
    text = printed(audit_report)
    for number in (
        "0.9999998",
        "7.3e-08",
        "0.90620",
        "0.9351201",
        "28,512",
        "-0.105",
        "+0.0121",
        "2.3e-06",
        "0.98500",
        "+0.002",
        "max 7.31",
    ):
        assert number in text, number
    assert "stop 903, length 97" in text and "249 of 4 responses" in text
    assert "model_id Tiny-1M" in text


@pytest.mark.parametrize("width", [160, 120, 100, 80, 60, 40])
def test_no_line_is_wider_than_the_terminal(audit_report: AuditReport, width: int) -> None:
    assert max(len(line) for line in printed(audit_report, width).splitlines()) <= width


@pytest.mark.parametrize("width", [120, 80, 41, 40, 39, 38])
def test_no_line_ends_in_spaces(audit_report: AuditReport, width: int) -> None:
    lines = printed(audit_report, width).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    colour = printed(audit_report, width, force_terminal=True, color_system="standard")
    assert "\x1b[1;31merror" in colour and not re.search(r" (\x1b\[[0-9;]*m)*\n", colour)


def test_a_damaged_file_is_named_once_with_what_to_do(audit_report: AuditReport) -> None:
    there = os.path.abspath("flip/x.arrow")
    files = tuple(
        Example(rollout_id="flip/x.arrow", position=None, detail=detail)
        for detail in (f"{there} is damaged: crc32", "flip/x.arrow, batch 3: its checksum", f"cannot read {there}: no")
    )
    text = printed(replace(audit_report, totals=replace(audit_report.totals, damaged_files=files)))
    assert "\n  flip/x.arrow is damaged: crc32\n  flip/x.arrow, batch 3: its checksum\n" in text
    assert "\n  flip/x.arrow: cannot read it: no\n  Copy them again from where they were written" in text


def test_what_nobody_asked_for_stands_apart(audit_report: AuditReport) -> None:
    entry = NotTested(check="staleness", reason="no bound was asked for", asked_for=False)
    text = printed(replace(audit_report, not_tested=(*audit_report.not_tested, entry)))
    assert "\nNot asked for\n  staleness: no bound was asked for\n" in text
    assert "staleness" not in text[text.index("Not tested") : text.index("Not asked for")]


def test_without_scores_the_table_has_no_empty_columns(audit_report: AuditReport) -> None:
    rows = tuple(replace(row, kept_ratio=None, full_ratio=None) for row in audit_report.settings)
    text = printed(replace(audit_report, settings=rows, budget=None, floors=None))
    assert "kept set" in text and "ratio, " not in text and "Signed budget" not in text


def test_an_audit_of_nothing_is_a_verdict_and_what_was_read() -> None:
    assert printed(EMPTY).splitlines() == [
        "nothing to find in 0 responses",
        "0 responses, 0 tokens (0 sampled), 0 kept ids in 1 file.",
    ]


def test_a_sample_says_that_it_is_one() -> None:
    text = printed(replace(EMPTY, totals=replace(EMPTY.totals, share_read=0.25)))
    assert "in 1 file, a sample of 25.0%." in text


def test_many_versions_are_cut_in_the_middle_and_counted(audit_report: AuditReport) -> None:
    rows = tuple(
        replace(audit_report.versions[0], version=1000 + n, last_version=1000 + n) for n in range(VERSIONS_SHOWN + 5)
    )
    text = printed(replace(audit_report, versions=rows))
    assert "1000 " in text and str(1000 + VERSIONS_SHOWN + 4) in text and "5 rows between them" in text
    assert "neighbours" not in text


def test_neighbouring_versions_that_are_counted_together_are_named(audit_report: AuditReport) -> None:
    rows = tuple(replace(audit_report.versions[0], version=n, last_version=n + 15) for n in (0, 16))
    text = printed(replace(audit_report, versions=rows))
    assert "Versions in rows of several (2)" in text and "16 to 31" in text
    assert "more than 200 versions: neighbours are counted together" in " ".join(text.split())


def spoilt(value: object, evil: str) -> object:
    """The record with every text replaced."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: spoilt(getattr(value, field.name), evil) for field in dataclasses.fields(value)}
        return replace(value, **fields)
    if isinstance(value, tuple):
        return tuple(spoilt(entry, evil) for entry in value)
    if isinstance(value, dict):
        return {spoilt(key, evil): spoilt(entry, evil) for key, entry in value.items()}
    return evil if type(value) is str else value


def test_control_sequences_and_markup_in_recorded_text_are_shown_not_obeyed(audit_report: AuditReport) -> None:
    text = printed(spoilt(audit_report, "x\x1b[2J\x9b\u202e[red]\r"), 200)  # type: ignore[arg-type]
    assert not set(text) & set("\x1b\x9b\u202e\r")
    assert "x\\x1b[2J\\x9b\\u202e[red]\\r" in text
