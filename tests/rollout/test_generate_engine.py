"""Other engines behind `generate`: a recorded vLLM, and transformers where it is installed; alone and in a pool."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keptset.rollout.actor import RolloutWorker
from keptset.rollout.config import EngineConfig
from keptset.rollout.engine_protocol import Engine, ReportsLoad
from keptset.rollout.generate_engine import GenerateEngine
from keptset.rollout.request import Request
from keptset.schemas.adapters import Stated, from_transformers, from_vllm
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, RolloutError
from keptset.schemas.rollout_batch import concat_batches
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.validation import validate

ENGINES = Path(__file__).parents[1] / "data" / "engines"
PARAMS = SamplingParams(temperature=0.5, top_k=5, top_p=0.9, max_new_tokens=5)
STATED = Stated(identity=Identity(vocab_size=24, model_id="toy"), others_off=True, no_update_in_flight=True)
BAD = 9
"""A prompt that begins with this id is answered with a token that its mask does not hold."""


def requests(count, first=1, **fields):
    prompt = np.array([first, 8, 13, 5], np.int32)
    return [
        Request(prompt_id=f"p{i}", prompt_token_ids=prompt, params=PARAMS, **fields).resolved(0) for i in range(count)
    ]


def recorded(asked):
    """What a vLLM server replied once, with weights 41, for every request anew."""
    replies = []
    for request in asked:
        name = "vllm_bad_not_in_mask" if request.prompt_token_ids[0] == BAD else "vllm_good"
        reply = json.loads((ENGINES / f"{name}.json").read_text())["response"]
        replies.append({**reply, "choices": reply["choices"][:1]})
    return from_vllm(replies, PARAMS, STATED, prompt_ids=[request.rollout_id for request in asked])


def test_responses_carry_their_requests_names_columns_and_the_engines_version():
    engine: Engine = GenerateEngine(recorded, most=3, version=41)
    assert isinstance(engine, ReportsLoad)
    asked = requests(5, sample_index=2, group_id="g", extra={"x_level": 3})
    for request in asked:
        engine.submit(request)
    assert (engine.unfinished, engine.load.waiting) == (5, 5)
    batch = engine.advance(1e6)
    assert engine.unfinished == 0 and engine.tokens_drawn == batch.num_tokens == 20
    assert validate(batch) == []
    assert batch.rollout_ids == [request.rollout_id for request in asked]
    assert batch.column("prompt_id").to_pylist() == [f"p{i}" for i in range(5)]
    assert batch.column("sample_index").to_pylist() == [2] * 5
    assert batch.column("group_id").to_pylist() == ["g"] * 5
    assert batch.column("x_level").to_pylist() == [3] * 5
    assert set(batch.policy_versions.values.tolist()) == {41}, "the server's own"
    assert (batch.identity.engine, batch.identity.model_id) == ("vllm", "toy")
    assert engine.advance(1.0) is None


def test_tokens_without_a_version_get_the_engines():
    def without_versions(asked):
        reply = json.loads((ENGINES / "vllm_offline_good.json").read_text())["response"]
        output = {name: value for name, value in reply["outputs"][0].items() if name != "weight_versions"}
        return from_vllm([{**reply, "outputs": [output]}], PARAMS, STATED, prompt_ids=[asked[0].rollout_id])

    engine = GenerateEngine(without_versions, most=1, version=7)
    engine.submit(requests(1)[0])
    batch = engine.advance(1.0)
    assert batch.policy_versions.values.tolist() == [7] * batch.num_tokens


def test_a_response_that_cannot_be_read_is_answered_with_the_reason():
    engine = GenerateEngine(recorded)
    for request in [*requests(2), *requests(1, BAD, sample_index=1)]:
        engine.submit(request)
    batch = engine.advance(1e6)
    assert len(batch) == 3 and validate(batch) == []
    assert batch.column("finish_reason").to_pylist() == ["stop", "stop", "error"]
    assert "token 12 is not among its 3 kept ids" in batch.column("error")[2].as_py()


def test_a_request_without_any_answer_is_answered_too():
    engine = GenerateEngine(lambda asked: recorded(asked[:-1]))
    for request in requests(3):
        engine.submit(request)
    batch = engine.advance(1e6)
    assert batch.column("error").to_pylist() == [None, None, "the engine returned no response"]


@pytest.mark.parametrize(
    ("generate", "told"),
    [
        (lambda asked: recorded([replace(asked[0], rollout_id="strange")]), "'strange', which is none of those asked"),
        (lambda asked: recorded([asked[0], asked[0]]), "one request more than once"),
    ],
)
def test_answers_to_what_was_not_asked_are_an_error(generate, told):
    engine = GenerateEngine(generate)
    engine.submit(requests(1)[0])
    with pytest.raises(RolloutError, match=told):
        engine.advance(1.0)


def test_a_call_takes_no_more_than_asked_and_time_stops_between_calls():
    calls = []
    engine = GenerateEngine(lambda asked: calls.append(len(asked)) or recorded(asked), most=2)
    for request in requests(5):
        engine.submit(request)
    assert len(engine.advance(0.0)) == 2 and engine.unfinished == 3
    assert len(engine.advance(1e6)) == 3 and calls == [2, 2, 1]


def test_a_waiting_request_can_be_aborted_and_is_returned():
    engine = GenerateEngine(recorded)
    first, second = requests(2)
    engine.submit(first)
    engine.submit(second)
    assert engine.abort(first.rollout_id) and not engine.abort("nobody") and engine.unfinished == 2
    batch = engine.advance(1e6)
    assert batch.column("finish_reason").to_pylist() == ["stop", "abort"] and validate(batch) == []
    engine.submit(first)
    assert engine.abort(first.rollout_id)
    assert engine.advance(0.0).rollout_ids == [first.rollout_id]


def test_weights_are_handed_on_where_the_engine_takes_them():
    taken = []
    engine = GenerateEngine(recorded, load_weights=taken.append)
    engine.update_weights(4, {"w": 1}, running="continue", cache="recompute")
    assert (engine.version, taken) == (4, [{"w": 1}])
    with pytest.raises(InvalidInput, match="this engine takes no new weights"):
        GenerateEngine(recorded).update_weights(4, {}, running="continue", cache="recompute")


def test_settings_and_requests_that_cannot_be_are_refused():
    def check(request):
        raise InvalidInput("too long")

    with pytest.raises(InvalidInput, match="most is 0"):
        GenerateEngine(recorded, most=0)
    with pytest.raises(InvalidInput, match="too long"):
        GenerateEngine(recorded, check=check).submit(requests(1)[0])


def test_a_worker_drops_what_nobody_wants_any_more():
    worker = RolloutWorker(lambda: GenerateEngine(recorded, most=1, version=41))
    first, _ = worker.turn(requests(4), seconds=0.0)
    assert first.unfinished == 3
    worker.abandon([request.rollout_id for request in requests(4)])
    turn, batch = worker.turn(requests(2), seconds=1e6)
    assert turn.unfinished == 0 and len(batch) == 2


def test_a_worker_hands_over_no_memory_but_its_batchs_own():
    class Sliced(GenerateEngine):
        def advance(self, seconds):
            batch = super().advance(seconds)
            parent = concat_batches([batch, *[many] * 200])
            return parent.slice(0, len(batch))

    many = recorded(requests(8, sample_index=1)).batch
    many = many.take(np.arange(len(many)))
    worker = RolloutWorker(lambda: Sliced(recorded, version=41))
    _, batch = worker.turn(requests(2), seconds=1.0)
    assert len(batch) == 2 and batch.arrow.get_total_buffer_size() < 20_000


def test_a_worker_refuses_versions_that_its_engine_never_held():
    worker = RolloutWorker(lambda: GenerateEngine(recorded, version=2))
    with pytest.raises(RolloutError, match=r"the batch says version 41, which this engine never held; it held \[2\]"):
        worker.turn(requests(1), seconds=1.0)


@pytest.fixture(scope="module")
def local_ray():
    ray = pytest.importorskip("ray", reason="needs the package ray")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def recorded_here():
    # Written out, since Ray's workers cannot import a test module.
    folder, params, stated = ENGINES, PARAMS, STATED

    def make():
        def generate(asked):
            reply = json.loads((folder / "vllm_good.json").read_text())["response"]
            replies = [{**reply, "choices": reply["choices"][:1]} for _ in asked]
            return from_vllm(replies, params, stated, prompt_ids=[request.rollout_id for request in asked])

        return GenerateEngine(generate, most=2, version=41)

    return make


def transformers_here():
    params, stated = PARAMS, STATED

    def make():
        import torch
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=24,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = LlamaForCausalLM(config).eval()
        settings = GenerationConfig(
            do_sample=True,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            max_new_tokens=params.max_new_tokens,
            eos_token_id=2,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )

        def generate(asked):
            (request,) = asked
            torch.manual_seed(request.params.seed)
            ids = torch.tensor(np.asarray(request.prompt_token_ids, np.int64))[None]
            output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            return from_transformers(output, settings, stated, prompt_ids=[request.rollout_id])

        return GenerateEngine(generate, most=1)

    return make


@pytest.mark.parametrize("make", [recorded_here, transformers_here], ids=["recorded vLLM", "transformers"])
@pytest.mark.usefixtures("local_ray")
def test_a_pool_hosts_it(make):
    from keptset.rollout.pool import RolloutPool

    if make is transformers_here:
        pytest.importorskip("torch", reason="needs the packages torch and transformers")
        pytest.importorskip("transformers", reason="needs the packages torch and transformers")
    with RolloutPool(make(), EngineConfig(slots=4), actors=2, turn_seconds=0.1) as pool:
        batches = list(pool.run(requests(12)))
    assert sorted(name for batch in batches for name in batch.rollout_ids) == sorted(
        request.rollout_id for request in requests(12)
    )
    for batch in batches:
        assert validate(batch) == []
        assert batch.column("finish_reason").to_pylist().count("error") == 0
        assert set(batch.policy_versions.values.tolist()) <= {0, 41}
        assert batch.kept_ids.inner.lengths.max() <= 5
