"""Losses: their value and gradient against plain loops, in every framework, and what they count and refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.advantages import group_advantages
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.corrections import Mask, Reject, Truncate, correct
from keptset.trainer_bridge.diagnostics import Diagnostics
from keptset.trainer_bridge.losses import cispo_loss, dual_clip_loss, grpo_loss, gspo_loss, ppo_clip_loss
from keptset.trainer_bridge.ratios import LogRatios, log_ratios, log_ratios_of
from keptset.trainer_bridge.scoring import score_aligned, score_aligned_full_vocabulary

LENGTHS = [3, 1, 4]
ROWS = np.repeat(np.arange(3), LENGTHS)
ADVANTAGES = np.array([1.5, -0.5, -2.0])
DELTA = np.array([0.5, -0.4, 0.1, -0.9, 1.9, 0.05, -0.3, 0.15])
"""Above, below and within the bounds, under advantages of either sign."""

CALLS = {
    "ppo_clip": lambda d, a, **s: ppo_clip_loss(d, a, **s),
    "ppo_clip uneven": lambda d, a, **s: ppo_clip_loss(d, a, clip_lower=0.1, clip_upper=0.28, **s),
    "ppo_clip sequence": lambda d, a, **s: ppo_clip_loss(d, a, level="sequence", **s),
    "dual_clip": lambda d, a, **s: dual_clip_loss(d, a, dual=3.0, **s),
    "grpo": lambda d, a, **s: grpo_loss(d, a, **s),
    "gspo": lambda d, a, **s: gspo_loss(d, a, clip_lower=0.1, clip_upper=0.1, **s),
}
"""Losses whose gradient is the derivative of their value."""


def ratios_of(delta: Any, rows: Any = ROWS, **settings: Any) -> LogRatios:
    return log_ratios(delta, np.zeros(len(rows)), rows, **settings)


def objective(name: str, delta: np.ndarray, advantage: float) -> np.ndarray:
    """What one response contributes, by the oracle: per token, or one number at response levels."""
    if name == "gspo":
        return np.array([reference.gspo(delta, advantage, 0.1)[1]])
    level = "sequence" if "sequence" in name else "token"
    ratio = np.exp(reference.log_ratio(delta, level))  # type: ignore[arg-type]
    if name == "dual_clip":
        return reference.dual_clip(ratio, advantage, 0.2, 3.0)
    if name == "ppo_clip uneven":
        return np.minimum(ratio * advantage, np.clip(ratio, 0.9, 1.28) * advantage)
    return reference.ppo_clip(ratio, advantage, 0.2)


def reduced(per_response: list[np.ndarray], reduce: str) -> float:
    """By plain loops. At response levels a response's one number stands for each of its tokens."""
    if reduce == "sum":
        return sum(float(o.sum()) for o in per_response)
    if reduce == "response_mean":
        return float(np.mean([o.mean() for o in per_response]))
    tokens = [np.broadcast_to(o, n) for o, n in zip(per_response, LENGTHS, strict=True)]
    return float(np.concatenate(tokens).mean())


@pytest.mark.parametrize("reduce", ["token_mean", "response_mean", "sum"])
@pytest.mark.parametrize("name", CALLS)
def test_the_value_is_the_oracles_objective_reduced_by_hand(framework: Any, name: str, reduce: Any) -> None:
    done = CALLS[name](ratios_of(framework.tensor(DELTA)), ADVANTAGES, reduce=reduce)
    by_response = [objective(name, DELTA[row == ROWS], ADVANTAGES[row]) for row in range(3)]
    expected = -reduced(by_response, reduce)
    assert float(framework.host(done.value)) == pytest.approx(expected, rel=1e-12)
    assert done.report.value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reduce", ["token_mean", "response_mean", "sum"])
@pytest.mark.parametrize("name", CALLS)
def test_the_gradient_is_the_derivative_of_the_value(name: str, reduce: Any) -> None:
    def value(delta: np.ndarray) -> float:
        return float(CALLS[name](ratios_of(delta), ADVANTAGES, reduce=reduce).value)

    step = 1e-6
    slopes = [(value(DELTA + e) - value(DELTA - e)) / (2 * step) for e in np.eye(len(DELTA)) * step]
    done = CALLS[name](ratios_of(DELTA), ADVANTAGES, reduce=reduce)
    np.testing.assert_allclose(done.gradient_T, slopes, atol=1e-8)


