"""What an engine can be asked beyond plain sampling: groups, bans, drafts, lists, new weights, pause and abort."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")

from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.engine import RolloutEngine  # noqa: E402
from keptset.rollout.models import Segment, load_decoder  # noqa: E402
from keptset.rollout.request import Request  # noqa: E402
from keptset.rollout.speculative import lookup_draft  # noqa: E402
from keptset.rollout.stop_strings import StopStrings  # noqa: E402
from keptset.rollout.top_logprobs import _first_on_device  # noqa: E402
from keptset.schemas.builder import BatchBuilder  # noqa: E402
from keptset.schemas.errors import InvalidInput  # noqa: E402
from keptset.schemas.sampling_params import SamplingParams  # noqa: E402
from keptset.schemas.validation import validate  # noqa: E402
from keptset.trainer_bridge import reference  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
FOLDER = DATA / "llama_untied_llama3rope"
PROMPT = np.random.default_rng(1).integers(0, 160, 30).astype(np.int32)


@pytest.fixture(scope="module")
def decoder():
    return load_decoder(FOLDER)


def ask(params, *, prompt=PROMPT, name="p", **more):
    return Request(prompt_id=name, prompt_token_ids=np.asarray(prompt, np.int32), params=params, **more)


def rows(batch):
    return batch.arrow.to_pylist()


def logits_of(decoder, ids):
    with paddle.no_grad():
        hidden = decoder.forward(np.asarray(ids), [Segment(slot=0, start=0, length=len(ids))])
        return decoder.logits(hidden).numpy().astype(np.float64)


def assert_same_record(one, other):
    for a, b in zip(rows(one), rows(other), strict=True):
        assert a["token_ids"] == b["token_ids"]
        assert a["kept_ids"] == b["kept_ids"]
        for column in ("behavior_logprobs", "log_kept_mass", "kept_entropy"):
            np.testing.assert_allclose(a[column], b[column], atol=2e-5)


class Counted:
    """A decoder that counts the tokens it computes."""

    def __init__(self, decoder):
        self._decoder, self.tokens = decoder, 0

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def forward(self, token_ids, *rest):
        self.tokens += len(token_ids)
        return self._decoder.forward(token_ids, *rest)


@pytest.mark.parametrize("prefill_tokens", [7, 512])
def test_a_group_computes_its_prompt_once_and_draws_as_if_alone(decoder, prefill_tokens):
    group = [ask(SamplingParams(top_k=30, max_new_tokens=6), sample_index=i) for i in range(9)]
    counted = Counted(decoder)
    together = RolloutEngine(counted, EngineConfig(slots=4, prefill_tokens=prefill_tokens)).generate(group)
    whole_prompts = 1 + (counted.tokens - len(PROMPT) - 9 * 6) // len(PROMPT)
    assert counted.tokens <= len(PROMPT) + 8 + 9 * 5 + 8 and whole_prompts <= 1
    alone = [RolloutEngine(decoder).generate([request]) for request in group]
    assert [r["token_ids"] for r in rows(together)] == [rows(batch)[0]["token_ids"] for batch in alone]


def test_a_group_of_single_tokens_computes_its_prompt_once_too(decoder):
    """Its first sample has ended by the time the others come to it."""
    counted = Counted(decoder)
    group = [ask(SamplingParams(top_k=30, max_new_tokens=1), sample_index=i) for i in range(4)]
    RolloutEngine(counted, EngineConfig(slots=4)).generate(group)
    assert counted.tokens == len(PROMPT) + 3


LOOPS = SamplingParams(temperature=0.5, top_k=4, allowed_token_ids=(3, 4, 5), max_new_tokens=60, draft_tokens=5)
"""Three ids to choose from: what followed before often follows again."""


def test_drafting_changes_no_token_no_set_and_no_number(decoder):
    asked = [ask(LOOPS, prompt=np.tile(PROMPT[:5], 5), sample_index=i) for i in range(6)]
    asked += [
        ask(replace(LOOPS, repetition_penalty=1.05, presence_penalty=0.1), name="q", sample_index=i) for i in range(3)
    ]
    drafting = RolloutEngine(decoder, EngineConfig(slots=4))
    drafted = drafting.generate(asked)
    plain = RolloutEngine(decoder, EngineConfig(slots=4))
    plain_batch = plain.generate(
        [replace(request, params=replace(request.params, draft_tokens=0)) for request in asked]
    )
    assert validate(drafted) == []
    assert_same_record(drafted, plain_batch)
    assert drafting.passes < 0.9 * plain.passes, "no draft was accepted: nothing is shown"


def test_a_response_that_repeats_itself_takes_fewer_passes_than_tokens(decoder):
    """Greedy decoding of three ids falls into a loop, which look-up drafts foresee."""
    engine = RolloutEngine(decoder)
    batch = engine.generate([ask(replace(LOOPS, temperature=0.0, top_k=0))])
    assert batch.num_tokens == 60
    assert engine.passes < 40


@pytest.mark.parametrize(
    ("sequence", "most", "draft"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),
        ([7, 1, 2, 5, 3, 1, 2, 6, 7, 1, 2], 1, [5]),
        ([1, 1, 1], 2, [1]),
        ([1, 2, 3], 5, []),
        ([1], 5, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_a_draft_is_what_followed_the_longest_then_latest_match(sequence, most, draft):
    assert lookup_draft(np.array(sequence, np.int32), most).tolist() == draft


def test_bans_shape_the_kept_sets_and_leave_the_rest_to_the_oracle(decoder):
    allowed = tuple(range(20, 60))
    params = SamplingParams(
        top_p=0.9,
        allowed_token_ids=allowed,
        banned_words=((25,), (30, 31), (int(PROMPT[-1]), 40)),
        max_new_tokens=25,
        stop_token_ids=(50,),
        min_new_tokens=25,
    )
    (row,) = rows(RolloutEngine(decoder).generate([ask(params)]))
    prompt, tokens = row["prompt_token_ids"], row["token_ids"]
    logits = logits_of(decoder, prompt + tokens)
    for t, token in enumerate(tokens):
        text = prompt + tokens[:t]
        banned = set(range(160)) - set(allowed) | {25}
        banned |= {31} if text[-1] == 30 else set()
        banned |= {40} if text[-1] == prompt[-1] else set()
        processed = reference.process(logits[len(text) - 1], prompt, tokens[:t], params, banned_ids=banned)
        assert row["kept_ids"][t] == reference.truncate(processed, params).kept_ids.tolist()
        assert token in row["kept_ids"][t]
    assert '"allowed_token_ids"' in row["sampler_extras"] and '"banned_words"' in row["sampler_extras"]


def test_listed_log_probabilities_are_over_the_kept_set_and_minus_infinity_outside(decoder):
    listed = ask(SamplingParams(top_k=3, top_logprobs=5, max_new_tokens=8))
    silent = ask(SamplingParams(top_k=3, max_new_tokens=8), name="silent")
    batch = RolloutEngine(decoder).generate([listed, silent])
    assert validate(batch) == []
    first, second = rows(batch)
    assert second["top_ids"] is None and second["top_logprobs"] is None
    logits = logits_of(decoder, first["prompt_token_ids"] + first["token_ids"])
    for t in range(8):
        row = logits[len(PROMPT) + t - 1]
        order = np.lexsort((np.arange(160), -row))[:5]
        assert first["top_ids"][t] == order.tolist()
        kept = reference.truncate(row, listed.params)
        expected = [
            dict(zip(kept.kept_ids.tolist(), kept.logprobs, strict=True)).get(i, -np.inf) for i in order.tolist()
        ]
        np.testing.assert_allclose(first["top_logprobs"][t], expected, atol=2e-5)
        assert np.isneginf(expected[3:]).all()


class Letters:
    """A tokenizer in which id i reads as one letter."""

    digest = "letters"

    def decode(self, ids):
        return "".join(chr(ord("A") + int(i)) for i in ids)


def test_a_stop_string_ends_the_response_where_it_is_complete(decoder):
    params = SamplingParams(max_new_tokens=30)
    free = rows(RolloutEngine(decoder).generate([ask(params)]))[0]["token_ids"]
    stop = Letters().decode(free[4:8])
    engine = RolloutEngine(decoder, tokenizer=Letters())
    (row,) = rows(engine.generate([ask(replace(params, stop_strings=("never", stop)))]))
    assert row["token_ids"] == free[:8] and row["finish_reason"] == "stop"
    with pytest.raises(InvalidInput, match="stop_strings need a tokenizer"):
        RolloutEngine(decoder).submit(ask(replace(params, stop_strings=("x",))))


def test_a_stop_string_does_not_end_a_response_that_is_too_short():
    strings, params = StopStrings(Letters()), SamplingParams(stop_strings=("AB",), min_new_tokens=4)
    text = np.array([ord(letter) - ord("A") for letter in "ABCABCDDDDAB"])
    ends = [length for length in range(1, 13) if strings.complete(ask(params), text[:length])]
    assert ends == [5, 12]
    params = replace(params, min_new_tokens=6)
    assert not any(strings.complete(ask(params), text[:length]) for length in range(1, 12))


def other_weights(decoder):
    """The same model with its layers disturbed."""
    rng = np.random.default_rng(9)
    weights = {name: tensor.numpy() for name, tensor in decoder.weights().items()}
    return {name: array + rng.normal(0, 0.05, array.shape).astype(np.float32) for name, array in weights.items()}


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_tokens_after_an_update_carry_its_version_and_its_logits(cache):
    old, new = load_decoder(FOLDER), load_decoder(FOLDER)
    new.load_weights(other_weights(new))
    engine = RolloutEngine(load_decoder(FOLDER), version=1)
    engine.submit(ask(SamplingParams(top_k=20, max_new_tokens=12)))
    for _ in range(5):
        assert engine.step() == []
    engine.update_weights(2, other_weights(old), cache=cache)
    (response,) = [response for _ in range(8) for response in engine.step()]
    builder = BatchBuilder(engine.identity)
    builder.add(response)
    (row,) = rows(builder.build())
    assert row["policy_versions"] == [1] * 5 + [2] * 7
    assert row["kv_policy"] == {"recompute": "recomputed", "keep": "kept"}[cache]
    ids = row["prompt_token_ids"] + row["token_ids"]
    gaps = []
    for t, (token, version) in enumerate(zip(row["token_ids"], row["policy_versions"], strict=True)):
        logits = logits_of({1: old, 2: new}[version], ids)[len(PROMPT) + t - 1]
        gaps.append(abs(reference.score(logits, row["kept_ids"][t], token, 1.0) - row["behavior_logprobs"][t]))
    assert max(gaps[:5]) < 2e-5
    assert (max(gaps[5:]) < 2e-5) == (cache == "recompute"), "kept keys and values are the old weights'"


def test_what_was_drawn_from_a_kept_cache_says_so_whatever_comes_later():
    engine = RolloutEngine(load_decoder(FOLDER), version=1)
    engine.submit(ask(SamplingParams(top_k=20, max_new_tokens=6)))
    for version, cache in ((2, "keep"), (3, "recompute")):
        engine.step()
        engine.step()
        engine.update_weights(version, other_weights(engine.decoder), cache=cache)
    (row,) = rows(engine.advance(60))
    assert row["policy_versions"] == [1, 1, 2, 2, 3, 3] and row["kv_policy"] == "kept"


def test_requeued_requests_start_again_under_the_new_weights(decoder):
    engine = RolloutEngine(load_decoder(FOLDER), EngineConfig(slots=2), version=1)
    asked = [ask(SamplingParams(top_k=20, max_new_tokens=9), sample_index=i) for i in range(4)]
    names = [engine.submit(request).rollout_id for request in asked]
    for _ in range(3):
        engine.step()
    engine.update_weights(2, other_weights(decoder), running="requeue")
    done = [response for _ in range(40) for response in engine.step()]
    assert sorted(response.rollout_id for response in done) == sorted(names)
    assert all(set(response.policy_versions.tolist()) == {2} and response.kv_policy == "none" for response in done)


def test_weights_that_do_not_fit_change_nothing(decoder):
    engine = RolloutEngine(load_decoder(FOLDER), version=1)
    with pytest.raises(InvalidInput, match="weight"):
        engine.update_weights(2, {"strange": np.zeros(1, np.float32)})
    assert engine.version == 1


def test_a_paused_engine_keeps_what_it_has_and_goes_on_where_it_stopped(decoder):
    expected = RolloutEngine(decoder).generate([ask(SamplingParams(max_new_tokens=6))])
    engine = RolloutEngine(decoder)
    engine.submit(ask(SamplingParams(max_new_tokens=6)))
    engine.step()
    engine.pause()
    assert engine.step() == [] and engine.advance(5) is None and engine.unfinished == 1
    engine.resume()
    assert rows(engine.advance(60)) == rows(expected)


def test_an_aborted_response_is_delivered_as_far_as_it_got(decoder):
    params = SamplingParams(top_k=9, max_new_tokens=10)
    whole = rows(RolloutEngine(decoder).generate([ask(params)]))[0]
    engine = RolloutEngine(decoder, EngineConfig(slots=1))
    running, waiting = engine.submit(ask(params)), engine.submit(ask(params, sample_index=1))
    for _ in range(4):
        engine.step()
    assert engine.abort(running.rollout_id) and engine.abort(waiting.rollout_id) and not engine.abort("strange")
    batch = engine.advance(60)
    started, never = rows(batch)
    assert (started["finish_reason"], never["finish_reason"]) == ("abort", "abort")
    assert started["token_ids"] == whole["token_ids"][:4] and started["kept_ids"] == whole["kept_ids"][:4]
    assert never["token_ids"] == []
    assert engine.unfinished == 0
    engine.submit(ask(params))


def test_a_bound_on_key_value_memory_lets_long_requests_wait_for_room_and_changes_no_token(decoder):
    rng = np.random.default_rng(3)
    lengths = [10, 20, 12, 30, 25, 8, 150, 40, 110, 60]
    asked = [
        ask(SamplingParams(top_k=20, max_new_tokens=30), prompt=rng.integers(0, 160, n), name=f"p{n}") for n in lengths
    ]
    free = RolloutEngine(decoder, EngineConfig(slots=6)).generate(asked)
    engine = RolloutEngine(decoder, EngineConfig(slots=6, kv_tokens=384))
    for request in asked:
        engine.submit(request)
    together, done = [], []
    while engine.unfinished:
        done += engine.step()
        cache = engine._room.cache
        assert cache.slots * cache.allocated <= 384
        assert engine._room.reserved_tokens <= 384
        together.append(len(engine._room._row))
    assert max(together) == 6, "short requests run together"
    by_id = {response.rollout_id: response.token_ids.tolist() for response in done}
    assert by_id == {row["rollout_id"]: row["token_ids"] for row in rows(free)}


def test_a_request_that_could_never_have_room_is_refused(decoder):
    engine = RolloutEngine(decoder, EngineConfig(kv_tokens=64))
    with pytest.raises(InvalidInput, match="more than kv_tokens = 64"):
        engine.submit(ask(SamplingParams(max_new_tokens=100)))


def test_listing_on_a_device_and_on_the_host_agree():
    logits = np.random.default_rng(0).normal(size=(4, 200)).astype(np.float32)
    counts = np.array([3, 7, 1])
    on_device = _first_on_device(paddle.to_tensor(logits), np.array([0, 2, 3]), counts)
    for row, count, ids in zip([0, 2, 3], counts, on_device, strict=True):
        assert ids.tolist() == np.argsort(-logits[row], kind="stable")[:count].tolist()
