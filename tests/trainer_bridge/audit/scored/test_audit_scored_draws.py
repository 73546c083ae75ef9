"""The draw test over a model's distributions, where none was recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from keptset.trainer_bridge import reference
from keptset.trainer_bridge.audit.checks.draws import Draws
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.token_scores import ModelScorer
from keptset.trainer_bridge.reference.audit import honest, pit, pit_uniform


def scorer_of(scored: Any, world: Any, models: Any = None) -> ModelScorer:
    return ModelScorer(scorer=scored.TableScorer(models or {0: world.model}))


def place(world: Any, row: int, at: int) -> float:
    """By the oracle; NaN where there was no choice."""
    position = world.position(row, at)
    if len(position.kept_ids) == 1:
        return float("nan")
    params = position.params
    z = reference.process(position.logits_V, position.prompt_ids, position.response_ids, params)[position.kept_ids]
    logp = z / params.temperature - reference.logsumexp(z / params.temperature)
    return pit(position.kept_ids, logp, position.token, pit_uniform(f"rollout-{row}", at))


def test_places_are_those_of_the_oracle(scored: Any, clean: Any) -> None:
    places = scorer_of(scored, clean).score(clean.batch()).places_T.reshape(16, -1)
    expected = np.array([[place(clean, row, at) for at in range(places.shape[1])] for row in range(16)])
    assert 0.5 < np.isfinite(expected).mean() < 1
    np.testing.assert_allclose(places, expected, atol=2e-6)


def test_each_place_is_under_the_weights_that_drew_the_token(scored: Any, clean: Any) -> None:
    newer = clean.model.moved(17, 0.3)
    alone = scorer_of(scored, clean).score(clean.batch()).places_T
    both = scorer_of(scored, clean, {0: clean.model, 1: newer}).score(clean.batch()).places_T
    np.testing.assert_allclose(both, alone, atol=2e-6)
    of_others = scorer_of(scored, clean, {1: newer}).score(clean.batch()).places_T
    assert np.isnan(of_others).all()


def test_a_response_whose_b_disagrees_with_the_model_has_no_places(scored: Any, clean: Any) -> None:
    wrong = clean.with_b([3], lambda row, at: honest(clean.position(row, at)) - 0.5)
    places = scorer_of(scored, wrong).score(wrong.batch()).places_T.reshape(16, -1)
    assert np.isnan(places[3]).all()
    assert np.isfinite(np.delete(places, 3, axis=0)).any(axis=1).all()


def outcome_of(scored: Any, world: Any) -> Any:
    check = Draws(AuditOptions())
    check.add(scored.audited(world.batch(), scorer_of(scored, world)))
    return check.outcome()


def test_honest_draws_pass_and_the_likeliest_tokens_do_not(scored: Any) -> None:
    honest_world = scored.draw(11, 40)
    (test,) = outcome_of(scored, honest_world).tests
    assert test.p_value > 1e-3

    # Of six responses the likeliest: each b is right, the choice among them is not.
    worlds = [honest_world, *(scored.draw(seed, 40, model=honest_world.model) for seed in range(12, 17))]
    likelier = [
        max(candidates, key=lambda response: float(np.sum(response.behavior_logprobs)))
        for candidates in zip(*(world.responses for world in worlds), strict=True)
    ]
    (test,) = outcome_of(scored, scored.World(likelier, honest_world.model)).tests
    assert test.p_value < 1e-3 and test.effect > 0.05


def test_without_a_model_or_recorded_distributions_it_is_not_tested(scored: Any, clean: Any) -> None:
    check = Draws(AuditOptions())
    check.add(scored.audited(clean.batch()))
    (missing,) = check.outcome().not_tested
    assert "there are 0" in missing.reason
    assert not check.outcome().tests
