"""Diagnostics: the oracle's numbers, sums that merge, and "no data"."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keptset.schemas.errors import InvalidInput, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.budget import Budget
from keptset.trainer_bridge.diagnostics import LOG_RATIO_EDGES, Diagnostics, DiagnosticsReport
from keptset.trainer_bridge.ratio_sums import LevelReport, RatioSums
from keptset.trainer_bridge.ratios import LogRatios, log_ratios, log_ratios_of
from keptset.trainer_bridge.scoring import score_aligned, score_aligned_full_vocabulary
from keptset.trainer_bridge.sketch import RELATIVE_ERROR, SMALLEST, LogHistogram, SizeHistogram

VECTORS = {
    case["name"]: case
    for case in json.loads((Path(__file__).resolve().parents[1] / "data" / "vectors" / "ratios.json").read_text())
}
DELTAS = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-4, 4))


def ratios_of(delta: Any, rows: Any = None, **options: Any) -> LogRatios:
    delta = np.asarray(delta, np.float64)
    return log_ratios(delta, np.zeros(len(delta)), np.zeros(len(delta), int) if rows is None else rows, **options)


def report_of(delta: Any, rows: Any = None) -> DiagnosticsReport:
    diagnostics = Diagnostics()
    diagnostics.add(ratios_of(delta, rows))
    return diagnostics.report()


@given(DELTAS)
def test_token_diagnostics_agree_with_the_oracle(delta: np.ndarray) -> None:
    got = report_of(delta).token
    assert got.k1 == pytest.approx(reference.k1(delta), abs=1e-9)
    assert got.k3 == pytest.approx(reference.k3(delta), abs=1e-9)
    assert got.chi2 == pytest.approx(reference.chi2(delta), rel=1e-9, abs=1e-9)
    assert got.ess_fraction == pytest.approx(reference.ess_fraction(delta), rel=1e-9)
    assert (got.mean_ratio, got.mean_ratio_se) == pytest.approx(reference.mean_ratio(delta), rel=1e-9)
    assert got.share_outside == np.mean((np.exp(delta) < 0.9) | (np.exp(delta) > 1.1))
    assert got.max_abs_log_ratio == np.abs(delta).max()
    assert got.mean_abs_log_ratio == pytest.approx(np.abs(delta).mean())


@given(DELTAS, st.integers(1, 6))
def test_sequence_diagnostics_count_each_response_once(delta: np.ndarray, responses: int) -> None:
    rows = np.sort(np.arange(len(delta)) % responses)
    report = report_of(delta, rows)
    sums = np.array([delta[rows == row].sum() for row in np.unique(rows)])
    assert report.sequence.count == report.geometric.count == len(sums)
    assert report.sequence.ess_fraction == pytest.approx(reference.ess_fraction(sums), rel=1e-9)
    assert report.sequence.mean_ratio == pytest.approx(np.exp(sums).mean(), rel=1e-9)


def test_vectors_hold() -> None:
    k = VECTORS["k_estimators"]
    got = report_of(k["delta"]).token
    assert (got.k1, got.k3) == pytest.approx((k["expect"]["k1"], k["expect"]["k3"]), abs=1e-15)
    ess = VECTORS["ess_before_clip"]
    assert report_of(np.log(ess["weights"])).token.ess_fraction == pytest.approx(ess["expect"]["ess_fraction"])
    once = VECTORS["sequence_ess_counts_sequences_once"]
    delta = np.concatenate([np.full(n, np.log(w) / n) for w, n in zip(once["weights"], once["lengths"], strict=True)])
    rows = np.repeat([0, 1], once["lengths"])
    assert report_of(delta, rows).sequence.ess_fraction == pytest.approx(once["expect"]["ess_fraction"])
    levels = VECTORS["levels"]
    got_levels = report_of(levels["delta"])
    for name, level in (("token_mean", "token"), ("sequence", "sequence"), ("geometric", "geometric")):
        assert getattr(got_levels, level).mean_ratio == pytest.approx(levels["expect"][name], rel=1e-12)


def test_near_ratio_one_no_digits_are_lost() -> None:
    delta = np.tile([1e-9, -1e-9], 500)
    got = report_of(delta).token
    assert got.mean_ratio_se == pytest.approx(1e-9 / np.sqrt(1000), rel=1e-6)
    assert got.k3 == pytest.approx(0.5e-18, rel=0.5)
    assert got.chi2 == pytest.approx(2e-18, rel=1e-3)


def test_huge_sequence_weights_leave_the_effective_sample_size_finite() -> None:
    report = report_of([900.0, 900.0, -900.0], [0, 1, 2])
    assert report.sequence.ess_fraction == pytest.approx(2 / 3)
    assert report.sequence.mean_ratio == np.inf


@given(DELTAS, st.lists(st.integers(1, 6), max_size=4))
def test_merged_parts_equal_the_whole(delta: np.ndarray, cuts: list[int]) -> None:
    rows = np.sort(np.arange(len(delta)) % 7)
    sizes = 1 + np.arange(len(delta)) % 5 * 400
    mass = -np.abs(delta)
    lag = np.where(np.arange(len(delta)) % 3, 2.0, np.nan)

    def counted(part: Any) -> Diagnostics:
        diagnostics = Diagnostics()
        values = np.where(np.arange(len(delta)) % 4 == 3, np.nan, delta)
        diagnostics.add(
            ratios_of(values[part], rows[part], on_violation="exclude"),
            kept_sizes_T=sizes[part],
            log_kept_mass_T=mass[part],
            trainer_log_kept_mass_T=mass[part] * 1.5,
            version_lag_T=lag[part],
        )
        return diagnostics

    bounds = np.unique(np.searchsorted(rows, [0, *cuts, 7])).tolist()  # a response lies in one batch
    merged = Diagnostics()
    for begin, end in itertools.pairwise(bounds):
        merged.merge(pickle.loads(pickle.dumps(counted(slice(begin, end)))))
    whole = counted(slice(0, len(delta)))
    assert_reports_equal(merged.report(), whole.report())
    np.testing.assert_array_equal(merged.histogram, whole.histogram)


@pytest.mark.parametrize("order", [[0.0, 2.0], [2.0, 0.0]])
def test_effective_sample_sizes_merge_whichever_part_holds_the_largest_weight(order: list[float]) -> None:
    merged = Diagnostics()
    for middle in order:
        part = Diagnostics()
        part.add(ratios_of([middle, middle - 1]))
        merged.merge(part)
    assert merged.report().token.ess_fraction == pytest.approx(reference.ess_fraction([0.0, -1.0, 2.0, 1.0]))


def assert_reports_equal(one: DiagnosticsReport, other: DiagnosticsReport) -> None:
    flat, expected = one.flat(), other.flat()
    assert flat.keys() == expected.keys()
    for name, value in flat.items():
        assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name


def test_nothing_counted_is_no_data() -> None:
    every_token_excluded = Diagnostics()
    every_token_excluded.add(
        ratios_of([np.nan], on_violation="exclude"), kept_sizes_T=[3], log_kept_mass_T=[0.0], version_lag_T=[1]
    )
    for diagnostics in (Diagnostics(), every_token_excluded):
        report = diagnostics.report()
        for level in (report.token, report.sequence, report.geometric):
            assert all(getattr(level, f.name) is None for f in fields(LevelReport) if f.name != "count"), (
                "no data is neither 0 nor an error"
            )
        for name in ("abs_log_ratio_p50", "kept_size_mean", "kept_mass_mean", "version_lag_max"):
            assert getattr(report, name) is None
    assert every_token_excluded.report().excluded_tokens == {"non_finite": 1}
    assert every_token_excluded.report().flat()["excluded_tokens/non_finite"] == 1.0


def test_quantiles_look_at_choices_only() -> None:
    diagnostics = Diagnostics()
    delta = np.concatenate([np.zeros(900), np.full(100, 0.5)])
    diagnostics.add(ratios_of(delta), kept_sizes_T=np.where(delta == 0, 1, 9))
    report = diagnostics.report()
    assert report.abs_log_ratio_p50 == pytest.approx(0.5, rel=RELATIVE_ERROR)
    assert report.abs_log_ratio_mean == report.abs_log_ratio_max == 0.5
    assert report.num_choices == 100
    assert report.kept_share_of_one == 0.9
    assert (report.kept_size_median, report.kept_size_p99) == (1.0, 9.0)


def test_a_scored_batch_tells_everything_its_record_holds(world: Any) -> None:
    packed = to_packed(world.batch)
    tokens = packed.tokens
    scores = score_aligned(packed, world.packed_logits(), full_share=1.0)
    diagnostics = Diagnostics()
    diagnostics.add_scored(log_ratios_of(scores, tokens), tokens, scores, current_version=12)
    report = diagnostics.report()
    counted = tokens.trainable_T
    assert report.token.count == counted.sum()
    assert report.token.mean_ratio == pytest.approx(1.0, abs=1e-6)
    assert report.kept_size_mean == pytest.approx(tokens.kept_sizes_T[counted].mean())
    assert report.kept_mass_mean == pytest.approx(np.exp(tokens.log_kept_mass_T[counted]).mean(), rel=1e-6)
    assert report.trainer_kept_mass_mean == pytest.approx(report.measured_kept_mass_mean, abs=1e-6)
    assert report.version_lag_mean == pytest.approx((12 - tokens.row_T[counted]).mean())
    assert report.version_lag_max == (12 - tokens.row_T[counted]).max()
    assert (report.ratio_over, report.over) == ("trainable", "kept")


def test_a_trainer_that_leaves_the_kept_sets_shows_in_its_kept_mass_and_in_no_ratio(world: Any) -> None:
    packed = to_packed(world.batch)
    tokens = packed.tokens
    logits = world.packed_logits()
    outside = np.ones_like(logits, bool)
    outside[np.repeat(packed.logit_index_T, np.diff(tokens.kept_offsets_T1)), tokens.kept_ids_N] = False
    outside[packed.logit_index_T[tokens.full_T]] = False
    logits[outside] += 3.0
    scores = score_aligned(packed, logits, full_share=1.0)
    diagnostics = Diagnostics()
    diagnostics.add_scored(log_ratios_of(scores, tokens), tokens, scores)
    report = diagnostics.report()
    assert report.token.max_abs_log_ratio < 1e-6
    assert report.trainer_kept_mass_mean < report.measured_kept_mass_mean - 0.1
    assert report.version_lag_mean is None


def test_full_vocabulary_and_kept_ratios_are_never_mixed(world: Any) -> None:
    warm = world.batch.filter(world.batch.column("temperature").to_numpy() > 0)
    packed = to_packed(warm)
    logits = np.concatenate([z for z, p in zip(world.logits, world.params, strict=True) if p.temperature > 0])
    kept, full = score_aligned(packed, logits), score_aligned_full_vocabulary(packed, logits)
    one, other = Diagnostics(), Diagnostics()
    one.add_scored(log_ratios_of(kept, packed.tokens), packed.tokens, kept)
    other.add_scored(log_ratios_of(full, packed.tokens), packed.tokens, full)
    assert other.report().trainer_kept_mass_mean is None
    with pytest.raises(InvalidInput, match="diagnostics of their own"):
        one.merge(other)
    with pytest.raises(InvalidInput, match="diagnostics of their own"):
        one.add(log_ratios_of(kept, packed.tokens, ratio_over="sampled"))
    one.merge(Diagnostics())


def test_sizes_that_are_unknown_count_as_choices_but_not_as_sizes(world: Any) -> None:
    diagnostics = Diagnostics()
    diagnostics.add(ratios_of([0.1, 0.2]), kept_sizes_T=[0, 4])
    report = diagnostics.report()
    assert (report.num_choices, report.kept_size_mean) == (2, 4.0)


def test_a_per_token_array_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match="there are 2 tokens"):
        Diagnostics().add(ratios_of([0.1, 0.2]), kept_sizes_T=[3])


def test_flat_names_carry_level_and_prefix() -> None:
    diagnostics = Diagnostics()
    diagnostics.add(ratios_of([0.0]), kept_sizes_T=[2])
    flat = diagnostics.report().flat("train/")
    assert {"train/token/mean_ratio", "train/sequence/ess_fraction", "train/kept_size_mean"} <= flat.keys()
    assert all(isinstance(v, float) for v in flat.values())
    assert "train/version_lag_mean" not in flat, "what has no data is left out"


def test_the_histogram_counts_every_token_once() -> None:
    diagnostics = Diagnostics()
    diagnostics.add(ratios_of([-5.0, -0.001, 0.0, 0.001, 2.0, 7.0]))
    assert diagnostics.histogram.sum() == 6
    assert (diagnostics.histogram[0], diagnostics.histogram[-1]) == (1, 2)
    middle = int(np.searchsorted(LOG_RATIO_EDGES, 0.0, side="right"))
    assert diagnostics.histogram[middle - 1 : middle + 1].sum() == 3


@given(
    hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(-1e5, 1e5)),
    st.floats(0, 1),
)
def test_sketched_quantiles_are_within_their_error(values: np.ndarray, q: float) -> None:
    histogram = LogHistogram()
    histogram.add(values)
    exact = np.sort(values)[max(1, int(np.ceil(q * len(values)))) - 1]
    assert histogram.quantile(q) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001, abs=SMALLEST)


def test_values_beyond_the_sketch_count_at_its_ends() -> None:
    histogram = LogHistogram()
    histogram.add(np.array([-1e300, 1e-300, 0.0, 1e300]))
    assert histogram.quantile(0.25) == pytest.approx(-1e6, rel=0.03)
    assert (histogram.quantile(0.5), histogram.quantile(0.75)) == (0.0, 0.0)
    assert histogram.quantile(1.0) == pytest.approx(1e6, rel=0.03)


@given(hnp.arrays(np.int64, st.integers(1, 50), elements=st.integers(1, 3000)), st.floats(0, 1))
def test_size_quantiles_are_exact_up_to_1024(sizes: np.ndarray, q: float) -> None:
    histogram = SizeHistogram()
    histogram.add(sizes)
    exact = np.sort(sizes)[max(1, int(np.ceil(q * len(sizes)))) - 1]
    got = histogram.quantile(q)
    assert got == exact if exact <= 1024 else got == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001)
    assert histogram.mean() == pytest.approx(sizes.mean())


def test_a_size_is_never_told_larger_than_the_largest_that_was_counted() -> None:
    whole, other = SizeHistogram(), SizeHistogram()
    whole.add(np.array([49_152, 49_152]))
    other.add(np.array([3]))
    for histogram in (whole, other):
        histogram.merge(whole if histogram is other else SizeHistogram())
    assert whole.quantile(0.5) == other.quantile(1.0) == 49_152


def test_an_empty_size_histogram_has_no_data() -> None:
    empty = SizeHistogram()
    assert (empty.quantile(0.5), empty.mean(), empty.share_of(1)) == (None, None, None)
    assert RatioSums().report().count == 0


def test_the_budget_adds_up_per_token_and_in_the_mean(rng: np.random.Generator) -> None:
    full, kept, version, b = rng.normal(-2, 1, (4, 50))
    budget = Budget()
    budget.add(full_now_T=full, kept_now_T=kept, kept_version_T=version, behavior_T=b)
    report = budget.report()
    exact = reference.budget(full, kept, version, b)
    for name in ("truncation", "staleness", "path", "total"):
        term = getattr(exact, name)
        assert (report[name].mean, report[name].mean_abs) == pytest.approx((term.mean(), np.abs(term).mean()))
    parts = sum(report[name].mean for name in ("truncation", "staleness", "path"))
    assert parts == pytest.approx(report["total"].mean, abs=1e-12)


def test_without_the_versions_weights_two_terms_are_one_and_labelled_so(rng: np.random.Generator) -> None:
    full, kept, b = rng.normal(-2, 1, (3, 8))
    one, other, whole = Budget(), Budget(), Budget()
    one.add(full_now_T=full[:3], kept_now_T=kept[:3], behavior_T=b[:3])
    other.add(full_now_T=full[3:], kept_now_T=kept[3:], behavior_T=b[3:])
    whole.add(full_now_T=full, kept_now_T=kept, behavior_T=b)
    one.merge(other)
    assert one.terms == ("truncation", "staleness_and_path", "total")
    assert one.report()["staleness_and_path"].mean == pytest.approx(whole.report()["staleness_and_path"].mean)
    versioned = Budget()
    versioned.add(full_now_T=full, kept_now_T=kept, kept_version_T=kept, behavior_T=b)
    with pytest.raises(InvalidInput, match="one of their own"):
        versioned.merge(one)


def test_a_budget_of_nothing_has_no_data() -> None:
    budget = Budget()
    assert budget.report() == {}
    budget.add(full_now_T=[np.nan], kept_now_T=[0.0], behavior_T=[0.0])
    assert budget.report()["total"].mean is None
    budget.merge(Budget())
    assert (budget.count, budget.not_measured, budget.excluded) == (0, 1, {})


NAN, INF = np.nan, np.inf
FAULTS = {
    "full_now_T": [-1.0, NAN, -INF, -1.0, NAN, -1.0, -INF],
    "kept_now_T": [-1.0, -1.0, -1.0, NAN, NAN, -1.0, -INF],
    "behavior_T": [-1.5, -1.0, -1.0, -1.0, -1.0, INF, -1.0],
}


@pytest.mark.parametrize("versioned", [False, True])
def test_the_budget_counts_what_it_excludes_and_what_was_not_measured_apart(versioned: bool) -> None:
    version = {"kept_version_T": [-1.0] * 7} if versioned else {}
    one, other = Budget(), Budget()
    one.add(**FAULTS, **version, on_violation="exclude")
    other.add(**FAULTS, **version, on_violation="exclude")
    assert (one.count, one.not_measured, one.excluded) == (1, 1, {"non_finite": 5})
    one.merge(other)
    assert (one.count, one.not_measured, one.excluded) == (2, 2, {"non_finite": 10})
    assert one.report()["total"].mean == 0.5


@pytest.mark.parametrize("token", [2, 3, 4, 5, 6])
def test_the_budget_raises_for_a_value_that_is_no_finite_number_and_counts_nothing(token: int) -> None:
    values = {name: [-1.0, value[token]] for name, value in FAULTS.items()}
    budget = Budget()
    with pytest.raises(ViolationError, match="r3.*7.*full_now") as raised:
        budget.add(**values, locate=lambda index: ("r3", 6 + index))
    kinds = [finding.kind for finding in raised.value.findings]
    assert kinds == ([FindingKind.LOGPROB] if token == 5 else [])
    assert budget == Budget()


def test_a_version_that_scored_nothing_is_no_missing_measurement() -> None:
    budget = Budget()
    with pytest.raises(ViolationError, match="kept_version nan"):
        budget.add(full_now_T=[NAN], kept_now_T=[-1.0], kept_version_T=[NAN], behavior_T=[-1.0])
    with pytest.raises(InvalidInput, match="on_violation is 'drop'"):
        budget.add(full_now_T=[-1.0], kept_now_T=[-1.0], behavior_T=[-1.0], on_violation="drop")  # type: ignore[arg-type]


def test_a_report_is_frozen(world: Any) -> None:
    report = Diagnostics().report()
    with pytest.raises(AttributeError):
        report.over = "full"  # type: ignore[misc]
    assert replace(report, over="full").over == "full"
