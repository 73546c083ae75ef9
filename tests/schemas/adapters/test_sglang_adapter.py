"""SGLang: single replies and batches, both kinds of log-probabilities, and the traps in each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from keptset.schemas.adapters import Adapted, Stated, from_sglang
from keptset.schemas.columns import Identity
from keptset.schemas.errors import SchemaError

Adapt = Callable[..., Adapted]
Example = Callable[[str], Any]


def metas(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [reply["meta_info"] for reply in tree["response"]]


def test_keys_that_are_absent_and_keys_that_are_null_both_say_that_no_mask_was_recorded(
    adapt: Adapt, example: Example
) -> None:
    absent = adapt("sglang", example("sglang_bad_mask_null.json"))
    tree = example("sglang_bad_mask_null.json")
    for meta in metas(tree):
        meta["output_token_sampling_mask"] = meta["output_token_sampling_logprobs"] = None
    assert adapt("sglang", tree).require().arrow.equals(absent.require().arrow)
    assert absent.batch.column("support").to_pylist() == ["absent"] * 2
    assert absent.batch.column("logprob_domain").to_pylist() == ["full"] * 2


def test_without_kept_logprobs_those_over_the_vocabulary_are_taken_and_named_so(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    for meta in metas(tree):
        del meta["output_token_sampling_logprobs"]
    batch = adapt("sglang", tree).require()
    assert batch.column("logprob_domain").to_pylist() == ["full"] * 2
    assert batch.behavior_logprobs[0][0] == np.float32(-0.6607055068016052)
    assert batch.log_kept_mass is None


def test_logprobs_over_the_support_give_the_whole_distribution_and_b(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    for name in ("output_token_sampling_logprobs", "output_token_sampling_mask_logprobs"):
        for meta in metas(tree):
            sizes = [len(ids) for ids in meta["output_token_sampling_mask"]]
            meta.pop("output_token_sampling_logprobs", None)
            meta[name] = [(-np.log(np.full(n, n))).tolist() for n in sizes]
            meta["output_token_logprobs"] = [[-9.0, token, None] for _, token, _ in meta["output_token_logprobs"]]
        batch = adapt("sglang", tree).require()
        assert batch.behavior_logprobs[0].tolist() == pytest.approx([-np.log(3), -np.log(5), 0])
        assert batch.column("kept_ids").to_pylist()[0][0] == [3, 10, 21]
        assert batch.kept_logprobs.inner[0].tolist() == pytest.approx([-np.log(3)] * 3)


def test_the_kept_mass_is_not_positive_by_the_rounding_of_two_logprobs(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    meta = metas(tree)[0]
    meta["output_token_logprobs"][0][0] = meta["output_token_sampling_logprobs"][0] + 3e-6
    assert adapt("sglang", tree).require().log_kept_mass[0][0] == 0
    meta["output_token_logprobs"][0][0] = meta["output_token_sampling_logprobs"][0] + 3e-4
    assert [f.kind.value for f in adapt("sglang", tree).rejected[0].findings] == ["mass"]


def test_nor_is_it_below_top_p_by_that_rounding_where_top_p_acts_alone(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    tree["request"]["sampling_params"] |= {"top_k": -1, "min_p": 0.0, "top_p": 0.5}
    meta = metas(tree)[0]
    b = meta["output_token_sampling_logprobs"][0]
    meta["output_token_logprobs"][0][0] = b + float(np.log(0.5)) - 5e-6
    batch = adapt("sglang", tree).require()
    assert batch.log_kept_mass[0][0] == np.float32(np.log(0.5))
    assert batch.column("top_k").to_pylist() == [0, 0]
    meta["output_token_logprobs"][0][0] = b + float(np.log(0.5)) - 5e-3
    assert [f.kind.value for f in adapt("sglang", tree).rejected[0].findings] == ["mass"]


def test_without_a_temperature_the_kept_mass_is_unknown(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    del tree["request"]["sampling_params"]["temperature"]
    batch = adapt("sglang", tree).require()
    assert batch.log_kept_mass is None
    assert batch.full_logprobs is not None


def test_one_version_per_response_counts_only_if_no_update_was_in_flight(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    assert adapt("sglang", tree).require().column("policy_versions").to_pylist() == [[42] * 3, [42] * 4]
    for meta in metas(tree):
        del meta["weight_versions"]
    assert adapt("sglang", tree).require().policy_versions is None
    batch = adapt("sglang", tree, stated=Stated(no_update_in_flight=True)).require()
    assert batch.column("policy_versions").to_pylist() == [[42] * 3, [42] * 4]
    assert batch.column("kv_policy").to_pylist() == ["none"] * 2


def test_a_piece_of_a_stream_is_no_response(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    metas(tree)[0]["finish_reason"] = None
    (rejected,) = adapt("sglang", tree).rejected
    assert str(rejected.error).startswith("response[0].meta_info.finish_reason is null: this is a piece of a stream")


def test_an_abort_before_any_output_is_a_response_without_tokens(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    reason = {"type": "abort", "message": "client went away", "status_code": 499, "err_type": None}
    tree["response"][0] = {"text": "", "output_ids": [], "meta_info": {"id": "x", "finish_reason": reason}}
    batch = adapt("sglang", tree).require()
    assert batch.column("finish_reason").to_pylist() == ["abort", "length"]
    assert batch.column("error").to_pylist() == ["client went away", None]
    assert batch.token_ids.lengths.tolist() == [0, 4]


def test_samples_of_one_prompt_stand_next_to_each_other_and_share_it(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    tree["request"]["input_ids"] = tree["request"]["input_ids"][:1]
    tree["response"][1]["meta_info"]["prompt_tokens"] = 5
    batch = adapt("sglang", tree).require()
    assert batch.column("prompt_token_ids").to_pylist() == [[1, 9, 9, 4, 16]] * 2
    assert batch.column("sample_index").to_pylist() == [0, 1]
    assert batch.rollout_ids == ["demo-0000", "demo-0001"]
    assert batch.column("group_id").to_pylist()[0] == batch.column("prompt_id").to_pylist()[1]


def test_a_prompt_of_another_length_than_the_engine_saw_is_not_its_prompt(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    tree["request"]["input_ids"].reverse()
    result = adapt("sglang", tree)
    assert len(result.batch) == 0
    assert [rejected.error for rejected in result.rejected] == [
        f"response[{n}].meta_info.prompt_tokens is {m}, but its prompt has {k}: it answers another one"
        for n, m, k in ((0, 5, 3), (1, 3, 5))
    ]


def test_each_prompt_may_have_settings_of_its_own(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    params = tree["request"]["sampling_params"]
    tree["request"]["sampling_params"] = [params, {**params, "top_k": 7}]
    assert adapt("sglang", tree).require().column("top_k").to_pylist() == [6, 7]
    tree["request"]["sampling_params"] = [params]
    (rejected,) = adapt("sglang", tree).rejected
    assert "expected sampling parameters for every prompt" in str(rejected.error)


def test_chat_choices_with_meta_info_are_read(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    reply = tree["response"][0]
    reply["completion_token_ids"] = reply.pop("output_ids")
    reply["prompt_token_ids"] = [1, 9, 9, 4, 16]
    chat = {"engine": tree["engine"], "request": {}, "response": {"choices": [reply]}}
    batch = adapt("sglang", chat).require()
    assert batch.column("token_ids").to_pylist() == [[10, 14, 2]]


def test_ids_that_stand_beside_logprobs_only_are_taken_from_there(adapt: Adapt, example: Example) -> None:
    tree = example("sglang_good.json")
    for reply in tree["response"]:
        del reply["output_ids"]
    assert adapt("sglang", tree).require().arrow.equals(adapt("sglang", example("sglang_good.json")).require().arrow)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["meta_info"].update(output_store_ref="s3://x"), "the lists are in a store outside the reply"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(1, [-1.0]), r"\[1\] is a list of 1; expected"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(1, {"a": 1}), r"\[1\] is an object with a; ex"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(1, [-1.0, 9, None]), "is about token 9, but"),
        (lambda r: r["meta_info"].update(finish_reason=7), "finish_reason is 7; expected"),
        (lambda r: r["meta_info"].update(weight_versions=[{"version": "1", "start": 2, "end": 9}]), "a span within"),
        (lambda r: r.pop("meta_info"), "meta_info is missing"),
        (lambda r: r.update(output_ids=None) or r["meta_info"].pop("output_token_logprobs"), "output_ids is missing"),
    ],
)
def test_a_response_of_another_layout_is_rejected_with_what_was_expected(
    adapt: Adapt, example: Example, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    tree = example("sglang_good.json")
    change(tree["response"][0])
    result = adapt("sglang", tree)
    (rejected,) = result.rejected
    with pytest.raises(SchemaError, match=message):
        raise SchemaError(rejected.error)
    assert len(result.batch) == 1


def test_live_dictionaries_take_prompts_from_the_caller(example: Example) -> None:
    tree = example("sglang_good.json")
    stated = Stated(identity=Identity(vocab_size=24, engine_version="9"), id_prefix="step 3/")
    result = from_sglang(
        tree["response"], tree["request"]["sampling_params"], stated, prompt_token_ids=tree["request"]["input_ids"]
    )
    batch = result.require()
    assert batch.rollout_ids == ["step 3/demo-0000", "step 3/demo-0001"]
    assert batch.column("prompt_token_ids").to_pylist() == tree["request"]["input_ids"]
    assert batch.identity == Identity(vocab_size=24, engine="sglang", engine_version="9")
    without = from_sglang(tree["response"], tree["request"]["sampling_params"], stated)
    assert {finding.kind.value for finding in without.findings} == {"prompt"}
    named = from_sglang(
        tree["response"], None, prompt_token_ids=tree["request"]["input_ids"], prompt_ids=["p", "p"]
    ).require()
    assert named.rollout_ids == ["p/0", "p/1"]


@pytest.mark.parametrize("tree", [{"choices": []}, [], {"outputs": []}, {"output_ids": [1, 2]}, 5])
def test_another_layout_is_refused(adapt: Adapt, tree: Any) -> None:
    with pytest.raises(SchemaError, match=r"expected a reply of /generate|expected an object with a field"):
        adapt("sglang", {"engine": {}, "response": tree} if tree == [] else tree)
