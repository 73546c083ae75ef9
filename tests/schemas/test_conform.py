"""Arrow data as others write it: what fits is cast without loss, what does not is refused by row and column."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.columns import COLUMNS, Identity
from keptset.schemas.errors import SchemaError
from keptset.schemas.rollout_batch import RolloutBatch

INT, FLOAT = pa.int32(), pa.float32()
METADATA = Identity(vocab_size=100).to_metadata()


@pytest.fixture
def base(batch_of: Callable[..., RolloutBatch]) -> pa.RecordBatch:
    return batch_of(0, 3).arrow


def with_column(base: pa.RecordBatch, name: str, array: pa.Array) -> pa.RecordBatch:
    number = base.schema.get_field_index(name)
    return base.set_column(number, pa.field(name, array.type), array)


TOKENS = [[1, 2], [], [3]]
SETS = [[[1, 2], None], [], [[3]]]
CASTS = [
    ("token_ids", pa.array(TOKENS, pa.large_list(pa.int64())), TOKENS),
    ("token_ids", pa.array(TOKENS, pa.list_(pa.uint32())), TOKENS),
    ("token_ids", pa.array(TOKENS, pa.list_(pa.int16())), TOKENS),
    ("token_ids", pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.uint64(), 2)), [[1, 2], [3, 4], [5, 6]]),
    ("prompt_token_ids", pa.nulls(3), [None] * 3),
    ("prompt_token_ids", pa.array([[], [], []], pa.list_(pa.null())), [[], [], []]),
    (
        "behavior_logprobs",
        pa.array([[-0.5], None, [-1.25, None]], pa.large_list(pa.float64())),
        [[-0.5], None, [-1.25, None]],
    ),
    ("behavior_logprobs", pa.array([[np.float16(-0.5)], [], []], pa.list_(pa.float16())), [[-0.5], [], []]),
    ("behavior_logprobs", pa.array([[-np.inf], [], []], pa.list_(pa.float64())), [[-np.inf], [], []]),
    ("sampled", pa.array([[True], [], [False]], pa.large_list(pa.bool_())), [[True], [], [False]]),
    ("kept_ids", pa.array(SETS, pa.large_list(pa.large_list(pa.int64()))), SETS),
    ("kept_ids", pa.array(SETS, pa.list_(pa.large_list(pa.uint16()))), SETS),
    ("rollout_id", pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    ("rollout_id", pa.array(["a", "b", "c"], pa.large_string()), ["a", "b", "c"]),
    ("group_id", pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
    ("sample_index", pa.array([0, 1, 2], pa.int64()), [0, 1, 2]),
    ("sample_index", pa.array([0, 1, 2], pa.uint8()), [0, 1, 2]),
    ("seed", pa.array([1, None, 2**63 - 1], pa.uint64()), [1, None, 2**63 - 1]),
    ("temperature", pa.array([1, None, 0], pa.int32()), [1.0, None, 0.0]),
    ("temperature", pa.array([0.5, None, 1.0], pa.float32()), [0.5, None, 1.0]),
    ("logit_bias", pa.array([[(1, 0.5)], None, []], pa.map_(pa.int64(), pa.float64())), [[(1, 0.5)], None, []]),
]
ARROW = int(pa.__version__.split(".")[0])
if ARROW >= 19:
    CASTS.append(("rollout_id", pa.array(["a", "b", "c"], pa.string_view()), ["a", "b", "c"]))
if hasattr(pa, "list_view"):
    CASTS += [
        ("token_ids", pa.array(TOKENS, pa.list_view(pa.int64())), TOKENS),
        ("token_ids", pa.array(TOKENS, pa.large_list_view(INT)), TOKENS),
        ("kept_ids", pa.array(SETS, pa.list_view(pa.list_view(INT))), SETS),
    ]


@pytest.mark.parametrize(
    ("name", "array", "expected"), CASTS, ids=lambda value: str(getattr(value, "type", "")) or None
)
def test_what_means_the_same_is_cast(base: pa.RecordBatch, name: str, array: pa.Array, expected: list[Any]) -> None:
    data = with_column(base, name, array)
    for given, rows in ((data, expected), (data.slice(1), expected[1:]), (data.slice(2, 0), [])):
        batch = RolloutBatch.from_arrow(given)
        batch.arrow.validate(full=True)
        assert batch.column(name).to_pylist() == rows
        assert batch.column(name).type.equals(next(column.type for column in COLUMNS if column.name == name))


REFUSALS = [
    (
        "token_ids",
        pa.array([[1], [2, 2**31], [3]], pa.list_(pa.int64())),
        "row 1, column token_ids: .*2147483648.* does not fit list<",
    ),
    ("token_ids", pa.array([[1], [2], [-(2**31) - 1]], pa.large_list(pa.int64())), "row 2, column token_ids"),
    ("token_ids", pa.array([[2**32 - 1], [], []], pa.list_(pa.uint32())), "row 0, column token_ids"),
    ("token_ids", pa.array([[1.0], [], []]), "column token_ids has type list<.*double>; the schema says list<.*int32>"),
    ("token_ids", pa.array([1, 2, 3]), "column token_ids has type int64"),
    ("token_ids", pa.array(["[1]", "", ""]), "column token_ids has type string"),
    ("kept_ids", pa.array([[[1]], [[2], [2**40]], []], pa.list_(pa.list_(pa.int64()))), "row 1, column kept_ids"),
    ("kept_ids", pa.array(TOKENS, pa.list_(INT)), "column kept_ids has type list<"),
    (
        "behavior_logprobs",
        pa.array([[-1.0], [-1e39], []]),
        r"row 1, column behavior_logprobs: \[-1e\+39\] does not fit",
    ),
    ("behavior_logprobs", pa.array([["-1"], [], []]), "column behavior_logprobs has type list<"),
    ("sampled", pa.array([[1], [0], []], pa.list_(pa.int8())), "column sampled has type list<"),
    ("seed", pa.array([1, 2, 2**63], pa.uint64()), "row 2, column seed: 9223372036854775808 does not fit int64"),
    ("sample_index", pa.array([0, 2**31, 1]), "row 1, column sample_index"),
    ("sample_index", pa.array([0.0, 1.0, 2.0]), "column sample_index has type double"),
    ("temperature", pa.array(["1", "1", "1"]), "column temperature has type string"),
    ("rollout_id", pa.array([b"a", b"b", b"c"]), "column rollout_id has type binary"),
    ("rollout_id", pa.array([1, 2, 3]).dictionary_encode(), "column rollout_id has type dictionary<"),
    ("logit_bias", pa.array([[(2**31, 1.0)], [], []], pa.map_(pa.int64(), FLOAT)), "row 0, column logit_bias"),
    (
        "logit_bias",
        pa.array([[(1, -1e300)], None, [(1, 1e300), (2, 1.0)]], pa.map_(pa.int64(), pa.float64())).take(
            pa.array([1, 2, 1])
        ),
        r"row 1, column logit_bias: \[\(1, 1e\+300\), \(2, 1\.0\)\] does not fit map<",
    ),
    ("logit_bias", pa.array([{"1": 1.0}] * 3), "column logit_bias has type struct<"),
    ("support", pa.array(["kept", "Kept", "full"]), "row 1, column support: 'Kept' is none of kept, full, absent"),
    ("logprob_domain", pa.array(["kept", "kept", ""]), "row 2, column logprob_domain: '' is none of"),
    ("finish_reason", pa.array(["eos", "stop", "stop"]), "row 0, column finish_reason: 'eos' is none of stop, length"),
    (
        "kv_policy",
        pa.array([None, "none", "lost"]),
        "row 2, column kv_policy: 'lost' is none of none, kept, recomputed",
    ),
]


@pytest.mark.parametrize(
    ("name", "array", "told"), REFUSALS, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(REFUSALS)]
)
def test_what_does_not_fit_is_refused_by_row_and_column(
    base: pa.RecordBatch, name: str, array: pa.Array, told: str
) -> None:
    with pytest.raises(SchemaError, match=told):
        RolloutBatch.from_arrow(with_column(base, name, array))


def test_the_row_told_is_that_of_the_data_given(base: pa.RecordBatch) -> None:
    data = with_column(base, "token_ids", pa.array([[2**40], [1], [2**31]], pa.list_(pa.int64())))
    with pytest.raises(SchemaError, match="row 1, column token_ids"):
        RolloutBatch.from_arrow(data.slice(1))
    assert len(RolloutBatch.from_arrow(data.slice(1, 1))) == 1, "what does not fit lies outside the slice"
    table = pa.Table.from_batches([data.slice(1, 1), data.slice(1, 2)])
    with pytest.raises(SchemaError, match="row 2, column token_ids"):
        RolloutBatch.from_arrow(table)


@pytest.mark.skipif(ARROW >= 19, reason="this Arrow casts string views")
def test_what_this_arrow_cannot_cast_is_refused_with_its_version(base: pa.RecordBatch) -> None:
    with pytest.raises(SchemaError, match=r"type string_view, which pyarrow 1\d\..* cannot cast to string"):
        RolloutBatch.from_arrow(with_column(base, "rollout_id", pa.array(["a", "b", "c"], pa.string_view())))


def test_a_long_value_is_shown_in_part(base: pa.RecordBatch) -> None:
    data = with_column(base, "token_ids", pa.array([[], [2**40] * 500, []], pa.list_(pa.int64())))
    with pytest.raises(SchemaError, match=r"row 1, column token_ids: .{77}\.\.\. does not fit"):
        RolloutBatch.from_arrow(data)


def test_missing_columns_are_unknown_unless_they_are_required(base: pa.RecordBatch) -> None:
    required = [column.name for column in COLUMNS if column.required]
    batch = RolloutBatch.from_arrow(base.select(required).replace_schema_metadata(base.schema.metadata))
    assert batch.arrow.schema.names == [column.name for column in COLUMNS]
    assert batch.kept_ids is None
    for name in required:
        rest = [other for other in base.schema.names if other != name]
        with pytest.raises(SchemaError, match=f"column {name} .* is missing; it is required"):
            RolloutBatch.from_arrow(base.select(rest).replace_schema_metadata(base.schema.metadata))


def test_columns_may_come_in_any_order_and_those_unknown_are_carried_behind(base: pa.RecordBatch) -> None:
    shuffled = base.select(base.schema.names[::-1]).replace_schema_metadata(base.schema.metadata)
    extra = pa.array([{"deep": [1]}, None, {"deep": []}])
    batch = RolloutBatch.from_arrow(shuffled.append_column("x_own", extra))
    assert batch.arrow.schema.names == [column.name for column in COLUMNS] + ["x_note", "x_own"]
    assert batch.column("x_own").equals(extra)
    assert batch.arrow.select(base.schema.names).equals(base)


def test_a_bias_beyond_float32_outside_the_slice_does_no_harm(base: pa.RecordBatch) -> None:
    biases = pa.array([[(1, 1e300)], [(2, 0.5)], [(3, -math.inf)]], pa.map_(pa.int64(), pa.float64()))
    data = with_column(base, "logit_bias", biases)
    with pytest.raises(SchemaError, match="row 0, column logit_bias"):
        RolloutBatch.from_arrow(data)
    batch = RolloutBatch.from_arrow(data.slice(1))
    assert batch.column("logit_bias").to_pylist() == [[(2, 0.5)], [(3, -math.inf)]]


def test_a_number_with_more_digits_than_the_schema_keeps_is_rounded_to_float32(base: pa.RecordBatch) -> None:
    batch = RolloutBatch.from_arrow(with_column(base, "behavior_logprobs", pa.array([[-0.1], [], []])))
    assert batch.column("behavior_logprobs").to_pylist() == [[float(np.float32(-0.1))], [], []]


def test_own_columns_keep_their_metadata_and_whether_they_may_be_null(base: pa.RecordBatch) -> None:
    field = pa.field("x_own", pa.int64(), nullable=False, metadata={"unit": "s"})
    own = pa.array([1, 2, 3])
    for data in (base.append_column(field, own), pa.Table.from_batches([base.append_column(field, own)] * 2)):
        found = RolloutBatch.from_arrow(data)
        assert found.arrow.schema.field("x_own").equals(field, check_metadata=True)
        assert found.slice(1).compact().arrow.schema.field("x_own").equals(field, check_metadata=True)
    with pytest.raises(SchemaError, match="column x_own holds 1 nulls and is declared not nullable"):
        RolloutBatch.from_arrow(base.append_column(field, pa.array([1, None, 3])))


def test_a_column_that_occurs_twice_is_refused(base: pa.RecordBatch) -> None:
    with pytest.raises(SchemaError, match="columns occur more than once: seed"):
        RolloutBatch.from_arrow(base.append_column("seed", base.column("seed")))


def test_a_table_of_many_pieces_is_one_batch(base: pa.RecordBatch) -> None:
    table = pa.Table.from_batches([base.slice(0, 1), base.slice(1), base.slice(0, 0)])
    assert RolloutBatch.from_arrow(table).arrow.equals(base)
    assert len(RolloutBatch.from_arrow(pa.Table.from_batches([], schema=base.schema))) == 0


def test_data_of_the_schema_is_taken_without_a_copy(base: pa.RecordBatch) -> None:
    before = pa.total_allocated_bytes()
    batch = RolloutBatch.from_arrow(base)
    assert pa.total_allocated_bytes() == before
    assert batch.column("token_ids").values.buffers()[1].address == base.column("token_ids").values.buffers()[1].address


def test_data_of_another_version_or_none_is_refused(base: pa.RecordBatch) -> None:
    for version, told in ((b"2", "has schema version 2, this keptset reads version 1"), (b"\xff", "schema version")):
        other = base.replace_schema_metadata({**base.schema.metadata, b"keptset.schema_version": version})
        with pytest.raises(SchemaError, match=told):
            RolloutBatch.from_arrow(other)
    for bare in (base.replace_schema_metadata(None), base.replace_schema_metadata({"engine": "other"})):
        with pytest.raises(SchemaError, match=r"no keptset\.schema_version: this is not a keptset batch"):
            RolloutBatch.from_arrow(bare)


@pytest.mark.parametrize("size", [b"0", b"-5", b"many", b"1.5", b"", "٣".encode(), b"9" * 5000])
def test_a_vocabulary_size_that_cannot_be_is_refused(base: pa.RecordBatch, size: bytes) -> None:
    odd = base.replace_schema_metadata({**METADATA, b"keptset.vocab_size": size})
    with pytest.raises(SchemaError, match=r"keptset\.vocab_size is .*; it must be a positive whole number"):
        RolloutBatch.from_arrow(odd)


def test_a_column_whose_name_is_no_text_is_refused(base: pa.RecordBatch) -> None:
    header = base.append_column("x_note", pa.nulls(3)).schema.serialize().to_pybytes().replace(b"x_note", b"x_n\xffte")
    schema = pa.ipc.read_schema(pa.py_buffer(header))
    odd = pa.RecordBatch.from_arrays([*base.columns, pa.nulls(3)], schema=schema)
    with pytest.raises(SchemaError, match="the name of a column is no UTF-8"):
        RolloutBatch.from_arrow(odd)


def test_identity_that_is_no_text_is_refused(base: pa.RecordBatch) -> None:
    odd = base.replace_schema_metadata({**METADATA, b"keptset.engine": b"\xff\xfe"})
    with pytest.raises(SchemaError, match=r"keptset\.engine is not UTF-8"):
        RolloutBatch.from_arrow(odd)


def test_metadata_of_others_is_dropped_and_identity_kept(base: pa.RecordBatch) -> None:
    identity = Identity(
        vocab_size=7,
        model_id="ü",
        model_digest="d",
        tokenizer_digest="t",
        engine="e",
        engine_version="v",
        filter_order="f",
        processor_order="p",
        logits_dtype="l",
    )
    batch = RolloutBatch.from_arrow(base.replace_schema_metadata({**identity.to_metadata(), b"pandas": b"{}"}))
    assert batch.identity == identity
    assert batch.arrow.schema.metadata == identity.to_metadata()
