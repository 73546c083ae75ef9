"""What an audit shows without judging: settings, versions, groups, endings, the worst responses; and staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.errors import DamagedFile
from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import KnownParams, SamplingParams
from keptset.schemas.storage.spool import SpoolWriter
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.audit import AuditOptions, AuditReport, audit
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.examples import FirstExamples
from keptset.trainer_bridge.audit.folding import EXPLAINS
from keptset.trainer_bridge.audit.pieces import pieces
from keptset.trainer_bridge.audit.reading.key_table import KeyTable
from keptset.trainer_bridge.audit.settings import setting_names

Row = dict[str, Any]


@pytest.fixture(scope="module")
def batch(honest: Callable[..., RolloutBatch]) -> RolloutBatch:
    return honest(30, tokens=20)


def report_of(folder: Path, *batches: RolloutBatch, **options: Any) -> AuditReport:
    with SpoolWriter(folder / "spool", "writer") as writer:
        for batch in batches:
            writer.append(batch)
            writer.rotate()
    return audit([folder / "spool"], AuditOptions(workers=1, **options))


@pytest.fixture(scope="module")
def report(batch: RolloutBatch, tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    return report_of(tmp_path_factory.mktemp("tables"), batch)


def test_totals_are_counted(report: AuditReport, batch: RolloutBatch) -> None:
    totals = report.totals
    counted = (totals.files, totals.responses, totals.tokens, totals.sampled_tokens, totals.kept_ids)
    assert counted == (1, 30, 600, 600, batch.num_kept_ids) and totals.share_read == 1
    assert report.identities == ({"vocab_size": "60", "model_id": "made up", "engine": "test"},)


def test_each_setting_has_a_row_with_exact_numbers(report: AuditReport, batch: RolloutBatch) -> None:
    assert [row.name for row in report.settings] == ["T 0.8, top_k 20, top_p 0.95", "T 0.8, top_p 0.95"]
    for row, parity in zip(report.settings, (1, 0), strict=True):
        rows = [r for n, r in enumerate(batch.arrow.to_pylist()) if n % 2 == parity]
        sizes = [len(ids) for r in rows for ids in r["kept_ids"]]
        assert (row.responses, row.tokens) == (15, 300)
        assert row.kept_mass_mean == pytest.approx(0.97)
        assert row.kept_size_mean == pytest.approx(np.mean(sizes))
        assert row.kept_size_median == sorted(sizes)[149]
        assert row.kept_size_p99 == sorted(sizes)[296]
        assert row.kept_size_one_share == pytest.approx(sizes.count(1) / 300)


def test_kept_sizes_are_counted_by_doublings(report: AuditReport, batch: RolloutBatch) -> None:
    sizes = [len(ids) for row in batch.arrow.to_pylist() for ids in row["kept_ids"]]
    assert report.kept_sizes is not None
    counted = dict(zip(report.kept_sizes.edges, report.kept_sizes.counts, strict=False))
    assert [counted[float(e)] for e in (1, 2, 4, 8)] == [
        sum(low <= size < 2 * low for size in sizes) for low in (1, 2, 4, 8)
    ]


def test_places_of_draws_are_shown_as_a_histogram(report: AuditReport) -> None:
    assert report.pit is not None and len(report.pit.edges) == len(report.pit.counts) + 1 == 65
    assert sum(report.pit.counts) == next(test.count for test in report.tests if test.name == "draws")


def test_endings_groups_and_domains_are_counted(report: AuditReport) -> None:
    assert report.finish_reasons == {"length": 20, "stop": 10}
    assert report.group_sizes == {2: 1, 4: 7}
    assert report.logprob_domains == {"kept": 30}


def test_settings_are_named_by_all_that_is_not_off(honest: Callable[..., RolloutBatch]) -> None:
    def name(params: SamplingParams | KnownParams | None) -> str:
        return setting_names(honest(1, params=params))[0]

    assert name(SamplingParams()) == "T 1"
    assert name(SamplingParams(temperature=0)) == "T 0"
    assert name(SamplingParams(min_p=0.1, repetition_penalty=1.2, logit_bias={3: 1.0})) == (
        "T 1, min_p 0.1, repetition 1.2, logit_bias of 1 ids"
    )
    assert name(KnownParams(temperature=0.5)).startswith("T 0.5, top_k unknown, top_p unknown")
    assert name(None) == "settings not recorded"


def test_log_probabilities_over_something_else_are_told(honest: Callable[..., RolloutBatch], tmp_path: Path) -> None:
    report = report_of(tmp_path, honest(4), honest(3, first=10, logprob_domain="raw"))
    assert report.logprob_domains == {"kept": 4, "raw": 3}
    (entry,) = [entry for entry in report.not_tested if entry.check == "b over the kept set"]
    assert "`raw` in 3 responses of 7" in entry.reason


def test_the_worst_responses_are_shown_with_all_their_tokens(report: AuditReport, batch: RolloutBatch) -> None:
    by_z = {}
    for row in batch.arrow.to_pylist():
        z = reference.surprisal_z(row["behavior_logprobs"], row["kept_entropy"], row["kept_logprob_var"])
        by_z[row["rollout_id"]] = abs(z)
    assert [shown.rollout_id for shown in report.worst] == sorted(by_z, key=by_z.__getitem__)[:-6:-1]
    worst = report.worst[0]
    row = next(r for r in batch.arrow.to_pylist() if r["rollout_id"] == worst.rollout_id)
    assert [token.token_id for token in worst.tokens] == row["token_ids"]
    assert [token.kept_size for token in worst.tokens] == [len(ids) for ids in row["kept_ids"]]
    for token, ids, logp in zip(worst.tokens, row["kept_ids"], row["kept_logprobs"], strict=True):
        assert [(i, p) for i, _, p in token.kept] == sorted(zip(ids, logp, strict=True), key=lambda m: -m[1])


def with_versions(
    batch: RolloutBatch, versions: list[list[int | None]], edited: Callable[..., RolloutBatch]
) -> RolloutBatch:
    def change(rows: list[Row]) -> None:
        for row, found in zip(rows, versions, strict=True):
            row["policy_versions"] = found

    return edited(batch, change)


def test_lags_are_behind_the_newest_version_so_far_of_the_writer(
    honest: Callable[..., RolloutBatch], edited: Callable[..., RolloutBatch], tmp_path: Path
) -> None:
    first = with_versions(honest(2, tokens=3), [[0, 0, 1], [4, 4, 4]], edited)
    second = with_versions(honest(2, tokens=3, first=2), [[1, 2, 2], [5, 5, None]], edited)
    report = report_of(tmp_path, first, second, max_version_lag=2)
    (finding,) = report.findings
    assert (finding.kind, finding.severity) == (FindingKind.STALENESS, Severity.WARNING)
    assert (finding.count, finding.responses) == (1, 1)  # 1 behind 4; 2 behind 4 is within the bound
    (example,) = finding.examples
    assert (example.rollout_id, example.position) == ("rollout-2", 0)
    assert example.detail == "version 1, recorded when version 4 had drawn"
    lags = {row.version: (row.tokens, row.mean_lag) for row in report.versions}
    assert lags == {None: (1, None), 0: (2, 1.0), 1: (2, 1.5), 2: (2, 2.0), 4: (3, 0.0), 5: (2, 0.0)}


def test_each_writer_has_its_own_newest_version(
    honest: Callable[..., RolloutBatch], edited: Callable[..., RolloutBatch], tmp_path: Path
) -> None:
    for name, version, first in (("a", 9, 0), ("b", 0, 1)):
        with SpoolWriter(tmp_path / "spool", name) as writer:
            writer.append(with_versions(honest(1, tokens=2, first=first), [[version, version]], edited))
    report = audit([tmp_path / "spool"], AuditOptions(workers=1, max_version_lag=0))
    assert report.findings == ()


def test_staleness_is_not_tested_without_versions_or_without_a_bound(
    honest: Callable[..., RolloutBatch], tmp_path: Path
) -> None:
    report = report_of(tmp_path, honest(2, policy_versions=None), max_version_lag=0)
    assert "no policy versions are recorded" in {e.check: e.reason for e in report.not_tested}["staleness"]
    assert report.versions[0].version is None


def test_keys_are_found_alike_in_memory_and_in_files() -> None:
    random = np.random.default_rng(0)
    keys_R2 = random.integers(0, 2**64, (500, 2), dtype=np.uint64)[random.integers(0, 500, 2000)]
    rows_R = random.permutation(2000)
    found = []
    for memory in (2**20, 240):
        with KeyTable(memory) as table:
            for begin in range(0, 2000, 90):
                table.add(keys_R2[begin : begin + 90], rows_R[begin : begin + 90])
            rows, firsts = table.shared()
            order = np.argsort(rows)
            found.append((rows[order].tolist(), firsts[order].tolist(), table.sizes(without=np.arange(0, 2000, 3))))
    assert found[0] == found[1]
    by_key: dict[tuple[int, int], list[int]] = {}
    for key, row in zip(keys_R2.tolist(), rows_R.tolist(), strict=True):
        by_key.setdefault(tuple(key), []).append(row)
    shared = {row: min(rows) for rows in by_key.values() if len(rows) > 1 for row in rows}
    assert dict(zip(found[0][0], found[0][1], strict=True)) == shared
    sizes = Counter(len([r for r in rows if r % 3]) for rows in by_key.values())
    assert found[0][2] == {size: n for size, n in sorted(sizes.items()) if size}


def test_sums_do_not_depend_on_their_order_whatever_their_size() -> None:
    values = np.random.default_rng(1).normal(0, 1, 5000) * 10.0 ** np.random.default_rng(2).integers(-6, 6, 5000)
    forward, backward = ExactSum(), ExactSum()
    forward.add(values)
    for part in np.array_split(values[::-1], 7):
        other = ExactSum()
        other.add(part)
        backward.merge(other)
    assert forward == backward
    assert forward.total == pytest.approx(np.sum(values), rel=1e-9)
    forward.add_known(np.array([np.nan, np.inf, 1.0]))
    assert forward.count == 5001


def test_every_kind_has_advice_and_no_cause_explains_itself() -> None:
    assert set(ADVICE) == set(FindingKind)
    for cause, symptoms in EXPLAINS.items():
        assert cause not in symptoms
        assert all(cause not in EXPLAINS.get(symptom, frozenset()) for symptom in symptoms)


def test_examples_are_the_first_in_the_order_of_reading_whatever_comes_first() -> None:
    def place(unit: int, row: int) -> tuple[tuple[int, int, int], Example]:
        return (unit, row, -1), Example(rollout_id=f"{unit}-{row}", position=None, detail="")

    late, early = FirstExamples(), FirstExamples()
    for at in (place(1, 0), place(0, 9), place(1, 1), place(2, 0)):
        late.add(*at)
    for at in (place(0, 3), place(0, 1)):
        early.add(*at)
    late.merge(early)
    assert [example.rollout_id for example in late.examples] == ["0-1", "0-3", "0-9"]


def test_what_was_read_before_an_error_is_worked_on_before_it_is_raised(batch: RolloutBatch) -> None:
    def batches() -> Iterator[RolloutBatch]:
        yield batch.slice(0, 2)
        yield batch.slice(2, 2)
        raise DamagedFile("here")

    seen = []
    with pytest.raises(DamagedFile, match="here"):
        for piece in pieces(batches()):
            seen.append(len(piece))
    assert seen == [4]


def test_batches_of_other_columns_are_not_joined(batch: RolloutBatch, honest: Callable[..., RolloutBatch]) -> None:
    other = honest(2, first=50, extra={"x_note": "mine"})
    assert [len(piece) for piece in pieces([batch, batch.slice(0, 1), other])] == [31, 2]
