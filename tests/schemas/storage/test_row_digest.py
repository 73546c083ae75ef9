"""A response has one digest wherever it lies, and another one as soon as anything in it differs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keptset.schemas.columns import COLUMNS, Identity
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.spool.row_digest import SIZE, content_digests, id_digests

OTHER = {
    "rollout_id": "other",
    "prompt_id": "other",
    "group_id": None,
    "sample_index": 7,
    "prompt_token_ids": [5],
    "token_ids": [1, 2, 3],
    "sampled": [False, False, False],
    "trainable": [True, False, True],
    "behavior_logprobs": [-0.5, None, -0.5],
    "logprob_domain": "raw",
    "full_logprobs": [-1.0, None, None],
    "log_kept_mass": None,
    "kept_entropy": [0.0, 0.0, None],
    "kept_logprob_var": [],
    "support": "absent",
    "kept_ids": [[1], None, [3, 4]],
    "kept_logprobs": [[0.0], None, []],
    "top_ids": [[1, 2]],
    "top_logprobs": [[-0.5, None]],
    "policy_versions": [1, 1, None],
    "kv_policy": "kept",
    "finish_reason": "length",
    "error": "went wrong",
    "temperature": 0.7000000000000001,
    "top_p": None,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "top_k": 7,
    "logit_bias": [(3, 0.25)],
    "sampler_extras": "{}",
    "seed": None,
}


def with_value(batch: RolloutBatch, name: str, value: object) -> RolloutBatch:
    """One row with another value in one column."""
    index = batch.arrow.schema.get_field_index(name)
    array = pa.array([value], batch.arrow.schema.field(index).type)
    return RolloutBatch.from_arrow(batch.arrow.set_column(index, batch.arrow.schema.field(index), array))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    start=st.integers(0, 11), length=st.integers(0, 12), order=st.permutations(range(12)), others=st.integers(20, 30)
)
def test_a_digest_does_not_depend_on_the_batch_around_the_response(
    batch_of: Callable[..., RolloutBatch], start: int, length: int, order: list[int], others: int
) -> None:
    batch = batch_of(0, 12)
    whole = content_digests(batch)
    assert content_digests(batch.slice(start, length)) == whole[start : start + length]
    assert content_digests(batch.take(order)) == [whole[row] for row in order]
    alone = [content_digests(batch_of(number, 1))[0] for number in range(start, min(start + 2, 12))]
    assert alone == whole[start : start + 2]
    joined = concat_batches([batch_of(others, 1, support="absent", kept_ids=None, kept_logprobs=None), batch])
    assert content_digests(joined)[1:] == whole
    assert len(set(whole)) == 12
    assert {len(digest) for digest in whole} == {SIZE}


@pytest.mark.parametrize("name", OTHER)
def test_another_value_in_any_column_is_another_content(batch_of: Callable[..., RolloutBatch], name: str) -> None:
    batch = batch_of(0, 1)
    changed = with_value(batch, name, OTHER[name])
    assert content_digests(changed) != content_digests(batch)
    assert (id_digests(changed) != id_digests(batch)) == (name == "rollout_id")


def test_every_column_is_among_those_that_count() -> None:
    assert set(OTHER) == {column.name for column in COLUMNS}


def test_the_identity_is_part_of_the_content(batch_of: Callable[..., RolloutBatch]) -> None:
    ours, theirs = batch_of(0, 1), batch_of(0, 1, identity=Identity(vocab_size=51))
    assert content_digests(ours) != content_digests(theirs)
    assert id_digests(ours) == id_digests(theirs)


LISTS = [[], [0], [0, 0], [None], [0, None], [None, 0], [-1], None]
NESTED = [[], [[]], [None], [[], []], [[0]], [[0], []], [[], [0]], [[0, 0]], [[0], [0]], [[None]], [[0], None], None]
NESTED += [[None, None, None], [[], [0], [0, 0]]]  # equal, number by number, if it were not said which numbers are what


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.list_(pa.int64()), LISTS),
        (pa.large_list(pa.float32()), LISTS),
        (pa.list_(pa.list_(pa.int32())), NESTED),
        (pa.list_(pa.bool_()), [[], [True], [False], [None], [True, False], None]),
        (pa.list_(pa.string()), [[], [""], ["a"], ["a", ""], [None], None]),
        (pa.map_(pa.string(), pa.int64()), [[], [("a", 1)], [("a", 2)], [("b", 1)], None]),
        (pa.struct([("a", pa.int64())]), [{"a": 1}, {"a": 2}, {"a": None}, None]),
        (pa.timestamp("ns"), [0, 1, 2, 1000, 1001, None]),
        (pa.date64(), [0, 86_400_000, 2**55, 2**55 + 86_400_000, None]),
        (pa.binary(), [b"", b"\0", b"\0\0", None]),
        (pa.string(), ["", "None", "'", None]),
    ],
    ids=str,
)
def test_own_columns_count_as_they_are(
    batch_of: Callable[..., RolloutBatch], kind: pa.DataType, values: list[object]
) -> None:
    plain = batch_of(0, 1, extra={})

    def digest(*own: object) -> list[bytes]:
        rows = plain.arrow.take(pa.array([0] * len(own)))
        array = pa.array(own, pa.int64()).view(kind) if pa.types.is_temporal(kind) else pa.array(own, kind)
        return content_digests(RolloutBatch.from_arrow(rows.append_column("x_own", array)))

    digests = digest(*values)
    assert len(set(digests)) == len(values)
    assert [digest(value)[0] for value in values] == digests
    assert digests[values.index(None)] == content_digests(plain)[0], "null is what a missing column is"


def test_own_numbers_count_by_value_not_by_the_type_that_their_batch_gave_them(
    batch_of: Callable[..., RolloutBatch],
) -> None:
    one = content_digests(batch_of(0, 1, extra={"x_reward": 1, "x_parts": [1, 2]}))
    assert one == content_digests(batch_of(0, 1, extra={"x_reward": 1.0, "x_parts": [1.0, 2.0]}))
    assert one != content_digests(batch_of(0, 1, extra={"x_reward": 1.5, "x_parts": [1, 2]}))
    assert one != content_digests(batch_of(0, 1, extra={"x_reward": 1, "x_parts": [1, 2.5]}))


def test_a_response_without_an_id_has_no_digest_of_it(batch_of: Callable[..., RolloutBatch]) -> None:
    batch = with_value(batch_of(0, 1), "rollout_id", None)
    assert id_digests(batch) == [None]
    assert len(content_digests(batch)) == 1
    assert content_digests(batch.slice(0, 0)) == id_digests(batch.slice(0, 0)) == []


def test_what_lies_behind_a_null_does_not_count(batch_of: Callable[..., RolloutBatch]) -> None:
    batch = batch_of(1, 1)
    column = batch.column("behavior_logprobs")
    hidden = column.values.to_numpy(zero_copy_only=False).copy()
    hidden[np.isnan(hidden)] = 77.0
    items = pa.Array.from_buffers(pa.float32(), len(hidden), [column.values.buffers()[0], pa.py_buffer(hidden)])
    again = pa.ListArray.from_arrays(column.offsets, items)
    assert column.null_count == 0 < items.null_count
    index = batch.arrow.schema.get_field_index("behavior_logprobs")
    other = RolloutBatch.from_arrow(batch.arrow.set_column(index, batch.arrow.schema.field(index), again))
    assert content_digests(other) == content_digests(batch)
