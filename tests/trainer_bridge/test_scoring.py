"""Scores over kept sets against the float64 oracle, in every framework."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.errors import InvalidInput, ScoringRefused, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.alignment import to_packed, to_padded
from keptset.trainer_bridge.scoring import (
    score_aligned,
    score_aligned_full_vocabulary,
    score_from_logits,
    score_full_vocabulary,
)

TOLERANCE = {"numpy": 1e-6, "paddle": 2e-5, "torch": 2e-5}
"""b is recorded in float32; Paddle and torch also sum in float32."""


@pytest.mark.parametrize("layout", ["left", "right", "packed"])
def test_equal_weights_score_what_was_recorded(world: Any, anywhere: Any, layout: str) -> None:
    if layout == "packed":
        aligned, logits = to_packed(world.batch), world.packed_logits()
    else:
        aligned = to_padded(world.batch, pad_token_id=0, side=layout, length=20)
        logits = world.padded_logits(layout, 20)
    scores = score_aligned(aligned, anywhere.tensor(logits), full_share=1.0)
    logprobs = anywhere.host(scores.logprobs_T)
    np.testing.assert_allclose(logprobs, world.oracle_scores(), rtol=0, atol=TOLERANCE[anywhere.name])
    np.testing.assert_allclose(logprobs, aligned.tokens.behavior_logprobs_T, rtol=0, atol=TOLERANCE[anywhere.name])
    measured = aligned.tokens.temperature_T > 0
    np.testing.assert_allclose(
        anywhere.host(scores.log_kept_mass_T)[measured],
        aligned.tokens.log_kept_mass_T[measured],
        rtol=0,
        atol=TOLERANCE[anywhere.name],
    )
    assert np.isnan(anywhere.host(scores.full_logprobs_T)[~measured]).all(), (
        "greedy tokens have no full-vocabulary score"
    )
    assert scores.over == "kept"


@pytest.mark.parametrize("offset", [-1, 1])
def test_reading_one_position_off_would_be_seen(world: Any, offset: int) -> None:
    packed = to_packed(world.batch)
    logits = np.roll(world.packed_logits(), offset, axis=0)
    off = np.abs(score_aligned(packed, logits).logprobs_T - world.oracle_scores())
    assert np.median(off[packed.tokens.kept_sizes_T > 1]) > 0.1


def test_logits_made_in_chunks_score_the_same(world: Any, anywhere: Any) -> None:
    packed = to_packed(world.batch)
    logits = anywhere.tensor(world.packed_logits())
    whole = score_aligned(packed, logits, full_share=0.3, entropy=True)
    asked: list[int] = []

    def logits_of(positions: np.ndarray) -> Any:
        asked.append(len(positions))
        assert len(positions) <= 3
        return anywhere.gather(logits, positions)

    parts = score_aligned(packed, logits_of, full_share=0.3, entropy=True, max_elements=3 * world.vocab_size)
    assert len(asked) > 2
    for name in ("logprobs_T", "full_logprobs_T", "entropy_T"):
        np.testing.assert_allclose(
            anywhere.host(getattr(parts, name)), anywhere.host(getattr(whole, name)), rtol=0, atol=1e-6
        )


def test_tokens_with_one_kept_id_ask_for_no_logits(simulate: Callable[..., Any], rng: np.random.Generator) -> None:
    world = simulate(rng, [SamplingParams(top_k=1), SamplingParams(top_k=4), SamplingParams(temperature=0)])
    packed = to_packed(world.batch)
    asked: list[int] = []

    def logits_of(positions: np.ndarray) -> np.ndarray:
        asked.extend(positions.tolist())
        return world.packed_logits()[positions]

    scores = score_aligned(packed, logits_of, full_share=0.0)
    single = packed.tokens.kept_sizes_T == 1
    assert not set(asked) & set(packed.logit_index_T[single].tolist())
    assert (scores.logprobs_T[single] == 0.0).all()


def test_a_batch_of_single_choices_still_scores_in_chunks(
    simulate: Callable[..., Any], rng: np.random.Generator
) -> None:
    world = simulate(rng, [SamplingParams(temperature=0)] * 2)
    packed = to_packed(world.batch)

    def logits_of(positions: np.ndarray) -> np.ndarray:
        assert len(positions) == 1, "one position tells framework and device; a model may not take none"
        return world.packed_logits()[positions]

    scores = score_aligned(packed, logits_of, full_share=0.0)
    assert scores.logprobs_T.tolist() == [0.0] * packed.tokens.num_tokens


def test_a_chunk_of_another_shape_is_refused(world: Any) -> None:
    with pytest.raises(InvalidInput, match=r"logits_of returned shape \[1, 40\]"):
        score_aligned(to_packed(world.batch), lambda positions: world.packed_logits()[:1])


def test_full_vocabulary_scores_are_asked_for_by_name_and_say_so(
    simulate: Callable[..., Any], rng: np.random.Generator, anywhere: Any
) -> None:
    world = simulate(rng, [SamplingParams(top_p=0.7), SamplingParams(top_k=3, temperature=0.5, repetition_penalty=1.4)])
    packed = to_packed(world.batch)
    scores = score_aligned_full_vocabulary(packed, anywhere.tensor(world.packed_logits()))
    assert scores.over == "full"
    np.testing.assert_allclose(
        anywhere.host(scores.logprobs_T), world.oracle_full_scores(), rtol=0, atol=TOLERANCE[anywhere.name]
    )
    recorded = packed.tokens.behavior_logprobs_T + packed.tokens.log_kept_mass_T
    np.testing.assert_allclose(anywhere.host(scores.logprobs_T), recorded, rtol=0, atol=TOLERANCE[anywhere.name])


RAGGED = st.integers(0, 2**32 - 1)


def ragged(seed: int, *, tokens: int = 9, vocab_size: int = 17) -> dict[str, Any]:
    """Random logits, sets from one id to all of them, and temperatures that differ by token."""
    rng = np.random.default_rng(seed)
    sets = [np.sort(rng.choice(vocab_size, rng.integers(1, vocab_size + 1), replace=False)) for _ in range(tokens)]
    return {
        "logits_RV": rng.normal(0, 4, (tokens, vocab_size)),
        "token_ids_T": np.array([rng.choice(kept) for kept in sets]),
        "kept_offsets_T1": np.cumsum([0, *map(len, sets)]),
        "kept_ids_N": np.concatenate(sets),
        "temperature_T": rng.uniform(0.2, 3, tokens),
    }


def oracle(case: dict[str, Any]) -> np.ndarray:
    offsets, ids = case["kept_offsets_T1"], case["kept_ids_N"]
    return np.array(
        [
            reference.score(z, ids[offsets[t] : offsets[t + 1]], case["token_ids_T"][t], case["temperature_T"][t])
            for t, z in enumerate(case["logits_RV"])
        ]
    )


@given(RAGGED)
def test_any_ragged_batch_agrees_with_the_oracle(seed: int) -> None:
    case = ragged(seed)
    np.testing.assert_allclose(score_from_logits(**case).logprobs_T, oracle(case), rtol=0, atol=1e-12)


@given(RAGGED)
def test_the_whole_vocabulary_as_kept_set_is_the_full_softmax(seed: int) -> None:
    case = ragged(seed)
    tokens, vocab_size = case["logits_RV"].shape
    everything = np.tile(np.arange(vocab_size), tokens)
    kept = score_from_logits(
        **case | {"kept_ids_N": everything, "kept_offsets_T1": np.arange(tokens + 1) * vocab_size}, entropy=True
    )
    bare = {"logits_RV": case["logits_RV"], "token_ids_T": case["token_ids_T"], "temperature_T": case["temperature_T"]}
    full = score_full_vocabulary(**bare)
    marked = score_from_logits(
        **bare,
        kept_offsets_T1=np.zeros(tokens + 1, int),
        kept_ids_N=np.zeros(0, int),
        full_T=np.ones(tokens, bool),
        entropy=True,
    )
    np.testing.assert_allclose(kept.logprobs_T, full.logprobs_T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(marked.logprobs_T, full.logprobs_T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(marked.entropy_T, kept.entropy_T, rtol=0, atol=1e-12)


@given(RAGGED)
def test_permuting_the_vocabulary_changes_no_score(seed: int) -> None:
    case = ragged(seed)
    rng = np.random.default_rng(seed + 1)
    new_of_old = rng.permutation(case["logits_RV"].shape[1])
    offsets, ids = case["kept_offsets_T1"], case["kept_ids_N"]
    moved = case | {
        "logits_RV": case["logits_RV"][:, np.argsort(new_of_old)],
        "token_ids_T": new_of_old[case["token_ids_T"]],
        "kept_ids_N": np.concatenate([np.sort(new_of_old[ids[a:b]]) for a, b in itertools.pairwise(offsets)]),
    }
    np.testing.assert_allclose(
        score_from_logits(**moved).logprobs_T, score_from_logits(**case).logprobs_T, rtol=0, atol=1e-12
    )


@given(RAGGED, st.floats(0.1, 10))
def test_scaling_logits_and_temperature_together_changes_no_score(seed: int, factor: float) -> None:
    case = ragged(seed)
    scaled = case | {"logits_RV": case["logits_RV"] * factor, "temperature_T": case["temperature_T"] * factor}
    np.testing.assert_allclose(
        score_from_logits(**scaled).logprobs_T, score_from_logits(**case).logprobs_T, rtol=0, atol=1e-9
    )


@given(RAGGED, st.permutations(range(9)))
def test_scoring_tokens_in_another_order_reorders_the_scores(seed: int, order: list[int]) -> None:
    case = ragged(seed)
    offsets, ids = case["kept_offsets_T1"], case["kept_ids_N"]
    sets = [ids[offsets[t] : offsets[t + 1]] for t in order]
    moved = {
        "logits_RV": case["logits_RV"],
        "token_ids_T": case["token_ids_T"][order],
        "kept_offsets_T1": np.cumsum([0, *map(len, sets)]),
        "kept_ids_N": np.concatenate(sets),
        "temperature_T": case["temperature_T"][order],
    }
    got = score_from_logits(**moved, rows_T=order).logprobs_T
    np.testing.assert_allclose(got, score_from_logits(**case).logprobs_T[order], rtol=0, atol=1e-12)


@given(RAGGED)
def test_kept_entropy_is_that_of_the_renormalised_distribution(seed: int) -> None:
    case = ragged(seed)
    got = score_from_logits(**case, entropy=True).entropy_T
    offsets, ids = case["kept_offsets_T1"], case["kept_ids_N"]
    for t, z in enumerate(case["logits_RV"]):
        s = z[ids[offsets[t] : offsets[t + 1]]] / case["temperature_T"][t]
        p = np.exp(s - reference.logsumexp(s))
        assert got[t] == pytest.approx(-np.sum(p * np.log(p)), abs=1e-9)


def test_a_kept_id_that_the_trainer_bans_adds_nothing_to_the_entropy(anywhere: Any) -> None:
    # Wide enough for vector instructions, whose exp(-inf) need not be 0.
    logits = anywhere.tensor(np.array([[0.0, *[-np.inf] * 40, 0.0]] * 2))
    kept = np.arange(42)
    scores = score_from_logits(logits, [0, 0], [0, 42, 42], kept, [1.0, 1.0], full_T=[False, True], entropy=True)
    np.testing.assert_allclose(anywhere.host(scores.entropy_T), np.log([2, 2]), rtol=1e-6)
    np.testing.assert_allclose(anywhere.host(scores.logprobs_T), -np.log([2, 2]), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_error_is_that_of_rounding_logits_once(trainer: Any, dtype: str) -> None:
    case = ragged(3, tokens=60, vocab_size=300)
    logits = trainer.tensor(case["logits_RV"], dtype)
    rounded = case | {"logits_RV": trainer.host(logits)}
    scores = score_from_logits(**case | {"logits_RV": logits})
    assert trainer.dtype(scores.logprobs_T) == ("float64" if dtype == "float64" else "float32")
    atol = 1e-12 if dtype == "float64" else 2e-5
    np.testing.assert_allclose(trainer.host(scores.logprobs_T), oracle(rounded), rtol=0, atol=atol)


def test_large_logits_neither_overflow_nor_lose_their_difference(anywhere: Any) -> None:
    logits = anywhere.tensor(np.array([[300.0, 299.0, -300.0], [3e38, 3e38, -3e38]]))
    scores = score_from_logits(logits, [1, 0], [0, 2, 5], [0, 1, 0, 1, 2], [1.0, 0.5])
    np.testing.assert_allclose(anywhere.host(scores.logprobs_T), [-1.3132616875182228, -np.log(2)], rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [49_152, 49_153, 511, 513])
def test_a_wide_vocabulary_costs_no_accuracy(anywhere: Any, vocab_size: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, vocab_size)).astype(np.float32)
    scores = score_full_vocabulary(anywhere.tensor(logits), [0, 7, 400, 510], np.ones(4))
    expected = [reference.score(row, None, token, 1.0) for row, token in zip(logits, [0, 7, 400, 510], strict=True)]
    np.testing.assert_allclose(anywhere.host(scores.logprobs_T), expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("kept", [512, 5_000, 49_151])
def test_a_wide_kept_set_costs_no_accuracy(anywhere: Any, kept: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (2, 49_152)).astype(np.float32)
    scores = score_from_logits(
        anywhere.tensor(logits),
        [0, 400],
        [0, kept, 2 * kept],
        np.tile(np.arange(kept), 2),
        np.ones(2),
        entropy=True,
    )
    for t, token in enumerate([0, 400]):
        logp = logits[t, :kept].astype(np.float64) - reference.logsumexp(logits[t, :kept])
        assert anywhere.host(scores.logprobs_T)[t] == pytest.approx(logp[token], abs=4e-6)
        assert anywhere.host(scores.entropy_T)[t] == pytest.approx(-np.sum(np.exp(logp) * logp), abs=4e-6)


def base(**changes: Any) -> dict[str, Any]:
    case = {
        "logits_RV": np.zeros((2, 6)),
        "token_ids_T": [1, 2],
        "kept_offsets_T1": [0, 2, 4],
        "kept_ids_N": [0, 1, 2, 3],
        "temperature_T": [1.0, 1.0],
    }
    return case | changes


VIOLATIONS = {
    "member": ({"kept_ids_N": [0, 2, 2, 3]}, FindingKind.MEMBER),
    "descending": ({"kept_ids_N": [1, 0, 2, 3]}, FindingKind.SORTED),
    "duplicate": ({"kept_ids_N": [1, 1, 2, 3]}, FindingKind.SORTED),
    "too large": ({"kept_ids_N": [1, 6, 2, 3]}, FindingKind.RANGE),
    "negative": ({"kept_ids_N": [-1, 1, 2, 3]}, FindingKind.RANGE),
    "empty": ({"kept_offsets_T1": [0, 0, 4]}, FindingKind.EMPTY_SET),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_stops_the_call_and_names_the_token(name: str) -> None:
    changes, kind = VIOLATIONS[name]
    if kind is FindingKind.EMPTY_SET:
        changes = changes | {"kept_ids_N": [1, 2, 3, 4]}
    with pytest.raises(ViolationError, match="token 0 of the call") as caught:
        score_from_logits(**base(**changes))
    assert caught.value.findings[0].kind is kind


@pytest.mark.parametrize("name", VIOLATIONS)
def test_an_excluded_violation_is_marked_and_leaves_no_number(name: str, anywhere: Any) -> None:
    changes, kind = VIOLATIONS[name]
    if kind is FindingKind.EMPTY_SET:
        changes = changes | {"kept_ids_N": [1, 2, 3, 4]}
    case = base(**changes)
    case["logits_RV"] = anywhere.tensor(case["logits_RV"])
    scores = score_from_logits(**case, on_violation="exclude", entropy=True, full_share=1.0)
    assert scores.violations.counts() == {kind.value: 1}
    assert scores.violations.bad_T.tolist() == [True, False]
    for values in (scores.logprobs_T, scores.entropy_T, scores.full_logprobs_T):
        assert np.isnan(anywhere.host(values)).tolist() == [True, False]


def test_a_violation_in_a_batch_is_named_by_rollout_and_position(world: Any) -> None:
    packed = to_packed(world.batch)
    tokens = packed.tokens
    token = int(np.flatnonzero(np.diff(tokens.kept_offsets_T1) > 1)[3])
    begin, end = tokens.kept_offsets_T1[token : token + 2]
    ids = tokens.kept_ids_N.copy()
    ids[begin:end] = ids[begin:end][::-1]
    broken = replace(packed, tokens=replace(tokens, kept_ids_N=ids))
    with pytest.raises(ViolationError) as caught:
        score_aligned(broken, world.packed_logits())
    example = caught.value.findings[0].examples[0]
    assert (example.rollout_id, example.position) == tokens.locate(token)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"temperature_T": [1.0, np.nan]}, ScoringRefused, "temperature of token 1 of the call is unknown"),
        ({"temperature_T": [0.0, 1.0]}, ScoringRefused, "temperature 0, which keeps exactly one token"),
        ({"absent_T": [False, True]}, ScoringRefused, "no kept set was recorded for token 1"),
        ({"temperature_T": [1.0, -0.5]}, InvalidInput, "temperature of token 1 of the call is -0.5"),
        ({"temperature_T": [1.0, np.inf]}, InvalidInput, "must be finite"),
        ({"temperature_T": [1.0]}, InvalidInput, "one temperature for each of the 2 tokens"),
        ({"temperature_T": 1.0}, InvalidInput, "expand a response's setting"),
        ({"kept_offsets_T1": [0, 4]}, InvalidInput, "2 tokens need 3"),
        ({"kept_offsets_T1": [0, 3, 5]}, InvalidInput, "to the 4 kept ids"),
        ({"kept_offsets_T1": [1, 2, 4]}, InvalidInput, "ascend from 0"),
        ({"kept_ids_N": [0.0, 1.0, 2.0, 3.0]}, InvalidInput, "must hold integers"),
        ({"token_ids_T": [[1, 2]]}, InvalidInput, "one axis of integers"),
        ({"full_T": [True, False]}, InvalidInput, "one or the other"),
        ({"full_T": [False]}, InvalidInput, "full_T has shape"),
        ({"rows_T": [0, 0]}, InvalidInput, "names a row twice"),
        ({"rows_T": [0, 2]}, InvalidInput, r"rows \[0, 2\)"),
        ({"rows_T": [0]}, InvalidInput, "one row for each"),
        ({"logits_RV": np.zeros((3, 6))}, InvalidInput, "3 rows for 2 tokens"),
        ({"logits_RV": np.zeros((1, 2, 6))}, InvalidInput, "reshape them"),
        ({"logits_RV": np.zeros((2, 6), int)}, InvalidInput, "floating point"),
        ({"logits_RV": [[0.0] * 6] * 2}, InvalidInput, "NumPy arrays, Paddle tensors and torch tensors"),
        ({"on_violation": "ignore"}, InvalidInput, "'raise' or 'exclude'"),
        ({"full_share": 1.5}, InvalidInput, "full_share is 1.5"),
    ],
)
def test_what_cannot_be_scored_honestly_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        score_from_logits(**base(**changes))


def test_integer_tensors_are_refused_too(trainer: Any) -> None:
    with pytest.raises(InvalidInput, match="floating point"):
        score_from_logits(**base(logits_RV=trainer.tensor(np.zeros((2, 6)), "int64")))


def test_full_vocabulary_scores_refuse_greedy_and_strange_tokens() -> None:
    logits = np.zeros((1, 4))
    with pytest.raises(ScoringRefused, match="temperature 0"):
        score_full_vocabulary(logits, [1], [0.0])
    with pytest.raises(ViolationError, match="outside"):
        score_full_vocabulary(logits, [4], [1.0])


def test_greedy_singletons_score_zero_at_temperature_zero() -> None:
    scores = score_from_logits(np.array([[1.0, 5.0]]), [0], [0, 1], [0], [0.0], entropy=True, full_share=1.0)
    assert (scores.logprobs_T.tolist(), scores.entropy_T.tolist()) == ([0.0], [0.0])
    assert np.isnan(scores.full_logprobs_T).all()


def test_a_batch_drawn_from_another_vocabulary_is_refused(
    simulate: Callable[..., Any], rng: np.random.Generator
) -> None:
    world = simulate(rng, [SamplingParams()])
    packed = to_packed(world.batch)
    with pytest.raises(InvalidInput, match="whole vocabulary of 40"):
        score_aligned(packed, np.zeros((packed.num_positions, 48)))


def test_responses_without_a_record_are_scored_over_the_vocabulary_by_name_only() -> None:
    from keptset.schemas.builder import BatchBuilder, Response
    from keptset.schemas.columns import Identity

    builder = BatchBuilder(Identity(vocab_size=5))
    builder.add(
        Response(
            rollout_id="foreign",
            prompt_id="p",
            prompt_token_ids=np.array([1]),
            token_ids=np.array([2]),
            behavior_logprobs=np.array([-1.0]),
            support="absent",
            finish_reason="stop",
            params=SamplingParams(),
        )
    )
    packed = to_packed(builder.build())
    with pytest.raises(ScoringRefused, match=r"foreign .*score_full_vocabulary"):
        score_aligned(packed, np.zeros((2, 5)))
    assert score_aligned_full_vocabulary(packed, np.zeros((2, 5))).logprobs_T.tolist() == [pytest.approx(-np.log(5))]


def test_chunks_need_a_vocabulary_size(world: Any) -> None:
    import pyarrow as pa

    from keptset.schemas.rollout_batch import RolloutBatch

    metadata = {k: v for k, v in world.batch.arrow.schema.metadata.items() if k != b"keptset.vocab_size"}
    batch = RolloutBatch.from_arrow(world.batch.arrow.replace_schema_metadata(metadata))
    assert isinstance(batch.arrow, pa.RecordBatch)
    with pytest.raises(InvalidInput, match="vocabulary size"):
        score_aligned(to_packed(batch), lambda positions: np.zeros((len(positions), 40)))