@pytest.mark.parametrize("name", [*CALLS, "cispo"])
def test_a_framework_passes_exactly_this_gradient_on(framework: Any, name: str) -> None:
    leaf = framework.tensor(DELTA)
    call = CALLS.get(name, cispo_loss)
    done = call(ratios_of(leaf * 1), ADVANTAGES)
    np.testing.assert_allclose(framework.gradient(done.value, leaf), done.gradient_T, rtol=1e-12)


def test_losses_in_float32_are_float32(framework: Any) -> None:
    done = ppo_clip_loss(ratios_of(framework.tensor(DELTA, "float32")), ADVANTAGES)
    exact = ppo_clip_loss(ratios_of(DELTA.astype(np.float32).astype(np.float64)), ADVANTAGES)
    assert float(framework.host(done.value)) == pytest.approx(float(exact.value), rel=1e-6)
    np.testing.assert_allclose(done.gradient_T, exact.gradient_T, rtol=1e-12)


@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=10),
    st.floats(-2, 2),
    st.floats(0, 0.9),
    st.floats(0, 0.9),
)
def test_ppo_clip_is_the_textbook_formula(delta: list[float], advantage: float, lower: float, upper: float) -> None:
    ratio = np.exp(delta)
    expected = np.minimum(ratio * advantage, np.clip(ratio, 1 - lower, 1 + upper) * advantage)
    d = ratios_of(np.array(delta), [0] * len(delta))
    done = ppo_clip_loss(d, [advantage], clip_lower=lower, clip_upper=upper)
    assert float(done.value) == pytest.approx(-expected.mean(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "grpo", "cispo"])
def test_at_equal_weights_every_token_loss_is_the_plain_policy_gradient(name: str) -> None:
    done = CALLS.get(name, cispo_loss)(ratios_of(np.zeros(8)), ADVANTAGES, reduce="token_mean")
    np.testing.assert_allclose(done.gradient_T, -ADVANTAGES[ROWS] / 8)


def test_cispo_weighs_the_gradient_of_log_pi_by_the_clipped_ratio() -> None:
    done = cispo_loss(ratios_of(DELTA), ADVANTAGES, clip_upper=0.28, reduce="sum")
    np.testing.assert_allclose(done.gradient_T, -np.minimum(np.exp(DELTA), 1.28) * ADVANTAGES[ROWS])
    assert (done.gradient_T != 0).all()
    assert done.report.clipped_above == 2
    both = cispo_loss(ratios_of(DELTA), ADVANTAGES, clip_lower=0.2, clip_upper=0.28, reduce="sum")
    np.testing.assert_allclose(both.gradient_T, -np.clip(np.exp(DELTA), 0.8, 1.28) * ADVANTAGES[ROWS])
    assert both.report.clipped_below == 3


def test_gspo_gives_every_token_of_a_response_the_same_share() -> None:
    done = gspo_loss(ratios_of(DELTA * 1e-4), ADVANTAGES)
    ratio = np.exp([DELTA[row == ROWS].mean() * 1e-4 for row in range(3)])
    np.testing.assert_allclose(done.gradient_T, (-ratio * ADVANTAGES / LENGTHS / 3)[ROWS])
    assert (done.report.level, done.report.entries, done.report.tokens) == ("geometric", 3, 8)


def test_grpo_of_grouped_rewards_is_the_published_formula() -> None:
    rewards = np.array([1.0, 0.0, 0.5])
    advantages = (rewards - rewards.mean()) / rewards.std()
    clipped = [
        np.minimum(np.exp(DELTA[row == ROWS]) * a, np.clip(np.exp(DELTA[row == ROWS]), 0.8, 1.2) * a)
        for row, a in enumerate(advantages)
    ]
    done = grpo_loss(ratios_of(DELTA), group_advantages(rewards, ["p"] * 3))
    assert float(done.value) == pytest.approx(-np.mean([c.mean() for c in clipped]))


