"""Lists, tensors and arrays of engines as NumPy arrays: exact, strict, and sorted without loss."""

import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.adapters import arrays
from keptset.schemas.adapters.arrays import KeptSets, sort_sets
from keptset.schemas.adapters.tree import Node
from keptset.schemas.errors import SchemaError, ViolationError

ID_SETS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=6)


@given(ID_SETS)
def test_nested_ids_are_the_lists_laid_end_to_end(rows: list[list[int]]) -> None:
    offsets, flat = arrays.nested_ids(Node(rows))
    assert [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)] == rows


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda row: array("q", row)])
@pytest.mark.parametrize("rows", [[[0, 1], [7]], [[0, 2**40], [-3]], [[np.int32(5), np.int32(0)], [1]]])
def test_nested_ids_come_in_any_container_and_size(kind: Any, rows: list[list[int]]) -> None:
    for outer in (list, tuple, iter):
        offsets, flat = arrays.nested_ids(Node(outer(list(map(kind, rows)))))
        assert (offsets.tolist(), flat.tolist()) == ([0, 2, 3], [*rows[0], *rows[1]])


@given(ID_SETS, st.booleans(), st.randoms(use_true_random=False))
def test_sorting_keeps_every_id_and_its_logprob_within_its_token(
    rows: list[list[int]], aligned: bool, random: Any
) -> None:
    offsets, flat = arrays.nested_ids(Node(rows))
    logprobs = np.array([random.random() for _ in flat]) if aligned else None
    kept = sort_sets(KeptSets(offsets, flat, logprobs))
    assert kept.offsets_T1.tolist() == offsets.tolist()
    for a, b, row in zip(offsets[:-1], offsets[1:], rows, strict=True):
        assert kept.ids_N[a:b].tolist() == sorted(row)
        if logprobs is not None and kept.logprobs_N is not None:
            before = sorted(zip(row, logprobs[a:b].tolist(), strict=True))
            assert sorted(zip(kept.ids_N[a:b].tolist(), kept.logprobs_N[a:b].tolist(), strict=True)) == before


@pytest.mark.parametrize("ids", [[-5, 3, -7], [2**40, 1, 2**40 - 1]])
def test_ids_that_are_none_are_sorted_too_so_that_they_are_reported_for_what_they_are(ids: list[int]) -> None:
    assert sort_sets(KeptSets(np.array([0, 3]), np.array(ids))).ids_N.tolist() == sorted(ids)


@pytest.mark.parametrize(
    "value",
    [[3, 1], (3, 1), np.array([3, 1], np.int32), array("l", [3, 1]), np.array([3, 1], np.uint64)],
    ids=lambda value: type(value).__name__,
)
def test_ids_come_in_any_container(value: Any) -> None:
    assert arrays.ids(Node(value)).tolist() == [3, 1]


