import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keptset.schemas.errors import InvalidInput
from keptset.scripts.ratio_table import (
    CHOICE_MAX_ABS_LOG,
    CHOICE_MEAN_ABS_LOG,
    HISTOGRAM_EDGES,
    MASS_GAP,
    Floor,
    RatioSummary,
    judge,
    log_ratio_histogram,
    to_json,
    verdict_line,
)
from keptset.trainer_bridge import reference

log_ratios = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-3, 3))


def _with_kept(result, **changes):
    return replace(result, kept_set_ratio=replace(result.kept_set_ratio, **changes))


@given(log_ratios)
def test_mean_and_standard_error_are_those_of_the_oracle(d_T):
    summary = RatioSummary.of(d_T, np.ones(len(d_T), bool))
    mean, error = reference.mean_ratio(d_T)
    assert summary.mean == pytest.approx(mean, rel=1e-12)
    assert summary.std_error == pytest.approx(error, rel=1e-12)
    assert summary.median == pytest.approx(np.exp(np.median(d_T)), rel=1e-12)


def test_share_outside_counts_ratios_beyond_nine_tenths_and_eleven_tenths_only():
    ratios = [0.8999, 0.9001, 1.0, 1.0999, 1.1001]
    assert RatioSummary.of(np.log(ratios), np.ones(5, bool)).share_outside == 2 / 5


def test_differences_are_judged_where_the_kept_set_has_more_than_one_member():
    summary = RatioSummary.of([0.5, -0.2, 0.1], [False, True, True])
    assert summary.choice_abs_log_mean == pytest.approx(0.15)
    assert summary.choice_abs_log_max == pytest.approx(0.2)


def test_a_log_ratio_that_is_no_number_is_refused_with_its_place():
    with pytest.raises(InvalidInput, match="1 of 2 log ratios are no finite numbers, the first nan of token 1"):
        RatioSummary.of([0.0, math.nan], [True, True])


def test_without_tokens_every_number_is_missing():
    summary = RatioSummary.of([], [])
    numbers = (summary.mean, summary.std_error, summary.median, summary.share_outside, summary.choice_abs_log_max)
    assert all(math.isnan(number) for number in numbers)
    assert sum(summary.histogram) == 0
    assert math.isnan(Floor.of([]).mean_abs)


@given(hnp.arrays(np.float64, st.integers(0, 60), elements=st.floats(-50, 50)))
def test_a_histogram_counts_every_token_once(d_T):
    assert log_ratio_histogram(d_T).sum() == len(d_T)


def test_a_ratio_of_one_falls_in_the_middle_of_a_bin_so_that_rounding_does_not_split_it():
    (filled,) = np.flatnonzero(log_ratio_histogram([0.0, 4e-3, -4e-3]))
    assert (HISTOGRAM_EDGES[filled] + HISTOGRAM_EDGES[filled + 1]) / 2 == pytest.approx(0, abs=1e-12)


def test_a_floor_takes_absolute_differences():
    floor = Floor.of([1e-6, -3e-6])
    assert (floor.mean_abs, floor.tokens) == (pytest.approx(2e-6), 2)


def test_a_setting_at_equal_weights_passes(make_result):
    assert judge(make_result()) == judge(make_result(name="another"))
    assert judge(make_result()).passes


@pytest.mark.parametrize(
    ("field", "bound"), [("choice_abs_log_mean", CHOICE_MEAN_ABS_LOG), ("choice_abs_log_max", CHOICE_MAX_ABS_LOG)]
)
def test_a_log_ratio_passes_at_its_bound_and_fails_just_above(make_result, field, bound):
    assert judge(_with_kept(make_result(), **{field: bound})).passes
    verdict = judge(_with_kept(make_result(), **{field: math.nextafter(bound, 1)}))
    assert not verdict.passes
    assert len(verdict.reasons) == 1
    assert "log ratio" in verdict.reasons[0]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_other_than_the_kept_mass_fails_in_either_direction(make_result, sign):
    result = make_result()
    mean = result.full_vocabulary_ratio.mean
    within = replace(result, kept_mass_mean=mean + sign * 0.99 * MASS_GAP)
    beyond = replace(result, kept_mass_mean=mean + sign * 1.01 * MASS_GAP)
    assert judge(within).passes
    assert not judge(beyond).passes
    assert not judge(replace(result, choice_mass_gap=sign * 1.01 * MASS_GAP)).passes
    assert judge(replace(result, choice_mass_gap=sign * MASS_GAP)).passes


def test_bounds_are_those_of_the_acceptance():
    assert (CHOICE_MEAN_ABS_LOG, CHOICE_MAX_ABS_LOG, MASS_GAP) == (2e-5, 2e-3, 1e-4)


def test_a_missing_number_fails_and_says_so(make_result):
    verdict = judge(_with_kept(make_result(), choice_abs_log_mean=math.nan))
    assert not verdict.passes
    assert "no data" in verdict.reasons[0]


def test_the_verdict_names_the_settings_that_fail(make_result):
    good, bad = make_result(name="good"), make_result(name="bad", noise=1e-2)
    assert verdict_line([good, bad]) == "1 of 2 settings break a bound: bad."
    assert "All 2 settings pass: over 800 tokens" in verdict_line([good, good])
    assert verdict_line([]) == "Nothing was measured."


def test_json_holds_the_numbers_flat_and_survives_a_strict_encoder(make_result, run_facts):
    result = make_result(kept_size_mean=math.nan)
    data = json.loads(json.dumps(to_json(run_facts, [result]), allow_nan=False))
    (row,) = data["settings"]
    assert row["kept_size_mean"] is None
    assert row["full_vocabulary_ratio_mean"] == result.full_vocabulary_ratio.mean
    assert row["kept_set_ratio_choice_abs_log_max"] == result.kept_set_ratio.choice_abs_log_max
    assert row["path_floor_mean_abs"] == pytest.approx(3.1e-6)
    assert len(data["histogram_edges"]) == len(row["kept_set_ratio_histogram"]) + 1
    assert data["passes"] is row["passes"] is True
    assert data["run"]["versions"]["ray"] == "2.60.0"
    assert not any(isinstance(value, dict) for value in row.values())


def test_nothing_measured_does_not_pass(run_facts):
    assert to_json(run_facts, [])["passes"] is False


def test_every_json_name_is_documented_and_every_documented_name_exists(make_result, run_facts, repository: Path):
    data = to_json(run_facts, [make_result()])
    (row,) = data["settings"]
    names = {*data, *data["run"], *row}
    without_prefix = {re.sub(r"^(full_vocabulary_ratio|kept_set_ratio|path_floor|batch_floor)_", "_", n) for n in names}
    page = (repository / "docs" / "demo.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`[^|]*) \|", page, flags=re.MULTILINE)
    assert {name for cell in first_cells for name in re.findall(r"`([a-z0-9_]+)`", cell)} == without_prefix
