import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset.rollout.history import History
from keptset.rollout.logit_processors import PROCESSOR_ORDER, LogitProcessors, check_ids, process
from keptset.rollout.truncation import truncate
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors" / "ratios.json").read_text())
PROCESSOR_VECTORS = [vector for vector in VECTORS if vector["kind"] == "processors"]


def history(prompt, response=()):
    so_far = History(prompt)
    for token in response:
        so_far.append(token)
    return so_far


def one(logits, prompt=(), response=(), **params):
    return process(np.array([logits], np.float64), [history(prompt, response)], [SamplingParams(**params)])[0]


@pytest.mark.parametrize("vector", PROCESSOR_VECTORS, ids=lambda vector: vector["name"])
def test_the_shared_vectors_hold(vector):
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    bias = {int(token): value for token, value in vector["logit_bias"].items()}
    params = {name: vector[name] for name in names} | {"logit_bias": bias}
    processed = one(vector["logits"], vector["prompt"], vector["response"], **params)
    np.testing.assert_allclose(processed, vector["expect"]["processed"], rtol=0, atol=1e-12)


@st.composite
def requests(draw, vocab_size):
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=12)
    off_or = lambda off, values: st.one_of(st.just(off), values)  # noqa: E731
    return (
        draw(ids),
        draw(ids),
        SamplingParams(
            repetition_penalty=draw(off_or(1.0, st.floats(0.1, 3))),
            frequency_penalty=draw(off_or(0.0, st.floats(-2, 2))),
            presence_penalty=draw(off_or(0.0, st.floats(-2, 2))),
            logit_bias=draw(st.dictionaries(st.integers(0, vocab_size - 1), st.floats(-100, 100), max_size=4)),
            min_new_tokens=draw(st.integers(0, 8)),
            stop_token_ids=tuple(draw(ids)),
        ),
    )


@st.composite
def batches(draw):
    vocab_size = draw(st.integers(1, 30))
    cases = draw(st.lists(requests(vocab_size), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal((len(cases), vocab_size)) * 4
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    return logits.astype(draw(st.sampled_from([np.float32, np.float64]))), cases


def oracle(logits, cases):
    return np.stack([reference.process(z, *case) for z, case in zip(logits, cases, strict=True)])


@settings(deadline=None, max_examples=200)
@given(batches())
def test_every_processor_does_what_the_oracle_does(batch):
    logits, cases = batch
    before = logits.copy()
    processed = process(logits, [history(p, r) for p, r, _ in cases], [params for _, _, params in cases])
    assert processed.dtype == logits.dtype
    assert (logits == before).all()
    tolerance = 1e-12 if logits.dtype == np.float64 else 3e-5  # a bias of 100 leaves an ulp of 8e-6
    np.testing.assert_allclose(processed, oracle(logits, cases), rtol=0, atol=tolerance)


@settings(deadline=None, max_examples=60)
@given(batches())
def test_tensors_are_processed_as_arrays_are(batch):
    paddle = pytest.importorskip("paddle")
    logits, cases = batch
    arguments = [history(p, r) for p, r, _ in cases], [params for _, _, params in cases]
    tensor = paddle.to_tensor(logits)
    processed = process(tensor, *arguments)
    np.testing.assert_array_equal(processed.numpy(), process(logits, *arguments))
    assert processed.dtype == tensor.dtype
    np.testing.assert_array_equal(tensor.numpy(), logits)


def test_logits_nobody_asks_to_change_are_returned_themselves():
    logits = np.zeros((2, 4))
    settled = SamplingParams(min_new_tokens=1, stop_token_ids=(3,))
    assert process(logits, [history([1], [2]), history([])], [settled, SamplingParams()]) is logits
    assert process(logits, [history([]), history([])], [SamplingParams(repetition_penalty=2.0)] * 2) is logits


def test_the_processors_act_in_the_recorded_order():
    assert PROCESSOR_ORDER.split(",") == [
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "allowed_token_ids",
        "banned_words",
        "min_new_tokens",
    ]
    params = {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 0.5, "logit_bias": {0: 8.0}}
    assert one([1.0, 0.0], response=[0, 0], **params)[0] == 1.0 / 2 - 2 * 1.0 - 0.5 + 8.0
    assert one([1.0, 0.0], stop_token_ids=(0,), min_new_tokens=1, logit_bias={0: 8.0})[0] == -np.inf


def test_stop_tokens_are_banned_until_the_minimum_is_reached():
    ask = {"min_new_tokens": 2, "stop_token_ids": (1, 3, 1)}
    for response, banned in (([], True), ([0], True), ([0, 0], False), ([0, 0, 0], False)):
        assert (one([0.0] * 4, response=response, **ask) == -np.inf).tolist() == [False, banned, False, banned]


def test_banning_every_token_fails_that_row_alone():
    logits = np.zeros((2, 2), np.float32)
    params = [SamplingParams(min_new_tokens=1, stop_token_ids=(0, 1)), SamplingParams()]
    kept = truncate(process(logits, [history([]), history([])], params), params)
    assert list(kept.errors) == [0]
    assert "loosen the bans" in kept.errors[0]


@pytest.mark.parametrize("bad", [{"logit_bias": {4: 1.0}}, {"stop_token_ids": (4,), "min_new_tokens": 1}])
def test_an_id_outside_the_vocabulary_is_refused_and_never_touches_another_row(bad):
    with pytest.raises(InvalidInput, match=r"row 1: id 4 is outside the vocabulary \[0, 4\)"):
        process(np.zeros((3, 4)), [history([])] * 3, [SamplingParams(), SamplingParams(**bad), SamplingParams()])
    with pytest.raises(InvalidInput, match="id 4 is outside"):
        check_ids(SamplingParams(**bad), 4)
    with pytest.raises(InvalidInput, match="id 4 is outside"):
        LogitProcessors(4).open(0, SamplingParams(**bad), [])


def test_prompts_outside_the_vocabulary_are_refused():
    with pytest.raises(InvalidInput, match="the prompt: id 9"):
        LogitProcessors(4).open(0, SamplingParams(), [1, 9])
    with pytest.raises(InvalidInput, match="row 0: id -1"):
        process(np.zeros((1, 4)), [history([-1])], [SamplingParams(repetition_penalty=2.0)])


def test_different_numbers_of_rows_are_refused():
    with pytest.raises(InvalidInput, match="2 rows of logits, 1 histories, 2 settings"):
        process(np.zeros((2, 4)), [history([])], [SamplingParams()] * 2)


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_a_history_counts_as_if_counted_anew(prompt, response):
    so_far = history(prompt, response)
    assert sorted(so_far.seen.tolist()) == sorted(set(prompt) | set(response))
    assert dict(zip(so_far.drawn.tolist(), so_far.counts.tolist(), strict=True)) == {
        token: response.count(token) for token in response
    }
    assert so_far.length == len(response)


def test_slots_are_processed_by_their_own_request_and_can_be_used_again():
    processors = LogitProcessors(4)
    processors.open(0, SamplingParams(presence_penalty=1.0), [])
    processors.open(5, SamplingParams(repetition_penalty=2.0), [3])
    processors.commit([5, 0, 5], [1, 2, 2])
    logits = np.ones((2, 4))
    assert processors.apply([5, 0], logits).tolist() == [[1, 0.5, 0.5, 0.5], [1, 1, 0, 1]]
    processors.close(5)
    processors.open(5, SamplingParams(), [3])
    assert processors.apply([5], logits[:1]).tolist() == [[1, 1, 1, 1]]