def test_losses_of_parts_add_up_to_that_of_the_whole() -> None:
    whole = ppo_clip_loss(ratios_of(DELTA), ADVANTAGES)
    parts = [
        ppo_clip_loss(ratios_of(DELTA[row == ROWS], [0] * n), [ADVANTAGES[row]], denominator=8)
        for row, n in enumerate(LENGTHS)
    ]
    assert sum(float(p.value) for p in parts) == pytest.approx(float(whole.value))
    np.testing.assert_allclose(np.concatenate([p.gradient_T for p in parts]), whole.gradient_T)
    by_response = [
        grpo_loss(ratios_of(DELTA[row == ROWS], [0] * n), [ADVANTAGES[row]], denominator=3)
        for row, n in enumerate(LENGTHS)
    ]
    assert sum(float(p.value) for p in by_response) == pytest.approx(
        float(grpo_loss(ratios_of(DELTA), ADVANTAGES).value)
    )


def test_a_constant_denominator_removes_the_length_bias() -> None:
    done = grpo_loss(ratios_of(np.zeros(8)), ADVANTAGES, reduce="sum", denominator=100)
    np.testing.assert_allclose(done.gradient_T, -ADVANTAGES[ROWS] / 100)


def test_weights_multiply_the_objective_and_dropped_tokens_stay_in_the_denominator() -> None:
    d = ratios_of(DELTA)
    weights = correct(d, Mask(level="token", upper=6.0), Truncate(level="token", upper=1.5))
    done = ppo_clip_loss(d, ADVANTAGES, weights=weights)
    expected = np.concatenate([objective("ppo_clip", DELTA[row == ROWS], ADVANTAGES[row]) for row in range(3)])
    assert float(done.value) == pytest.approx(-np.sum(weights.weights_T * expected) / 8)
    assert done.gradient_T[4] == 0
    assert (done.report.entries, done.report.dropped, done.report.tokens) == (8, 1, 8)
    assert (done.report.clipped_above, done.report.clipped_below) == (1, 2), "a dropped token is clipped nowhere"
    flat = done.report.flat()
    assert flat["ppo_clip_token/clipped_above_share"] == pytest.approx(1 / 7)
    assert flat["ppo_clip_token/clipped_below_share"] == pytest.approx(2 / 7)


def test_a_rejected_response_has_no_gradient_and_leaves_the_others_theirs() -> None:
    d = ratios_of(DELTA)
    done = gspo_loss(d, ADVANTAGES, weights=correct(d, Reject(level="sequence", upper=3.0), weights="one"))
    plain = gspo_loss(d, ADVANTAGES)
    assert (done.gradient_T[ROWS == 2] == 0).all()
    np.testing.assert_allclose(done.gradient_T[ROWS != 2], plain.gradient_T[ROWS != 2])


def test_token_weights_cannot_weigh_a_response() -> None:
    d = ratios_of(DELTA)
    with pytest.raises(InvalidInput, match="response 0 have weights from .* correct at level 'sequence'"):
        gspo_loss(d, ADVANTAGES, weights=correct(d, Truncate(level="token", upper=2.0)))
    same = correct(d, Truncate(level="geometric", upper=2.0))
    assert gspo_loss(d, ADVANTAGES, weights=same).report.entries == 3


def test_an_excluded_token_reaches_neither_value_nor_gradient(framework: Any) -> None:
    delta = DELTA.copy()
    delta[1] = np.nan
    leaf = framework.tensor(delta)
    done = ppo_clip_loss(ratios_of(leaf * 1, on_violation="exclude"), ADVANTAGES)
    others = [objective("ppo_clip", delta[(row == ROWS) & np.isfinite(delta)], ADVANTAGES[row]) for row in range(3)]
    assert float(framework.host(done.value)) == pytest.approx(-np.concatenate(others).sum() / 7)
    assert done.report.excluded_tokens == {"non_finite": 1}
    gradient = framework.gradient(done.value, leaf)
    assert gradient[1] == 0
    np.testing.assert_allclose(gradient, done.gradient_T)


def test_at_response_level_an_excluded_token_takes_its_response_along() -> None:
    delta = DELTA.copy()
    delta[1] = np.inf
    done = gspo_loss(ratios_of(delta, on_violation="exclude"), ADVANTAGES)
    assert (done.gradient_T[ROWS == 0] == 0).all()
    assert (done.report.entries, done.report.responses) == (2, 2)
    assert done.report.excluded_responses == {"non_finite": 1}


