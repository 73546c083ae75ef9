"""Gradients of scores from hidden states: exact, in float32 for the head, zero where nothing can move."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.replay import Patch, Replay
from keptset.trainer_bridge.scoring import (
    DenseHeadGradient,
    Head,
    RowSparseHeadGradient,
    score_from_hidden,
    score_from_logits,
)

TOKENS, VOCAB, HIDDEN = 24, 50, 8
TIGHT = 1 << 16


@pytest.fixture(params=["listed", "listed and full"])
def case(request: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Sets from one id to the whole vocabulary: all listed, which NumPy scores on a host, or some marked `full`."""
    full = (np.arange(TOKENS) % 6 == 5) & (request.param != "listed")
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


@pytest.fixture
def arrays(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, weight and bias."""
    return rng.normal(size=(TOKENS, HIDDEN)), rng.normal(size=(VOCAB, HIDDEN)), rng.normal(size=VOCAB)


def leaves(trainer: Any, arrays: tuple[np.ndarray, ...], dtype: str = "float32") -> tuple[Any, Any, Any]:
    hidden, weight, bias = (trainer.tensor(array, dtype, gradient=True) for array in arrays)
    return hidden, weight, bias


def logit_gradient(logits: np.ndarray, case: dict[str, Any], upstream: np.ndarray) -> np.ndarray:
    """[T, V] of the dense formula, from the oracle."""
    offsets, ids = case["kept_offsets_T1"], case["kept_ids_N"]
    return np.stack(
        [
            upstream[t]
            * reference.score_gradient(
                z,
                None if case["full_T"][t] else ids[offsets[t] : offsets[t + 1]],
                case["token_ids_T"][t],
                case["temperature_T"][t],
            )
            for t, z in enumerate(logits)
        ]
    )


def backward(trainer: Any, scores: Any, upstream: np.ndarray) -> None:
    (scores.logprobs_T * trainer.tensor(upstream, trainer.dtype(scores.logprobs_T))).sum().backward()


@pytest.mark.parametrize("scratch_bytes", [None, TIGHT])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("float64", 1e-12)])
def test_gradients_are_those_of_the_dense_formula(
    trainer: Any,
    case: dict[str, Any],
    arrays: Any,
    rng: np.random.Generator,
    dtype: str,
    atol: float,
    scratch_bytes: int | None,
) -> None:
    hidden, weight, bias = leaves(trainer, arrays, dtype)
    upstream = rng.normal(size=TOKENS)
    scores = score_from_hidden(hidden, Head(weight_VH=weight, bias_V=bias), **case, scratch_bytes=scratch_bytes)
    backward(trainer, scores, upstream)
    h, w, b = arrays
    d = logit_gradient(h @ w.T + b, case, upstream)
    for leaf, expected in ((hidden, d @ w), (weight, d.T @ h), (bias, d.sum(0))):
        np.testing.assert_allclose(trainer.host(leaf.grad), expected, rtol=0, atol=atol)
        assert leaf.grad.dtype == leaf.dtype


@pytest.mark.parametrize("kind", ["kept", "full"])
def test_many_chunks_and_blocks_add_up_to_the_same_gradients(trainer: Any, kind: str, rng: np.random.Generator) -> None:
    tokens, vocab, hidden_size = 70, 300, 200
    sizes = np.full(tokens, 40 if kind == "kept" else 0)
    sets = [np.sort(rng.choice(vocab, size, replace=False)) for size in sizes]
    case = {
        "token_ids_T": np.array([kept[0] if len(kept) else 7 for kept in sets]),
        "kept_offsets_T1": np.cumsum([0, *sizes]),
        "kept_ids_N": np.concatenate(sets).astype(np.int64),
        "temperature_T": rng.uniform(0.5, 2, tokens),
        "full_T": sizes == 0,
    }
    h, w = rng.normal(size=(tokens, hidden_size)) / 4, rng.normal(size=(vocab, hidden_size)) / 4
    upstream = rng.normal(size=tokens)
    d = logit_gradient(h @ w.T, case, upstream)
    for scratch_bytes in (TIGHT, 1 << 18, None):
        hidden, weight = trainer.tensor(h, gradient=True), trainer.tensor(w, gradient=True)
        scores = score_from_hidden(hidden, Head(weight_VH=weight), **case, scratch_bytes=scratch_bytes)
        backward(trainer, scores, upstream)
        np.testing.assert_allclose(trainer.host(hidden.grad), d @ w, rtol=0, atol=2e-5)
        np.testing.assert_allclose(trainer.host(weight.grad), d.T @ h, rtol=0, atol=2e-5)


@pytest.mark.parametrize("asks", ["hidden", "weight", "bias"])
def test_only_what_asks_for_a_gradient_gets_one(trainer: Any, case: dict[str, Any], arrays: Any, asks: str) -> None:
    names = ("hidden", "weight", "bias")
    hidden, weight, bias = (
        trainer.tensor(array, gradient=name == asks) for name, array in zip(names, arrays, strict=True)
    )
    backward(trainer, score_from_hidden(hidden, Head(weight_VH=weight, bias_V=bias), **case), np.ones(TOKENS))
    got = dict(zip(names, (hidden.grad, weight.grad, bias.grad), strict=True))
    assert got.pop(asks) is not None
    assert all(gradient is None for gradient in got.values())


def test_a_call_without_gradients_leaves_no_graph(trainer: Any, case: dict[str, Any], arrays: Any) -> None:
    hidden, weight, bias = leaves(trainer, arrays)
    head = Head(weight_VH=weight, bias_V=bias)
    with trainer.no_gradients():
        assert not trainer.has_graph(score_from_hidden(hidden, head, **case).logprobs_T)
    detached = Head(weight_VH=weight.detach())
    assert not trainer.has_graph(score_from_hidden(hidden.detach(), detached, **case).logprobs_T)
    scores = score_from_hidden(hidden, head, **case, entropy=True, full_share=1.0, distribution=True)
    assert trainer.has_graph(scores.logprobs_T)
    assert trainer.has_graph(scores.kept_logprobs_N)
    assert not trainer.has_graph(scores.entropy_T)
    assert not trainer.has_graph(scores.full_logprobs_T)


def test_gradients_of_single_choices_and_of_ids_outside_the_sets_are_exactly_zero(
    trainer: Any, case: dict[str, Any], arrays: Any
) -> None:
    listed = np.flatnonzero(~case["full_T"] & (np.arange(TOKENS) != 2))[:4]  # token 2 keeps everything
    sizes, offsets = np.diff(case["kept_offsets_T1"])[listed], case["kept_offsets_T1"]
    ids = np.concatenate([case["kept_ids_N"][offsets[t] : offsets[t + 1]] for t in listed])
    hidden, weight, _ = leaves(trainer, arrays)
    scores = score_from_hidden(
        hidden,
        Head(weight_VH=weight),
        case["token_ids_T"][listed],
        np.cumsum([0, *sizes]),
        ids,
        case["temperature_T"][listed],
        rows_T=listed,
    )
    backward(trainer, scores, np.ones(len(listed)))
    choices = np.repeat(sizes, sizes) > 1
    outside = np.setdiff1d(np.arange(VOCAB), ids[choices])
    assert len(outside) > VOCAB / 2
    assert (trainer.host(weight.grad)[outside] == 0.0).all()
    touched = np.abs(trainer.host(hidden.grad)).sum(1) > 0
    assert np.flatnonzero(touched).tolist() == listed[sizes > 1].tolist()


def test_the_gradient_of_a_batch_is_that_of_its_halves(trainer: Any, case: dict[str, Any], arrays: Any) -> None:
    gradients = []
    offsets = case["kept_offsets_T1"]
    for cuts in ([0, TOKENS], [0, 9, TOKENS]):
        hidden, weight, bias = leaves(trainer, arrays, "float64")
        for begin, end in itertools.pairwise(cuts):
            part = {name: case[name][begin:end] for name in ("token_ids_T", "temperature_T", "full_T")}
            part["kept_offsets_T1"] = offsets[begin : end + 1] - offsets[begin]
            part["kept_ids_N"] = case["kept_ids_N"][offsets[begin] : offsets[end]]
            head = Head(weight_VH=weight, bias_V=bias)
            scores = score_from_hidden(hidden, head, **part, rows_T=np.arange(begin, end))
            backward(trainer, scores, np.ones(end - begin))
        gradients.append([trainer.host(leaf.grad) for leaf in (hidden, weight, bias)])
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_gradients_pass_through_replayed_processors(
    trainer: Any, case: dict[str, Any], arrays: Any, rng: np.random.Generator
) -> None:
    num, counts = len(case["kept_ids_N"]), np.where(case["full_T"], 3, 0)
    replay = Replay(divisor_N=rng.uniform(0.5, 2, num), shift_N=rng.normal(size=num))
    ids = [np.sort(rng.choice(VOCAB, 3, replace=False)) for _ in np.flatnonzero(case["full_T"])]
    patch = Patch(
        offsets_T1=np.cumsum([0, *counts]),
        ids_N=np.concatenate([np.zeros(0, np.int64), *ids]),
        replay_N=Replay(divisor_N=rng.uniform(0.5, 2, counts.sum()), shift_N=rng.normal(size=counts.sum())),
    )
    hidden, weight, _ = leaves(trainer, arrays, "float64")
    case = case | {"replay_N": replay, "patch": patch}
    score_from_hidden(hidden, Head(weight_VH=weight), **case, scratch_bytes=TIGHT).logprobs_T.sum().backward()
    h, w, _ = arrays
    dense = trainer.tensor(h @ w.T, "float64", gradient=True)
    score_from_logits(dense, **case).logprobs_T.sum().backward()
    d = trainer.host(dense.grad)
    np.testing.assert_allclose(trainer.host(hidden.grad), d @ w, rtol=0, atol=1e-12)
    np.testing.assert_allclose(trainer.host(weight.grad), d.T @ h, rtol=0, atol=1e-12)


def test_the_distribution_is_differentiable(
    trainer: Any, case: dict[str, Any], arrays: Any, rng: np.random.Generator
) -> None:
    # Any function of all log-probabilities, with the scores beside it, against the derivative written out densely.
    hidden, weight, bias = leaves(trainer, arrays, "float64")
    h, w, b = arrays
    on_kept, on_scores = rng.normal(size=len(case["kept_ids_N"])), rng.normal(size=TOKENS)
    scores = score_from_hidden(hidden, Head(weight_VH=weight, bias_V=bias), **case, distribution=True)
    loss = (scores.kept_logprobs_N * trainer.tensor(on_kept, "float64")).sum()
    (loss + (scores.logprobs_T * trainer.tensor(on_scores, "float64")).sum()).backward()
    d = logit_gradient(h @ w.T + b, case, on_scores)
    offsets = case["kept_offsets_T1"]
    for t in range(TOKENS):
        listed = slice(offsets[t], offsets[t + 1])
        ids, temperature = case["kept_ids_N"][listed], case["temperature_T"][t]
        z = (h[t] @ w.T + b)[ids] / temperature
        p = np.exp(z - reference.logsumexp(z)) if len(ids) else z
        d[t, ids] += (on_kept[listed] - p * on_kept[listed].sum()) / temperature
    for leaf, expected in ((hidden, d @ w), (weight, d.T @ h), (bias, d.sum(0))):
        np.testing.assert_allclose(trainer.host(leaf.grad), expected, rtol=0, atol=1e-11)


def test_the_distribution_alone_carries_a_gradient(trainer: Any, case: dict[str, Any], arrays: Any) -> None:
    hidden, weight, _ = leaves(trainer, arrays, "float64")
    scores = score_from_hidden(hidden, Head(weight_VH=weight), **case, distribution=True)
    (scores.kept_logprobs_N**2).sum().backward()
    assert np.abs(trainer.host(hidden.grad)).sum() > 0


def test_a_token_that_takes_no_part_cannot_poison_the_gradient(trainer: Any, case: dict[str, Any], arrays: Any) -> None:
    h, w, b = (array.copy() for array in arrays)
    h[3], h[5] = np.nan, np.inf  # one scored over a listed set, one over the vocabulary
    hidden, weight, bias = leaves(trainer, (h, w, b))
    scores = score_from_hidden(hidden, Head(weight_VH=weight, bias_V=bias), **case, distribution=True)
    assert np.flatnonzero(np.isnan(trainer.host(scores.logprobs_T))).tolist() == [3, 5]
    counted = np.delete(np.arange(TOKENS), [3, 5])
    scores.logprobs_T[trainer.tensor(counted).astype("int64") if trainer.name == "paddle" else counted].sum().backward()
    for leaf in (hidden, weight, bias):
        assert np.isfinite(trainer.host(leaf.grad)).all()
    assert (trainer.host(hidden.grad)[[3, 5]] == 0.0).all()


TERM = 0.00099945068359375
"""bfloat16(1e-3)."""


def ten_thousand_terms(trainer: Any, calls: int, weight: Any, sink: Any) -> None:
    """Each token's gradient of head row 0 is 1 * bfloat16(1e-3), that of row 1 the negative."""
    tokens = 10_000 // calls
    for _ in range(calls):
        hidden = trainer.tensor(np.full((tokens, 4), TERM), "bfloat16")
        scores = score_from_hidden(
            hidden,
            Head(weight_VH=weight),
            np.zeros(tokens, int),
            2 * np.arange(tokens + 1),
            np.tile([0, 1], tokens),
            np.ones(tokens),
            head_gradient=sink,
        )
        (scores.logprobs_T * 2.0).sum().backward()


@pytest.mark.parametrize("calls", [1, 100])
def test_ten_thousand_terms_in_bfloat16_add_up_in_float32(trainer: Any, calls: int) -> None:
    weight = trainer.tensor(np.zeros((3, 4)), "bfloat16", gradient=True)
    buffer = trainer.tensor(np.zeros((3, 4)), "float32")
    rows = RowSparseHeadGradient()
    ten_thousand_terms(trainer, calls, weight, DenseHeadGradient(buffer))
    ten_thousand_terms(trainer, calls, weight, rows)
    expected = np.repeat([[9.9945068], [-9.9945068], [0.0]], 4, axis=1)
    np.testing.assert_allclose(trainer.host(buffer), expected, rtol=0, atol=1e-3)
    merged = rows.merged()
    assert merged.ids_U.tolist() == [0, 1]
    np.testing.assert_allclose(trainer.host(merged.weight_UH), expected[:2], rtol=0, atol=1e-3)
    assert weight.grad is None


def test_what_autograd_gets_in_bfloat16_is_the_float32_sum_rounded_once(trainer: Any) -> None:
    weight = trainer.tensor(np.zeros((3, 4)), "bfloat16", gradient=True)
    ten_thousand_terms(trainer, 1, weight, None)
    assert trainer.dtype(weight.grad) == "bfloat16"
    # The neighbours of 9.9945 in bfloat16; Paddle 2.6 cuts instead of rounding.
    assert np.abs(trainer.host(weight.grad)[:, 0]).tolist() in ([10.0, 10.0, 0.0], [9.9375, 9.9375, 0.0])


def test_the_same_terms_added_in_bfloat16_would_stop_growing(trainer: Any) -> None:
    total = 0.0
    for _ in range(2000):
        total = trainer.host(trainer.tensor([total + TERM], "bfloat16"))[0]
    assert total <= 0.5


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_every_way_of_the_head_s_gradient_gives_the_same(
    trainer: Any, case: dict[str, Any], arrays: Any, dtype: str
) -> None:
    wide = "float64" if dtype == "float64" else "float32"
    hidden, weight, bias = leaves(trainer, arrays, dtype)
    head = Head(weight_VH=weight, bias_V=bias)
    dense = DenseHeadGradient(trainer.tensor(np.ones((VOCAB, HIDDEN)), wide), trainer.tensor(np.ones(VOCAB), wide))
    sparse = RowSparseHeadGradient()
    for sink in (dense, sparse, sparse):
        backward(trainer, score_from_hidden(hidden, head, **case, head_gradient=sink), np.ones(TOKENS))
    assert weight.grad is None
    assert bias.grad is None
    backward(trainer, score_from_hidden(hidden, head, **case), np.ones(TOKENS))
    atol = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 0.05, "float16": 0.01}[dtype]
    merged = sparse.merged()
    for own, added, twice in (
        (weight.grad, dense.weight_VH, merged.weight_UH),
        (bias.grad, dense.bias_V, merged.bias_U),
    ):
        np.testing.assert_allclose(trainer.host(added) - 1, trainer.host(own), rtol=0, atol=atol)
        np.testing.assert_allclose(trainer.host(twice) / 2, trainer.host(added) - 1, rtol=0, atol=1e-5)
    sparse.clear()
    assert sparse.merged() is None


