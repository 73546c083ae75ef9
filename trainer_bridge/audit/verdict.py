"""From what the checks saw to findings: tests decided together, causes told from symptoms, one line in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from keptset.schemas.findings import FindingKind, Severity
from keptset.trainer_bridge.audit.check import Evidence, HypothesisTest
from keptset.trainer_bridge.audit.folding import explained_by
from keptset.trainer_bridge.audit.report import AuditFinding, HypothesisTestResult, Totals

DRAW_TESTS = ("surprisal", "draws")
"""Those that assume that nobody chose rollouts by what was drawn."""
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO)
_KINDS = tuple(FindingKind)


def decide(tests: Sequence[HypothesisTest], *, family_level: float, filtered: bool) -> tuple[HypothesisTestResult, ...]:
    """Holm's step-down procedure over all tests that may lead to a finding, and the bound on each effect.

    The smallest of n p-values is held against level / n, the next against level / (n - 1), until one is larger.
    """
    judged = [test for test in tests if not (filtered and test.name in DRAW_TESTS)]
    rejected: set[str] = set()
    for step, test in enumerate(sorted(judged, key=lambda test: test.p_value)):
        if test.p_value > family_level / (len(judged) - step):
            break
        rejected.add(test.name)
    return tuple(
        HypothesisTestResult(
            **vars(test),
            rejected=test.name in rejected and test.effect >= test.effect_bound,
            informational=filtered and test.name in DRAW_TESTS,
        )
        for test in tests
    )


def fold(
    evidence: Sequence[Evidence], results: Sequence[HypothesisTestResult], responses: int, level: float
) -> tuple[AuditFinding, ...]:
    """The findings, errors first; what is explained by another is among its symptoms.

    `responses` is how many there are, of which a finding's share is told.
    """
    standing = [seen for seen in (_standing(e, results, level) for e in evidence) if seen is not None]
    by_kind = {seen.kind: seen for seen in standing if seen.severity is not Severity.INFO}
    cause_of: dict[FindingKind, FindingKind] = {}
    for seen in standing:
        if seen.kind in by_kind and (cause := _cause(seen, by_kind)) is not None:
            cause_of[seen.kind] = cause
    roots = [seen for seen in standing if seen.kind not in cause_of]
    symptoms: dict[FindingKind, list[AuditFinding]] = {}
    for seen in standing:
        if seen.kind in cause_of:
            symptoms.setdefault(_root(seen.kind, cause_of), []).append(_finding(seen, responses))
    findings = [_finding(seen, responses, tuple(_sorted(symptoms.get(seen.kind, ())))) for seen in roots]
    return tuple(_sorted(findings))


def _standing(evidence: Evidence, results: Sequence[HypothesisTestResult], level: float) -> Evidence | None:
    """Evidence as the test leaves it that it stands on; None where it falls."""
    if evidence.test is None:
        return evidence
    result = next(result for result in results if result.name == evidence.test)
    if result.rejected:
        return evidence
    if result.informational and result.p_value <= level and result.effect >= result.effect_bound:
        told = f"{evidence.summary}; expected where rollouts were filtered"
        return Evidence(**{**vars(evidence), "severity": Severity.INFO, "summary": told})
    return None


def _cause(seen: Evidence, by_kind: dict[FindingKind, Evidence]) -> FindingKind | None:
    """What explains all of it; of several causes the one that is seen with it most."""
    causes = [kind for kind in explained_by(seen.kind) if kind in by_kind]
    if not causes:
        return None
    if seen.test is not None:
        return causes[0]
    told = [kind for kind in causes if any(kind in others for others in seen.together)]
    alone = sum(count for others, count in seen.together.items() if not others & set(causes))
    if told and not alone:
        return max(told, key=lambda kind: sum(n for others, n in seen.together.items() if kind in others))
    wide = [kind for kind in causes if _covers(by_kind[kind], seen)]
    return wide[0] if wide else None


def _covers(cause: Evidence, seen: Evidence) -> bool:
    """Whether a cause that a model found is there wherever this is. Where it does not say in which of its responses
    this shows, it explains as many as it has."""
    shown = sum(count for others, count in cause.together.items() if seen.kind in others)
    return (shown or cause.responses) >= seen.responses


def _root(kind: FindingKind, cause_of: dict[FindingKind, FindingKind]) -> FindingKind:
    while kind in cause_of:
        kind = cause_of[kind]
    return kind


def _finding(seen: Evidence, responses: int, symptoms: tuple[AuditFinding, ...] = ()) -> AuditFinding:
    return AuditFinding(
        kind=seen.kind,
        severity=seen.severity,
        count=seen.count,
        responses=seen.responses,
        share=seen.responses / responses if responses else 0.0,
        summary=seen.summary,
        advice=seen.advice,
        examples=seen.examples,
        symptoms=symptoms,
    )


def _sorted(findings: Sequence[AuditFinding]) -> list[AuditFinding]:
    return sorted(findings, key=lambda f: (_ORDER.index(f.severity), -f.responses, _KINDS.index(f.kind)))


def worst_severity(findings: Sequence[AuditFinding]) -> Severity | None:
    """The highest among them."""
    return min((f.severity for f in findings), key=_ORDER.index, default=None)


def verdict_line(findings: Sequence[AuditFinding], totals: Totals, not_tested: int) -> str:
    """One line in plain words."""
    looked = f"{totals.responses:,} responses with {totals.sampled_tokens:,} sampled tokens"
    if totals.share_read < 1:
        looked = f"a sample of {looked}"
    counts = [(sum(f.severity is severity for f in findings), severity.value) for severity in _ORDER[:2]]
    told = [f"{n} {word}{'s' * (n > 1)}" for n, word in counts if n]
    damaged = len(totals.damaged_files)
    tail = f"; {damaged} damaged {'file' if damaged == 1 else 'files'} not read" if damaged else ""
    tail += f"; {not_tested} {'check' if not_tested == 1 else 'checks'} could not be made" if not_tested else ""
    if not totals.responses:
        return f"Nothing was there to audit{tail}."
    if not told:
        return f"Nothing wrong was found in {looked}{tail}."
    first = findings[0]
    which = "" if sum(n for n, _ in counts) == 1 else "first of all "
    return f"{' and '.join(told)} in {looked}, {which}{first.kind.value}: {first.kind.meaning}{tail}."
