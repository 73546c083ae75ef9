"""Every kind of fault that files alone show: planted into honest rollouts, it is the one thing that is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keptset.schemas.findings import FindingKind, Severity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolWriter
from keptset.schemas.validation import STRUCTURAL
from keptset.trainer_bridge.audit import AuditOptions, AuditReport, audit

Row = dict[str, Any]
ROWS = 50
REPEATS = {FindingKind.CONFLICT, FindingKind.DUPLICATE, FindingKind.SEED_REUSED}


def _choice(row: Row) -> int:
    """The first position with at least two kept ids."""
    return next(t for t, ids in enumerate(row["kept_ids"]) if len(ids) > 1)


def lengths(row: Row) -> None:
    row["log_kept_mass"].pop()


def nulls(row: Row) -> None:
    row["behavior_logprobs"][0] = None


def token_out_of_range(row: Row) -> None:
    row["token_ids"][1] = 60


def member_out_of_range(row: Row) -> None:
    t = _choice(row)
    row["kept_ids"][t] = [*row["kept_ids"][t][:-1], 1000]


def sorted_(row: Row) -> None:
    row["kept_ids"][_choice(row)].reverse()


def doubled(row: Row) -> None:
    t = _choice(row)
    row["kept_ids"][t][1] = row["kept_ids"][t][0]


def empty_set(row: Row) -> None:
    row["kept_ids"][0] = []


def empty_set_and_distribution(row: Row) -> None:
    row["kept_ids"][0] = []
    row["kept_logprobs"][0] = []


def member(row: Row) -> None:
    t = _choice(row)
    row["token_ids"][t] = next(i for i in range(60) if i not in row["kept_ids"][t])


def member_removed(row: Row) -> None:
    row["kept_ids"][_choice(row)].remove(row["token_ids"][_choice(row)])


def logprob(row: Row) -> None:
    row["behavior_logprobs"][_choice(row)] = 0.25


def logprob_not_finite(row: Row) -> None:
    row["behavior_logprobs"][0] = float("nan")


def logprob_of_one(row: Row) -> None:
    t = next(t for t, ids in enumerate(row["kept_ids"]) if len(ids) == 1)
    row["behavior_logprobs"][t] = -0.1


def mass(row: Row) -> None:
    row["log_kept_mass"][3] = 0.5


def mass_below_top_p(row: Row) -> None:
    row["top_k"] = 0
    row["log_kept_mass"][3] = -0.2


def set_size(row: Row) -> None:
    row["top_k"] = 1


def version_order(row: Row) -> None:
    row["policy_versions"] = [7] * (len(row["policy_versions"]) - 1) + [6]


def prompt(row: Row) -> None:
    row["prompt_token_ids"] = []


def support_absent(row: Row) -> None:
    row |= {"support": "absent", "kept_ids": None, "kept_logprobs": None}


def distribution(row: Row) -> None:
    t = _choice(row)
    row["kept_logprobs"][t] = [p - 0.3 for p in row["kept_logprobs"][t]]


def b_beside_the_distribution(row: Row) -> None:
    row["behavior_logprobs"][_choice(row)] -= 0.4


PLANTED: list[tuple[FindingKind, Callable[[Row], None]]] = [
    (FindingKind.LENGTHS, lengths),
    (FindingKind.NULLS, nulls),
    (FindingKind.RANGE, token_out_of_range),
    (FindingKind.RANGE, member_out_of_range),
    (FindingKind.SORTED, sorted_),
    (FindingKind.SORTED, doubled),
    (FindingKind.EMPTY_SET, empty_set),
    (FindingKind.EMPTY_SET, empty_set_and_distribution),
    (FindingKind.MEMBER, member),
    (FindingKind.MEMBER, member_removed),
    (FindingKind.LOGPROB, logprob),
    (FindingKind.LOGPROB, logprob_not_finite),
    (FindingKind.LOGPROB, logprob_of_one),
    (FindingKind.MASS, mass),
    (FindingKind.MASS, mass_below_top_p),
    (FindingKind.SET_SIZE, set_size),
    (FindingKind.VERSION_ORDER, version_order),
    (FindingKind.PROMPT, prompt),
    (FindingKind.SUPPORT_ABSENT, support_absent),
    (FindingKind.DISTRIBUTION, distribution),
    (FindingKind.DISTRIBUTION, b_beside_the_distribution),
]


@pytest.fixture(scope="module")
def clean(honest: Callable[..., RolloutBatch]) -> RolloutBatch:
    return honest(ROWS, tokens=16)


@pytest.fixture
def audit_of(tmp_path: Path) -> Callable[..., AuditReport]:
    """`audit_of(batch, batch, ...)`: each in a spool file of its own."""

    def run(*batches: RolloutBatch, **options: Any) -> AuditReport:
        for number, batch in enumerate(batches):
            with SpoolWriter(tmp_path / "spool", f"writer-{number}") as writer:
                writer.append(batch)
        return audit([tmp_path / "spool"], AuditOptions(workers=1, **options))

    return run


def test_honest_rollouts_give_no_finding(clean: RolloutBatch, audit_of: Callable[..., AuditReport]) -> None:
    report = audit_of(clean)
    assert report.findings == () and report.severity is None
    assert report.verdict.startswith(f"Nothing wrong was found in {ROWS} responses")
    assert [test.name for test in report.tests] == ["surprisal", "draws"]


def test_every_structural_kind_is_planted() -> None:
    assert {kind for kind, _ in PLANTED} == set(STRUCTURAL) - REPEATS


@pytest.mark.parametrize("share", [0.02, 1.0])
@pytest.mark.parametrize(("kind", "plant"), PLANTED, ids=[plant.__name__ for _, plant in PLANTED])
def test_a_planted_fault_is_the_one_finding(
    kind: FindingKind,
    plant: Callable[[Row], None],
    share: float,
    clean: RolloutBatch,
    edited: Callable[..., RolloutBatch],
    audit_of: Callable[..., AuditReport],
) -> None:
    faulty = round(ROWS * share)

    def change(rows: list[Row]) -> None:
        for row in rows[:faulty]:
            plant(row)

    report = audit_of(edited(clean, change))
    (finding,) = [f for f in report.findings if f.severity is not Severity.INFO]
    assert (finding.kind, finding.responses) == (kind, faulty)
    assert finding.share == pytest.approx(faulty / ROWS)
    assert finding.examples[0].rollout_id == "rollout-0" and len(finding.examples) == min(finding.count, 3)
    assert not any(test.rejected for test in report.tests)
    assert kind.value in report.verdict


def with_seed(batch: RolloutBatch, seed: int) -> RolloutBatch:
    at = batch.arrow.schema.get_field_index("seed")
    seeds = pa.array([seed] * len(batch), pa.int64())
    return RolloutBatch.from_arrow(batch.arrow.set_column(at, batch.arrow.schema.field(at), seeds))


def test_a_response_that_comes_again_in_another_file_is_a_duplicate_and_counts_once(
    clean: RolloutBatch, audit_of: Callable[..., AuditReport]
) -> None:
    report = audit_of(clean, clean.slice(40, 3))
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.count) == (FindingKind.DUPLICATE, Severity.WARNING, 3)
    assert finding.examples[0].rollout_id == "rollout-40"
    assert "writer-1-00000000.arrow part 0 row 0; the first is" in finding.examples[0].detail
    assert report.totals.responses == ROWS + 3
    assert sum(row.responses for row in report.settings) == ROWS
    assert sum(size * groups for size, groups in report.group_sizes.items()) == ROWS


def test_a_rollout_id_with_other_content_is_a_conflict(
    clean: RolloutBatch, honest: Callable[..., RolloutBatch], audit_of: Callable[..., AuditReport]
) -> None:
    report = audit_of(clean, honest(1, seed=5, first=60, rollout_id="rollout-3"))
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.count) == (FindingKind.CONFLICT, Severity.ERROR, 1)
    assert finding.examples[0].rollout_id == "rollout-3"


def test_rows_of_one_seed_are_found_across_files_and_count_as_one(
    clean: RolloutBatch, honest: Callable[..., RolloutBatch], audit_of: Callable[..., AuditReport]
) -> None:
    report = audit_of(clean, with_seed(honest(4, first=60), 1007))
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.count) == (FindingKind.SEED_REUSED, Severity.WARNING, 5)
    assert {example.rollout_id for example in finding.examples} == {"rollout-7", "rollout-60", "rollout-61"}
    assert "its seed is that of 5 rows" in finding.examples[0].detail
    assert sum(row.responses for row in report.settings) == ROWS


def test_the_seed_of_a_copy_is_not_told_a_second_time(
    clean: RolloutBatch, audit_of: Callable[..., AuditReport]
) -> None:
    report = audit_of(clean, clean, clean)
    (finding,) = report.findings
    assert (finding.kind, finding.count) == (FindingKind.DUPLICATE, 2 * ROWS)


def test_two_independent_faults_are_two_findings(
    clean: RolloutBatch, edited: Callable[..., RolloutBatch], audit_of: Callable[..., AuditReport]
) -> None:
    def change(rows: list[Row]) -> None:
        logprob(rows[1])
        distribution(rows[2])

    report = audit_of(edited(clean, change))
    assert {f.kind for f in report.findings} == {FindingKind.LOGPROB, FindingKind.DISTRIBUTION}


def test_what_a_cause_explains_is_folded_under_it(
    clean: RolloutBatch, edited: Callable[..., RolloutBatch], audit_of: Callable[..., AuditReport]
) -> None:
    (finding,) = audit_of(edited(clean, lambda rows: logprob(rows[1]))).findings
    (symptom,) = finding.symptoms
    assert symptom.kind is FindingKind.DISTRIBUTION and symptom.symptoms == ()
