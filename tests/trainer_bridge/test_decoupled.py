"""Behaviour, proximal, current: two ratios over the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keptset.schemas.errors import ScoringRefused, ViolationError
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.corrections import Truncate, correct
from keptset.trainer_bridge.decoupled import decoupled_log_ratios, log_ratios_between
from keptset.trainer_bridge.losses import ppo_clip_loss
from keptset.trainer_bridge.ratios import log_ratios_of
from keptset.trainer_bridge.scoring import score_aligned, score_aligned_full_vocabulary


@pytest.fixture
def packed(world: Any) -> Any:
    return to_packed(world.batch)


def moved(world: Any, by: float, seed: int = 1) -> np.ndarray:
    """Logits of a model whose weights went on."""
    return world.packed_logits() + by * np.random.default_rng(seed).normal(size=world.packed_logits().shape)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_two_ratios_multiply_to_the_one(world: Any, packed: Any, framework: Any, level: Any) -> None:
    proximal = score_aligned(packed, moved(world, 0.1))
    current = score_aligned(packed, framework.tensor(moved(world, 0.3)))
    two = decoupled_log_ratios(current, packed.tokens, proximal=proximal)
    one = log_ratios_of(current, packed.tokens)
    product = two.proximal_over_behavior.log_ratios_T(level) + two.current_over_proximal.log_ratios_T(level)
    np.testing.assert_allclose(product, one.log_ratios_T(level), atol=1e-6)
    assert two.proximal_over_behavior.num_responses == two.current_over_proximal.num_responses == 12


def test_at_the_first_update_only_the_mismatch_differs_from_one(world: Any, packed: Any, framework: Any) -> None:
    logits = framework.tensor(moved(world, 0.2), "float32")
    two = decoupled_log_ratios(score_aligned(packed, logits), packed.tokens)
    assert (two.current_over_proximal.host_delta_T == 0).all()
    assert np.abs(two.proximal_over_behavior.host_delta_T).max() > 0.05
    done = ppo_clip_loss(two.current_over_proximal, np.ones(12))
    assert np.abs(framework.gradient(done.value, logits)).max() > 0, "the ratio is 1, and its gradient that of log pi"


def test_corrections_of_the_mismatch_weigh_the_clipped_objective(world: Any, packed: Any) -> None:
    two = decoupled_log_ratios(
        score_aligned(packed, moved(world, 0.3)), packed.tokens, proximal=score_aligned(packed, moved(world, 0.2))
    )
    weights = correct(two.proximal_over_behavior, Truncate(level="token", upper=1.1))
    done = ppo_clip_loss(two.current_over_proximal, np.ones(12), weights=weights)
    trained = packed.tokens.trainable_T
    ratio = np.exp(two.current_over_proximal.host_delta_T[trained])
    mismatch = np.minimum(np.exp(two.proximal_over_behavior.host_delta_T[trained]), 1.1)
    assert float(done.value) == pytest.approx(-np.mean(mismatch * np.minimum(ratio, 1.2)))


@pytest.mark.parametrize("broken", ["proximal", "current"])
def test_a_token_excluded_from_either_is_excluded_from_both(world: Any, packed: Any, broken: str) -> None:
    good, bad = world.packed_logits(), world.packed_logits()
    token = int(np.flatnonzero(packed.tokens.trainable_T & (packed.tokens.kept_sizes_T > 1))[0])
    bad[packed.logit_index_T[token]] = np.nan
    logits = {"proximal": good, "current": good, broken: bad}
    scores = {name: score_aligned(packed, given) for name, given in logits.items()}
    with pytest.raises(ViolationError):
        decoupled_log_ratios(scores["current"], packed.tokens, proximal=scores["proximal"])
    two = decoupled_log_ratios(scores["current"], packed.tokens, proximal=scores["proximal"], on_violation="exclude")
    for ratios in (two.proximal_over_behavior, two.current_over_proximal):
        assert not ratios.counted_T[token]
        assert ratios.violations.counts() == {"non_finite": 1}


def test_scores_over_different_supports_have_no_ratio(simulate: Any, rng: np.random.Generator) -> None:
    world = simulate(rng, [SamplingParams(top_k=3)] * 2)
    packed = to_packed(world.batch)
    kept = score_aligned(packed, world.packed_logits())
    full = score_aligned_full_vocabulary(packed, world.packed_logits())
    with pytest.raises(ScoringRefused, match="over `kept`, the other over `full`"):
        decoupled_log_ratios(kept, packed.tokens, proximal=full)
    with pytest.raises(ScoringRefused, match="over `full`, the other over `kept`"):
        log_ratios_between(full, kept, packed.tokens)


def test_the_ratio_to_a_reference_asks_for_no_behaviour(world: Any, packed: Any) -> None:
    policy, other = score_aligned(packed, moved(world, 0.2)), score_aligned(packed, world.packed_logits())
    unrecorded = replace(packed.tokens, behavior_logprobs_T=np.full(packed.tokens.num_tokens, np.nan, np.float32))
    between = log_ratios_between(policy, other, unrecorded)
    np.testing.assert_allclose(between.host_delta_T, policy.logprobs_T - other.logprobs_T)
    assert between.violations.counts() == {}