def test_ids_beyond_64_bits_stay_out_of_range() -> None:
    packed = (0xBF800000 << 32) | 7  # the bits of a negative float32 above an id
    assert arrays.ids(Node([1, packed])).max() > 2**32
    assert arrays.ids(Node(np.array([1, packed], np.uint64))).max() > 2**32
    assert arrays.nested_ids(Node([[1], [-packed]]))[1].min() < -(2**32)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2.5], r"x\[1\] is 2.5; expected a whole number"),
        ([1, "7"], r"x\[1\] is '7'; expected a whole number"),
        ([5, True], r"x\[1\] is True; expected a whole number"),
        ([5, None], r"x\[1\] is null; expected a whole number"),
        ([2**64, None], r"x\[1\] is null; expected a whole number"),
        ([2**70, 0.5], r"x\[1\] is 0.5; expected a whole number"),
        ([[5]], r"x\[0\] is a list of 1; expected a whole number"),
        ("123", "x is '123'; expected a list"),
        ({"1": 2}, "x is an object with 1; expected a list"),
        (7, "x is 7; expected a list"),
        (np.array([1.0]), "expected one dimension of whole numbers, not 1 of float64"),
        (np.array([[1]]), "expected one dimension of whole numbers, not 2 of int64"),
    ],
)
def test_what_is_no_list_of_ids_is_refused_by_place_and_value(value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        arrays.ids(Node(value, "x"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1], None], r"x\[1\] is null; expected a list"),
        ([[1], 2], r"x\[1\] is 2; expected a list"),
        ([[1], "23"], r"x\[1\] is '23'; expected a list"),
        ([[1], {"2": 3}], r"x\[1\] is an object with 2; expected a list"),
        ([[1], [2, 3.5]], r"x\[1\]\[1\] is 3.5; expected a whole number"),
        ([[], [9, 1, True]], r"x\[1\]\[2\] is True; expected a whole number"),
        ([[0], [], [1, False, 7]], r"x\[2\]\[1\] is False; expected a whole number"),
        ([[1], [np.float32(2)]], r"x\[1\]\[0\] is a float32; expected a whole number"),
        ([[1], [0, np.True_]], r"x\[1\]\[1\] is a bool\w*; expected a whole number"),
        ([[1], [float("nan")]], r"x\[1\]\[0\] is nan; expected a whole number"),
        ([[1], [2, "3"]], r"x\[1\]\[1\] is '3'; expected a whole number"),
        ([[2**40], [2, None]], r"x\[1\]\[1\] is null; expected a whole number"),
        (None, "x is null; expected a list"),
    ],
)
@pytest.mark.filterwarnings("ignore:In future, it will be an error for 'np.bool_'")
def test_what_is_no_list_of_lists_is_refused_by_place_and_value(value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        arrays.nested_ids(Node(value, "x"))


def test_null_and_the_marker_for_missing_are_masked_and_nothing_else_is() -> None:
    values = arrays.floats(Node([-0.5, None, -9999.0, -9998.0, float("-inf"), float("nan"), 0]))
    assert np.ma.getmaskarray(values).tolist() == [False, True, True, False, False, False, False]
    assert not isinstance(arrays.floats(Node([-0.5, 0.0])), np.ma.MaskedArray)
    assert np.ma.getmaskarray(arrays.floats(Node(np.float32([-9999, 0])))).tolist() == [True, False]
    assert np.isnan(arrays.nested_floats(Node([[-9999.0], [None]]))[1]).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.5, "1"], r"x\[1\] is '1'; expected a number or null"),
        ([0.0, False], r"x\[1\] is False; expected a number or null"),
        ([0.5, np.True_], r"x\[1\] is a bool\w*; expected a number or null"),
        ([0.5, [1]], r"x\[1\] is a list of 1; expected a number or null"),
        ([10**400], "x holds a number beyond float64"),
        (np.array(["a"]), "expected one dimension of numbers"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        arrays.floats(Node(value, "x"))


def test_a_field_of_every_entry_is_read_from_mappings_and_objects_alike() -> None:
    assert arrays.column(Node([{"a": 1}, {"a": 2}]), "a") == [1, 2]
    assert arrays.column(Node([SimpleNamespace(a=1), {"a": 2}]), "a") == [1, 2]
    with pytest.raises(SchemaError, match=r"x\[1\]\.a is missing"):
        arrays.column(Node([{"a": 1}, {}], "x"), "a")
    with pytest.raises(SchemaError, match=r"x\[0\] is 'a'; expected an object"):
        arrays.column(Node(["a"], "x"), "a")


def test_logprobs_beside_a_mask_must_have_its_shape() -> None:
    with pytest.raises(ViolationError) as caught:
        arrays.kept_sets(Node([[1, 2], [3]]), Node([[-0.1], [-0.2, -0.3]], "logprobs"), "r")
    assert [finding.kind.value for finding in caught.value.findings] == ["lengths"]


def test_the_logprob_of_a_token_outside_its_set_is_unknown() -> None:
    kept = KeptSets(np.array([0, 2, 3]), np.array([1, 4, 5]), np.array([-1.0, -0.5, 0.0]))
    found = arrays.logprobs_of(np.array([4, 6]), kept)
    assert found[0] == -0.5
    assert np.ma.getmaskarray(found).tolist() == [False, True]


class Tensor:
    """Stands for a tensor of a library that is not installed here."""

    def __init__(self, values: Any, dtype: str) -> None:
        self.values, self.dtype, self.calls = values, dtype, []

    def detach(self) -> "Tensor":
        self.calls.append("detach")
        return self

    def cpu(self) -> "Tensor":
        self.calls.append("cpu")
        return self

    def float(self) -> "Tensor":
        self.calls.append("float")
        return self

    def numpy(self) -> Any:
        return np.asarray(self.values)


def test_tensors_are_taken_off_their_device_and_widened_where_numpy_has_no_such_type() -> None:
    tensor = Tensor([1.0, 2.0], "torch.bfloat16")
    assert arrays.floats(Node(tensor)).tolist() == [1.0, 2.0]
    assert tensor.calls == ["float", "detach", "cpu"]
    assert arrays.as_numpy([1, 2]) is None
