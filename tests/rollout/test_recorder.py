import numpy as np
import pytest

from keptset.rollout import recorder as recorder_module
from keptset.rollout.recorder import Recorder
from keptset.rollout.request import Request
from keptset.rollout.truncation import truncate
from keptset.schemas.builder import BatchBuilder
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

VOCAB = 50


def request(name, **changes):
    given = {"prompt_id": name, "prompt_token_ids": np.array([1, 2], np.int32), **changes}
    return Request(**given).resolved(base_seed=0)


def random_step(rng, rows, params):
    return truncate(rng.normal(size=(rows, VOCAB)).astype(np.float32) * 3, [params] * rows)


def commit(recorder, slots, kept, version=0):
    tokens = np.array([kept.members(row)[0][0] for row in range(len(slots))], np.int32)
    recorder.commit(np.array(slots), tokens, kept.logprobs_of(np.arange(len(slots)), tokens), kept, version)
    return tokens


TOP_5 = SamplingParams(top_k=5)


def replay(slots_per_step, *, params=TOP_5, compact_above=None, monkeypatch=None):
    """Drive a recorder and, beside it, a plain list per slot; return both."""
    if compact_above is not None:
        monkeypatch.setattr(recorder_module, "_COMPACT_ABOVE", compact_above)
    rng = np.random.default_rng(0)
    recorder = Recorder(slots=4, vocab_size=VOCAB, distribution_share=1.0)
    for slot in range(4):
        recorder.open(slot, request(f"p{slot}"))
    plain = {slot: [] for slot in range(4)}
    for version, slots in enumerate(slots_per_step):
        kept = random_step(rng, len(slots), params)
        tokens = commit(recorder, slots, kept, version)
        for row, slot in enumerate(slots):
            ids, logprobs = kept.members(row)
            plain[slot].append((tokens[row], ids, logprobs, kept.log_kept_mass_B[row], version))
    return recorder, plain


def assert_same(response, plain):
    assert response.token_ids.tolist() == [token for token, *_ in plain]
    assert np.split(response.kept_ids, response.kept_offsets[1:-1])[-1].tolist() == plain[-1][1].tolist()
    np.testing.assert_array_equal(response.kept_ids, np.concatenate([ids for _, ids, *_ in plain]))
    np.testing.assert_allclose(response.kept_logprobs, np.concatenate([p for _, _, p, *_ in plain]), rtol=1e-6)
    np.testing.assert_allclose(response.log_kept_mass, [m for *_, m, _ in plain], rtol=1e-6)
    assert response.policy_versions.tolist() == [version for *_, version in plain]


def test_each_slot_gets_its_own_tokens_whatever_the_steps_hold():
    recorder, plain = replay([[0, 1, 2, 3], [3, 1], [0], [2, 0, 1], [1]])
    for slot in range(4):
        assert_same(recorder.close(slot, "stop"), plain[slot])


def test_several_tokens_of_one_slot_in_one_step_are_taken_in_order():
    recorder, plain = replay([[0, 0, 1, 0], [1, 1, 0]])
    for slot in range(2):
        assert_same(recorder.close(slot, "stop"), plain[slot])


def test_room_left_by_closed_responses_is_used_again_without_mixing_sets(monkeypatch):
    recorder, plain = replay([[0, 1, 2, 3]] * 80, compact_above=10, monkeypatch=monkeypatch)
    for slot in (0, 2, 3):
        assert_same(recorder.close(slot, "length"), plain[slot])
    assert recorder._kept.used == sum(len(ids) for _, ids, *_ in plain[1])
    assert_same(recorder.close(1, "length"), plain[1])


def test_a_response_that_always_kept_the_vocabulary_has_full_support_and_no_sets():
    recorder, _ = replay([[0], [0]], params=SamplingParams())
    response = recorder.close(0, "stop")
    assert response.support == "full" and response.kept_ids is None
    np.testing.assert_array_equal(response.log_kept_mass, [0.0, 0.0])


def test_one_truncated_token_makes_the_support_kept_and_lists_the_vocabulary_for_the_others():
    recorder = Recorder(slots=1, vocab_size=VOCAB, distribution_share=0.0)
    recorder.open(0, request("p"))
    rng = np.random.default_rng(1)
    commit(recorder, [0], random_step(rng, 1, SamplingParams()))
    small = random_step(rng, 1, SamplingParams(top_k=3))
    commit(recorder, [0], small)
    response = recorder.close(0, "stop")
    assert response.support == "kept"
    first, second = np.split(response.kept_ids, response.kept_offsets[1:-1])
    assert first.tolist() == list(range(VOCAB))
    assert second.tolist() == small.members(0)[0].tolist()


def test_a_recorded_distribution_is_whole_where_some_tokens_kept_the_whole_vocabulary():
    """As where stop tokens are banned only at first, and nothing else is."""
    recorder = Recorder(slots=2, vocab_size=VOCAB, distribution_share=1.0)
    recorder.open(0, request("p", params=SamplingParams(min_new_tokens=1, stop_token_ids=(3,))))
    recorder.open(1, request("never cut"))
    rng, sets = np.random.default_rng(1), []
    for params in (SamplingParams(top_k=3), SamplingParams()):
        sets.append(random_step(rng, 2, params))
        commit(recorder, [0, 1], sets[-1])
    assert recorder._kept.used == 2 * 3 + VOCAB, "what no response can list is not held"
    response = recorder.close(0, "stop")
    for t, kept in enumerate(sets):
        span = slice(*response.kept_offsets[t : t + 2])
        ids, logprobs = kept.members(0)
        assert response.kept_ids[span].tolist() == ids.tolist()
        np.testing.assert_allclose(response.kept_logprobs[span], logprobs, rtol=1e-6)


def test_an_empty_response_builds_a_batch():
    recorder = Recorder(slots=1, vocab_size=VOCAB, distribution_share=1.0)
    recorder.open(0, request("p"))
    builder = BatchBuilder(Identity(vocab_size=VOCAB))
    builder.add(recorder.close(0, "error", "logits hold NaN"))
    batch = builder.build()
    assert batch.num_tokens == 0
    assert batch.column("error").to_pylist() == ["logits hold NaN"]


def test_the_share_of_recorded_distributions_is_the_share_asked_for():
    recorder = Recorder(slots=1, vocab_size=VOCAB, distribution_share=0.3)
    wanted = [recorder._wants_distribution(request("p", sample_index=i)) for i in range(2000)]
    assert abs(np.mean(wanted) - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 2000)


def test_a_request_settles_to_the_same_identity_every_time():
    first, again = request("p", sample_index=3), request("p", sample_index=3)
    assert (first.rollout_id, first.params.seed) == (again.rollout_id, again.params.seed)
    assert request("p", sample_index=4).params.seed != first.params.seed


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([], "non-empty"),
        ([1.5], "float"),
        ([[1]], "shape"),
        ([1] * 9, "9 tokens"),
        ([1, 50], "position 1"),
        ([-1], "-1"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused_by_name(ids, told):
    with pytest.raises(InvalidInput, match=f"prompt strange.*{told}"):
        Request(prompt_id="strange", prompt_token_ids=np.array(ids)).check(VOCAB, 9)