def test_row_sparse_gradients_hold_the_ids_of_the_kept_sets_and_no_others(
    trainer: Any, rng: np.random.Generator
) -> None:
    sparse = RowSparseHeadGradient()
    weight = trainer.tensor(rng.normal(size=(VOCAB, HIDDEN)), gradient=True)
    for kept, token in (([3, 9], 9), ([9, 40], 40), ([7], 7)):
        hidden = trainer.tensor(rng.normal(size=(1, HIDDEN)))
        scores = score_from_hidden(
            hidden, Head(weight_VH=weight), [token], [0, len(kept)], kept, [1.0], head_gradient=sparse
        )
        scores.logprobs_T.sum().backward()
    assert sparse.merged().ids_U.tolist() == [3, 9, 40]
    assert list(sparse.merged().weight_UH.shape) == [3, HIDDEN]


@pytest.mark.parametrize(
    ("weight_shape", "bias_shape", "dtype", "message"),
    [
        ((VOCAB, HIDDEN), None, "float32", "the head has a bias; give a buffer for it just then"),
        ((VOCAB, HIDDEN + 1), (VOCAB,), "float32", r"buffer of the weight has shape \[50, 9\]"),
        ((VOCAB, HIDDEN), (VOCAB + 1,), "float32", "buffer of the bias has shape"),
        ((VOCAB, HIDDEN), (VOCAB,), "bfloat16", "gradients are summed in .*float32"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused_before_anything_is_computed(
    trainer: Any, case: dict[str, Any], arrays: Any, weight_shape: Any, bias_shape: Any, dtype: str, message: str
) -> None:
    hidden, weight, bias = leaves(trainer, arrays)
    buffers = [
        None if shape is None else trainer.tensor(np.zeros(shape), dtype) for shape in (weight_shape, bias_shape)
    ]
    with pytest.raises(InvalidInput, match=message):
        score_from_hidden(
            hidden, Head(weight_VH=weight, bias_V=bias), **case, head_gradient=DenseHeadGradient(*buffers)
        )


def test_a_head_gradient_that_no_backward_pass_could_fill_is_refused(
    trainer: Any, case: dict[str, Any], arrays: Any
) -> None:
    hidden, weight, _ = (trainer.tensor(array) for array in arrays)
    sink = RowSparseHeadGradient()
    with pytest.raises(InvalidInput, match="neither the hidden states nor the head ask for a gradient"):
        score_from_hidden(hidden, Head(weight_VH=weight), **case, head_gradient=sink)
    with trainer.no_gradients():
        score_from_hidden(hidden, Head(weight_VH=weight), **case, head_gradient=sink)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_error_is_at_most_the_dense_formula_s_own(trainer: Any, dtype: str, rng: np.random.Generator) -> None:
    """Dense: the logits as a product in `dtype` leaves them, the rest in float32; both against float64."""
    tokens, vocab, hidden_size = 400, 500, 256
    sizes = rng.integers(2, 30, tokens)
    sets = [np.sort(rng.choice(vocab, size, replace=False)) for size in sizes]
    case = {
        "token_ids_T": np.array([rng.choice(kept) for kept in sets]),
        "kept_offsets_T1": np.cumsum([0, *sizes]),
        "kept_ids_N": np.concatenate(sets),
        "temperature_T": rng.uniform(0.5, 1.5, tokens),
    }
    hidden = trainer.tensor(rng.normal(size=(tokens, hidden_size)), dtype)
    weight = trainer.tensor(rng.normal(size=(vocab, hidden_size)) / 8, dtype)
    h, w = trainer.host(hidden), trainer.host(weight)
    exact = score_from_logits(h @ w.T, **case).logprobs_T
    product = (h.astype(np.float32) @ w.T.astype(np.float32)).astype(np.float32)
    dense = score_from_logits(trainer.tensor(product, dtype), **case)
    ours = score_from_hidden(hidden, Head(weight_VH=weight), **case)
    error = np.abs(trainer.host(ours.logprobs_T) - exact)
    dense_error = np.abs(trainer.host(dense.logprobs_T) - exact)
    assert error.max() <= 1.5 * dense_error.max()
    assert error.mean() <= 1.1 * dense_error.mean()
    if dtype != "float32":
        assert error.mean() < dense_error.mean() / 100, "16-bit logits are never made"


def test_gradients_in_half_precision_are_the_exact_ones_rounded_once(
    trainer: Any, case: dict[str, Any], arrays: Any
) -> None:
    for dtype, unit in (("bfloat16", 2**-8), ("float16", 2**-11)):
        hidden, weight, bias = leaves(trainer, arrays, dtype)
        h, w, b = (trainer.host(leaf) for leaf in (hidden, weight, bias))
        backward(trainer, score_from_hidden(hidden, Head(weight_VH=weight, bias_V=bias), **case), np.ones(TOKENS))
        d = logit_gradient(h @ w.T + b, case, np.ones(TOKENS))
        for leaf, expected in ((hidden, d @ w), (weight, d.T @ h), (bias, d.sum(0))):
            # Paddle 2.6 cuts off some of what it should round.
            np.testing.assert_allclose(trainer.host(leaf.grad), expected, rtol=2 * unit, atol=1e-5)
            assert leaf.grad.dtype == leaf.dtype


def test_mixed_precision_around_the_call_narrows_nothing(trainer: Any, case: dict[str, Any], arrays: Any) -> None:
    results = []
    for around in (contextlib.nullcontext(), trainer.mixed_precision()):
        hidden, weight, _ = leaves(trainer, arrays)
        with around:
            scores = score_from_hidden(hidden, Head(weight_VH=weight), **case)
            backward(trainer, scores, np.ones(TOKENS))
        results.append([trainer.host(values) for values in (scores.logprobs_T, hidden.grad, weight.grad)])
    for plain, within in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, within)


def test_a_head_that_was_overwritten_before_backward_is_refused_by_torch(case: dict[str, Any], arrays: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` has it")
    hidden, weight, _ = (torch.tensor(array, requires_grad=True) for array in arrays)
    scores = score_from_hidden(hidden, Head(weight_VH=weight), **case)
    with torch.no_grad():
        weight.add_(1.0)  # an optimizer step too early
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.logprobs_T.sum().backward()


def test_modules_parameters_are_taken_as_they_are(trainer: Any, case: dict[str, Any], arrays: Any) -> None:
    h, w, b = arrays
    linear = trainer.linear(w, b)
    weight = linear.weight.T if trainer.name == "paddle" else linear.weight
    hidden = trainer.tensor(h, gradient=True)
    scores = score_from_hidden(hidden, Head(weight_VH=weight, bias_V=linear.bias), **case)
    backward(trainer, scores, np.ones(TOKENS))
    d = logit_gradient(h @ w.T + b, case, np.ones(TOKENS))
    expected = d.T @ h if trainer.name == "torch" else h.T @ d
    np.testing.assert_allclose(trainer.host(linear.weight.grad), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(trainer.host(linear.bias.grad), d.sum(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["kept", "full"])
@pytest.mark.parametrize("scratch_bytes", [1 << 17, 1 << 19])
def test_working_memory_stays_within_its_bound(
    trainer: Any, kind: str, scratch_bytes: int, rng: np.random.Generator
) -> None:
    # The [T, V] logits would be 6 MB, the rows of the head for all pairs as much.
    tokens, vocab, hidden_size = 500, 3000, 64
    sizes = np.full(tokens, 50 if kind == "kept" else 0)
    sets = [np.sort(rng.choice(vocab, size, replace=False)) for size in sizes]
    case = {
        "token_ids_T": np.array([kept[0] if len(kept) else 7 for kept in sets]),
        "kept_offsets_T1": np.cumsum([0, *sizes]),
        "kept_ids_N": np.concatenate(sets).astype(np.int64),
        "temperature_T": np.ones(tokens),
        "full_T": sizes == 0,
    }
    hidden = trainer.tensor(rng.normal(size=(tokens, hidden_size)), gradient=True)
    weight = trainer.tensor(rng.normal(size=(vocab, hidden_size)), gradient=True)

    def both_ways() -> None:
        score_from_hidden(
            hidden, Head(weight_VH=weight), **case, scratch_bytes=scratch_bytes
        ).logprobs_T.sum().backward()

    gradients = 4 * hidden_size * (tokens + vocab)
    numbers = 100 * max(tokens, sizes.sum())  # what is kept per token and kept id: indices, logits, probabilities
    if trainer.name == "paddle":
        peak = trainer.peak_bytes(both_ways)
        assert peak - gradients - numbers <= scratch_bytes
    else:
        largest = trainer.largest_tensor(both_ways, besides=((tokens, hidden_size), (vocab, hidden_size)))
        assert largest <= max(scratch_bytes, 8 * sizes.sum())
