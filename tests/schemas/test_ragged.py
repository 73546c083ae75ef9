"""Views of list columns say what Arrow's own Python lists say, whatever was cut, picked or joined before."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.ragged import NestedRagged, Ragged, gather_spans, offsets_of, without_list_views

INT, FLOAT = pa.int32(), pa.float32()
items = st.none() | st.integers(-5, 5)
lists = st.lists(st.none() | st.lists(items, max_size=4), max_size=6)
nested_lists = st.lists(st.none() | st.lists(st.none() | st.lists(items, max_size=3), max_size=3), max_size=5)
cuts = st.tuples(st.integers(0, 6), st.integers(0, 6))


def read(ragged: Ragged) -> list[Any]:
    """The lists a view stands for, through its public parts alone."""
    rows: list[Any] = []
    for row in range(len(ragged)):
        if ragged.row_valid is not None and not ragged.row_valid[row]:
            assert ragged.lengths[row] == 0
            rows.append(None)
            continue
        start, stop = ragged.offsets[row : row + 2]
        valid = np.ones(stop - start, bool) if ragged.valid is None else ragged.valid[start:stop]
        rows.append([value if good else None for value, good in zip(ragged[row].tolist(), valid, strict=True)])
    return rows


def read_nested(nested: NestedRagged) -> list[Any]:
    tokens = read(nested.inner)
    bounds = zip(nested.row_offsets[:-1], nested.row_offsets[1:], strict=True)
    valid = np.ones(len(nested), bool) if nested.row_valid is None else nested.row_valid
    return [tokens[start:stop] if good else None for (start, stop), good in zip(bounds, valid, strict=True)]


@given(lists, cuts)
def test_a_view_of_any_slice_reads_as_the_slice(rows: list[Any], cut: tuple[int, int]) -> None:
    array = pa.array(rows, pa.list_(INT)).slice(*cut)
    view = Ragged.from_arrow(array)
    assert read(view) == array.to_pylist()
    assert view.offsets[0] == 0
    assert view.offsets[-1] == len(view.values)
    assert view.to_arrow(INT).to_pylist() == array.to_pylist()


@given(nested_lists, cuts, cuts)
def test_a_nested_view_of_a_slice_of_a_slice_reads_as_that(rows: list[Any], cut: tuple[int, int], again: Any) -> None:
    array = pa.array(rows, pa.list_(pa.list_(INT))).slice(*cut).slice(*again)
    view = NestedRagged.from_arrow(array)
    assert read_nested(view) == array.to_pylist()
    assert view.to_arrow(INT).to_pylist() == array.to_pylist()


@given(nested_lists, nested_lists, st.lists(st.integers(0, 20), max_size=6), cuts)
def test_a_nested_view_reads_right_after_joining_and_picking(
    ours: Any, theirs: Any, picks: list[int], cut: Any
) -> None:
    kind = pa.list_(pa.list_(INT))
    joined = pa.concat_arrays([pa.array(ours, kind).slice(*cut), pa.array(theirs, kind)])
    picks = [pick % len(joined) for pick in picks] if len(joined) else []
    every_other = pa.array([number % 2 == 0 for number in range(len(joined))], pa.bool_())
    for array in (joined, joined.take(pa.array(picks, pa.int64())), joined.filter(every_other)):
        assert read_nested(NestedRagged.from_arrow(array)) == array.to_pylist()


@given(st.lists(st.integers(0, 4), max_size=8), st.data())
def test_lists_that_are_null_may_span_items_and_read_empty(lengths: list[int], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    offsets = offsets_of(lengths)
    array = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(range(int(offsets[-1])), INT), mask=pa.array(mask, pa.bool_())
    )
    for part in (array, array.slice(1), array.slice(0, 3)):
        assert read(Ragged.from_arrow(part)) == part.to_pylist()


@pytest.mark.parametrize(
    "rows", [[[1, 2], [], [3]], [[1, 2], None, [3]]], ids=["no nulls", "a null that spans nothing"]
)
def test_a_view_shares_memory_with_arrow(rows: list[Any]) -> None:
    array = pa.array([[9, 9], *rows], pa.list_(INT)).slice(1)
    values = Ragged.from_arrow(array).values
    assert np.shares_memory(values, np.frombuffer(array.values.buffers()[1], np.int32))
    assert values.tolist() == [1, 2, 3]


def test_a_nested_view_shares_memory_with_arrow_where_some_tokens_have_no_set() -> None:
    array = pa.array([[[1, 2], None, [3]], None, [[4]]], pa.list_(pa.list_(INT)))
    values = NestedRagged.from_arrow(array).inner.values
    assert np.shares_memory(values, np.frombuffer(array.values.values.buffers()[1], np.int32))


def test_views_of_memory_that_must_not_be_written_are_read_only() -> None:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"a": pa.array([[1.0, 2.0]], pa.list_(FLOAT)), "b": pa.array([[True, None]])})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    read_back = pa.ipc.open_stream(sink.getvalue()).read_next_batch()
    values = Ragged.from_arrow(read_back.column("a")).values
    assert not values.flags.writeable
    assert values.tolist() == [1.0, 2.0]
    assert Ragged.from_arrow(read_back.column("b")).values.tolist() == [True, False]


def test_behind_a_null_stands_a_value_that_cannot_be_mistaken() -> None:
    assert np.isnan(Ragged.from_arrow(pa.array([[None, 1.0]], pa.list_(FLOAT))).values[0])
    assert Ragged.from_arrow(pa.array([[None, 1]], pa.list_(INT))).values[0] == -1
    assert not Ragged.from_arrow(pa.array([[None, True]])).values[0]


def test_lists_are_reached_by_number_from_either_end() -> None:
    view = Ragged.from_arrow(pa.array([[1], [2, 3]], pa.list_(INT)))
    assert view[1].tolist() == view[-1].tolist() == [2, 3]
    assert [row.tolist() for row in (view[number] for number in range(len(view)))] == [[1], [2, 3]]
    for number in (2, -3):
        with pytest.raises(IndexError, match=f"list {number} of 2"):
            view[number]


@given(lists.filter(len), st.lists(st.integers(0, 100), max_size=8))
def test_whole_lists_are_picked_without_a_loop(rows: list[Any], picks: list[int]) -> None:
    full = [row or [] for row in rows]
    picks = [pick % len(rows) for pick in picks]
    flat = np.array([item or 0 for row in full for item in row], int)
    offsets, index = gather_spans(offsets_of([len(row) for row in full]), np.array(picks, int))
    picked = [flat[index][start:stop].tolist() for start, stop in itertools.pairwise(offsets)]
    assert picked == [[item or 0 for item in full[pick]] for pick in picks]


@pytest.mark.skipif(not hasattr(pa, "ListViewArray"), reason="this Arrow has no list views")
def test_list_views_that_overlap_or_stand_in_any_order_become_lists() -> None:
    view = pa.ListViewArray.from_arrays(pa.array([2, 0, 1], INT), pa.array([2, 3, 0], INT), pa.array([5, 6, 7, 8], INT))
    assert without_list_views(view).to_pylist() == [[7, 8], [5, 6, 7], []]
    assert without_list_views(view.slice(1)).to_pylist() == [[5, 6, 7], []]


def test_keys_of_maps_are_lists_per_row() -> None:
    kind = pa.map_(INT, FLOAT)
    array = pa.array([[(9, 0.0)], [(1, 0.5)], None, [], [(2, 1.0), (3, 2.0)]], kind)
    for part in (array, array.slice(1), array.slice(2, 1), array.slice(0, 0)):
        expected = [None if row is None else [key for key, _ in row] for row in part.to_pylist()]
        assert read(Ragged.from_map_keys(part)) == expected
