from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")

from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.engine import RolloutEngine  # noqa: E402
from keptset.rollout.models import Segment, load_decoder  # noqa: E402
from keptset.rollout.request import Request  # noqa: E402
from keptset.rollout.sampling import uniforms  # noqa: E402
from keptset.schemas.errors import InvalidInput, RolloutError  # noqa: E402
from keptset.schemas.sampling_params import SamplingParams  # noqa: E402
from keptset.schemas.validation import validate  # noqa: E402
from keptset.trainer_bridge import reference  # noqa: E402

FOLDER = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "qwen2_bias"
SETTINGS = [
    SamplingParams(),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.7, top_p=0.95, top_k=40),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=9, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logit_bias={3: 2.0}),
]


@pytest.fixture(scope="module")
def decoder():
    return load_decoder(FOLDER)


def requests(count, *, new_tokens=12, params=SETTINGS, seed=5):
    rng = np.random.default_rng(seed)
    return [
        Request(
            prompt_id=f"p{i}",
            prompt_token_ids=rng.integers(0, 160, rng.integers(1, 30)).astype(np.int32),
            params=replace(params[i % len(params)], max_new_tokens=new_tokens),
        )
        for i in range(count)
    ]


def one_pass_logits(decoder, ids):
    """Logits of every position, from one forward pass that knows nothing of the engine."""
    with paddle.no_grad():
        hidden = decoder.forward(np.asarray(ids), [Segment(slot=0, start=0, length=len(ids))])
        return decoder.logits(hidden).numpy()


def test_every_recorded_number_is_the_oracles_on_a_separate_forward_pass(decoder):
    engine = RolloutEngine(decoder, EngineConfig(slots=3, prefill_tokens=16, distribution_share=1.0))
    asked = requests(14)
    batch = engine.generate(asked)
    assert validate(batch) == []
    assert batch.rollout_ids == [request.resolved(0).rollout_id for request in asked]
    for row, request in enumerate(asked):
        recorded = batch.arrow.slice(row, 1).to_pylist()[0]
        prompt, tokens = recorded["prompt_token_ids"], recorded["token_ids"]
        assert prompt == request.prompt_token_ids.tolist() and len(tokens) == 12
        logits = one_pass_logits(decoder, prompt + tokens)
        for t, token in enumerate(tokens):
            position = len(prompt) + t
            processed = reference.process(logits[position - 1], prompt, tokens[:t], request.params)
            kept = reference.truncate(processed, request.params)
            if recorded["support"] == "full":
                assert len(kept.kept_ids) == 160
            else:
                assert recorded["kept_ids"][t] == kept.kept_ids.tolist()
                np.testing.assert_allclose(recorded["kept_logprobs"][t], kept.logprobs, atol=2e-5)
            seed = np.array([recorded["seed"]])
            assert token == reference.draw(kept, float(uniforms(seed, np.array([position]))[0]))
            b = kept.logprobs[np.searchsorted(kept.kept_ids, token)]
            np.testing.assert_allclose(recorded["behavior_logprobs"][t], b, atol=2e-5)
            np.testing.assert_allclose(recorded["log_kept_mass"][t], kept.log_kept_mass, atol=2e-5)
            np.testing.assert_allclose(recorded["kept_entropy"][t], kept.entropy, atol=1e-4)
            np.testing.assert_allclose(recorded["kept_logprob_var"][t], kept.logprob_var, atol=1e-4)


def test_the_untruncated_rows_have_full_support_and_the_truncated_have_not(decoder):
    batch = RolloutEngine(decoder, EngineConfig(slots=4)).generate(requests(7))
    assert batch.column("support").to_pylist() == ["full"] + ["kept"] * 6


def test_a_row_seed_gives_the_same_tokens_alone_and_in_any_company(decoder):
    asked = requests(9)
    together = RolloutEngine(decoder, EngineConfig(slots=4, prefill_tokens=7)).generate(asked)
    alone = [RolloutEngine(decoder, EngineConfig(slots=1)).generate([request]) for request in reversed(asked)]
    assert [ids.tolist() for ids in (together.token_ids[i] for i in range(9))] == [
        batch.token_ids[0].tolist() for batch in reversed(alone)
    ]


def test_samples_of_one_prompt_differ(decoder):
    prompt = np.array([5, 6, 7], np.int32)
    params = SamplingParams(max_new_tokens=16)
    group = [Request(prompt_id="p", prompt_token_ids=prompt, params=params, sample_index=i) for i in range(8)]
    batch = RolloutEngine(decoder).generate(group)
    assert len({tuple(batch.token_ids[i].tolist()) for i in range(8)}) == 8


