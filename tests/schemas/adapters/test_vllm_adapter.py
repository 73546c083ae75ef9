"""vLLM: server replies of several versions and offline objects, and the traps in each."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keptset.schemas.adapters import Adapted, Stated, from_vllm
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, SchemaError, ViolationError
from keptset.schemas.sampling_params import SamplingParams

Adapt = Callable[..., Adapted]
Example = Callable[[str], Any]
STATED = Stated(identity=Identity(vocab_size=24))


class Logprob:
    def __init__(self, logprob: float) -> None:
        self.logprob, self.rank, self.decoded_token = logprob, 1, None


def live(tree: dict[str, Any]) -> SimpleNamespace:
    """A RequestOutput as the offline engine returns it, from its recorded form."""
    outputs = []
    for choice in tree["outputs"]:
        fields = copy.deepcopy(choice)
        fields["logprobs"] = [{int(k): Logprob(v["logprob"]) for k, v in row.items()} for row in choice["logprobs"]]
        fields["sampling_mask"] = SimpleNamespace(**choice["sampling_mask"])
        fields["weight_versions"] = [SimpleNamespace(**span) for span in choice["weight_versions"]]
        outputs.append(SimpleNamespace(**fields))
    return SimpleNamespace(**{**tree, "outputs": outputs})


PARAMS = SimpleNamespace(
    temperature=0.5,
    top_k=5,
    top_p=0.9,
    min_p=0.0,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    logit_bias=None,
    seed=None,
)
"""As vLLM's own SamplingParams."""


def columns(result: Adapted, *left_out: str) -> dict[str, Any]:
    table = result.require().arrow.to_pydict()
    return {name: values for name, values in table.items() if name not in left_out}


