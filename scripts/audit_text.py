"""An audit on a terminal: the verdict, what was not tested, the findings, then the numbers behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keptset.schemas.findings import Example, Severity
from keptset.scripts import number_text
from keptset.scripts.audit_ratios import settings_legend, settings_table
from keptset.scripts.audit_words import (
    DAMAGE_ADVICE,
    TERMS,
    beyond_heading,
    by_reason,
    counted,
    damage_told,
    extent,
    given,
    group_sizes,
    identity_line,
    outcome,
    p_value,
    small_number,
    version_name,
    versions_together,
    visible,
    what_was_read,
)
from keptset.trainer_bridge.audit.comparison import Comparison
from keptset.trainer_bridge.audit.report import AuditFinding, AuditReport, HypothesisTestResult, VersionRow

SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}
VERSIONS_SHOWN = 12
"""Rows of the table of versions; of more the first and the last are shown."""

_INDENT = 2


def print_audit(report: AuditReport, console: Console) -> None:
    """Everything but the plots and whole responses, which are on the page."""
    style = "bold green" if report.severity is None else SEVERITY_STYLES[report.severity]
    console.print(_Trimmed(Text(visible(report.verdict), style=style)))
    console.print(_Trimmed(_dim(what_was_read(report.totals) + ".")))
    for title, body in _sections(report, console.width):
        console.print()
        console.print(_Trimmed(Text(title, style="bold")))
        for part in body:
            console.print(_Trimmed(part))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Two recordings of the same rollouts: whether they part, then where and since when."""
    verdict = "The recordings part." if comparison.parts else "The recordings are the same."
    console.print(Text(verdict, style="bold red" if comparison.parts else "bold green"))
    for line in comparison.lines():
        console.print(_Trimmed(_indented(line, _INDENT + len(line) - len(line.lstrip()))))


class _Trimmed:
    """Without the spaces with which lines are filled up to a width: a log keeps them."""

    def __init__(self, body: RenderableType) -> None:
        self._body = body

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._body, options, pad=False):
            text = Text(end="\n", no_wrap=True)
            for segment in line:
                text.append(segment.text, segment.style)
            text.rstrip()
            yield text


def _sections(report: AuditReport, width: int) -> Iterator[tuple[str, Sequence[RenderableType]]]:
    if report.totals.damaged_files:
        lines = [_damaged(file) for file in report.totals.damaged_files]
        yield f"Files not read to their end ({len(lines)})", [*lines, _indented(DAMAGE_ADVICE)]
    for title, asked_for in (("Not tested", True), ("Not asked for", False)):
        if left_out := by_reason([entry for entry in report.not_tested if entry.asked_for is asked_for]):
            yield title, [_indented(f"{checks}: {reason}") for checks, reason in left_out]
    if report.findings:
        yield f"Findings ({len(report.findings)})", _apart([_finding(finding) for finding in report.findings])
    if report.tests:
        yield "Tests", [_tests(report.tests)]
    if report.settings:
        yield "Settings", [settings_table(report.settings, width), _dim(settings_legend(report.settings))]
    if report.budget:
        yield "Signed budget of the log ratio over the vocabulary, per token in nats", [_budget(report)]
    if report.floors is not None:
        yield "Floors", [_indented(_floors(report))]
    if len(report.versions) > 1:
        told = "Versions in rows of several" if versions_together(report.versions) else "Versions"
        yield f"{told} ({len(report.versions)})", _versions(report.versions)
    if report.totals.responses:
        yield "Responses", [_indented(line) for line in _responses(report)]


def _apart(parts: Sequence[RenderableType]) -> list[RenderableType]:
    """With an empty line between."""
    return [piece for part in parts for piece in ("", part)][1:]


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def _indented(text: str | Text, depth: int = _INDENT) -> Padding:
    return Padding(Text(visible(text.strip())) if isinstance(text, str) else text, (0, 0, 0, depth), expand=False)


