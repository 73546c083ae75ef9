"""Scored checks through the whole audit: one root cause is one finding at warning or above, wherever it is planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keptset.schemas.findings import FindingKind, Severity
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.spool import SpoolWriter
from keptset.trainer_bridge.audit import AuditOptions, AuditReport, audit
from keptset.trainer_bridge.audit.explanations import EXPLANATIONS
from keptset.trainer_bridge.audit.options import BatchScorer
from keptset.trainer_bridge.audit.recorded_logprobs import RecordedScorer
from keptset.trainer_bridge.audit.token_scores import ModelScorer

ROWS = 32
TWO = {FindingKind.PROCESSORS_MISSING: [1, 5]}


def report_of(folder: Path, world: Any, scorer: Callable[[], BatchScorer]) -> AuditReport:
    batch = world.batch()
    with SpoolWriter(folder) as writer:
        for begin in range(0, len(batch), 16):
            writer.append(batch.slice(begin, 16))
    return audit([folder], AuditOptions(workers=1, scorer=scorer))


def loud(report: AuditReport) -> list[FindingKind]:
    return [finding.kind for finding in report.findings if finding.severity is not Severity.INFO]


@dataclass(frozen=True, eq=False)
class Opened:
    """Makes the scorer, as `options.scorer` asks for it."""

    scored: Any
    models: Any

    def __call__(self) -> ModelScorer:
        return ModelScorer(scorer=self.scored.TableScorer(self.models))

    def __reduce__(self) -> Any:
        return (str, (f"tables of {len(self.models)} versions",))


@pytest.fixture(scope="module")
def world(scored: Any) -> Any:
    return scored.draw(21, ROWS)


def test_honest_rollouts_are_left_alone_and_every_table_is_filled(scored: Any, world: Any, tmp_path: Path) -> None:
    report = report_of(tmp_path / "spool", world, Opened(scored, {0: world.model}))
    assert report.findings == ()
    assert {test.name: test.rejected for test in report.tests}["unit mean"] is False
    assert all(row.kept_ratio.mean == pytest.approx(1, abs=1e-5) for row in report.settings)
    assert all(row.full_ratio.mean == pytest.approx(row.kept_mass_mean, abs=1e-5) for row in report.settings)
    assert report.versions[0].mean_abs_log_ratio < 1e-5
    assert report.budget["truncation"].mean < 0 and abs(report.budget["path"].mean) < 1e-5
    assert sum(report.kept_log_ratios.counts) == sum(map(sum, report.positions.counts)) == ROWS * 24
    assert {entry.check for entry in report.not_tested}.isdisjoint(
        {"explanations", "unit mean", "support drift", "scores"}
    )


@pytest.mark.parametrize("share", ["two of 32", "all"])
@pytest.mark.parametrize("kind", EXPLANATIONS, ids=lambda kind: kind.value)
def test_one_fault_is_one_loud_finding(scored: Any, world: Any, tmp_path: Path, kind: FindingKind, share: str) -> None:
    rows = TWO.get(kind, [3, 7]) if share == "two of 32" else range(ROWS)
    models = {0: world.model}
    if kind is FindingKind.WRONG_VERSION:
        models[1] = world.model.moved(17, 0.3)
    report = report_of(tmp_path / "spool", scored.plant(world, kind, rows), Opened(scored, models))
    assert loud(report) == [kind], [(f.kind, f.summary, f.symptoms) for f in report.findings]


def test_a_swap_with_a_response_of_a_larger_top_k_is_one_finding(scored: Any, world: Any, tmp_path: Path) -> None:
    small, large = 2, 3  # top_k 8 and 20
    sets = {small: scored.sets_of(world.responses[large]), large: scored.sets_of(world.responses[small])}
    swapped = world.with_sets([small, large], lambda row: sets[row])
    report = report_of(tmp_path / "spool", swapped, Opened(scored, {0: world.model}))
    assert loud(report) == [FindingKind.MASK_SWAPPED]
    assert FindingKind.SET_SIZE in {symptom.kind for symptom in report.findings[0].symptoms}


def test_a_swap_with_a_shorter_response_is_one_finding_in_both(scored: Any, world: Any, tmp_path: Path) -> None:
    short, whole, length = 5, 9, 8
    sets = {row: scored.sets_of(world.responses[row]) for row in (short, whole)}
    swapped = world.with_sets([whole], lambda row: sets[short][:length] + sets[whole][length:])
    swapped = swapped.with_sets([short], lambda row: sets[whole])
    cut = {"token_ids", "behavior_logprobs", "log_kept_mass", "policy_versions"}
    of_short = swapped.responses[short]
    swapped.responses[short] = replace(
        of_short,
        **{name: getattr(of_short, name)[:length] for name in cut},
        kept_offsets=of_short.kept_offsets[: length + 1],
        kept_ids=of_short.kept_ids[: of_short.kept_offsets[length]],
    )
    (found,) = report_of(tmp_path / "spool", swapped, Opened(scored, {0: world.model})).findings
    assert (found.kind, found.responses) == (FindingKind.MASK_SWAPPED, 2)


def test_a_fault_that_reaches_few_tokens_of_a_response_leaves_no_finding_of_its_own(
    scored: Any, tmp_path: Path
) -> None:
    """There validation sees that b disagrees with the recorded distribution."""
    settings = (SamplingParams(temperature=0.8, top_k=6, logit_bias={3: -1.0}),)  # few of whose sets hold id 3
    world = scored.draw(21, 16, settings)
    faulty = scored.plant(world, FindingKind.PROCESSORS_MISSING, range(16)).with_distributions()
    report = report_of(tmp_path / "spool", faulty, Opened(scored, {0: world.model}))
    assert loud(report) == [FindingKind.PROCESSORS_MISSING]
    (symptom,) = report.findings[0].symptoms
    assert (symptom.kind, symptom.responses) == (FindingKind.DISTRIBUTION, report.findings[0].responses)


def test_a_mismatch_explains_that_tokens_are_more_or_less_probable_than_recorded(
    scored: Any, world: Any, tmp_path: Path
) -> None:
    """Both are made of b."""
    base_10 = world.with_b(
        range(ROWS), lambda row, at: float(world.responses[row].behavior_logprobs[at]) / math.log(10)
    ).with_entropies()
    report = report_of(tmp_path / "spool", base_10, Opened(scored, {0: world.model}))
    assert loud(report) == [FindingKind.LOGPROB_MISMATCH]
    assert FindingKind.SURPRISAL in {symptom.kind for symptom in report.findings[0].symptoms}


def test_recorded_scores_need_no_model(scored: Any, world: Any, tmp_path: Path) -> None:
    responses = [
        replace(r, extra={"x_l": (r.behavior_logprobs + 1e-6).tolist(), "x_l_version": 0}) for r in world.responses
    ]
    report = report_of(tmp_path / "spool", replace(world, responses=responses), partial(RecordedScorer, column="x_l"))
    assert report.findings == () and report.budget is None
    assert all(row.kept_ratio.mean == pytest.approx(1, abs=1e-5) and row.full_ratio is None for row in report.settings)
    assert "support drift" in {entry.check for entry in report.not_tested}


def test_a_trainer_that_scores_the_whole_vocabulary_fails_the_unit_mean(scored: Any, tmp_path: Path) -> None:
    world = scored.draw(22, 160, scored.settings[:1])
    responses = [replace(r, extra={"x_l": (r.behavior_logprobs + r.log_kept_mass).tolist()}) for r in world.responses]
    report = report_of(tmp_path / "spool", replace(world, responses=responses), partial(RecordedScorer, column="x_l"))
    assert loud(report) == [FindingKind.UNIT_MEAN]


def test_a_fault_of_one_response_does_not_hide_one_of_the_whole_run(scored: Any, tmp_path: Path) -> None:
    """A response with an error is no part of the mean ratio, so it cannot have moved it."""
    world = scored.draw(22, 160, scored.settings[:1])
    responses = [replace(r, extra={"x_l": (r.behavior_logprobs + r.log_kept_mass).tolist()}) for r in world.responses]
    of_run = replace(world, responses=responses)
    both = of_run.with_b([5], lambda row, at: 0.5 if at == 3 else float(responses[row].behavior_logprobs[at]))
    report = report_of(tmp_path / "spool", both, partial(RecordedScorer, column="x_l"))
    assert loud(report) == [FindingKind.UNIT_MEAN, FindingKind.LOGPROB]