def test_a_stop_token_ends_the_response_and_is_its_last_token(decoder):
    asked = requests(6, params=[SamplingParams()])
    free = RolloutEngine(decoder).generate(asked)
    stops = [int(free.token_ids[row][4]) for row in range(6)]
    stopping = [
        replace(request, params=replace(request.params, stop_token_ids=(stop,)))
        for request, stop in zip(asked, stops, strict=True)
    ]
    batch = RolloutEngine(decoder).generate(stopping)
    for row, stop in enumerate(stops):
        expected = free.token_ids[row].tolist()
        assert batch.token_ids[row].tolist() == expected[: expected.index(stop) + 1]
    assert set(batch.column("finish_reason").to_pylist()) == {"stop"}


def test_min_new_tokens_bans_the_stop_token_and_shows_in_the_kept_sets(decoder):
    params = SamplingParams(stop_token_ids=tuple(range(100)), min_new_tokens=6, max_new_tokens=8)
    batch = RolloutEngine(decoder).generate(requests(3, params=[params], new_tokens=8))
    for row in batch.arrow.to_pylist():
        assert len(row["token_ids"]) >= 7 or row["finish_reason"] == "stop"
        for token, kept in zip(row["token_ids"][:6], row["kept_ids"][:6], strict=True):
            assert token >= 100 and kept == list(range(100, 160))


def test_the_context_ends_a_response_with_reason_length(decoder):
    request = Request(
        prompt_id="long", prompt_token_ids=np.zeros(250, np.int32), params=SamplingParams(max_new_tokens=100)
    )
    batch = RolloutEngine(decoder).generate([request])
    assert batch.num_tokens == 6
    assert batch.column("finish_reason").to_pylist() == ["length"]


def test_memory_grows_with_the_longest_request_under_way(decoder):
    engine = RolloutEngine(decoder, EngineConfig(slots=2))
    short = requests(1)[0]
    long = Request(prompt_id="long", prompt_token_ids=np.arange(150, dtype=np.int32), params=short.params)
    alone = RolloutEngine(decoder, EngineConfig(slots=2))
    tokens = alone.generate([short]).token_ids[0].tolist()
    batch = engine.generate([short, long])
    assert batch.token_ids[0].tolist() == tokens
    assert engine._room.cache.allocated >= 150 > alone._room.cache.allocated


def test_a_request_whose_logits_are_nan_fails_alone():
    broken = load_decoder(FOLDER)
    weights = broken.weights()
    embedding = weights["model.embed_tokens.weight"].numpy()
    embedding[7] = np.nan
    broken.load_weights({**weights, "model.embed_tokens.weight": paddle.to_tensor(embedding)})
    params = SamplingParams(max_new_tokens=3, logit_bias={7: -1e30})
    good = Request(prompt_id="good", prompt_token_ids=np.array([1, 2], np.int32), params=params)
    bad = Request(prompt_id="bad", prompt_token_ids=np.array([1, 7], np.int32), params=params)
    batch = RolloutEngine(broken).generate([good, bad])
    assert batch.column("finish_reason").to_pylist() == ["length", "error"]
    assert batch.token_ids[1].tolist() == [] and len(batch.token_ids[0]) == 3
    assert "NaN" in batch.column("error").to_pylist()[1]


@pytest.fixture(scope="module")
def spoilt():
    """A decoder that has NaN where token 7 stands in a prompt."""
    spoilt = load_decoder(FOLDER)
    weights = spoilt.weights()
    embedding = weights["model.embed_tokens.weight"].numpy()
    embedding[7] = np.nan
    spoilt.load_weights({**weights, "model.embed_tokens.weight": paddle.to_tensor(embedding)})
    return spoilt


LIMITED = SamplingParams(max_new_tokens=3, allowed_token_ids=(*range(7), *range(8, 20)))
SPOILING = Request(prompt_id="bad", prompt_token_ids=np.array([1, 2, 7, 4, 7, 5, 7, 6], np.int32), params=LIMITED)
SHORT = Request(prompt_id="good", prompt_token_ids=np.array([1, 2], np.int32), params=LIMITED)