def test_what_only_the_correction_excluded_is_left_out_and_counted_too() -> None:
    broken = DELTA.copy()
    broken[0] = np.nan
    weights = correct(ratios_of(broken, on_violation="exclude"), weights="sequence")
    for loss in (ppo_clip_loss, gspo_loss):
        done = loss(
            ratios_of(DELTA), ADVANTAGES, weights=correct(ratios_of(broken, on_violation="exclude"), weights="one")
        )
        assert done.report.excluded_tokens == {"non_finite": 1}
        assert done.gradient_T[0] == 0
        assert done.report.tokens == (7 if loss is ppo_clip_loss else 5)
        done = loss(ratios_of(DELTA), ADVANTAGES, weights=weights)
        assert done.report.excluded_responses == {"non_finite": 1}
        assert (done.gradient_T[ROWS == 0] == 0).all()


def test_where_nothing_counts_the_loss_is_zero_with_gradient_zero_and_the_report_has_no_data(framework: Any) -> None:
    leaf = framework.tensor([np.nan, np.inf])
    done = ppo_clip_loss(ratios_of(leaf * 1, [0, 1], on_violation="exclude"), [1.0, 1.0])
    assert float(framework.host(done.value)) == 0
    assert done.report.value is None
    assert "ppo_clip_token/value" not in done.report.flat()
    assert framework.gradient(done.value, leaf).tolist() == [0, 0]


def test_a_batch_without_tokens_has_a_loss_of_zero(framework: Any) -> None:
    done = ppo_clip_loss(ratios_of(framework.tensor(np.zeros(0)), np.zeros(0, int)), [])
    assert float(framework.host(done.value)) == 0


def test_a_token_outside_the_loss_mask_has_no_gradient() -> None:
    mask = np.array([True, False] * 4)
    done = ppo_clip_loss(ratios_of(DELTA, trainable_T=mask), ADVANTAGES)
    assert (done.gradient_T[~mask] == 0).all()
    assert done.report.tokens == 4


def test_clipped_entries_are_counted_by_side() -> None:
    report = dual_clip_loss(ratios_of(DELTA), ADVANTAGES).report
    # A > 0: .5 above; A < 0: -.9, -.3 below, and 1.9 beyond the dual bound.
    assert (report.clipped_above, report.clipped_below, report.clipped_dual) == (1, 2, 1)
    flat = report.flat("train/")
    assert flat["train/dual_clip_token/clipped_below_share"] == 0.25
    assert flat["train/dual_clip_token/clipped_dual_share"] == 0.125
    assert flat["train/dual_clip_token/entries"] == 8


def test_advantages_may_be_given_per_token() -> None:
    spread = ppo_clip_loss(ratios_of(DELTA), ADVANTAGES[ROWS], advantages_per="token")
    assert float(spread.value) == float(ppo_clip_loss(ratios_of(DELTA), ADVANTAGES).value)


def test_a_lower_bound_of_zero_clips_nothing_below() -> None:
    d = ratios_of(np.array([-30.0]), [0])
    done = ppo_clip_loss(d, [-1.0], clip_lower=1.0)
    assert float(done.value) == pytest.approx(math.exp(-30))
    assert (done.gradient_T[0], done.report.clipped_below) == (pytest.approx(math.exp(-30)), 0)


