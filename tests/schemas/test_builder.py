"""What a producer hands over is what the batch holds; what cannot be held is refused by response and column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from keptset.schemas import builder as builder_module
from keptset.schemas.builder import BatchBuilder, Response, canonical_extras
from keptset.schemas.columns import COLUMNS, SET_COLUMNS, TOKEN_COLUMNS, Identity
from keptset.schemas.errors import InvalidInput, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.validation import validate

Make = Callable[..., Response]
IDENTITY = Identity(vocab_size=50)


def build(*responses: Response) -> RolloutBatch:
    builder = BatchBuilder(IDENTITY)
    for response in responses:
        builder.add(response)
    assert len(builder) == len(responses)
    batch = builder.build()
    assert len(builder) == 0
    return batch


def full(**changes: Any) -> Response:
    """Every field set: token 1 of 3 was not sampled."""
    fields: dict[str, Any] = {
        "rollout_id": "r",
        "prompt_id": "p",
        "group_id": "g",
        "sample_index": 4,
        "prompt_token_ids": np.array([1, 2], np.uint16),
        "token_ids": np.array([5, 6, 7]),
        "sampled": np.array([1, 0, 1], bool),
        "trainable": np.array([True, False, False]),
        "behavior_logprobs": np.array([-0.5, 99.0, 0.0]),
        "full_logprobs": np.array([-0.625, 99.0, -0.25]),
        "log_kept_mass": np.array([-0.125, 99.0, -0.25]),
        "kept_entropy": np.array([0.5, 99.0, 0.0]),
        "kept_logprob_var": np.array([0.25, 99.0, 0.0]),
        "kept_offsets": np.array([0, 2, 3, 4]),
        "kept_ids": np.array([5, 9, 11, 7]),
        "kept_logprobs": np.array([-0.5, -1.0, -3.0, 0.0]),
        "top_offsets": np.array([0, 1, 1, 3]),
        "top_ids": np.array([5, 7, 8]),
        "top_logprobs": np.array([-0.5, 0.0, -np.inf]),
        "policy_versions": np.array([3, 3, -1]),
        "kv_policy": "kept",
        "finish_reason": "error",
        "error": "it broke",
        "params": SamplingParams(temperature=0.7, top_k=3, logit_bias={9: 1.5, 2: -1.0}, stop_token_ids=(2,)),
        "seed": 2**63 - 1,
        "extra": {"x_reward": 0.5},
    }
    return Response(**fields | changes)


def test_every_field_comes_out_as_it_went_in_and_null_where_not_sampled() -> None:
    (row,) = build(full()).arrow.to_pylist()
    assert row == {
        "rollout_id": "r",
        "prompt_id": "p",
        "group_id": "g",
        "sample_index": 4,
        "prompt_token_ids": [1, 2],
        "token_ids": [5, 6, 7],
        "sampled": [True, False, True],
        "trainable": [True, False, False],
        "behavior_logprobs": [-0.5, None, 0.0],
        "logprob_domain": "kept",
        "full_logprobs": [-0.625, None, -0.25],
        "log_kept_mass": [-0.125, None, -0.25],
        "kept_entropy": [0.5, None, 0.0],
        "kept_logprob_var": [0.25, None, 0.0],
        "support": "kept",
        "kept_ids": [[5, 9], None, [7]],
        "kept_logprobs": [[-0.5, -1.0], None, [0.0]],
        "top_ids": [[5], None, [7, 8]],
        "top_logprobs": [[-0.5], None, [0.0, -np.inf]],
        "policy_versions": [3, None, None],
        "kv_policy": "kept",
        "finish_reason": "error",
        "error": "it broke",
        "temperature": 0.7,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "top_k": 3,
        "logit_bias": [(2, -1.0), (9, 1.5)],
        "sampler_extras": '{"stop_token_ids":[2]}',
        "seed": 2**63 - 1,
        "x_reward": 0.5,
    }


def test_what_is_not_given_is_unknown() -> None:
    (row,) = build(
        Response(rollout_id="r", prompt_id="p", token_ids=np.array([1]), finish_reason="stop")
    ).arrow.to_pylist()
    known = {name for name, value in row.items() if value is not None}
    required = {column.name for column in COLUMNS if column.required}
    assert known == required | {"kv_policy"}
    assert row["sampled"] == [True]


def test_rows_that_know_and_rows_that_do_not_stand_side_by_side(response: Make) -> None:
    nothing = dict.fromkeys(("kept_ids", "kept_logprobs", "behavior_logprobs", "params", "prompt_token_ids", "top_ids"))
    batch = build(response(1), response(2, **nothing, support="absent", extra={}), response(4))
    rows = batch.arrow.to_pylist()
    assert rows[0]["kept_ids"] == build(response(1)).arrow.to_pylist()[0]["kept_ids"]
    assert rows[2]["kept_ids"] == build(response(4)).arrow.to_pylist()[0]["kept_ids"]
    assert {rows[1][name] for name in ("kept_ids", "behavior_logprobs", "temperature", "logit_bias", "x_note")} == {
        None
    }


def test_sets_of_rows_without_support_kept_are_not_stored() -> None:
    (row,) = build(full(support="full")).arrow.to_pylist()
    assert (row["kept_ids"], row["kept_logprobs"]) == (None, None)
    assert row["top_ids"] == [[5], None, [7, 8]]


def test_values_a_mask_hides_are_unknown() -> None:
    hidden = np.ma.MaskedArray([-0.5, 0.0, -1.0], mask=[False, False, True])
    (row,) = build(full(full_logprobs=hidden)).arrow.to_pylist()
    assert row["full_logprobs"] == [-0.5, None, None]


def test_an_empty_builder_gives_an_empty_batch_of_its_identity() -> None:
    batch = BatchBuilder(IDENTITY).build()
    assert (len(batch), batch.identity) == (0, IDENTITY)
    assert BatchBuilder(IDENTITY).build_batches() == []


@pytest.mark.parametrize(
    "name",
    [
        "sampled",
        "trainable",
        "behavior_logprobs",
        "full_logprobs",
        "log_kept_mass",
        "kept_entropy",
        "kept_logprob_var",
        "policy_versions",
    ],
)
def test_a_column_of_another_length_is_refused_at_once(name: str) -> None:
    with pytest.raises(ViolationError, match=f"r: 3 tokens, but {name} has 2; every column needs one entry") as told:
        BatchBuilder(IDENTITY).add(full(**{name: getattr(full(), name)[:2]}))
    (finding,) = told.value.findings
    assert (finding.kind, finding.examples[0].rollout_id) == (FindingKind.LENGTHS, "r")


def test_every_list_column_but_the_ids_themselves_follows_the_tokens() -> None:
    lists = {column.name for column in COLUMNS if str(column.type).startswith("list<")}
    assert {*TOKEN_COLUMNS, *SET_COLUMNS, "token_ids", "prompt_token_ids"} == lists
    assert SET_COLUMNS == ("kept_ids", "kept_logprobs", "top_ids", "top_logprobs")


@pytest.mark.parametrize("name", TOKEN_COLUMNS)
def test_builder_and_validation_both_look_at_the_length_of_every_per_token_column(name: str) -> None:
    with pytest.raises(ViolationError, match=f"{name} has 2"):
        BatchBuilder(IDENTITY).add(full(**{name: getattr(full(), name)[:2]}))
    arrow = build(full()).arrow
    index = arrow.schema.get_field_index(name)
    shorter = pc.list_slice(arrow.column(index), 0, 2, return_fixed_size_list=False)
    broken = arrow.set_column(index, arrow.schema.field(index), shorter)
    assert [finding.kind for finding in validate(RolloutBatch.from_arrow(broken))] == [FindingKind.LENGTHS]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kept_offsets": np.array([0, 2, 4])}, r"kept_offsets \(less one\) has 2"),
        ({"top_offsets": np.array([0, 1, 1, 2, 3])}, r"top_offsets \(less one\) has 4"),
    ],
)
def test_sets_for_another_number_of_tokens_are_refused_at_once(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ViolationError, match=told):
        BatchBuilder(IDENTITY).add(full(**changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"kept_offsets": np.array([0, 2, 3, 5])},
            "r: kept_offsets must ascend from 0 to the number of ids; .* 0 to 5",
        ),
        ({"kept_offsets": np.array([1, 2, 3, 4])}, "r: kept_offsets must ascend from 0"),
        ({"kept_offsets": np.array([0, 3, 2, 4])}, "r: kept_offsets must ascend"),
        ({"kept_logprobs": np.array([-0.5])}, r"r: kept_offsets must ascend .*'kept_logprobs': 1"),
        ({"kept_offsets": None}, "r: kept_ids, kept_logprobs given without kept_offsets"),
        ({"top_offsets": None}, "r: top_ids, top_logprobs given without top_offsets"),
        ({"extra": {"reward": 1.0}}, "r: own columns must begin with x_: reward"),
        ({"support": "partial"}, "r: support is 'partial'; it must be one of kept, full, absent"),
        ({"logprob_domain": None}, "r: logprob_domain is None; it must be one of kept, full, raw, unknown"),
        ({"finish_reason": "eos"}, "r: finish_reason is 'eos'"),
        ({"kv_policy": "lost"}, "r: kv_policy is 'lost'"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(changes: dict[str, Any], told: str) -> None:
    builder = BatchBuilder(IDENTITY)
    with pytest.raises(InvalidInput, match=told):
        builder.add(full(**changes))
    assert len(builder) == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"token_ids": np.array([1, 2**31, 3])}, "bad: a value does not fit column token_ids"),
        ({"token_ids": np.array([1.5, 2.0, 3.0])}, "bad: a value does not fit column token_ids"),
        ({"kept_ids": np.array([1, 2, 2**40, 3])}, "bad: a value does not fit column kept_ids"),
        ({"prompt_token_ids": np.array([2**32])}, "bad: a value does not fit column prompt_token_ids"),
        ({"sample_index": 2**31}, "bad: a value does not fit column sample_index"),
        ({"seed": 2**63}, "bad: a value does not fit column seed"),
        ({"prompt_id": 5}, "bad: a value does not fit column prompt_id"),
        ({"extra": {"x_odd": object()}}, "bad: a value does not fit column x_odd"),
        ({"extra": {"x_reward": "high"}}, "values of column x_reward do not fit together"),
    ],
)
def test_a_value_that_does_not_fit_is_told_by_response_and_column(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        build(full(), full(rollout_id="bad", **changes), full(rollout_id="s"))


def test_batches_are_cut_before_they_grow_too_large_to_join(response: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    responses = [response(number) for number in range(6)]
    whole = build(*responses)
    largest = max(len(r.kept_ids) for r in responses if r.kept_ids is not None)
    monkeypatch.setattr(builder_module, "MAX_KEPT_IDS", largest + 1)
    builder = BatchBuilder(IDENTITY)
    for one in responses:
        builder.add(one)
    with pytest.raises(InvalidInput, match="kept ids are too many for one batch .* use build_batches"):
        builder.build()
    parts = builder.build_batches()
    assert len(builder) == 0
    assert len(parts) > 1
    assert all(part.num_kept_ids <= largest + 1 for part in parts)
    assert [row for part in parts for row in part.arrow.to_pylist()] == whole.arrow.to_pylist()


def test_a_single_response_larger_than_a_batch_stays_whole(response: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "MAX_KEPT_IDS", 1)
    builder = BatchBuilder(IDENTITY)
    builder.add(response(0))
    builder.add(response(1))
    assert [len(part) for part in builder.build_batches()] == [1, 1]
    builder.add(response(0))
    assert len(builder.build()) == 1


def test_built_batches_are_valid(response: Make) -> None:
    assert validate(build(*(response(number) for number in range(12)))) == []


def test_rare_settings_are_written_one_way_only() -> None:
    assert canonical_extras(SamplingParams()) is None
    ours = canonical_extras(SamplingParams(stop_token_ids=(9, 2), min_new_tokens=3))
    assert ours == '{"min_new_tokens":3,"stop_token_ids":[2,9]}'
    (row,) = build(full(sampler_extras='{"mine":1}')).arrow.to_pylist()
    assert row["sampler_extras"] == '{"mine":1}'


@pytest.mark.parametrize("changes", [{"sample_index": 1.5}, {"seed": 7.9}, {"seed": True}])
def test_a_fraction_is_never_cut_down_to_a_whole_number(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"r: {next(iter(changes))} is .*; it must be a whole number"):
        build(full(**changes))
