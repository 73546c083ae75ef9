"""What the terminal and the page say alike about an audit: words, numbers, and text that comes from recorded data.

Rollout ids and decoded tokens are what somebody recorded. They may hold terminal control sequences or characters that
turn the direction of writing, and are shown with these spelled out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from keptset.schemas.findings import Example, Severity
from keptset.scripts import number_text
from keptset.trainer_bridge.audit.check import NotTested
from keptset.trainer_bridge.audit.report import AuditFinding, HypothesisTestResult, Totals, VersionRow
from keptset.trainer_bridge.audit.version_table import MAX_ROWS

SMALLEST_P = 1e-300
"""Below this a p-value is no more than a statement about float64."""

TERMS: Mapping[str, tuple[str, str]] = {
    "truncation": ("truncation", "l over the vocabulary less l over the kept set: the trainer's log kept mass"),
    "staleness": ("staleness", "l of the scoring weights less l of the weights that drew the token"),
    "path": ("path and faults", "l of the weights that drew the token less b: rounding on two paths, and faults"),
    "staleness_and_path": (
        "staleness, path and faults",
        "l of the scoring weights less b; the weights that drew the token were not at hand to split it",
    ),
    "total": ("total", "l over the vocabulary less b: what a trainer sees that knows nothing of kept sets"),
}
"""Term of the signed budget -> (name, what it is)."""

_IDENTITY = ("model_id", "engine", "engine_version", "vocab_size", "logits_dtype")
"""What people ask first; the JSON has all of it."""


def visible(text: str) -> str:
    r"""Text with everything that does not print spelled out.

    >>> visible("a\x1b[2J\u202eb\n"), visible(" spaces stay ")
    ('a\\x1b[2J\\u202eb\\n', ' spaces stay ')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def given(value: float | None) -> float:
    """The number, or nan where there is none: what `number_text` writes as a dash."""
    return math.nan if value is None else float(value)


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "token"), plural(4321, "token")
    ('1 token', '4,321 tokens')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def version_name(row: VersionRow) -> str:
    """Of one version, or of the neighbours that are counted together."""
    if row.version is None:
        return "unknown"
    return str(row.version) if row.version == row.last_version else f"{row.version} to {row.last_version}"


def versions_together(versions: Sequence[VersionRow]) -> str | None:
    """That rows count several versions, where they do."""
    if all(row.version == row.last_version for row in versions):
        return None
    return f"There are more than {MAX_ROWS} versions: neighbours are counted together, and a row tells which."


def extent(finding: AuditFinding) -> str:
    """How often, in how many responses, and which share of all responses that is."""
    of_all = f"{number_text.share(finding.share)} of all"
    if all(example.position is None for example in finding.examples) and finding.count == finding.responses:
        return f"{plural(finding.responses, 'response')} ({of_all})"
    return f"{plural(finding.count, 'place')} in {plural(finding.responses, 'response')} ({of_all})"


def beyond_heading(finding: AuditFinding) -> str:
    """The summary without what the heading says already: how often, and what the kind means. May be empty."""
    told = finding.summary
    for known in (f"{plural(finding.count, 'place')} in {plural(finding.responses, 'response')}", finding.kind.meaning):
        if told == known or told.startswith(f"{known}: "):
            told = told[len(known) + 2 :]
    return told


def p_value(value: float) -> str:
    """
    >>> p_value(0.0321), p_value(3e-9), p_value(0)
    ('0.032', '3.0e-09', '<1e-300')
    """
    if value < SMALLEST_P:
        return f"<{SMALLEST_P:.0e}"
    return f"{value:.2g}" if value >= 0.001 else f"{value:.1e}"


def small_number(value: float, *, signed: bool = False) -> str:
    """A statistic, an effect or a log-probability, whatever its size.

    >>> small_number(0.00512), small_number(-31.25), small_number(2.2e-5), small_number(0.1, signed=True)
    ('0.00512', '-31.2', '2.2e-05', '+0.1')
    """
    if math.isnan(value):
        return number_text.NO_DATA
    if abs(value) < 0.001:
        return number_text.small(value, signed=signed)
    return f"{value:+.3g}" if signed else f"{value:.3g}"


def outcome(test: HypothesisTestResult) -> str:
    """What became of a test."""
    if test.informational:
        return "not judged"
    return "rejected" if test.rejected else "holds"


def what_was_read(totals: Totals) -> str:
    """One sentence of how much."""
    part = "" if totals.share_read >= 1 else f", a sample of {number_text.share(totals.share_read)}"
    return (
        f"{plural(totals.responses, 'response')}, {plural(totals.tokens, 'token')} ({totals.sampled_tokens:,} "
        f"sampled), {plural(totals.kept_ids, 'kept id')} in {plural(totals.files, 'file')}{part}"
    )


def by_reason(not_tested: Sequence[NotTested]) -> list[tuple[str, str]]:
    """(checks, reason), one for each reason: many checks lack the same thing."""
    checks: dict[str, list[str]] = {}
    for entry in not_tested:
        checks.setdefault(entry.reason, []).append(entry.check)
    return [(", ".join(names), reason) for reason, names in checks.items()]


DAMAGE_ADVICE = (
    "Copy them again from where they were written; if they are damaged there too, what they held is lost to the audit."
)


def damage_told(file: Example) -> tuple[str, str]:
    """A damaged file: its name, and what follows it. Errors name the file themselves, perhaps by its absolute path.

    >>> damage_told(Example(rollout_id="a.arrow", position=None, detail="a.arrow is damaged: crc32"))
    ('a.arrow', ' is damaged: crc32')
    >>> damage_told(Example(rollout_id="a.arrow", position=None, detail="cannot read a.arrow: no access"))
    ('a.arrow', ': cannot read it: no access')
    """
    name = file.rollout_id
    for known in (os.path.abspath(name), name):
        if file.detail.startswith(known):
            return name, file.detail[len(known) :]
    return name, f": {file.detail.replace(os.path.abspath(name), 'it').replace(name, 'it')}"


def identity_line(identity: Mapping[str, str]) -> str:
    """Which model and engine recorded something."""
    told = ", ".join(f"{name} {identity[name]}" for name in _IDENTITY if name in identity)
    return told or "no model or engine is recorded"


def of_severity(findings: Sequence[AuditFinding], severity: Severity) -> int:
    return sum(finding.severity is severity for finding in findings)


def counted(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    """
    >>> counted({"stop": 1200, "length": 3})
    'stop 1,200, length 3'
    """
    return ", ".join(f"{visible(str(name))} {count:,}" for name, count in counts.items())


def group_sizes(groups: Mapping[int, int]) -> str:
    """
    >>> group_sizes({4: 249, 1: 1})
    '249 of 4 responses, 1 of 1 response'
    """
    return ", ".join(f"{count:,} of {plural(size, 'response')}" for size, count in sorted(groups.items(), reverse=True))