def _finding(finding: AuditFinding) -> RenderableType:
    """A root cause: what, how often, where, what it explains, what to do."""
    rows = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    rows.add_column(no_wrap=True, min_width=8)
    rows.add_column(overflow="fold")
    rows.add_row(
        Text(finding.severity.value, style=SEVERITY_STYLES[finding.severity]),
        Text.assemble((finding.kind.value, "bold"), f": {finding.kind.meaning}"),
    )
    rows.add_row("", Text(extent(finding), style="bold"))
    if told := beyond_heading(finding):
        rows.add_row("", Text(visible(told)))
    for number, example in enumerate(finding.examples):
        rows.add_row(Text("" if number else "such as", style="dim"), _place(example))
    for number, symptom in enumerate(finding.symptoms):
        text = f"{symptom.kind.value}, {extent(symptom)}: {beyond_heading(symptom) or symptom.kind.meaning}"
        rows.add_row(Text("" if number else "explains", style="dim"), Text(visible(text)))
    rows.add_row(Text("to do", style="dim"), Text(visible(finding.advice)))
    return Padding(rows, (0, 0, 0, _INDENT), expand=False)


def _place(example: Example) -> Text:
    where = "" if example.position is None else f" token {example.position}"
    return Text.assemble((visible(example.rollout_id), "cyan"), f"{where}: {visible(example.detail)}")


def _damaged(file: Example) -> RenderableType:
    name, told = damage_told(file)
    return _indented(Text.assemble((visible(name), "cyan"), visible(told)))


def _tests(tests: Sequence[HypothesisTestResult]) -> Table:
    table = _table(("test", "statistic", "p", "effect", "bound", "over", "outcome"))
    for test in tests:
        style = "bold red" if test.rejected and not test.informational else ""
        table.add_row(
            visible(test.name),
            small_number(test.statistic),
            p_value(test.p_value),
            f"{visible(test.effect_name)} {small_number(test.effect)}",
            small_number(test.effect_bound),
            f"{test.count:,}",
            Text(outcome(test), style=style),
        )
    return table


def _budget(report: AuditReport) -> Table:
    table = _table(("term", "mean", "mean |term|", "what it is"), left=(0, 3))
    for term, value in (report.budget or {}).items():
        name, meaning = TERMS.get(term, (term, ""))
        mean, mean_abs = small_number(given(value.mean), signed=True), small_number(given(value.mean_abs))
        table.add_row(Text(visible(name), style="bold" if term == "total" else ""), mean, mean_abs, meaning)
    return table


def _floors(report: AuditReport) -> str:
    floors = report.floors
    assert floors is not None
    path, path_p99, batch, batch_p99 = (
        number_text.small(given(value))
        for value in (floors.path_mean_abs, floors.path_p99_abs, floors.batch_mean_abs, floors.batch_p99_abs)
    )
    return (
        f"one pass against token by token: mean |d| {path}, p99 {path_p99}; order and padding changed: mean |d| "
        f"{batch}, p99 {batch_p99}; over {floors.tokens:,} tokens with |K| > 1. Printed, never judged."
    )


def _versions(versions: Sequence[VersionRow]) -> list[RenderableType]:
    names = ("version", "tokens", "mean lag", "-b - H", "kept mass", "mean ratio", "error", "mean log", "mean |log|")
    shown = list(versions)
    if len(shown) > VERSIONS_SHOWN:
        shown = [*shown[: VERSIONS_SHOWN // 2], *shown[-VERSIONS_SHOWN // 2 :]]
    table = _table(names)
    for row in shown:
        table.add_row(
            version_name(row),
            f"{row.tokens:,}",
            number_text.ratio(given(row.mean_lag), 1),
            small_number(given(row.surprisal_excess), signed=True),
            number_text.ratio(given(row.kept_mass_mean)),
            number_text.ratio(given(row.mean_ratio)),
            number_text.small(given(row.ratio_std_error)),
            small_number(given(row.mean_log_ratio), signed=True),
            small_number(given(row.mean_abs_log_ratio)),
        )
    left_out, together = len(versions) - len(shown), versions_together(versions)
    notes = [f"{left_out} rows between them are left out here"] if left_out else []
    return [table, *(_indented(note) for note in (*notes, *([together] if together else [])))]


def _responses(report: AuditReport) -> Iterator[str]:
    yield from dict.fromkeys(identity_line(identity) for identity in report.identities)
    yield f"ended by: {counted(report.finish_reasons) or 'nothing recorded'}"
    yield f"log-probabilities over: {counted(report.logprob_domains) or 'nothing recorded'}"
    if report.group_sizes:
        yield f"groups: {group_sizes(report.group_sizes)}"


def _table(names: Sequence[str], left: Sequence[int] = (0,)) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, name in enumerate(names):
        table.add_column(
            Text(name, style="dim"), justify="left" if number in left else "right", overflow="fold", no_wrap=False
        )
    return table