def test_an_unbounded_ratio_is_refused_and_its_response_named() -> None:
    d = ratios_of(np.array([0.0, 1000.0]), [0, 1])
    with pytest.raises(InvalidInput, match=r"token ratio of response 1 is exp\(1000.0\).*dual_clip_loss"):
        ppo_clip_loss(d, [1.0, -1.0])
    assert float(ppo_clip_loss(d, [1.0, 1.0]).value) == pytest.approx(-1.1)
    assert float(dual_clip_loss(d, [1.0, -1.0]).value) == pytest.approx(1.0)
    assert float(ppo_clip_loss(d, [1.0, 0.0]).value) == pytest.approx(-0.5), "an advantage of 0 asks for nothing"
    masked = correct(d, Mask(level="token", upper=10.0), weights="one")
    assert float(ppo_clip_loss(d, [1.0, -1.0], weights=masked).value) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda d: ppo_clip_loss(d, [1.0]), r"shape \(1,\).*at least 3 responses"),
        (lambda d: ppo_clip_loss(d, np.ones((3, 1))), "shape"),
        (lambda d: ppo_clip_loss(d, [1.0, np.nan, 1.0]), "advantages of response 1 is nan"),
        (lambda d: ppo_clip_loss(d, np.ones(3), advantages_per="token"), "there are 8 sampled tokens"),
        (
            lambda d: ppo_clip_loss(d, np.ones(8), advantages_per="token", level="sequence"),
            "one objective per response",
        ),
        (lambda d: ppo_clip_loss(d, np.ones(3), advantages_per="word"), "advantages_per is 'word'"),
        (lambda d: ppo_clip_loss(d, np.ones(3), reduce="mean"), "reduce is 'mean'"),
        (lambda d: ppo_clip_loss(d, np.ones(3), denominator=0), "denominator is 0"),
        (lambda d: ppo_clip_loss(d, np.ones(3), level="word"), "level is 'word'"),
        (lambda d: ppo_clip_loss(d, np.ones(3), clip_lower=1.5), "clip_lower is 1.5"),
        (lambda d: ppo_clip_loss(d, np.ones(3), clip_upper=-0.1), "clip_upper -0.1"),
        (lambda d: cispo_loss(d, np.ones(3), clip_upper=math.inf), "clip_upper inf"),
        (lambda d: dual_clip_loss(d, np.ones(3), dual=1.2), "dual is 1.2"),
        (lambda d: dual_clip_loss(d, np.ones(3), dual=math.inf), "dual is inf"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        call(ratios_of(DELTA))


def test_weights_of_other_tokens_are_refused() -> None:
    with pytest.raises(InvalidInput, match="weights are of 1 tokens; the ratios have 8"):
        ppo_clip_loss(ratios_of(DELTA), ADVANTAGES, weights=correct(ratios_of(np.zeros(1), [0])))
    with pytest.raises(InvalidInput, match="weights are over sampled tokens, the ratios over trainable"):
        ppo_clip_loss(ratios_of(DELTA), ADVANTAGES, weights=correct(ratios_of(DELTA, ratio_over="sampled")))


def test_a_batch_tells_how_many_advantages_it_takes(world: Any) -> None:
    packed = to_packed(world.batch)
    d = log_ratios_of(score_aligned(packed, world.packed_logits()), packed.tokens)
    with pytest.raises(InvalidInput, match="each of 12 responses"):
        ppo_clip_loss(d, np.ones(13))
    assert ppo_clip_loss(d, np.ones(12)).report.over == "kept"


def test_the_gradient_reaches_the_kept_logits_and_no_others(world: Any, framework: Any) -> None:
    packed = to_packed(world.batch)
    logits = framework.tensor(world.packed_logits())
    done = ppo_clip_loss(log_ratios_of(score_aligned(packed, logits), packed.tokens), np.ones(12))
    gradient = framework.gradient(done.value, logits)
    kept = np.zeros(gradient.shape, bool)
    tokens = packed.tokens
    for t, row in enumerate(packed.logit_index_T):
        ids = slice(tokens.kept_offsets_T1[t], tokens.kept_offsets_T1[t + 1])
        kept[row, slice(None) if tokens.full_T[t] else tokens.kept_ids_N[ids]] = True
    assert (gradient[~kept] == 0).all()
    assert np.abs(gradient[kept]).max() > 0


def test_the_report_says_what_the_scores_are_over(simulate: Any, rng: np.random.Generator) -> None:
    world = simulate(rng, [SamplingParams(top_k=3)] * 2)
    packed = to_packed(world.batch)
    reports = [
        ppo_clip_loss(log_ratios_of(score(packed, world.packed_logits()), packed.tokens), [1.0, 1.0]).report
        for score in (score_aligned, score_aligned_full_vocabulary)
    ]
    assert [report.over for report in reports] == ["kept", "full"]


def test_scores_and_ratios_of_one_level_are_no_log_ratios(world: Any) -> None:
    packed = to_packed(world.batch)
    scores = score_aligned(packed, world.packed_logits())
    for wrong, name in ((scores, "Scores"), (log_ratios_of(scores, packed.tokens).at("token"), "Ratios")):
        for call in (lambda d: grpo_loss(d, np.ones(12)), correct, Diagnostics().add):
            with pytest.raises(InvalidInput, match=f"ratios is a {name}; give what log_ratios_of"):
                call(wrong)
