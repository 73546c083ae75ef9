"""Value-changing processors, replayed at the kept ids alone, against the oracle's dense replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.adapters.settings import Stated, read_settings
from keptset.schemas.adapters.tree import Node
from keptset.schemas.errors import InvalidInput, ScoringRefused
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import replay as replay_module
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.replay import REPLAYED_ORDER, Replayer
from keptset.trainer_bridge.scoring import score_aligned, score_aligned_full_vocabulary, score_from_logits

PROCESSORS = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.1},
    "bias": {"logit_bias": {0: 3.0, 5: -2.0, 7: 0.5}},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": {1: 2.0, 4: -1.5},
    },
}


def make_world(simulate: Callable[..., Any], rng: np.random.Generator, name: str, **settings: Any) -> Any:
    """Ids repeat often here: a vocabulary of 12, and responses of up to 20 tokens."""
    params = SamplingParams(**PROCESSORS[name], **settings)
    return simulate(rng, [params, SamplingParams(top_k=3), params], vocab_size=12, max_response=20)


@pytest.mark.parametrize("settings", [{"top_k": 6}, {"top_p": 0.8, "temperature": 0.6}, {}], ids=str)
@pytest.mark.parametrize("name", PROCESSORS)
def test_replayed_scores_are_the_recorded_ones(
    simulate: Callable[..., Any], rng: np.random.Generator, name: str, settings: dict[str, Any]
) -> None:
    world = make_world(simulate, rng, name, **settings)
    packed = to_packed(world.batch)
    scores = score_aligned(packed, world.packed_logits(), full_share=1.0)
    np.testing.assert_allclose(scores.logprobs_T, world.oracle_scores(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(scores.logprobs_T, packed.tokens.behavior_logprobs_T, rtol=0, atol=1e-6)
    np.testing.assert_allclose(scores.full_logprobs_T, world.oracle_full_scores(), rtol=0, atol=1e-6)
    by_name = score_aligned_full_vocabulary(packed, world.packed_logits())
    np.testing.assert_allclose(by_name.logprobs_T, world.oracle_full_scores(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PROCESSORS)
def test_ignoring_a_processor_would_be_seen(simulate: Callable[..., Any], rng: np.random.Generator, name: str) -> None:
    world = make_world(simulate, rng, name, top_k=6)
    packed = to_packed(world.batch)
    tokens = packed.tokens
    ignored = score_from_logits(
        world.packed_logits(),
        tokens.token_ids_T,
        tokens.kept_offsets_T1,
        tokens.kept_ids_N,
        tokens.temperature_T,
        rows_T=packed.logit_index_T,
    )
    changed = np.isin(tokens.row_T, [0, 2])
    assert np.abs(ignored.logprobs_T - tokens.behavior_logprobs_T)[changed].max() > 0.05


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.5, 2),
    st.floats(-1, 1),
    st.floats(-1, 1),
    st.dictionaries(st.integers(0, 11), st.floats(-3, 3, width=32), max_size=4),
)
def test_any_processors_replay_to_the_oracle(
    simulate: Callable[..., Any], seed: int, r: float, f: float, q: float, bias: dict[int, float]
) -> None:
    params = SamplingParams(
        repetition_penalty=r, frequency_penalty=f, presence_penalty=q, logit_bias=bias, top_k=5, temperature=0.8
    )
    world = simulate(np.random.default_rng(seed), [params, SamplingParams(), params], vocab_size=12, max_response=12)
    scores = score_aligned(to_packed(world.batch), world.packed_logits(), full_share=1.0)
    np.testing.assert_allclose(scores.logprobs_T, world.oracle_scores(), rtol=0, atol=1e-9)
    np.testing.assert_allclose(scores.full_logprobs_T, world.oracle_full_scores(), rtol=0, atol=1e-9)


def test_bans_need_no_replay(simulate: Callable[..., Any], rng: np.random.Generator) -> None:
    params = SamplingParams(top_k=4, min_new_tokens=5, stop_token_ids=(0, 3))
    world = simulate(rng, [params] * 3, processor_order=None, vocab_size=9)
    packed = to_packed(world.batch)
    assert Replayer(packed.tokens).kept() is None
    scores = score_aligned(packed, world.packed_logits())
    np.testing.assert_allclose(scores.logprobs_T, packed.tokens.behavior_logprobs_T, rtol=0, atol=1e-6)


def test_responses_without_processors_carry_nothing_of_their_neighbours(
    simulate: Callable[..., Any], rng: np.random.Generator
) -> None:
    world = make_world(simulate, rng, "all", top_k=6)
    tokens = to_packed(world.batch).tokens
    kept = Replayer(tokens).kept()
    assert kept is not None
    plain_N = np.repeat(tokens.row_T == 1, np.diff(tokens.kept_offsets_T1))
    assert (kept.divisor_N[plain_N] == 1).all()
    assert (kept.shift_N[plain_N] == 0).all()
    assert (kept.divisor_N[~plain_N] != 1).any()


def without(batch: RolloutBatch, column: str) -> RolloutBatch:
    arrays = {name: batch.column(name) for name in batch.arrow.schema.names}
    arrays[column] = pa.nulls(batch.num_responses, batch.arrow.schema.field(column).type)
    return RolloutBatch.from_arrow(pa.RecordBatch.from_pydict(arrays, schema=batch.arrow.schema))


@pytest.mark.parametrize("column", REPLAYED_ORDER)
def test_a_setting_that_was_not_recorded_is_refused_by_name(world: Any, column: str) -> None:
    with pytest.raises(ScoringRefused, match=f"{column} of rollout-0 is unknown"):
        score_aligned(to_packed(without(world.batch, column)), world.packed_logits())


@pytest.mark.parametrize("column", REPLAYED_ORDER)
def test_greedy_responses_need_no_settings(simulate: Callable[..., Any], rng: np.random.Generator, column: str) -> None:
    world = simulate(rng, [SamplingParams(temperature=0, repetition_penalty=2.0)] * 2, processor_order=None)
    scores = score_aligned(to_packed(without(world.batch, column)), world.packed_logits())
    assert (scores.logprobs_T == 0).all()


@pytest.mark.parametrize(
    "order",
    [
        None,
        "logit_bias,repetition_penalty,frequency_penalty,presence_penalty",
        "repetition_penalty,frequency_penalty",
        "",
    ],
)
def test_another_order_or_none_is_refused_where_a_processor_was_on(
    simulate: Callable[..., Any], rng: np.random.Generator, order: str | None
) -> None:
    params = SamplingParams(repetition_penalty=1.2, top_k=4)
    world = simulate(rng, [params], processor_order=order)
    with pytest.raises(ScoringRefused, match="processor_order is"):
        score_aligned(to_packed(world.batch), world.packed_logits())
    plain = simulate(rng, [SamplingParams(top_k=4)], processor_order=order)
    score_aligned(to_packed(plain.batch), plain.packed_logits())


def test_an_order_that_names_bans_as_well_is_taken(simulate: Callable[..., Any], rng: np.random.Generator) -> None:
    order = ", ".join([*REPLAYED_ORDER, "min_new_tokens"])
    world = simulate(rng, [SamplingParams(repetition_penalty=1.2, top_k=4)], processor_order=order)
    score_aligned(to_packed(world.batch), world.packed_logits())


@pytest.mark.parametrize("params", [SamplingParams(top_k=4), SamplingParams(repetition_penalty=1.2, top_k=4)])
def test_an_order_that_names_a_processor_nobody_knows_is_refused_by_its_name(
    simulate: Callable[..., Any], rng: np.random.Generator, params: SamplingParams
) -> None:
    order = ",".join([*REPLAYED_ORDER, "watermark"])
    world = simulate(rng, [params], processor_order=order)
    with pytest.raises(ScoringRefused, match="processor_order names 'watermark'"):
        score_aligned(to_packed(world.batch), world.packed_logits())
    greedy = simulate(rng, [SamplingParams(temperature=0)], processor_order=order)
    score_aligned(to_packed(greedy.batch), greedy.packed_logits())


def with_extras(batch: RolloutBatch, extras: list[str | None]) -> RolloutBatch:
    arrays = {name: batch.column(name) for name in batch.arrow.schema.names}
    arrays["sampler_extras"] = pa.array(extras, pa.string())
    return RolloutBatch.from_arrow(pa.RecordBatch.from_pydict(arrays, schema=batch.arrow.schema))


def test_a_setting_of_another_engine_that_changes_logits_is_refused_by_name(
    simulate: Callable[..., Any], rng: np.random.Generator
) -> None:
    world = simulate(rng, [SamplingParams(top_k=4), SamplingParams(top_k=4), SamplingParams(temperature=0)])
    guided = '{"guidance_scale":1.5,"stop_token_ids":[3]}'
    with pytest.raises(ScoringRefused, match="rollout-1 was sampled with guidance_scale = 1.5"):
        score_aligned(to_packed(with_extras(world.batch, [None, guided, None])), world.packed_logits())
    for harmless in ('{"stop_token_ids":[3]}', '{"guidance_scale":1.0}', '{"sequence_bias":null}'):
        score_aligned(to_packed(with_extras(world.batch, [harmless, None, guided])), world.packed_logits())


def test_adapters_keep_what_cannot_be_replayed_so_that_it_is_refused() -> None:
    settings = read_settings(Node({"temperature": 1.0, "guidance_scale": 1.5, "dry_multiplier": 0}), Stated())
    assert settings.extras == '{"guidance_scale":1.5}'


def test_a_batch_whose_keys_would_overflow_is_refused(
    simulate: Callable[..., Any], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = simulate(rng, [SamplingParams(repetition_penalty=1.2, top_k=4)])
    monkeypatch.setattr(replay_module, "MAX_KEY", 10)
    with pytest.raises(InvalidInput, match="score it in slices"):
        score_aligned(to_packed(world.batch), world.packed_logits())