def test_live_objects_and_their_recorded_form_give_the_same_batch(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_offline_good.json")
    tree["request"]["sampling_params"] |= {
        **{name: value for name, value in vars(PARAMS).items() if value is not None},
        "logit_bias": {},
    }
    recorded = adapt("vllm", tree)
    result = from_vllm([live(tree["response"])], PARAMS, STATED)
    ids = ("rollout_id", "prompt_id", "group_id")
    assert columns(result, *ids) == columns(recorded, *ids)
    assert result.batch.rollout_ids == ["0/0", "0/1"]
    assert result.batch.column("logit_bias").to_pylist() == [[], []]
    assert result.batch.identity == Identity(vocab_size=24, engine="vllm")


def test_versions_come_from_spans_token_by_token(adapt: Adapt, example: Example) -> None:
    batch = adapt("vllm", example("vllm_good.json")).require()
    assert batch.column("policy_versions").to_pylist() == [[41] * 4, [41, 41, 42, 42, 42]]
    tree = example("vllm_good.json")
    tree["response"]["choices"][1]["weight_versions"] = [
        {"version": "41", "start": 0, "end": 2},
        {"version": "latest", "start": 3, "end": 5},
    ]
    assert adapt("vllm", tree).require().column("policy_versions").to_pylist()[1] == [41, 41, None, None, None]


def test_choices_are_told_apart_by_index_not_by_position(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_good.json")
    tree["response"]["choices"].reverse()
    turned = adapt("vllm", tree).require()
    assert turned.rollout_ids == ["demo-0001/1", "demo-0001/0"]
    assert turned.take([1, 0]).arrow.equals(adapt("vllm", example("vllm_good.json")).require().arrow)


def test_kept_sets_are_sets_whatever_their_order(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_good.json")
    for choice in tree["response"]["choices"]:
        for ids in choice["sampling_mask"]:
            ids.reverse()
    assert columns(adapt("vllm", tree)) == columns(adapt("vllm", example("vllm_good.json")))


def test_the_kept_distribution_moves_along_with_its_ids(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_good.json")
    choice = tree["response"]["choices"][0]
    choice["sampling_mask"] = [[11, 7, 3], [12], [9], [2]]
    probabilities = np.array([0.25, 0.5, 0.25])
    choice["sampling_mask_logprobs"] = [np.log(probabilities).tolist(), [0.0], [0.0], [0.0]]
    choice["logprobs"] = None
    tree["response"]["choices"] = [choice]
    batch = adapt("vllm", tree).require()
    assert batch.column("kept_ids").to_pylist() == [[[3, 7, 11], [12], [9], [2]]]
    assert np.exp(batch.kept_logprobs.inner[0]).tolist() == pytest.approx([0.25, 0.5, 0.25])
    # Without `logprobs` the sampled token's entry of that distribution is b.
    assert batch.behavior_logprobs[0].tolist() == pytest.approx([np.log(0.5), 0, 0, 0])
    assert batch.column("logprob_domain").to_pylist() == ["kept"]


def test_old_versions_name_tokens_by_a_text_alone(adapt: Adapt, example: Example) -> None:
    new, old = adapt("vllm", example("vllm_good.json")), adapt("vllm", example("vllm_old_logprobs_good.json"))
    assert columns(old, "policy_versions") == columns(new, "policy_versions")
    tree = example("vllm_old_logprobs_good.json")
    tree["response"]["choices"][0]["logprobs"]["content"][1]["token"] = "twelve"
    (rejected,) = adapt("vllm", tree).rejected
    assert rejected.error == (
        "response.choices[0].logprobs.content[1].token is 'twelve'; expected a text such as 'token_id:7'"
    )


def test_the_variant_with_bare_logprobs_is_read(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_good.json")
    for choice in tree["response"]["choices"]:
        bare = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        choice["logprobs"] = {"content": None, "sampled": bare}
    assert columns(adapt("vllm", tree)) == columns(adapt("vllm", example("vllm_good.json")))


def test_the_flat_container_of_newer_engines_is_read_without_one_object_per_token() -> None:
    flat = SimpleNamespace(
        start_indices=[0, 2], end_indices=[2, 3], token_ids=[7, 5, 9], logprobs=[-0.5, -1.0, -0.25], ranks=[2, 1, 1]
    )
    choice = SimpleNamespace(
        index=0, token_ids=[7, 9], logprobs=flat, sampling_mask=SimpleNamespace(token_ids=[[5, 7], [9, 10]])
    )
    output = SimpleNamespace(request_id="3", prompt_token_ids=[1], outputs=[choice])
    assert from_vllm([output]).require().behavior_logprobs.values.tolist() == [-0.5, -0.25]
    flat.token_ids = [5, 7, 9]
    assert "logprobs[0] is about token 5, but the response has 7 there" in from_vllm([output]).rejected[0].reason
    flat.start_indices = [0, 9]
    assert "expected start indices within the entries" in from_vllm([output]).rejected[0].reason


def test_the_marker_for_a_missing_logprob_becomes_null_and_is_reported(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_good.json")
    tree["response"]["choices"][0]["logprobs"]["content"][1]["logprob"] = -9999.0
    result = adapt("vllm", tree)
    assert [finding.kind.value for finding in result.rejected[0].findings] == ["nulls"]
    assert result.rejected[0].findings[0].examples[0].position == 1


@pytest.mark.parametrize("missing", [-9999.0, None])
def test_a_kept_distribution_with_one_entry_missing_is_reported_and_not_left_out(
    adapt: Adapt, example: Example, missing: float | None
) -> None:
    tree = example("vllm_good.json")
    choice = tree["response"]["choices"][0]
    choice["sampling_mask_logprobs"] = [[-np.log(len(row))] * len(row) for row in choice["sampling_mask"]]
    choice["logprobs"]["content"] = [
        {**entry, "logprob": row[0]}
        for entry, row in zip(choice["logprobs"]["content"], choice["sampling_mask_logprobs"], strict=True)
    ]
    assert adapt("vllm", tree).require().column("kept_logprobs").is_null().to_pylist() == [False, True]
    choice["sampling_mask_logprobs"][1][0] = missing  # of a token that was not sampled
    (rejected,) = adapt("vllm", tree).rejected
    (finding,) = rejected.findings
    assert (finding.kind.value, [one.position for one in finding.examples]) == ("distribution", [1])


def test_replies_that_do_not_repeat_their_prompt_take_it_from_the_caller(example: Example) -> None:
    tree = example("vllm_good.json")
    reply, prompt = tree["response"], tree["request"]["token_ids"]
    del reply["prompt_token_ids"]
    without = from_vllm([reply], PARAMS, STATED)
    assert {finding.kind.value for one in without.rejected for finding in one.findings} == {"prompt"}
    batch = from_vllm([reply, {**reply, "request_id": "b"}], PARAMS, STATED, prompt_token_ids=[prompt, [5]]).require()
    assert batch.column("prompt_token_ids").to_pylist() == [prompt, prompt, [5], [5]]
    reply["prompt_token_ids"] = prompt
    assert from_vllm([reply], PARAMS, STATED, prompt_token_ids=[[5]]).require().prompt_token_ids[0].tolist() == prompt
    with pytest.raises(InvalidInput, match="2 prompt_token_ids for 1 outputs; give one for each"):
        from_vllm([reply], PARAMS, STATED, prompt_token_ids=[[5], [6]])


@pytest.mark.parametrize("packed", [(0x3F800000 << 32) | 7, (0xBF800000 << 32) | 7, 24, -1])
def test_an_id_outside_the_vocabulary_is_reported_however_large(adapt: Adapt, example: Example, packed: int) -> None:
    tree = example("vllm_good.json")
    tree["response"]["choices"][1]["sampling_mask"][2][0] = packed
    result = adapt("vllm", tree)
    (rejected,) = result.rejected
    assert rejected.rollout_id == "demo-0001/1"
    assert next((f.kind.value, f.examples[0].position) for f in rejected.findings) == ("range", 2)
    assert result.batch.rollout_ids == ["demo-0001/0"]


@pytest.mark.parametrize(
    ("flags", "mask", "domain"),
    [
        (["--logprobs-mode=processed_logprobs"], True, "kept"),
        (["--logprobs-mode=processed_logprobs"], False, "kept"),
        (["--logprobs-mode", "raw_logprobs"], False, "raw"),
        (["--logprobs-mode=raw_logprobs"], True, "raw"),
        ([], True, "kept"),
        ([], False, "unknown"),
    ],
)
def test_the_domain_of_logprobs_follows_the_engine_flags_and_the_mask(
    adapt: Adapt, example: Example, flags: list[str], mask: bool, domain: str
) -> None:
    tree = example("vllm_good.json" if mask else "vllm_bad_mask_null.json")
    tree["engine"]["flags"] = flags
    assert set(adapt("vllm", tree).require().column("logprob_domain").to_pylist()) == {domain}


def test_a_mode_that_returns_logits_gives_no_logprobs(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_bad_mask_null.json")
    tree["engine"]["flags"] = ["--logprobs-mode=processed_logits"]
    batch = adapt("vllm", tree).require()
    assert batch.behavior_logprobs is None
    assert batch.column("logprob_domain").to_pylist() == ["unknown"] * 2


def test_a_stated_domain_counts_only_where_the_engine_does_not_tell(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_bad_mask_null.json")
    stated = Stated(identity=Identity(vocab_size=24), logprob_domain="raw")
    assert adapt("vllm", tree, stated=stated).require().column("logprob_domain").to_pylist() == ["kept"] * 2
    tree["engine"]["flags"] = []
    assert adapt("vllm", tree, stated=stated).require().column("logprob_domain").to_pylist() == ["raw"] * 2


def test_a_missing_mask_makes_support_absent_and_unknown_settings_null(adapt: Adapt, example: Example) -> None:
    batch = adapt("vllm", example("vllm_bad_mask_null.json")).require()
    assert batch.column("support").to_pylist() == ["absent"] * 2
    assert batch.kept_ids is None
    assert batch.column("top_k").to_pylist() == [5, 5]
    for name in ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "kv_policy"):
        assert batch.column(name).null_count == 2


def test_the_prompt_is_the_replys_or_else_the_requests(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_good.json")
    assert adapt("vllm", tree).require().column("prompt_token_ids").to_pylist() == [[1, 8, 13, 5]] * 2
    tree["response"]["prompt_token_ids"] = [4, 2]
    assert adapt("vllm", tree).require().column("prompt_token_ids").to_pylist() == [[4, 2]] * 2
    del tree["response"]["prompt_token_ids"], tree["request"]["token_ids"]
    assert {f.kind.value for f in adapt("vllm", tree).findings} == {"prompt"}


def test_an_offline_request_number_is_joined_with_its_file(adapt: Adapt, example: Example) -> None:
    ids = adapt("vllm", example("vllm_offline_good.json")).require().rollout_ids
    assert [name.rpartition("/recorded:")[2] for name in ids] == ["0/0", "0/1"]


def test_callers_prompt_ids_name_the_rollouts_and_number_repeated_prompts(example: Example) -> None:
    output = live(example("vllm_offline_good.json")["response"])
    batch = from_vllm([output, output], PARAMS, STATED, prompt_ids=["p", "p"]).require()
    assert batch.rollout_ids == ["p/0", "p/1", "p/2", "p/3"]
    assert batch.column("group_id").to_pylist() == ["p"] * 4
    with pytest.raises(InvalidInput, match="1 prompt_ids for 2 outputs"):
        from_vllm([output, output], prompt_ids=["p"])


def test_lengths_that_differ_are_reported_and_the_other_choice_goes_on(adapt: Adapt, example: Example) -> None:
    for spoil in (
        lambda choice: choice["sampling_mask"].pop(),
        lambda choice: choice["logprobs"]["content"].pop(),
    ):
        tree = example("vllm_good.json")
        spoil(tree["response"]["choices"][0])
        result = adapt("vllm", tree)
        assert [f.kind.value for f in result.rejected[0].findings] == ["lengths"]
        assert result.batch.rollout_ids == ["demo-0001/1"]
        with pytest.raises(ViolationError, match="1 responses were rejected"):
            result.require()
    output = live(example("vllm_offline_good.json")["response"])
    output.outputs[0].logprobs.pop()
    assert [f.kind.value for f in from_vllm([output], PARAMS).rejected[0].findings] == ["lengths"]


def test_a_sampled_token_without_its_own_logprob_is_not_given_anothers(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_offline_good.json")
    tree["response"]["outputs"][0]["logprobs"][1] = {"9": {"logprob": -0.1}}
    (rejected,) = adapt("vllm", tree).rejected
    assert rejected.error == (
        "response.outputs[0].logprobs[1] does not hold the sampled token 12; expected its log-probability among them"
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"output_ids": [1]}, "the record is an object with output_ids; expected a reply of /inference/v1/generate"),
        (7, "the record is 7; expected an object with a field"),
        ({"choices": 5}, "choices is 5; expected a list"),
        ({"choices": [{"index": 0, "text": "hello"}]}, r"choices\[0\] is an object with index, text; expected a reply"),
    ],
)
def test_another_layout_is_refused_with_what_was_expected(adapt: Adapt, tree: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        adapt("vllm", tree)
    with pytest.raises(SchemaError, match=message):
        from_vllm([tree])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda choice: choice.pop("token_ids"), "response.choices[0].token_ids is missing; expected the response's"),
        (lambda choice: choice.pop("index"), "response.choices[0].index is missing; expected the number of the choice"),
        (lambda choice: choice.update(logprobs=[7] * 4), "response.choices[0].logprobs[0] is 7; expected an object"),
        (lambda choice: choice.update(logprobs=7), "response.choices[0].logprobs is 7; expected logprobs.content, or"),
        (lambda choice: choice.update(sampling_mask=7), "response.choices[0].sampling_mask is 7; expected a list"),
        (lambda choice: choice.update(finish_reason=7), "response.choices[0].finish_reason is 7; expected a string"),
        (lambda choice: choice.update(finish_reason="\ud800"), "expected a string of whole Unicode characters"),
        (lambda choice: choice["logprobs"]["content"][0].update(token_id=8), "is about token 8, but the response has"),
    ],
)
def test_a_choice_of_another_layout_is_rejected_with_what_was_expected(
    adapt: Adapt, example: Example, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    tree = example("vllm_good.json")
    change(tree["response"]["choices"][0])
    result = adapt("vllm", tree)
    (rejected,) = result.rejected
    assert message in str(rejected.error)
    assert rejected.path == "response.choices[0]"
    assert result.batch.rollout_ids == ["demo-0001/1"]


def test_keptset_params_are_taken_for_live_objects(example: Example) -> None:
    params = SamplingParams(temperature=0.5, top_k=5, top_p=0.9)
    batch = from_vllm([live(example("vllm_offline_good.json")["response"])], params).require()
    assert batch.column("top_p").to_pylist() == [0.9, 0.9]
    assert batch.column("repetition_penalty").to_pylist() == [1.0, 1.0]
