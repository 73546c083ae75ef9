"""Corrections: what each does to the weights, what it counts, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.corrections import BatchNormalise, Corrected, Mask, Reject, Truncate, Veto, correct
from keptset.trainer_bridge.ratios import LogRatios, log_ratios
from keptset.trainer_bridge.staleness import staleness_weights

LEVELS = ("token", "sequence", "geometric")
DELTAS = hnp.arrays(np.float64, st.integers(1, 12), elements=st.floats(-3, 3))
BOUNDS = st.tuples(st.floats(0.05, 1), st.floats(1.01, 4))


def ratios_of(*responses: list[float], on_violation: str = "exclude", **settings: Any) -> LogRatios:
    """Log ratios of responses given as lists."""
    d = np.concatenate([np.array(r, np.float64) for r in responses])
    rows = np.repeat(np.arange(len(responses)), [len(r) for r in responses])
    return log_ratios(d, np.zeros(len(d)), rows, on_violation=on_violation, **settings)


def weights(corrected: Corrected) -> list[float]:
    return corrected.weights_T.round(6).tolist()


@given(st.lists(DELTAS, min_size=1, max_size=4), BOUNDS, st.sampled_from(LEVELS))
def test_each_correction_does_to_each_response_what_the_oracle_does(
    responses: list[np.ndarray], bounds: tuple[float, float], level: Any
) -> None:
    d = ratios_of(*responses)
    lower, upper = bounds
    # The oracle compares ratios, the code their logarithms: next to a bound they may round to either side of it.
    log = np.concatenate([reference.log_ratio(r, level) for r in responses])
    assume((np.abs(log[:, None] - np.log([lower, upper])) > 1e-9).all())
    steps = {
        "truncate": Truncate(level=level, upper=upper),
        "mask": Mask(level=level, lower=lower, upper=upper),
        "reject": Reject(level=level, lower=lower, upper=upper),
    }
    for name, step in steps.items():
        expected = [
            reference.correct(r, correction=name, level=level, lower=lower, upper=upper)  # type: ignore[arg-type]
            for r in responses
        ]
        done = correct(d, step)
        np.testing.assert_allclose(done.weights_T, np.concatenate([e.weights_T for e in expected]), rtol=1e-9)
        if name == "mask":
            assert done.report.dropped_tokens == sum(e.dropped_tokens for e in expected)
        if name == "reject":
            assert done.report.dropped_responses == sum(e.dropped_sequences for e in expected)


@pytest.mark.parametrize("name", [Mask, Reject])
def test_a_ratio_on_a_bound_is_within_it(name: Any) -> None:
    d = ratios_of([math.log(2.0)], [math.log(0.25)])
    assert weights(correct(d, name(level="token", lower=0.25, upper=2.0))) == [2.0, 0.25]
    done = correct(d, Truncate(level="token", upper=2.0))
    assert weights(done) == [2.0, 0.25]
    assert done.report.steps[0].tokens == 0, "nothing had to be cut"


def test_a_bound_that_is_not_given_bounds_nothing() -> None:
    d = ratios_of([-20.0], [20.0])
    assert weights(correct(d, Mask(level="token", upper=2.0), weights="one")) == [1, 0]
    assert weights(correct(d, Mask(level="token", lower=0.5), weights="one")) == [0, 1]
    assert weights(correct(d, Reject(level="sequence", upper=2.0), weights="one")) == [1, 0]
    assert weights(correct(d, Truncate(level="token", upper=0.5))) == [round(math.exp(-20), 6), 0.5]
    step = correct(d, Truncate(level="token", upper=0.5)).report.steps[0]
    assert (step.lower, step.upper) == (0.0, 0.5)


def test_without_a_step_every_token_weighs_one() -> None:
    assert correct(ratios_of([3.0, -3.0])).weights_T.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_step_weights_of_a_level_are_its_ratios(level: Any) -> None:
    d = ratios_of([0.5, -0.25], [0.125])
    expected = np.exp(
        np.concatenate([np.broadcast_to(reference.log_ratio(r, level), len(r)) for r in ([0.5, -0.25], [0.125])])
    )
    assert correct(d, weights=level).weights_T.tolist() == pytest.approx(expected.tolist())


def test_a_veto_looks_at_every_token_and_takes_the_whole_response() -> None:
    d = ratios_of([0.0, math.log(1e-5), 0.0], [0.0, math.log(1e-3)], [0.0, 9.0])
    assert weights(correct(d, Veto(), weights="one")) == [0, 0, 0, 1, 1, 1, 1]
    report = correct(d, Veto(lower=1e-4, upper=1e3), weights="one").report
    assert (report.dropped_responses, report.dropped_tokens) == (2, 5)
    assert [(s.name, s.tokens, s.responses) for s in report.steps] == [("veto_token", 5, 2)]


def test_rejection_can_leave_the_weights_at_one_or_at_another_level() -> None:
    d = ratios_of([0.5, -0.2, 1.5], [0.1, -0.1])
    step = Reject(level="sequence", lower=0.5, upper=2.0)
    assert weights(correct(d, step, weights="one")) == [0, 0, 0, 1, 1]
    assert weights(correct(d, step, weights="token")) == [0, 0, 0, round(math.exp(0.1), 6), round(math.exp(-0.1), 6)]


def test_steps_act_in_order_and_count_only_what_was_left() -> None:
    d = ratios_of([1.0, 0.0], [3.0, 0.0], [-10.0, 0.0])
    done = correct(
        d,
        Mask(level="token", lower=0.5, upper=5.0),
        Veto(lower=1e-4, upper=10.0),
        Truncate(level="token", upper=2.0),
        weights="token",
    )
    assert weights(done) == [2.0, 1.0, 0, 0, 0, 0]
    assert [(s.name, s.tokens, s.responses) for s in done.report.steps] == [
        ("mask_token", 2, 2),
        ("veto_token", 2, 2),
        ("truncate_token", 1, 1),
    ]
    assert done.report.dropped_tokens == 4


def test_a_veto_still_sees_the_tokens_that_a_mask_took_out() -> None:
    # Otherwise the order of two corrections would decide whether an extreme token is seen at all.
    d = ratios_of([-20.0, 0.0, 0.0])
    mask, veto = Mask(level="token", lower=0.5), Veto()
    assert weights(correct(d, mask, veto, weights="one")) == [0, 0, 0]
    assert weights(correct(d, veto, mask, weights="one")) == [0, 0, 0]


@given(st.lists(DELTAS, min_size=1, max_size=4), st.sampled_from(LEVELS))
def test_batch_normalisation_leaves_a_mean_of_one(responses: list[np.ndarray], level: Any) -> None:
    done = correct(ratios_of(*responses), Truncate(level=level, upper=2.0), BatchNormalise(level=level))
    firsts = np.cumsum([0, *(len(r) for r in responses[:-1])])
    entries = done.weights_T if level == "token" else done.weights_T[firsts]
    assert entries.mean() == pytest.approx(1.0)
    assert done.report.weight_count == len(entries)


def test_batch_normalisation_counts_neither_dropped_nor_excluded_tokens() -> None:
    d = ratios_of([math.log(2), math.log(4), 50.0, math.nan])
    done = correct(d, Mask(level="token", upper=10.0), BatchNormalise(level="token"))
    assert weights(done) == [round(2 / 3, 6), round(4 / 3, 6), 0, 0]


def test_parts_of_a_batch_are_normalised_by_the_mean_of_the_whole() -> None:
    parts = [ratios_of([0.3, 0.1]), ratios_of([-0.4])]
    whole = correct(ratios_of([0.3, 0.1], [-0.4]), Truncate(level="token", upper=1.2), BatchNormalise(level="token"))
    cut = Truncate(level="token", upper=1.2)
    reports = [correct(part, cut).report for part in parts]
    mean = sum(r.weight_sum for r in reports) / sum(r.weight_count for r in reports)
    done = [correct(part, cut, BatchNormalise(level="token", mean=mean)).weights_T for part in parts]
    np.testing.assert_allclose(np.concatenate(done), whole.weights_T, rtol=1e-12)


def test_normalisation_works_where_the_weights_themselves_would_overflow() -> None:
    done = correct(ratios_of([900.0], [900.0 + math.log(3)]), BatchNormalise(level="sequence"))
    assert weights(done) == [0.5, 1.5]
    assert done.report.weight_sum == math.inf


def test_nothing_left_is_no_data() -> None:
    done = correct(ratios_of([5.0]), Mask(level="token", upper=2.0), BatchNormalise(level="token"))
    assert weights(done) == [0]
    assert done.report.largest_weight is None
    assert "correction/mean_weight" not in done.report.flat()
    empty = correct(ratios_of([]), Truncate(level="token", upper=2.0))
    assert len(empty.weights_T) == 0


def test_at_token_level_an_excluded_token_goes_alone_and_is_counted() -> None:
    done = correct(ratios_of([0.0, math.nan], [0.0]), Truncate(level="token", upper=2.0))
    assert weights(done) == [1, 0, 1]
    assert done.counted_T.tolist() == [True, False, True]
    assert done.report.excluded_tokens == {"non_finite": 1}
    assert done.report.excluded_responses == {}
    assert (done.report.counted_tokens, done.report.dropped_tokens) == (2, 0)


@pytest.mark.parametrize("step", [Reject(level="sequence", upper=2.0), Truncate(level="geometric", upper=2.0)])
def test_at_response_levels_an_excluded_token_takes_its_response_along(step: Any) -> None:
    done = correct(ratios_of([0.0, math.nan], [0.0]), step)
    assert weights(done) == [0, 0, 1]
    assert done.counted_T.tolist() == [False, False, True]
    assert done.report.excluded_responses == {"non_finite": 1}


def test_a_dropped_token_counts_and_an_excluded_one_does_not() -> None:
    done = correct(ratios_of([0.0, 5.0, math.nan]), Mask(level="token", upper=2.0))
    assert done.counted_T.tolist() == [True, True, False]
    assert (done.report.counted_tokens, done.report.dropped_tokens) == (2, 1)


def test_tokens_outside_the_loss_mask_neither_weigh_nor_count() -> None:
    done = correct(ratios_of([0.0, 99.0], trainable_T=[True, False]), Reject(level="sequence", upper=2.0))
    assert weights(done) == [1, 0]
    assert done.report.ratio_over == "trainable"
    assert done.report.counted_tokens == 1


def test_a_weight_that_nothing_bounds_is_refused_rather_than_infinite() -> None:
    with pytest.raises(InvalidInput, match=r"response 1, is exp\(100.0\).*truncate, mask or reject"):
        correct(ratios_of([0.0], [50.0, 50.0]), weights="sequence")
    assert weights(correct(ratios_of([0.0], [50.0, 50.0]), Reject(level="sequence", upper=2.0))) == [1, 0, 0]


def test_stale_tokens_weigh_less_after_the_bounds_and_before_the_mean() -> None:
    stale = staleness_weights([5, 3], [0, 1], 5, max_lag=1, beyond="down_weight", decay=0.5)
    d = ratios_of([math.log(8)], [math.log(8)])
    done = correct(d, Truncate(level="token", upper=4.0), stale)
    assert weights(done) == [4.0, 2.0]
    assert done.report.steps[1].name == "staleness"
    assert (done.report.steps[1].tokens, done.report.steps[1].responses) == (1, 1)
    normalised = correct(d, Truncate(level="token", upper=4.0), stale, BatchNormalise(level="token"))
    assert weights(normalised) == [round(4 / 3, 6), round(2 / 3, 6)]


def test_stale_tokens_that_are_dropped_are_counted_as_dropped() -> None:
    stale = staleness_weights([5, 1], [0, 1], 5, max_lag=1)
    done = correct(ratios_of([0.0], [0.0]), stale)
    assert weights(done) == [1, 0]
    assert (done.report.dropped_tokens, done.report.dropped_responses) == (1, 1)


def test_weights_of_responses_need_one_age_per_response() -> None:
    d = ratios_of([0.0, 0.0])
    one_by_one = staleness_weights([5, 1], [0, 0], 5, max_lag=1, beyond="down_weight")
    with pytest.raises(InvalidInput, match="per='response'"):
        correct(d, one_by_one, weights="sequence")
    together = staleness_weights([5, 1], [0, 0], 5, max_lag=1, beyond="down_weight", per="response")
    assert weights(correct(d, together, weights="sequence")) == [0.125, 0.125]
    with pytest.raises(InvalidInput, match="weighs 2 tokens; the ratios have 1"):
        correct(ratios_of([0.0]), together)


def test_the_report_is_flat_names_and_numbers() -> None:
    d = ratios_of([0.0, 5.0, math.nan])
    flat = correct(d, Mask(level="token", upper=2.0), Truncate(level="token", upper=1.5)).report.flat("train/")
    assert flat == {
        "train/correction/counted_tokens": 2.0,
        "train/correction/dropped_tokens": 1.0,
        "train/correction/dropped_responses": 0.0,
        "train/correction/mean_weight": 1.0,
        "train/correction/largest_weight": 1.0,
        "train/correction/mask_token/tokens": 1.0,
        "train/correction/mask_token/responses": 1.0,
        "train/correction/truncate_token/tokens": 0.0,
        "train/correction/truncate_token/responses": 0.0,
        "train/correction/excluded_tokens/non_finite": 1.0,
    }


@pytest.mark.parametrize(
    ("steps", "asked", "told"),
    [
        ((Mask(level="token", upper=2.0), Reject(level="sequence", upper=2.0)), None, "levels sequence, token"),
        ((Truncate(level="token", upper=2.0),), "sequence", "Truncate of level 'token'.*'sequence'"),
        ((BatchNormalise(level="token"),), "one", "BatchNormalise of level 'token'.*'one'"),
        ((Mask(level="word", upper=2.0),), None, "level is 'word'"),  # type: ignore[arg-type]
        ((), "word", "weights is 'word'"),
    ],
)
def test_levels_that_do_not_fit_are_refused(steps: Any, asked: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        correct(ratios_of([0.0]), *steps, weights=asked)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Truncate(level="token", upper=0.0),
        lambda: Truncate(level="token", upper=math.nan),
        lambda: Mask(level="token", lower=2.0, upper=1.0),
        lambda: Reject(level="token", lower=-1.0),
        lambda: Veto(lower=1.0, upper=1.0),
    ],
)
def test_bounds_that_are_none_are_refused(make: Any) -> None:
    with pytest.raises(InvalidInput, match="must ascend from 0"):
        make()


@pytest.mark.parametrize("mean", [0.0, math.inf, math.nan])
def test_a_mean_that_is_none_is_refused(mean: float) -> None:
    with pytest.raises(InvalidInput, match="mean is"):
        BatchNormalise(level="token", mean=mean)
