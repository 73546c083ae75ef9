"""A batch reads what its rows say, however it was cut, picked, joined, stored or sent."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keptset.schemas import rollout_batch
from keptset.schemas.columns import COLUMNS, Identity
from keptset.schemas.errors import SchemaError
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches

BatchOf = Callable[..., RolloutBatch]
shared = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows_of(batch: RolloutBatch) -> list[dict[str, object]]:
    """Rows from Arrow; and again through the views, which must say the same."""
    rows = batch.arrow.to_pylist()
    tokens = [batch.token_ids[row].tolist() for row in range(len(batch))]
    assert tokens == [row["token_ids"] for row in rows]
    if batch.kept_ids is not None:
        bounds = batch.kept_ids.row_offsets
        sizes = [
            np.diff(batch.kept_ids.inner.offsets)[start:stop].tolist() for start, stop in itertools.pairwise(bounds)
        ]
        assert sizes == [[len(ids or []) for ids in row["kept_ids"]] for row in rows]
    return rows


@shared
@given(data=st.data())
def test_any_chain_of_cuts_and_picks_reads_as_the_same_chain_on_rows(batch_of: BatchOf, data: st.DataObject) -> None:
    batch, rows = batch_of(0, 6), rows_of(batch_of(0, 6))
    for _ in range(data.draw(st.integers(1, 4))):
        step = data.draw(st.sampled_from(["slice", "take", "filter", "concat", "compact"]))
        if step == "slice":
            start, length = data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, 6))
            batch, rows = batch.slice(start, length), rows[start : start + length]
        elif step == "take" and rows:
            picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
            batch, rows = batch.take(picks), [rows[pick] for pick in picks]
        elif step == "filter":
            mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
            batch, rows = batch.filter(mask), [row for row, kept in zip(rows, mask, strict=True) if kept]
        elif step == "concat" and len(rows) < 40:
            batch, rows = concat_batches([batch, batch.slice(1), batch]), [*rows, *rows[1:], *rows]
        elif step == "compact":
            batch = batch.compact()
    assert rows_of(batch) == rows
    assert len(batch) == batch.num_responses == len(rows)
    assert batch.num_tokens == sum(len(row["token_ids"]) for row in rows)
    assert batch.num_kept_ids == sum(len(ids or []) for row in rows for ids in row["kept_ids"] or [])
    assert batch.rollout_ids == [row["rollout_id"] for row in rows]


def test_a_compact_slice_holds_its_own_rows_alone(batch_of: BatchOf) -> None:
    parent = batch_of(0, 600)
    part = parent.slice(100, 2)
    assert part.arrow.get_total_buffer_size() == parent.arrow.get_total_buffer_size()
    compact = part.compact()
    assert compact.arrow.get_total_buffer_size() < part.arrow.nbytes + 2000
    assert compact.arrow.equals(part.arrow, check_metadata=True)
    assert parent.slice(5, 0).compact().arrow.get_total_buffer_size() < 1000


def test_what_is_compact_is_not_copied(batch_of: BatchOf) -> None:
    batch = batch_of(0, 200).compact()
    assert batch.compact() is batch


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_batch_is_pickled_without_its_parent_and_without_its_views(batch_of: BatchOf, protocol: int) -> None:
    parent = batch_of(0, 600)
    part = parent.slice(100, 2)
    before = len(pickle.dumps(part, protocol))
    _ = (part.token_ids, part.kept_ids, part.rollout_ids, part.behavior_logprobs)
    sent = pickle.dumps(part, protocol)
    assert len(sent) == before < 30_000
    back = pickle.loads(sent)
    assert back.arrow.equals(part.arrow, check_metadata=True)
    assert back.identity == part.identity


def test_a_batch_in_a_mapped_file_reads_without_being_copied(batch_of: BatchOf, tmp_path: Path) -> None:
    batch = batch_of(0, 5)
    with pa.OSFile(str(tmp_path / "f"), "wb") as sink, pa.ipc.new_file(sink, batch.arrow.schema) as writer:
        writer.write_batch(batch.arrow)
    with pa.memory_map(str(tmp_path / "f")) as source:
        before = pa.total_allocated_bytes()
        mapped = RolloutBatch.from_arrow(pa.ipc.open_file(source).get_batch(0))
        assert rows_of(mapped) == rows_of(batch)
        assert pa.total_allocated_bytes() - before < batch.arrow.nbytes / 2
        assert not mapped.kept_ids.inner.values.flags.writeable


def test_columns_in_which_nothing_is_known_read_none(batch_of: BatchOf) -> None:
    batch = batch_of(0, 3)
    for name in ("trainable", "full_logprobs", "top_ids", "top_logprobs"):
        assert getattr(batch, name) is None
        assert batch.column(name).null_count == 3
    assert batch.kept_logprobs is not None
    assert batch.slice(0, 1).kept_logprobs is None


def test_columns_are_those_of_the_schema_and_the_callers_own(batch_of: BatchOf) -> None:
    batch = batch_of(0, 3)
    assert batch.arrow.schema.names == [column.name for column in COLUMNS] + ["x_note"]
    assert batch.extra_columns == ["x_note"]
    with pytest.raises(SchemaError, match="no column 'tokens'; there are rollout_id, prompt_id"):
        batch.column("tokens")


def test_batches_of_different_identity_are_not_joined_and_the_difference_is_named(batch_of: BatchOf) -> None:
    ours = batch_of(0, 2)
    theirs = batch_of(2, 2, identity=Identity(vocab_size=51, model_id="tiny", engine="test", engine_version="1"))
    with pytest.raises(SchemaError, match=r"batches 0 and 2 .*keptset\.vocab_size: 50 and 51"):
        concat_batches([ours, ours, theirs])
    unknown = batch_of(2, 2, identity=Identity(vocab_size=50, model_id="tiny", engine="test"))
    with pytest.raises(SchemaError, match=r"keptset\.engine_version: 1 and unknown"):
        concat_batches([ours, unknown])


def test_batches_of_different_own_columns_are_not_joined(batch_of: BatchOf) -> None:
    with pytest.raises(SchemaError, match=r"different columns of the caller's own: \['x_note'\] and \[\]"):
        concat_batches([batch_of(0, 1), batch_of(1, 1, extra={})])
    with pytest.raises(SchemaError, match="or other types of them"):
        concat_batches([batch_of(0, 1), batch_of(1, 1, extra={"x_note": 5})])


def test_batches_too_large_together_are_not_joined(batch_of: BatchOf, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(0, 3)
    monkeypatch.setattr(rollout_batch, "MAX_ITEMS", 2 * batch.num_kept_ids - 1)
    assert len(concat_batches([batch])) == 3
    with pytest.raises(
        SchemaError, match=f"would hold {2 * batch.num_tokens} tokens and {2 * batch.num_kept_ids} kept"
    ):
        concat_batches([batch, batch])


def of_a_gibibyte(kind: str) -> pa.Array:
    """One value of 2^30 items, of memory that nothing touches."""
    offsets = pa.py_buffer(np.array([0, 2**30], np.int32))
    if kind == "text":
        return pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(np.zeros(2**30, np.uint8))])
    return pa.ListArray.from_buffers(pa.list_(pa.null()), 1, [None, offsets], children=[pa.nulls(2**30)])


@pytest.mark.parametrize("kind", ["text", "lists"])
def test_columns_beyond_the_reach_of_arrows_offsets_are_not_joined_and_lose_no_row(batch_of: BatchOf, kind) -> None:
    arrow = batch_of(0, 1).arrow.append_column("x_large", of_a_gibibyte(kind))
    batch = RolloutBatch.from_arrow(arrow)
    assert len(concat_batches([batch])) == 1
    with pytest.raises(SchemaError, match=r"column x_large is too large for one batch .*; join fewer"):
        concat_batches([batch, batch, batch])
    with pytest.raises(SchemaError, match="column x_large is too large for one batch"):
        RolloutBatch.from_arrow(pa.Table.from_batches([arrow, arrow, arrow]))


def test_own_columns_of_any_type_are_joined_row_by_row(batch_of: BatchOf) -> None:
    columns = {
        "x_word": (pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "a"]).dictionary_encode()),
        "x_deep": (
            pa.array([{"a": [1]}, None]),
            pa.array([{"a": None}, {"a": []}], pa.struct({"a": pa.list_(pa.int64())})),
        ),
    }
    batches = []
    for side in (0, 1):
        arrow = batch_of(2 * side, 2).arrow
        for name, values in columns.items():
            arrow = arrow.append_column(name, values[side])
        batches.append(RolloutBatch.from_arrow(arrow))
    assert rows_of(concat_batches(batches)) == [row for batch in batches for row in rows_of(batch)]


def test_nothing_cannot_be_joined_and_empty_batches_can(batch_of: BatchOf) -> None:
    with pytest.raises(SchemaError, match="nothing to join"):
        concat_batches([])
    empty = batch_of(0, 1).slice(0, 0)
    assert len(concat_batches([empty, empty])) == 0
    assert len(concat_batches([empty, batch_of(0, 2), empty])) == 2


def test_a_batch_says_what_it_holds(batch_of: BatchOf) -> None:
    batch = batch_of(0, 2)
    assert repr(batch) == f"RolloutBatch(2 responses, {batch.num_tokens} tokens, {batch.num_kept_ids} kept ids)"