def test_a_request_that_failed_leaves_nothing_in_the_memory_of_the_next_one(spoilt):
    batch = RolloutEngine(spoilt, EngineConfig(slots=1)).generate([SPOILING, SHORT])
    assert batch.column("finish_reason").to_pylist() == ["error", "length"]


def test_a_request_that_was_aborted_before_a_draw_leaves_nothing_either(spoilt):
    engine = RolloutEngine(spoilt, EngineConfig(slots=1, prefill_tokens=5))
    engine.submit(SPOILING)
    engine.step()
    assert engine.abort(engine._slots[0].request.rollout_id)
    engine.submit(SHORT)
    assert engine.advance(60).column("finish_reason").to_pylist() == ["abort", "length"]


@pytest.mark.parametrize("running", ["continue", "requeue"])
def test_bad_weights_are_over_with_the_next_ones(spoilt, decoder, running):
    """A response that they had half computed anew when good ones came ends well."""
    engine = RolloutEngine(load_decoder(FOLDER), EngineConfig(slots=1, prefill_tokens=5))
    long = np.tile(SPOILING.prompt_token_ids, 3)
    engine.submit(replace(SPOILING, prompt_token_ids=long, params=replace(LIMITED, max_new_tokens=6)))
    while not engine.tokens_drawn:
        engine.step()
    engine.update_weights(1, spoilt.weights(), running=running)
    engine.step()
    engine.step()
    engine.update_weights(2, decoder.weights(), running=running)
    (response,) = engine.advance(60).arrow.to_pylist()
    assert response["finish_reason"] == "length" and len(response["token_ids"]) == 6


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompt_token_ids": np.zeros(256, np.int32)}, "256 tokens"),
        ({"prompt_token_ids": np.zeros(0, np.int32)}, "non-empty"),
        ({"prompt_token_ids": np.array([160], np.int32)}, "outside the vocabulary"),
        ({"params": SamplingParams(stop_token_ids=(160,))}, "stop_token_ids.*160"),
        ({"params": SamplingParams(logit_bias={999: 1.0})}, "logit_bias.*999"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_leaves_the_engine_working(decoder, changes, told):
    engine = RolloutEngine(decoder)
    good = requests(1)[0]
    with pytest.raises(InvalidInput, match=told):
        engine.submit(replace(good, **changes))
    assert engine.unfinished == 0
    assert engine.generate([good]).num_tokens == 12


def test_a_repeated_row_seed_is_refused_unless_allowed(decoder):
    pair = [replace(r, params=replace(r.params, seed=3)) for r in requests(2, params=[SamplingParams()])]
    with pytest.raises(InvalidInput, match="row seed 3 is already in flight"):
        RolloutEngine(decoder).generate(pair)
    batch = RolloutEngine(decoder, EngineConfig(allow_shared_seed=True)).generate(pair)
    assert batch.column("seed").to_pylist() == [3, 3]


def test_identity_and_own_columns_travel_with_the_batch(decoder):
    engine = RolloutEngine(decoder, model_id="tiny", tokenizer_digest="abc", version=4)
    batch = engine.generate([replace(requests(1)[0], extra={"x_reward": 0.5}, group_id="g")])
    assert batch.identity.vocab_size == 160 and batch.identity.model_id == "tiny"
    assert batch.identity.filter_order == "temperature,min_p,top_k,top_p"
    assert batch.column("x_reward").to_pylist() == [0.5]
    assert set(batch.policy_versions.values.tolist()) == {4}


def test_no_truncation_records_b_as_the_full_log_probability(decoder):
    batch = RolloutEngine(decoder).generate(requests(1, params=[SamplingParams()]))
    prompt, tokens = batch.prompt_token_ids[0].tolist(), batch.token_ids[0].tolist()
    logits = one_pass_logits(decoder, prompt + tokens).astype(np.float64)
    for t, token in enumerate(tokens):
        row = logits[len(prompt) + t - 1]
        assert abs(batch.behavior_logprobs.values[t] - (row[token] - reference.logsumexp(row))) < 2e-5


def test_a_turn_of_no_time_is_one_step(decoder):
    engine = RolloutEngine(decoder)
    engine.submit(requests(1)[0])
    assert engine.advance(0.0) is None and engine.passes == 1


def test_an_engine_whose_step_failed_says_so_instead_of_waiting_forever(decoder, monkeypatch):
    engine = RolloutEngine(decoder)
    engine.submit(requests(1)[0])
    monkeypatch.setattr("keptset.rollout.engine.truncate", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(RolloutError, match="an earlier step failed"):
        engine.step()
