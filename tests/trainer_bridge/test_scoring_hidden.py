"""Scores from hidden states against the float64 oracle and against scores from dense logits, in every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.errors import InvalidInput, ScoringRefused, ViolationError
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.alignment import to_packed, to_padded
from keptset.trainer_bridge.replay import Patch, Replay
from keptset.trainer_bridge.scoring import (
    Head,
    Shard,
    head_hand,
    score_aligned,
    score_aligned_from_hidden,
    score_aligned_full_vocabulary,
    score_aligned_full_vocabulary_from_hidden,
    score_from_hidden,
    score_from_logits,
    score_full_vocabulary,
    score_full_vocabulary_from_hidden,
)

TOKENS, VOCAB, HIDDEN = 24, 50, 8
TIGHT = 1 << 16
"""Bytes of working memory that make several chunks and blocks of the sizes here, where a row is widened."""
TOLERANCE = {"numpy": 1e-12, "paddle": 2e-5, "torch": 2e-5}


def make_case(rng: np.random.Generator, *, full: bool = True) -> dict[str, Any]:
    """Sets from one id to the whole vocabulary, all listed, or some of them marked `full`."""
    full_T = (np.arange(TOKENS) % 6 == 5) & full
    sizes = rng.integers(1, 12, TOKENS)
    sizes[1], sizes[2], sizes[full_T] = 1, VOCAB, 0
    sets = [np.sort(rng.choice(VOCAB, size, replace=False)) for size in sizes]
    return {
        "token_ids_T": np.array([rng.choice(kept) if len(kept) else rng.integers(VOCAB) for kept in sets]),
        "kept_offsets_T1": np.cumsum([0, *sizes]),
        "kept_ids_N": np.concatenate(sets).astype(np.int32),
        "temperature_T": rng.uniform(0.3, 2, TOKENS),
        "full_T": full_T,
    }


def make_head(rng: np.random.Generator, vocab: int = VOCAB, hidden: int = HIDDEN) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(vocab, hidden)), rng.normal(size=vocab)


def oracle(logits: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    offsets, ids = case["kept_offsets_T1"], case["kept_ids_N"]
    return np.array(
        [
            reference.score(
                z,
                None if case["full_T"][t] else ids[offsets[t] : offsets[t + 1]],
                case["token_ids_T"][t],
                case["temperature_T"][t],
            )
            for t, z in enumerate(logits)
        ]
    )


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("scratch_bytes", [None, TIGHT])
def test_scores_agree_with_the_oracle_on_the_dense_logits(
    anywhere: Any, rng: np.random.Generator, scratch_bytes: int | None, full: bool
) -> None:
    case, hidden, (weight, bias) = make_case(rng, full=full), rng.normal(size=(TOKENS, HIDDEN)), make_head(rng)
    head = Head(weight_VH=anywhere.tensor(weight), bias_V=anywhere.tensor(bias))
    scores = score_from_hidden(anywhere.tensor(hidden), head, **case, scratch_bytes=scratch_bytes)
    expected = oracle(hidden @ weight.T + bias, case)
    np.testing.assert_allclose(anywhere.host(scores.logprobs_T), expected, rtol=0, atol=TOLERANCE[anywhere.name])
    assert scores.over == "kept"


def test_a_head_without_bias_is_one_with_zeros(anywhere: Any, rng: np.random.Generator) -> None:
    case, hidden, (weight, bias) = make_case(rng), rng.normal(size=(TOKENS, HIDDEN)), make_head(rng)
    without = score_from_hidden(anywhere.tensor(hidden), Head(weight_VH=anywhere.tensor(weight)), **case)
    zeros = Head(weight_VH=anywhere.tensor(weight), bias_V=anywhere.tensor(bias * 0))
    np.testing.assert_allclose(
        anywhere.host(without.logprobs_T),
        anywhere.host(score_from_hidden(anywhere.tensor(hidden), zeros, **case).logprobs_T),
        rtol=0,
        atol=1e-6,
    )


SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(1, 30), st.integers(2, 90), st.integers(1, 300), st.integers(1 << 16, 1 << 20))
def test_everything_agrees_with_scores_from_dense_logits(
    seed: int, tokens: int, vocab: int, hidden_size: int, scratch_bytes: int
) -> None:
    rng = np.random.default_rng(seed)
    full = rng.random(tokens) < 0.3
    sizes = np.where(full, 0, rng.integers(1, vocab + 1, tokens))
    sets = [np.sort(rng.choice(vocab, size, replace=False)) for size in sizes]
    case = {
        "token_ids_T": np.array([rng.choice(kept) if len(kept) else rng.integers(vocab) for kept in sets]),
        "kept_offsets_T1": np.cumsum([0, *sizes]),
        "kept_ids_N": np.concatenate(sets).astype(np.int64),
        "temperature_T": rng.uniform(0.3, 3, tokens),
        "full_T": full,
        "rows_T": rng.permutation(tokens + 3)[:tokens],
    }
    hidden, (weight, bias) = rng.normal(size=(tokens + 3, hidden_size)), make_head(rng, vocab, hidden_size)
    bias[rng.random(vocab) < 0.1] = -30.0
    asked = {"entropy": True, "full_share": 0.4}
    got = score_from_hidden(
        hidden,
        Head(weight_VH=weight, bias_V=bias),
        **case,
        **asked,
        distribution=True,
        scratch_bytes=scratch_bytes,
    )
    expected = score_from_logits(hidden @ weight.T + bias, **case, **asked)
    for name in ("logprobs_T", "entropy_T", "full_logprobs_T"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=1e-11, atol=1e-11)
    offsets = case["kept_offsets_T1"]
    for t in np.flatnonzero(~full):
        listed = slice(offsets[t], offsets[t + 1])
        z = (hidden @ weight.T + bias)[case["rows_T"][t]][case["kept_ids_N"][listed]] / case["temperature_T"][t]
        np.testing.assert_allclose(got.kept_logprobs_N[listed], z - reference.logsumexp(z), rtol=0, atol=1e-10)


def test_the_distribution_holds_the_scores_and_sums_to_one(anywhere: Any, rng: np.random.Generator) -> None:
    case, hidden, (weight, bias) = make_case(rng), rng.normal(size=(TOKENS, HIDDEN)), make_head(rng)
    head = Head(weight_VH=anywhere.tensor(weight), bias_V=anywhere.tensor(bias))
    scores = score_from_hidden(anywhere.tensor(hidden), head, **case, distribution=True)
    logprobs, offsets = anywhere.host(scores.kept_logprobs_N), case["kept_offsets_T1"]
    for t in np.flatnonzero(~case["full_T"]):
        listed = slice(offsets[t], offsets[t + 1])
        assert np.exp(logprobs[listed]).sum() == pytest.approx(1, abs=1e-5)
        own = logprobs[listed][case["kept_ids_N"][listed] == case["token_ids_T"][t]]
        np.testing.assert_allclose(own, anywhere.host(scores.logprobs_T)[t], rtol=0, atol=1e-6)


def test_nothing_is_measured_that_was_not_asked_for(rng: np.random.Generator) -> None:
    case, hidden, (weight, _) = make_case(rng), rng.normal(size=(TOKENS, HIDDEN)), make_head(rng)
    scores = score_from_hidden(hidden, Head(weight_VH=weight), **case)
    assert scores.entropy_T is scores.full_logprobs_T is scores.kept_logprobs_N is scores.log_kept_mass_T is None


def test_trainer_kept_mass_is_measured_on_a_share_of_the_tokens(anywhere: Any, rng: np.random.Generator) -> None:
    case, hidden, (weight, _) = make_case(rng), rng.normal(size=(TOKENS, HIDDEN)), make_head(rng)
    head = Head(weight_VH=anywhere.tensor(weight))
    mass = anywhere.host(score_from_hidden(anywhere.tensor(hidden), head, **case, full_share=0.4).log_kept_mass_T)
    measured = ~np.isnan(mass)
    assert 0.2 < measured.mean() < 0.6
    logits, offsets = hidden @ weight.T, case["kept_offsets_T1"]
    for t in np.flatnonzero(measured & ~case["full_T"]):
        kept = case["kept_ids_N"][offsets[t] : offsets[t + 1]]
        expected = reference.trainer_kept_mass(logits[t], kept, case["temperature_T"][t])
        assert mass[t] == pytest.approx(expected, abs=TOLERANCE[anywhere.name])


def test_single_choices_score_zero_and_neither_their_states_nor_the_head_are_read(anywhere: Any) -> None:
    hidden, weight = np.full((3, HIDDEN), np.nan), np.full((VOCAB, HIDDEN), np.nan)
    head = Head(weight_VH=anywhere.tensor(weight))
    scores = score_from_hidden(
        anywhere.tensor(hidden),
        head,
        [3, 4, 5],
        [0, 1, 2, 3],
        [3, 4, 5],
        [0.0, 1.0, 2.0],
        entropy=True,
        distribution=True,
    )
    for values in (scores.logprobs_T, scores.entropy_T, scores.kept_logprobs_N):
        assert anywhere.host(values).tolist() == [0.0, 0.0, 0.0]


def test_an_empty_batch_scores_to_nothing(anywhere: Any) -> None:
    head = Head(weight_VH=anywhere.tensor(np.zeros((VOCAB, HIDDEN))))
    scores = score_from_hidden(anywhere.tensor(np.zeros((0, HIDDEN))), head, [], [0], [], [], full_share=1.0)
    assert list(scores.logprobs_T.shape) == [0]


class CountedReads(np.ndarray):
    """Counts the rows that are read of it."""

    reads: list[int]

    def __array_finalize__(self, source: Any) -> None:
        self.reads = []

    def take(self, index: Any, axis: int) -> Any:  # type: ignore[override]
        self.reads.append(len(index))
        return np.asarray(self).take(index, axis=axis)


def rows_read_of(
    head: Head, hidden: Any, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, on_host: bool
) -> int:
    """Rows of the head that scoring reads: from the host's memory, or by the framework's own operations."""
    kind = type(head_hand.head_hand_for(hidden))
    reads: list[int | list[int]] = []
    rows_at, host_arrays = kind.rows_at, kind.host_arrays

    def counted_rows(hand: Any, table: Any, index: Any) -> Any:
        reads.append(len(index) if table is head.weight_VH else 0)
        return rows_at(hand, table, index)

    def counted_arrays(hand: Any, *tables: Any) -> Any:
        found = host_arrays(hand, *tables)
        if found is None:
            return None
        arrays = [array.view(CountedReads) for array in found]
        reads.extend(array.reads for array, table in zip(arrays, tables, strict=True) if table is head.weight_VH)
        return arrays

    monkeypatch.setattr(kind, "rows_at", counted_rows)
    monkeypatch.setattr(kind, "host_arrays", counted_arrays if on_host else lambda hand, *tables: None)
    score_from_hidden(hidden, head, **case)
    return sum(sum(read) if isinstance(read, list) else read for read in reads)


@pytest.mark.parametrize("on_host", [True, False])
def test_one_long_set_does_not_make_the_others_pay(
    anywhere: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    vocab, sizes = 6000, np.array([5000] + [2] * 99 + [1] * 100)
    sets = [np.sort(rng.choice(vocab, size, replace=False)) for size in sizes]
    hidden = anywhere.tensor(rng.normal(size=(200, 4)))
    head = Head(weight_VH=anywhere.tensor(rng.normal(size=(vocab, 4))))
    case = {
        "token_ids_T": [kept[0] for kept in sets],
        "kept_offsets_T1": np.cumsum([0, *sizes]),
        "kept_ids_N": np.concatenate(sets),
        "temperature_T": np.ones(200),
    }
    rows = rows_read_of(head, hidden, case, monkeypatch, on_host=on_host)
    # One for each id of a real choice; a host fills 5,000 up to the 5,120 of its sizes, which none of the others is.
    assert rows == (5120 if on_host and anywhere.name != "torch" else 5000) + 2 * 99


def test_the_largest_logit_may_come_in_any_chunk(anywhere: Any, rng: np.random.Generator) -> None:
    # Logits that grow along the vocabulary make every chunk move the running maximum; falling ones none.
    vocab, hidden_size = 3000, 64
    for slope in (1.0, -1.0, 0.0):
        weight = np.zeros((vocab, hidden_size))
        weight[:, 0] = slope * np.arange(vocab) / 10
        bias = rng.normal(size=vocab)
        bias[::7] = -np.inf  # a model that bans ids has such
        token_ids = np.array([1, 1500, 2999])
        hidden = np.zeros((3, hidden_size))
        hidden[:, 0] = [1.0, 0.5, 2.0]
        scores = score_full_vocabulary_from_hidden(
            anywhere.tensor(hidden),
            Head(weight_VH=anywhere.tensor(weight), bias_V=anywhere.tensor(bias)),
            token_ids,
            [1.0, 0.7, 1.3],
            entropy=True,
            scratch_bytes=TIGHT,
        )
        expected = score_full_vocabulary(hidden @ weight.T + bias, token_ids, [1.0, 0.7, 1.3])
        np.testing.assert_allclose(anywhere.host(scores.logprobs_T), expected.logprobs_T, rtol=1e-6, atol=1e-5)
        assert np.isfinite(anywhere.host(scores.entropy_T)).all()
        assert scores.over == "full"


def test_a_chunk_of_banned_ids_adds_nothing(anywhere: Any) -> None:
    vocab, hidden_size = 2000, 64
    bias = np.full(vocab, -np.inf)
    bias[[3, 1990]] = 0.0
    scores = score_full_vocabulary_from_hidden(
        anywhere.tensor(np.zeros((1, hidden_size))),
        Head(weight_VH=anywhere.tensor(np.zeros((vocab, hidden_size))), bias_V=anywhere.tensor(bias)),
        [1990],
        [1.0],
        entropy=True,
        scratch_bytes=TIGHT,
    )
    for values, expected in ((scores.logprobs_T, -np.log(2)), (scores.entropy_T, np.log(2))):
        np.testing.assert_allclose(anywhere.host(values), [expected], rtol=1e-6)


def processors(rng: np.random.Generator, case: dict[str, Any]) -> tuple[Replay, Patch]:
    """Divisors and shifts for every kept id, and for three ids of each token over the vocabulary."""
    num, counts = len(case["kept_ids_N"]), np.where(case["full_T"], 3, 0)
    replay = Replay(divisor_N=rng.uniform(0.5, 2, num), shift_N=rng.normal(size=num))
    ids = [np.sort(rng.choice(VOCAB, 3, replace=False)) for _ in np.flatnonzero(case["full_T"])]
    patch = Patch(
        offsets_T1=np.cumsum([0, *counts]),
        ids_N=np.concatenate(ids),
        replay_N=Replay(divisor_N=rng.uniform(0.5, 2, counts.sum()), shift_N=rng.normal(size=counts.sum())),
    )
    return replay, patch


def test_processors_are_replayed_on_kept_ids_and_over_the_vocabulary(anywhere: Any, rng: np.random.Generator) -> None:
    case, hidden, (weight, bias) = make_case(rng), rng.normal(size=(TOKENS, HIDDEN)), make_head(rng)
    replay, patch = processors(rng, case)
    head = Head(weight_VH=anywhere.tensor(weight), bias_V=anywhere.tensor(bias))
    got = score_from_hidden(anywhere.tensor(hidden), head, **case, replay_N=replay, patch=patch, scratch_bytes=TIGHT)
    expected = score_from_logits(hidden @ weight.T + bias, **case, replay_N=replay, patch=patch).logprobs_T
    np.testing.assert_allclose(anywhere.host(got.logprobs_T), expected, rtol=0, atol=TOLERANCE[anywhere.name])
    ignored = score_from_logits(hidden @ weight.T + bias, **case).logprobs_T
    assert np.abs(ignored - expected).max() > 0.1, "processors that are ignored would be seen"


@pytest.mark.parametrize("layout", ["left", "right", "packed", "packed in one row"])
def test_every_layout_and_each_response_s_own_settings(
    simulate: Callable[..., Any], anywhere: Any, layout: str, rng: np.random.Generator
) -> None:
    settings = [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.7, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(presence_penalty=0.5, logit_bias={3: 1.5, 7: -2.0}),
    ]
    world = simulate(rng, settings * 2)
    padded = layout in ("left", "right")
    aligned = to_padded(world.batch, pad_token_id=0, side=layout) if padded else to_packed(world.batch)
    hidden, weight = rng.normal(size=(aligned.num_positions, HIDDEN)), rng.normal(size=(world.vocab_size, HIDDEN))
    logits = hidden @ weight.T
    shape = aligned.input_ids_BL.shape if padded else (1, -1) if layout == "packed in one row" else (-1,)
    got = score_aligned_from_hidden(
        aligned,
        anywhere.tensor(hidden.reshape(*shape, HIDDEN)),
        Head(weight_VH=anywhere.tensor(weight)),
        entropy=True,
        full_share=0.5,
    )
    expected = score_aligned(aligned, logits, entropy=True, full_share=0.5)
    for name in ("logprobs_T", "entropy_T", "full_logprobs_T"):
        np.testing.assert_allclose(
            anywhere.host(getattr(got, name)), getattr(expected, name), rtol=0, atol=2 * TOLERANCE[anywhere.name]
        )


def test_full_vocabulary_scores_of_a_batch_are_asked_for_by_name(
    simulate: Callable[..., Any], anywhere: Any, rng: np.random.Generator
) -> None:
    world = simulate(rng, [SamplingParams(top_p=0.7), SamplingParams(top_k=3, temperature=0.5, repetition_penalty=1.4)])
    packed = to_packed(world.batch)
    hidden, weight = rng.normal(size=(packed.num_positions, HIDDEN)), rng.normal(size=(world.vocab_size, HIDDEN))
    head = Head(weight_VH=anywhere.tensor(weight))
    got = score_aligned_full_vocabulary_from_hidden(packed, anywhere.tensor(hidden), head, entropy=True)
    expected = score_aligned_full_vocabulary(packed, hidden @ weight.T, entropy=True)
    assert got.over == "full"
    for name in ("logprobs_T", "entropy_T"):
        np.testing.assert_allclose(
            anywhere.host(getattr(got, name)), getattr(expected, name), rtol=0, atol=2 * TOLERANCE[anywhere.name]
        )


def test_an_excluded_violation_is_marked_and_leaves_no_number(anywhere: Any) -> None:
    head = Head(weight_VH=anywhere.tensor(np.zeros((6, HIDDEN))))
    scores = score_from_hidden(
        anywhere.tensor(np.zeros((2, HIDDEN))),
        head,
        [1, 2],
        [0, 2, 4],
        [0, 2, 2, 3],
        [1.0, 1.0],
        on_violation="exclude",
        entropy=True,
        distribution=True,
        full_share=1.0,
    )
    assert scores.violations.counts() == {"member": 1}
    for values in (scores.logprobs_T, scores.entropy_T, scores.full_logprobs_T):
        assert np.isnan(anywhere.host(values)).tolist() == [True, False]
    assert np.isnan(anywhere.host(scores.kept_logprobs_N)).tolist() == [True, True, False, False]


def bare(**changes: Any) -> dict[str, Any]:
    case = {
        "hidden_RH": np.zeros((2, 4)),
        "head": Head(weight_VH=np.zeros((6, 4))),
        "token_ids_T": [1, 2],
        "kept_offsets_T1": [0, 2, 4],
        "kept_ids_N": [0, 1, 2, 3],
        "temperature_T": [1.0, 1.0],
    }
    return case | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"head": Head(weight_VH=np.zeros((4, 6)))}, InvalidInput, r"\[vocabulary, hidden\]: transpose it"),
        ({"head": Head(weight_VH=np.zeros((6, 5)))}, InvalidInput, r"\[2, 4\], the head's weight \[6, 5\]$"),
        ({"head": np.zeros((6, 4))}, InvalidInput, "the head is a .*ndarray.*give Head"),
        ({"head": Head(weight_VH=np.zeros(6))}, InvalidInput, r"must be \[vocabulary, hidden\]"),
        ({"head": Head(weight_VH=np.zeros((6, 4)), bias_V=np.zeros(4))}, InvalidInput, r"bias has shape \[4\]"),
        ({"hidden_RH": np.zeros((1, 2, 4))}, InvalidInput, r"reshape them to \[positions, hidden\]"),
        ({"hidden_RH": np.zeros((2, 4), np.float32)}, InvalidInput, "give both in float64"),
        ({"hidden_RH": np.zeros((2, 4), int)}, InvalidInput, "must be floating point"),
        ({"hidden_RH": np.zeros((3, 4))}, InvalidInput, "3 rows for 2 tokens"),
        ({"hidden_RH": [[0.0] * 4] * 2}, InvalidInput, "NumPy arrays, Paddle tensors and torch tensors"),
        ({"scratch_bytes": 100}, InvalidInput, "scratch_bytes is 100; it must be at least"),
        ({"kept_ids_N": [0, 1, 2, 6]}, ViolationError, "range"),
        ({"temperature_T": [1.0, np.nan]}, ScoringRefused, "temperature of token 1 of the call is unknown"),
        ({"absent_T": [False, True]}, ScoringRefused, "no kept set was recorded"),
        (
            {"head": Head(weight_VH=np.zeros((6, 4)), shard=Shard(first=3, vocab_size=8))},
            InvalidInput,
            r"ids \[3, 9\), outside a vocabulary of 8",
        ),
        (
            {"head": Head(weight_VH=np.zeros((6, 4)), shard=Shard(first=0, vocab_size=8))},
            InvalidInput,
            "NumPy has no process groups",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        score_from_hidden(**bare(**changes))


def test_a_head_of_another_framework_is_refused(trainer: Any) -> None:
    with pytest.raises(InvalidInput, match="the head's weight is a"):
        score_from_hidden(**bare(hidden_RH=trainer.tensor(np.zeros((2, 4)))))


def test_hidden_states_of_another_layout_are_refused(world: Any) -> None:
    packed = to_packed(world.batch)
    head = Head(weight_VH=np.zeros((world.vocab_size, 4)))
    with pytest.raises(InvalidInput, match="as the model gives them, not shifted and not cut"):
        score_aligned_from_hidden(packed, np.zeros((packed.num_positions - 1, 4)), head)
    with pytest.raises(InvalidInput, match="drawn from a whole vocabulary of 40"):
        score_aligned_from_hidden(packed, np.zeros((packed.num_positions, 4)), Head(weight_VH=np.zeros((41, 4))))


def test_a_head_that_does_not_fit_is_told_before_its_record_is_blamed(world: Any) -> None:
    packed, weight_VH = to_packed(world.batch), np.zeros((world.vocab_size, 4))
    hidden = np.zeros((1, packed.num_positions, 4))
    for score in (score_aligned_from_hidden, score_aligned_full_vocabulary_from_hidden):
        with pytest.raises(InvalidInput, match="transpose it"):
            score(packed, hidden, Head(weight_VH=weight_VH.T))
        with pytest.raises(InvalidInput, match="the head is a .*give Head"):
            score(packed, hidden, weight_VH)  # type: ignore[arg-type]
