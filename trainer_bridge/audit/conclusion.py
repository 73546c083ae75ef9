"""From all that was counted to the report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from keptset.schemas.columns import Identity
from keptset.schemas.errors import DamagedFile, SchemaError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.audit.check import Check, NotTested, Outcome
from keptset.trainer_bridge.audit.checks import NEED_SCORES, not_asked_for
from keptset.trainer_bridge.audit.checks.ratios import Ratios
from keptset.trainer_bridge.audit.checks.worst import Worst, WorstPlace
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.partial import Partial
from keptset.trainer_bridge.audit.planning import Plan, Unit
from keptset.trainer_bridge.audit.report import AuditReport, ShownResponse, Totals
from keptset.trainer_bridge.audit.shown import shown_response
from keptset.trainer_bridge.audit.unit_audit import batches_of, scorer_of
from keptset.trainer_bridge.audit.verdict import decide, fold, verdict_line, worst_severity


def conclude(partial: Partial, plan: Plan, options: AuditOptions) -> AuditReport:
    """The report of an audit whose units were all counted. Reads the worst responses again, to show them."""
    outcomes = [check.outcome() for check in partial.checks]
    tests = [test for outcome in outcomes for test in outcome.tests]
    evidence = [*(e for outcome in outcomes for e in outcome.evidence), *plan.repeats]
    not_tested = (*_not_tested(partial.checks, outcomes), *not_asked_for(options))
    results = decide(tests, family_level=options.family_level, filtered=options.filtered)
    findings = fold(evidence, results, partial.responses, options.family_level)
    known = {entry.rollout_id for entry in plan.damaged}
    totals = Totals(
        files=len(plan.inputs),
        damaged_files=(*plan.damaged, *(entry for entry in partial.damaged_files() if entry.rollout_id not in known)),
        responses=partial.responses,
        tokens=partial.tokens,
        sampled_tokens=partial.sampled_tokens,
        kept_ids=partial.kept_ids,
        share_read=plan.share_read,
    )
    report = AuditReport(
        verdict=verdict_line(findings, totals, sum(entry.asked_for for entry in not_tested)),
        severity=worst_severity(findings),
        totals=totals,
        identities=tuple(_told(identity) for identity in partial.identities),
        findings=findings,
        tests=results,
        not_tested=not_tested,
        settings=(),
        versions=(),
        finish_reasons={},
        group_sizes=dict(plan.group_sizes),
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
    for check in partial.checks:
        report = check.contribute(report)
    places = [place for check in partial.checks if isinstance(check, Worst) for place in check.places]
    return replace(report, worst=_shown(places, plan, options))


def _not_tested(checks: Sequence[Check], outcomes: Sequence[Outcome]) -> Iterator[NotTested]:
    """What the checks could not test. Where nothing could be scored, every check of scores has that one reason."""
    reasons = [
        outcome.not_tested[0].reason
        for check, outcome in zip(checks, outcomes, strict=True)
        if isinstance(check, Ratios) and check.scored_nothing
    ]
    for entry in (entry for outcome in outcomes for entry in outcome.not_tested):
        yield replace(entry, reason=reasons[0]) if reasons and entry.check in NEED_SCORES else entry


def _told(identity: Identity) -> dict[str, str]:
    return {name: str(value) for name, value in vars(identity).items() if value is not None}


def _shown(places: Sequence[WorstPlace], plan: Plan, options: AuditOptions) -> tuple[ShownResponse, ...]:
    found: dict[WorstPlace, ShownResponse] = {}
    for number in {place.unit for place in places}:
        # What cannot be read a second time is not shown; it was counted all the same.
        with contextlib.suppress(DamagedFile, SchemaError, StorageError):
            for place, one in _rows(plan.units[number], [p for p in places if p.unit == number], options):
                scorer = scorer_of(options)
                scores = None if scorer is None else scorer.score(one).kept_T
                found[place] = shown_response(one, 0, reason=place.reason, scores=scores)
    return tuple(found[place] for place in places if place in found)


def _rows(unit: Unit, places: Sequence[WorstPlace], options: AuditOptions) -> Iterator[tuple[WorstPlace, RolloutBatch]]:
    first_row = 0
    for batch in batches_of(unit, options):
        for place in places:
            if first_row <= place.row < first_row + len(batch):
                yield place, batch.slice(place.row - first_row, 1)
        first_row += len(batch)
