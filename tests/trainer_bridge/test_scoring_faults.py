"""Faults that comparable code has had, each planted so that it would be seen here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.errors import ScoringRefused, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.alignment import to_packed, to_padded
from keptset.trainer_bridge.ratios import importance_ratios
from keptset.trainer_bridge.sampled_tokens import sampled_tokens
from keptset.trainer_bridge.scoring import score_aligned, score_from_logits
from keptset.trainer_bridge.scoring.hand import hand_for

paddle = pytest.importorskip("paddle", reason="Paddle is not installed; `make test` has it")


def test_a_set_listed_in_probability_order_is_refused_rather_than_scored() -> None:
    # A mask built over sorted probabilities and never brought back to id order arrives like this.
    logits = np.array([[0.0, 3.0, 1.0, 2.0]])
    by_probability = np.argsort(-logits[0])[:3]
    with pytest.raises(ViolationError) as caught:
        score_from_logits(logits, [1], [0, 3], by_probability, [1.0])
    assert caught.value.findings[0].kind is FindingKind.SORTED


@pytest.mark.parametrize("outside", [-np.inf, np.nan, np.inf, 1e30])
def test_logits_outside_the_kept_set_have_no_part_in_the_score(outside: float) -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]])
    honest = score_from_logits(logits, [1], [0, 2], [0, 1], [1.0]).logprobs_T
    logits[0, 2:] = outside
    np.testing.assert_array_equal(score_from_logits(logits, [1], [0, 2], [0, 1], [1.0]).logprobs_T, honest)
    tensor = paddle.to_tensor(logits)
    tensor.stop_gradient = False
    score_from_logits(tensor, [1], [0, 2], [0, 1], [1.0]).logprobs_T.sum().backward()
    assert np.isfinite(tensor.grad.numpy()).all()
    assert (tensor.grad.numpy()[0, 2:] == 0.0).all()


def test_memory_that_nobody_wrote_reaches_no_result(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Uninitialised memory may hold anything; here it holds nan, and so do all logits that no score needs.
    def poisoned(shape: Any, dtype: Any = float, **_: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        return np.full(shape, np.nan if dtype.kind == "f" else np.iinfo(dtype).max if dtype.kind in "iu" else 1, dtype)

    monkeypatch.setattr(np, "empty", poisoned)
    monkeypatch.setattr(np, "empty_like", lambda a, dtype=None, **_: poisoned(a.shape, dtype or a.dtype))
    monkeypatch.setattr(paddle, "empty", lambda shape, dtype="float32": paddle.full(shape, float("nan"), dtype))
    padded = to_padded(world.batch, pad_token_id=7, side="left", length=18)
    logits = world.padded_logits("left", 18).reshape(-1, world.vocab_size)
    tokens = padded.tokens
    needed = np.zeros_like(logits, dtype=bool)
    full_rows = padded.logit_index_T[tokens.full_T]
    needed[full_rows] = True
    chosen = np.repeat(padded.logit_index_T, np.diff(tokens.kept_offsets_T1))
    needed[chosen, tokens.kept_ids_N] = True
    logits[~needed] = np.nan
    for make in (lambda z: z, paddle.to_tensor):
        scores = score_aligned(padded, make(logits), entropy=True, full_share=0.0)
        for values in (scores.logprobs_T, scores.entropy_T):
            assert np.isfinite(np.asarray(values)).all()
    assert (padded.input_ids_BL[~padded.attention_mask_BL] == 7).all()
    assert padded.input_ids_BL.max() < world.vocab_size


def test_numbers_behind_arrow_nulls_are_never_read(world: Any) -> None:
    # A row that asked for no log-probabilities: its buffer holds numbers all the same.
    column = world.batch.column("behavior_logprobs")
    lengths = column.value_lengths().to_pylist()
    items = pa.array(np.full(sum(lengths), -0.125, np.float32), mask=np.ones(sum(lengths), bool))
    assert items.buffers()[1].to_pybytes()[:4] == np.float32(-0.125).tobytes()
    nulls = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), items)
    arrays = {name: world.batch.column(name) for name in world.batch.arrow.schema.names} | {"behavior_logprobs": nulls}
    batch = RolloutBatch.from_arrow(pa.RecordBatch.from_pydict(arrays, schema=world.batch.arrow.schema))
    assert np.isnan(sampled_tokens(batch).behavior_logprobs_T).all()
    packed = to_packed(batch)
    scores = score_aligned(packed, world.packed_logits())
    with pytest.raises(ViolationError) as caught:
        importance_ratios(scores, packed.tokens, level="token")
    assert caught.value.findings[0].kind is FindingKind.LOGPROB
    left = importance_ratios(scores, packed.tokens, level="token", on_violation="exclude")
    assert left.log_ratios_C.shape == (0,)
    assert left.excluded_tokens == {"non_finite": int(packed.tokens.trainable_T.sum())}


def test_every_array_is_made_where_the_logits_are(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    original = paddle.to_tensor

    def spy(data: Any, dtype: Any = None, place: Any = None, stop_gradient: bool = True) -> Any:
        asked.append(place)
        return original(data, dtype=dtype, place=place, stop_gradient=stop_gradient)

    logits = original(world.packed_logits())
    logits.stop_gradient = False
    monkeypatch.setattr(paddle, "to_tensor", spy)
    packed = to_packed(world.batch)
    scores = score_aligned(packed, logits, entropy=True, full_share=1.0)
    ratios = importance_ratios(scores, packed.tokens, level="geometric")
    ratios.ratios_C.sum().backward()
    assert len(asked) > 10
    assert all(place is not None and place._equals(logits.place) for place in asked)
    for tensor in (
        scores.logprobs_T,
        scores.entropy_T,
        scores.full_logprobs_T,
        scores.log_kept_mass_T,
        ratios.log_ratios_C,
        ratios.ratios_C,
        logits.grad,
    ):
        assert tensor.place._equals(logits.place)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["gpu:0", "cpu"])
def test_results_stay_with_the_logits_whatever_the_default_device(world: Any, where: str) -> None:
    default = paddle.device.get_device()
    try:
        paddle.device.set_device("gpu:0" if where == "cpu" else "cpu")
        place = paddle.CPUPlace() if where == "cpu" else paddle.CUDAPlace(0)
        logits = paddle.to_tensor(world.packed_logits(), place=place, stop_gradient=False)
        packed = to_packed(world.batch)
        scores = score_aligned(packed, logits, entropy=True, full_share=1.0)
        importance_ratios(scores, packed.tokens, level="sequence").ratios_C.sum().backward()
        for tensor in (scores.logprobs_T, scores.entropy_T, scores.full_logprobs_T, logits.grad):
            assert tensor.place._equals(logits.place)
        np.testing.assert_allclose(scores.logprobs_T.numpy(), world.oracle_scores(), rtol=0, atol=2e-5)
    finally:
        paddle.device.set_device(default)


def test_settings_per_response_are_not_mistaken_for_settings_per_token(
    simulate: Callable[..., Any], rng: np.random.Generator
) -> None:
    # As many responses as the longest has tokens: a temperature per response would broadcast over tokens unnoticed.
    settings = [SamplingParams(temperature=t, top_k=8) for t in (0.3, 0.9, 1.5, 2.5)]
    world = simulate(rng, settings, forced_share=0.0, max_response=4)
    assert sorted(set(world.batch.token_ids.lengths))[-1] == len(settings)
    assert len(set(world.batch.token_ids.lengths)) > 1
    packed = to_packed(world.batch)
    scores = score_aligned(packed, world.packed_logits())
    np.testing.assert_allclose(scores.logprobs_T, world.oracle_scores(), rtol=0, atol=1e-6)


def test_a_half_finished_record_of_settings_is_refused_not_guessed(world: Any) -> None:
    temperature = world.batch.column("temperature").to_pylist()
    temperature[2] = None
    arrays = {name: world.batch.column(name) for name in world.batch.arrow.schema.names}
    arrays["temperature"] = pa.array(temperature, pa.float64())
    batch = RolloutBatch.from_arrow(pa.RecordBatch.from_pydict(arrays, schema=world.batch.arrow.schema))
    with pytest.raises(ScoringRefused, match="rollout-2 is unknown"):
        score_aligned(to_packed(batch), world.packed_logits())


def test_the_hand_without_logits_cannot_read_any() -> None:
    hand = hand_for(paddle.zeros([1, 3])).without_logits()
    with pytest.raises(AttributeError):
        hand.gather(np.array([0]))
