"""slime: dumps, samples and its server's replies, and the traps in each."""

import base64
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keptset.schemas.adapters import Adapted, Stated, from_slime
from keptset.schemas.columns import Identity
from keptset.schemas.errors import SchemaError

Adapt = Callable[..., Adapted]
Example = Callable[[str], Any]
STATED = Stated(identity=Identity(vocab_size=24))


def test_tool_tokens_have_no_set_no_logprob_and_no_draw(adapt: Adapt, example: Example) -> None:
    batch = adapt("slime", example("slime_good.json")).require()
    assert batch.column("sampled").to_pylist()[1] == [True, True, False, False, True, True]
    assert batch.column("trainable").to_pylist()[1] == [True, True, False, False, True, True]
    assert batch.column("kept_ids").to_pylist()[1][2:4] == [None, None]
    assert batch.column("behavior_logprobs").to_pylist()[1][2:4] == [None, None]


@pytest.mark.parametrize(("loss", "b", "sampled"), [(1, 0.0, True), (0, -0.5, True), (0, 0.0, False)])
def test_a_token_counts_as_injected_only_if_nothing_says_that_it_was_drawn(
    adapt: Adapt, example: Example, loss: int, b: float, sampled: bool
) -> None:
    tree = example("slime_good.json")
    sample = tree["dump"]["samples"][1]
    sample["loss_mask"][2], sample["rollout_log_probs"][2] = loss, b
    result = adapt("slime", tree)
    if sampled:
        assert [f.kind.value for f in result.rejected[0].findings] == ["empty_set"]
        assert result.rejected[0].findings[0].examples[0].position == 2
    else:
        assert not result.require().sampled[1][2]


def test_a_token_with_a_set_was_drawn_though_it_is_certain_and_not_trained_on(adapt: Adapt, example: Example) -> None:
    tree = example("slime_good.json")
    tree["dump"]["samples"][0]["loss_mask"][2] = 0
    batch = adapt("slime", tree).require()
    assert batch.column("sampled").to_pylist()[0] == [True] * 3
    assert batch.column("trainable").to_pylist()[0] == [True, True, False]
    assert batch.column("kept_ids").to_pylist()[0][2] == [2]


def test_a_sampled_token_outside_its_ids_is_a_finding_and_never_added(adapt: Adapt, example: Example) -> None:
    tree = example("slime_good.json")
    tree["dump"]["samples"][0]["rollout_top_p_token_ids"][0] = 15
    result = adapt("slime", tree)
    (rejected,) = result.rejected
    assert [(f.kind.value, f.examples[0].position) for f in rejected.findings] == [("member", 0)]
    assert isinstance(rejected.record, dict)
    assert rejected.record["dump"]["samples"][0]["rollout_top_p_token_ids"][0] == 15
    assert result.batch.rollout_ids == ["7/1"]


def test_a_first_token_that_ships_only_itself_is_a_finding(adapt: Adapt, example: Example) -> None:
    tree = example("slime_good.json")
    sample = tree["dump"]["samples"][0]
    sample["rollout_top_p_token_ids"], sample["rollout_top_p_token_offsets"] = [6, 20, 3, 11, 5, 2], [0, 1, 5, 6]
    assert [f.kind.value for f in adapt("slime", tree).rejected[0].findings] == ["logprob"]


def test_without_ids_logprobs_have_no_domain_that_is_known(adapt: Adapt, example: Example) -> None:
    batch = adapt("slime", example("slime_bad_mask_null.json")).require()
    assert batch.column("support").to_pylist() == ["absent"] * 2
    assert batch.column("logprob_domain").to_pylist() == ["unknown"] * 2
    assert batch.column("sampled").to_pylist()[1] == [True, True, False, False, True, True]


def test_launch_flags_tell_three_settings_and_the_rest_is_unknown(adapt: Adapt, example: Example) -> None:
    batch = adapt("slime", example("slime_good.json")).require()
    told = {name: batch.column(name).to_pylist()[0] for name in ("temperature", "top_p", "top_k", "min_p")}
    assert told == {"temperature": 1.25, "top_p": 0.9, "top_k": 0, "min_p": None}


def test_versions_of_calls_hold_for_tokens_only_if_they_agree_and_no_update_was_in_flight(
    adapt: Adapt, example: Example
) -> None:
    tree = example("slime_good.json")
    assert adapt("slime", tree).require().policy_versions is None
    versions = adapt("slime", tree, stated=Stated(no_update_in_flight=True)).require().column("policy_versions")
    assert versions.to_pylist() == [[41] * 3, None]


def test_ids_follow_rollout_group_and_index(adapt: Adapt, example: Example) -> None:
    batch = adapt("slime", example("slime_good.json")).require()
    assert batch.rollout_ids == ["7/0", "7/1"]
    assert batch.column("prompt_id").to_pylist() == ["7/group 0"] * 2
    assert batch.column("sample_index").to_pylist() == [0, 1]


