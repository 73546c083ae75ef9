"""Passes that NumPy does for Paddle on a host: when it does, and what it must not let pass."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from keptset.trainer_bridge.scoring import DenseHeadGradient, Head, host_pass, score_from_hidden

from .conftest import Paddle

VOCAB, HIDDEN = 50, 8
TWO_TOKENS: dict[str, Any] = {"token_ids_T": [1, 2], "temperature_T": [0.01, 0.01]}
LISTED: dict[str, Any] = TWO_TOKENS | {"kept_offsets_T1": [0, 2, 4], "kept_ids_N": [1, 3, 2, 5]}
WITH_FULL: dict[str, Any] = TWO_TOKENS | {"kept_offsets_T1": [0, 2, 2], "kept_ids_N": [1, 3], "full_T": [False, True]}


@pytest.fixture
def paddle() -> Paddle:
    return Paddle()


@pytest.fixture
def arrays(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of two tokens, and weight."""
    return rng.normal(size=(2, HIDDEN)), rng.normal(size=(VOCAB, HIDDEN))


@pytest.mark.parametrize("listed", [True, False])
def test_numpy_does_whole_passes_for_paddle_where_all_sets_are_listed(
    paddle: Paddle, arrays: Any, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight = (paddle.tensor(array, gradient=True) for array in arrays)
    passes = []
    of = host_pass.HostPass.of
    monkeypatch.setattr(host_pass.HostPass, "of", lambda *given: passes.append(of(*given)) or passes[-1])
    score_from_hidden(hidden, Head(weight_VH=weight), **(LISTED if listed else WITH_FULL))
    assert [found is not None for found in passes] == [listed]


def test_a_buffer_that_was_replaced_by_one_out_of_reach_is_not_passed_over(paddle: Paddle, arrays: Any) -> None:
    hidden, weight = (paddle.tensor(array, gradient=True) for array in arrays)
    sink = DenseHeadGradient(paddle.tensor(np.zeros((VOCAB, HIDDEN))))
    scores = score_from_hidden(hidden, Head(weight_VH=weight), **LISTED, head_gradient=sink)
    sink.weight_VH = paddle.tensor(np.zeros((HIDDEN, VOCAB))).T
    if sink.weight_VH.is_contiguous():
        pytest.skip("this Paddle copies where it transposes")
    with pytest.raises(Exception, match="replaced between forward and backward"):
        scores.logprobs_T.sum().backward()


def test_scores_beyond_float32_are_infinite_without_a_warning(paddle: Paddle, arrays: Any) -> None:
    hidden, weight = (paddle.tensor(array * 3e18) for array in arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = score_from_hidden(hidden, Head(weight_VH=weight), **LISTED)
    logprobs = paddle.host(scores.logprobs_T)
    assert ((logprobs == 0) | np.isneginf(logprobs) | np.isnan(logprobs)).all()
