"""Gradients of scores against autograd on the dense formula, and against the oracle."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.alignment import to_packed, to_padded
from keptset.trainer_bridge.replay import Patch, Replay
from keptset.trainer_bridge.scoring import (
    score_aligned,
    score_aligned_full_vocabulary,
    score_from_logits,
    score_full_vocabulary,
)

TOKENS, VOCAB = 24, 50


@pytest.fixture
def case(rng: np.random.Generator) -> dict[str, Any]:
    """Sets from one id to the whole vocabulary, some listed and some marked `full`."""
    full = np.arange(TOKENS) % 6 == 5
    sizes = rng.integers(1, 12, TOKENS)
    sizes[1], sizes[2], sizes[full] = 1, VOCAB, 0
    sets = [np.sort(rng.choice(VOCAB, size, replace=False)) for size in sizes]
    return {
        "token_ids_T": np.array([rng.choice(kept) if len(kept) else rng.integers(VOCAB) for kept in sets]),
        "kept_offsets_T1": np.cumsum([0, *sizes]),
        "kept_ids_N": np.concatenate(sets).astype(np.int32),
        "temperature_T": rng.uniform(0.3, 2, TOKENS),
        "full_T": full,
    }


def leaf(trainer: Any, rng: np.random.Generator, dtype: str, rows: int = TOKENS) -> Any:
    return trainer.tensor(rng.normal(0, 3, (rows, VOCAB)), dtype, gradient=True)


def dense_scores(trainer: Any, logits: Any, case: dict[str, Any]) -> Any:
    """The formula over a dense mask, for autograd to differentiate."""
    keep = np.zeros((TOKENS, VOCAB), bool)
    keep[np.repeat(np.arange(TOKENS), np.diff(case["kept_offsets_T1"])), case["kept_ids_N"]] = True
    keep[case["full_T"]] = True
    own = np.zeros((TOKENS, VOCAB))
    own[np.arange(TOKENS), case["token_ids_T"]] = 1.0
    dtype = trainer.dtype(logits)
    s = logits / trainer.tensor(case["temperature_T"][:, None], dtype)
    over = trainer.module.logsumexp(s + trainer.tensor(np.where(keep, 0.0, -1e30), dtype), 1)
    return (s * trainer.tensor(own, dtype)).sum(1) - over


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_equal_autograd_on_the_dense_formula(
    trainer: Any, case: dict[str, Any], dtype: str, rng: Any
) -> None:
    ours = leaf(trainer, rng, dtype)
    theirs = trainer.tensor(trainer.host(ours), dtype, gradient=True)
    weights = trainer.tensor(rng.normal(size=TOKENS), dtype)
    got, expected = score_from_logits(ours, **case).logprobs_T, dense_scores(trainer, theirs, case)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    np.testing.assert_allclose(trainer.host(got), trainer.host(expected), rtol=0, atol=1e-5)
    np.testing.assert_allclose(trainer.host(ours.grad), trainer.host(theirs.grad), rtol=0, atol=1e-5)
    assert ours.grad.dtype == ours.dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_the_exact_ones_rounded_once(
    trainer: Any, case: dict[str, Any], dtype: str, rng: Any
) -> None:
    logits = leaf(trainer, rng, dtype)
    score_from_logits(logits, **case).logprobs_T.sum().backward()
    z, exact = trainer.host(logits), np.zeros((TOKENS, VOCAB))
    for t in range(TOKENS):
        begin, end = case["kept_offsets_T1"][t : t + 2]
        kept = None if case["full_T"][t] else case["kept_ids_N"][begin:end]
        exact[t] = reference.score_gradient(z[t], kept, case["token_ids_T"][t], case["temperature_T"][t])
    rounded = trainer.host(trainer.tensor(exact, dtype))
    assert logits.grad.dtype == logits.dtype
    one_unit = {"float16": 2**-10, "bfloat16": 2**-7}[dtype]
    np.testing.assert_allclose(trainer.host(logits.grad), rounded, rtol=one_unit, atol=1e-6)


def test_gradients_outside_the_kept_set_and_of_single_choices_are_exactly_zero(
    trainer: Any, case: dict[str, Any], rng: Any
) -> None:
    logits = leaf(trainer, rng, "float32")
    score_from_logits(logits, **case).logprobs_T.sum().backward()
    grad = trainer.host(logits.grad)
    inside = np.zeros((TOKENS, VOCAB), bool)
    inside[np.repeat(np.arange(TOKENS), np.diff(case["kept_offsets_T1"])), case["kept_ids_N"]] = True
    inside[case["full_T"]] = True
    assert (grad[~inside] == 0.0).all()
    assert (grad[1] == 0.0).all()
    assert (grad[inside & (np.arange(TOKENS) > 2)[:, None]] != 0.0).any()


def test_a_batch_of_single_choices_has_a_gradient_and_it_is_zero(trainer: Any, rng: Any) -> None:
    logits = leaf(trainer, rng, "float32", rows=2)
    scores = score_from_logits(logits, [3, 4], [0, 1, 2], [3, 4], [0.0, 1.0])
    assert trainer.host(scores.logprobs_T).tolist() == [0.0, 0.0]
    scores.logprobs_T.sum().backward()
    assert (trainer.host(logits.grad) == 0.0).all()


def test_gradients_flow_through_a_padded_batch_to_the_right_positions(trainer: Any, world: Any) -> None:
    padded = to_padded(world.batch, pad_token_id=0, side="left")
    logits = trainer.tensor(
        np.nan_to_num(world.padded_logits("left", padded.input_ids_BL.shape[1])), "float64", gradient=True
    )
    score_aligned(padded, logits).logprobs_T.sum().backward()
    touched = np.abs(trainer.host(logits.grad)).sum(axis=2).reshape(-1) > 0
    choices = padded.logit_index_T[padded.tokens.kept_sizes_T > 1]
    assert np.flatnonzero(touched).tolist() == choices.tolist()


def test_chunks_give_the_gradient_of_the_whole(trainer: Any, world: Any, rng: Any) -> None:
    packed = to_packed(world.batch)
    hidden_size = 7
    hidden, head = (
        rng.normal(size=(packed.num_positions, hidden_size)),
        rng.normal(size=(hidden_size, world.vocab_size)),
    )
    gradients = []
    for whole in (True, False):
        h, w = (trainer.tensor(array, "float64", gradient=True) for array in (hidden, head))

        def logits_of(positions: np.ndarray, h: Any = h, w: Any = w) -> Any:
            return trainer.gather(h, positions) @ w

        logits = h @ w if whole else logits_of
        score_aligned(packed, logits, max_elements=4 * world.vocab_size).logprobs_T.sum().backward()
        gradients.append((trainer.host(h.grad), trainer.host(w.grad)))
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_the_graph_holds_on_to_no_logits(trainer: Any, rng: Any) -> None:
    # What scoring in chunks promises: a chunk's logits go after its forward, and M numbers stay for backward.
    hidden = trainer.tensor(rng.normal(size=(4, 3)), gradient=True)
    head = trainer.tensor(rng.normal(size=(3, 50_000)))
    before = trainer.allocated()
    logits = hidden @ head
    held = weakref.ref(logits)
    scores = score_from_logits(logits, [1, 2, 3, 4], [0, 2, 4, 6, 8], [1, 2, 2, 3, 3, 4, 4, 5], [1.0] * 4)
    del logits
    assert held() is None
    assert trainer.allocated() - before < 50_000
    scores.logprobs_T.sum().backward()
    assert np.abs(trainer.host(hidden.grad)).sum() > 0


def test_the_full_vocabulary_is_scored_in_blocks_with_the_same_gradient(
    trainer: Any, case: dict[str, Any], rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {name: case[name] for name in ("token_ids_T", "temperature_T")}
    results = []
    logits = leaf(trainer, rng, "float64")
    for elements in (1, 3 * VOCAB, 1 << 22):
        monkeypatch.setattr(f"keptset.trainer_bridge.scoring.{trainer.name}_hand._HOST_BLOCK", elements)
        trainer.clear_gradient(logits)
        scores = score_full_vocabulary(logits, **bare)
        scores.logprobs_T.sum().backward()
        results.append((trainer.host(scores.logprobs_T), trainer.host(logits.grad)))
    for logprobs, gradient in results[1:]:
        np.testing.assert_allclose(logprobs, results[0][0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(gradient, results[0][1], rtol=0, atol=1e-12)


def test_gradients_pass_through_replayed_processors(trainer: Any, case: dict[str, Any], rng: Any) -> None:
    logits = leaf(trainer, rng, "float64")
    num_kept = len(case["kept_ids_N"])
    replay = Replay(divisor_N=rng.uniform(0.5, 2, num_kept), shift_N=rng.normal(size=num_kept))
    patched = np.flatnonzero(case["full_T"])
    counts = np.where(case["full_T"], 3, 0)
    patch = Patch(
        offsets_T1=np.cumsum([0, *counts]),
        ids_N=np.concatenate([np.sort(rng.choice(VOCAB, 3, replace=False)) for _ in patched]),
        replay_N=Replay(divisor_N=rng.uniform(0.5, 2, 3 * len(patched)), shift_N=rng.normal(size=3 * len(patched))),
    )
    score_from_logits(logits, **case, replay_N=replay, patch=patch).logprobs_T.sum().backward()

    def total(z: np.ndarray) -> float:
        z = z.copy()
        for token in range(TOKENS):
            if case["full_T"][token]:
                at = slice(*patch.offsets_T1[token : token + 2])
                ids, divisor, shift = patch.ids_N[at], patch.replay_N.divisor_N[at], patch.replay_N.shift_N[at]
            else:
                at = slice(*case["kept_offsets_T1"][token : token + 2])
                ids, divisor, shift = case["kept_ids_N"][at], replay.divisor_N[at], replay.shift_N[at]
            z[token, ids] = np.where(z[token, ids] > 0, z[token, ids] / divisor, z[token, ids] * divisor) + shift
        return float(score_from_logits(z, **case).logprobs_T.sum())

    z, step = trainer.host(logits), 1e-6
    rows, columns = rng.integers(0, TOKENS, 60), rng.integers(0, VOCAB, 60)
    rows, columns = [*rows, *np.repeat(patched, 3)], [*columns, *patch.ids_N]
    for row, column in zip(rows, columns, strict=True):
        nudge = np.zeros_like(z)
        nudge[row, column] = step
        numeric = (total(z + nudge) - total(z - nudge)) / (2 * step)
        assert trainer.host(logits.grad)[row, column] == pytest.approx(numeric, abs=1e-7)


def test_a_token_that_takes_no_part_cannot_poison_the_gradient(trainer: Any, case: dict[str, Any], rng: Any) -> None:
    values = rng.normal(0, 3, (TOKENS, VOCAB))
    values[3], values[5] = np.nan, np.inf  # one scored over a listed set, one over the vocabulary
    logits = trainer.tensor(values, "float64", gradient=True)
    weights = np.ones(TOKENS)
    weights[[3, 5]] = 0.0
    scores = score_from_logits(logits, **case).logprobs_T
    assert np.isnan(trainer.host(scores)).nonzero()[0].tolist() == [3, 5]
    trainer.gather(scores, np.flatnonzero(weights)).sum().backward()
    assert np.isfinite(trainer.host(logits.grad)).all()
    assert (trainer.host(logits.grad)[[3, 5]] == 0.0).all()


def test_small_gradients_are_scaled_and_never_dropped(trainer: Any, case: dict[str, Any], rng: Any) -> None:
    logits = leaf(trainer, rng, "float32")
    score_from_logits(logits, **case).logprobs_T.sum().backward()
    ordinary = trainer.host(logits.grad)
    trainer.clear_gradient(logits)
    (score_from_logits(logits, **case).logprobs_T.sum() * 2.0**-60).backward()
    np.testing.assert_array_equal(trainer.host(logits.grad), ordinary * np.float32(2.0**-60))


def test_mixed_precision_around_the_call_narrows_nothing(trainer: Any, case: dict[str, Any], rng: Any) -> None:
    logits = leaf(trainer, rng, "float32")
    plain = score_from_logits(logits, **case, entropy=True)
    with trainer.mixed_precision():
        within = score_from_logits(logits, **case, entropy=True)
    for name in ("logprobs_T", "entropy_T"):
        assert trainer.dtype(getattr(within, name)) == "float32"
        assert trainer.host(getattr(within, name)).tolist() == trainer.host(getattr(plain, name)).tolist()


def test_a_call_without_gradients_leaves_no_graph(trainer: Any, case: dict[str, Any], rng: Any) -> None:
    logits = leaf(trainer, rng, "float32")
    with trainer.no_gradients():
        assert not trainer.has_graph(score_from_logits(logits, **case).logprobs_T)
    assert not trainer.has_graph(score_from_logits(logits.detach(), **case).logprobs_T)
    scores = score_from_logits(logits, **case, full_share=1.0, entropy=True)
    assert trainer.has_graph(scores.logprobs_T)
    assert not trainer.has_graph(scores.entropy_T)
    assert not trainer.has_graph(scores.full_logprobs_T)
    assert not trainer.has_graph(scores.log_kept_mass_T)


def test_full_vocabulary_scores_of_a_batch_have_the_dense_gradient(
    trainer: Any, simulate: Callable[..., Any], rng: np.random.Generator
) -> None:
    world = simulate(rng, [SamplingParams(top_p=0.8, temperature=0.6)] * 3)
    packed = to_packed(world.batch)
    logits = trainer.tensor(world.packed_logits(), "float64", gradient=True)
    score_aligned_full_vocabulary(packed, logits).logprobs_T.sum().backward()
    expected = np.zeros(logits.shape)
    for token, row in enumerate(packed.logit_index_T):
        expected[row] = reference.score_gradient(
            trainer.host(logits)[row], None, int(packed.tokens.token_ids_T[token]), packed.tokens.temperature_T[token]
        )
    np.testing.assert_allclose(trainer.host(logits.grad), expected, rtol=0, atol=1e-12)