def test_samples_may_stand_one_a_line(adapt: Adapt, example: Example) -> None:
    samples = example("slime_good.json")["dump"]["samples"]
    batch = adapt("slime", *samples).require()
    assert len(set(batch.rollout_ids)) == 2
    assert batch.column("sample_index").to_pylist() == [0, 1]
    for sample in samples:
        sample["index"] = sample["group_index"] = None
    assert len(set(adapt("slime", *samples).require().rollout_ids)) == 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [("completed", "stop"), ("truncated", "length"), ("aborted", "abort"), ("failed", "error"), ("pending", "unknown")],
)
def test_a_status_is_a_finish_reason(adapt: Adapt, example: Example, status: str, reason: str) -> None:
    sample = {**example("slime_good.json")["dump"]["samples"][0], "status": status}
    assert adapt("slime", sample).require().column("finish_reason").to_pylist() == [reason]


def int32s(values: list[int]) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


def test_the_servers_base64_says_what_the_sample_says(adapt: Adapt, example: Example) -> None:
    sample = adapt("slime", example("slime_good.json")).require()
    tree = example("slime_engine_good.json")
    meta = tree["response"]["meta_info"]
    sets, offsets = meta.pop("top_p_token_ids"), meta.pop("top_p_token_offsets")
    for kept in ("", "kept_"):
        tree["response"]["meta_info"] = {**meta, f"top_p_{kept}token_ids": sets, f"top_p_{kept}token_offsets": offsets}
        for engine in ("slime", "sglang"):
            batch = adapt(engine, tree).require()
            for name in ("token_ids", "kept_ids", "behavior_logprobs"):
                assert batch.column(name).to_pylist() == sample.column(name).to_pylist()[:1]
            assert batch.column("logprob_domain").to_pylist() == ["kept"]
            assert batch.full_logprobs is None


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ("###", int32s([0]), "top_p_token_ids is '###'; expected base64 of int32 numbers"),
        ("AAA=", int32s([0]), "expected base64 of int32 numbers; it holds 2 bytes"),
        (int32s([1]), int32s([0, 2]), "expected offsets that ascend from 0 to the number of ids, 1"),
        (int32s([1, 2]), int32s([0, 2, 1, 2]), "expected offsets that ascend from 0 to the number of ids, 2"),
        (int32s([1]), int32s([]), "expected offsets that ascend from 0 to the number of ids, 1"),
        (int32s([1]), None, "top_p_token_offsets is missing"),
    ],
)
def test_base64_that_is_no_ragged_list_is_rejected(
    adapt: Adapt, example: Example, ids: str, offsets: str | None, message: str
) -> None:
    tree = example("slime_engine_good.json")
    tree["response"]["meta_info"] |= {"top_p_token_ids": ids, "top_p_token_offsets": offsets}
    assert message in str(adapt("slime", tree).rejected[0].error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_length": 9}, "response_length is 9; expected a length within the 7 tokens"),
        ({"response_length": -1}, "response_length is -1; expected a length within the 7 tokens"),
        ({"tokens": None}, "tokens is missing; expected prompt and response"),
        ({"rollout_top_p_token_ids": None}, "rollout_top_p_token_ids is missing; expected the kept ids"),
        ({"rollout_top_p_token_offsets": [0, 9, 3, 8]}, "expected offsets that ascend from 0 to the number of ids, 8"),
        ({"weight_versions": "41"}, "weight_versions is '41'; expected a list"),
        (
            {
                "rollout_top_p_token_ids": None,
                "rollout_top_p_token_offsets": None,
                "rollout_sampling_mask": {"ids": []},
            },
            "rollout_sampling_mask is a fork's layout; expected rollout_top_p_token_ids",
        ),
    ],
)
def test_a_sample_of_another_layout_is_rejected_with_what_was_expected(
    adapt: Adapt, example: Example, change: dict[str, Any], message: str
) -> None:
    tree = example("slime_good.json")
    tree["dump"]["samples"][0].update(change)
    result = adapt("slime", tree, stated=Stated(no_update_in_flight=True))
    assert message in str(result.rejected[0].error)
    assert result.batch.rollout_ids == ["7/1"]


@pytest.mark.parametrize("tree", [{"samples": [{"text": "a"}]}, {"prompt": "a"}, {"samples": 5}, 5, "x", []])
def test_another_layout_is_refused(adapt: Adapt, tree: Any) -> None:
    with pytest.raises(SchemaError, match="expected"):
        adapt("slime", tree)


class Status(Enum):
    COMPLETED = "completed"


def test_live_samples_are_objects_with_tensors(example: Example) -> None:
    sample = example("slime_good.json")["dump"]["samples"][0]
    recorded = from_slime([sample], {"temperature": 1.25}, STATED).require()
    sample["status"] = Status.COMPLETED
    for name in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
        sample[name] = np.array(sample[name], np.int32)
    assert from_slime([SimpleNamespace(**sample)], {"temperature": 1.25}, STATED).require().arrow.equals(recorded.arrow)
