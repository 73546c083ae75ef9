"""Responses drawn anew follow the distributions that they are drawn from, bent ones included."""

from __future__ import annotations

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.scripts.audit_redraws import Redraw, greedy, sharper, with_trainer

TIMES = 4_000
P = [[0.5, 0.3, 0.2], [1.0], [0.25, 0.25, 0.5]]
IDS = [[2, 5, 9], [4], [1, 3, 7]]


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    """TIMES responses of three tokens, with the same three distributions."""
    builder = BatchBuilder(Identity(vocab_size=10))
    logp = np.log(np.concatenate(P))
    for number in range(TIMES):
        builder.add(
            Response(
                rollout_id=f"r{number}",
                prompt_id="p",
                prompt_token_ids=np.array([1]),
                token_ids=np.array([2, 4, 1]),
                behavior_logprobs=logp[[0, 3, 4]],
                log_kept_mass=np.zeros(3),
                kept_offsets=np.array([0, 3, 4, 7]),
                kept_ids=np.concatenate(IDS),
                kept_logprobs=logp,
                finish_reason="length",
            )
        )
    return builder.build()


def shares(drawn: RolloutBatch, rows: slice) -> list[list[float]]:
    """Of each id of each set, over some responses."""
    tokens = drawn.token_ids.values.reshape(-1, 3)[rows]
    return [[float(np.mean(tokens[:, at] == token)) for token in ids] for at, ids in enumerate(IDS)]


def powered(p: list[float], power: float) -> list[float]:
    total = sum(one**power for one in p)
    return [one**power / total for one in p]


def test_honest_draws_follow_the_recorded_distribution(batch: RolloutBatch) -> None:
    drawn = Redraw(batch=batch).draw(np.random.default_rng(1), np.zeros(TIMES, bool))
    for found, p in zip(shares(drawn, slice(None)), P, strict=True):
        assert found == pytest.approx(p, abs=0.03)
    b = drawn.behavior_logprobs.values.reshape(-1, 3)
    at = [IDS[0].index(token) for token in drawn.token_ids.values.reshape(-1, 3)[:, 0]]
    np.testing.assert_allclose(b[:, 0], np.log(P[0])[at], atol=1e-6)
    assert not set(drawn.rollout_ids) & set(batch.rollout_ids)


def test_only_faulty_responses_are_drawn_from_what_is_bent(batch: RolloutBatch) -> None:
    faulty = np.arange(TIMES) < TIMES // 2
    drawn = Redraw(batch=batch).draw(np.random.default_rng(2), faulty, sharper(2.0))
    for found, p in zip(shares(drawn, slice(0, TIMES // 2)), P, strict=True):
        assert found == pytest.approx(powered(p, 2.0), abs=0.04)
    for found, p in zip(shares(drawn, slice(TIMES // 2, None)), P, strict=True):
        assert found == pytest.approx(p, abs=0.04)


def test_greedy_draws_take_the_first_of_the_most_probable(batch: RolloutBatch) -> None:
    drawn = Redraw(batch=batch).draw(np.random.default_rng(3), np.ones(TIMES, bool), greedy)
    assert shares(drawn, slice(None)) == [[1, 0, 0], [1], [0, 0, 1]]
    tied = greedy(np.log([0.4, 0.4, 0.2]), np.array([0, 3]))
    assert tied.tolist() == [0.0, -np.inf, -np.inf]


def test_a_noisy_trainer_has_distributions_and_its_ratio_is_1_in_the_mean(batch: RolloutBatch) -> None:
    redraw, random = Redraw(batch=batch), np.random.default_rng(4)
    l_N = redraw.noisy_trainer(0.5, random)
    sums = np.add.reduceat(np.exp(l_N), redraw.offsets_T1[:-1])
    np.testing.assert_allclose(sums, 1.0)
    drawn = redraw.draw(random, np.zeros(TIMES, bool))
    l_T = l_N[redraw.position_in_sets(drawn)]
    assert np.mean(np.exp(l_T - drawn.behavior_logprobs.values)) == pytest.approx(1.0, abs=0.02)
    kept = with_trainer(drawn, l_T).column("x_trainer_logprobs").to_pylist()
    assert kept[1] == l_T[3:6].tolist()
