"""Lists of an engine become NumPy arrays: no Python work per token beyond what flattening a list needs.

Legend: T tokens of one response, N kept ids of one response.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keptset.schemas.adapters.tree import Node
from keptset.schemas.errors import InvalidInput, SchemaError, ViolationError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity
from keptset.schemas.ragged import offsets_of, row_index

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MISSING_LOGPROB = -9999.0
"""What engines write for a log-probability they do not have, or that is -inf, since JSON has no -inf."""
_BEYOND = 1 << 62
"""Stands for whole numbers beyond 64 bits. No id is that large: it is reported like any that is out of range."""


class KeptSets(NamedTuple):
    """The kept sets of one response."""

    offsets_T1: IntArray
    ids_N: IntArray
    logprobs_N: FloatArray | None = None
    """The whole kept distribution, where the engine gives it."""

    @property
    def sizes_T(self) -> IntArray:
        return np.diff(self.offsets_T1)


def violation(kind: FindingKind, rollout_id: str, detail: str, position: int | None = None) -> ViolationError:
    """One occurrence of `kind` in one response."""
    example = Example(rollout_id=rollout_id, position=position, detail=detail)
    finding = Finding(kind=kind, severity=Severity.ERROR, count=1, responses=1, examples=(example,))
    return ViolationError(f"{rollout_id}: {detail}", (finding,))


def ids(node: Node) -> IntArray:
    """Whole numbers [N] of a list, a tensor or a NumPy array. Errors: SchemaError naming the entry that is none."""
    dense = as_numpy(node.value)
    if dense is None:
        return _integers(_as_list(node), node)
    if dense.ndim != 1 or dense.dtype.kind not in "iu":
        raise node.refuse(f"one dimension of whole numbers, not {dense.ndim} of {dense.dtype}")
    return _within_64_bits(dense)


def floats(node: Node) -> FloatArray:
    """Numbers [N]; null and -9999 become masked entries over NaN. Errors: SchemaError naming the entry that is none."""
    dense = as_numpy(node.value)
    if dense is None:
        return mark_missing(_numbers(_as_list(node), node))
    if dense.ndim != 1 or dense.dtype.kind not in "iuf":
        raise node.refuse(f"one dimension of numbers, not {dense.ndim} of {dense.dtype}")
    return mark_missing(dense.astype(np.float64))


def nested_ids(node: Node) -> tuple[IntArray, IntArray]:
    """Offsets [T + 1] and whole numbers [N] of a list of lists. Errors: SchemaError naming the entry that is none."""
    rows = _as_list(node)
    plain = _plain_nested_ids(rows)
    if plain is not None:
        return plain
    rows, offsets = _rows(Node(rows, node.path))
    return offsets, _integers(list(chain.from_iterable(rows)), node, rows)


def _plain_nested_ids(rows: Sequence[Any]) -> tuple[IntArray, IntArray] | None:
    """Of Python's own lists of whole numbers within 32 bits; None where anything is not that."""
    numbers = array("I")
    try:
        any(map(numbers.fromlist, rows))  # each returns None; it takes nothing but a list
    except (TypeError, OverflowError):
        return None
    offsets = offsets_of(np.fromiter(map(len, rows), np.int64, count=len(rows)))
    flat = np.array(numbers, np.int64)
    small = np.flatnonzero(flat < 2)  # a boolean passes for 0 or 1
    row = np.searchsorted(offsets, small, side="right") - 1
    found = map(getitem, map(rows.__getitem__, row.tolist()), (small - offsets[row]).tolist())
    return None if _BOOLEANS & set(map(type, found)) else (offsets, flat)


def nested_floats(node: Node) -> tuple[IntArray, FloatArray]:
    """Offsets [T + 1] and numbers [N] of a list of lists; null and -9999 become NaN."""
    rows, offsets = _rows(node)
    values = _numbers(list(chain.from_iterable(rows)), node, rows)
    return offsets, np.where(values == MISSING_LOGPROB, np.nan, values)


def column(node: Node, name: str) -> list[Any]:
    """Field `name` of every object of a list."""
    entries = _as_list(node)
    try:
        return [entry[name] for entry in entries]
    except (KeyError, TypeError, IndexError):
        return [entry.require(name, "one in every entry").value for entry in Node(entries, node.path).items()]


def kept_sets(ids_node: Node, logprobs_node: Node | None, rollout_id: str) -> KeptSets:
    """Kept sets as the engine listed them, sorted within a token; log-probabilities, where given, move along.

    Errors: ViolationError (`lengths`) where the two lists do not have the same shape.
    """
    offsets_T1, ids_N = nested_ids(ids_node)
    if logprobs_node is None:
        return sort_sets(KeptSets(offsets_T1, ids_N))
    logprob_offsets_T1, logprobs_N = nested_floats(logprobs_node)
    if not np.array_equal(offsets_T1, logprob_offsets_T1):
        raise violation(
            FindingKind.LENGTHS,
            rollout_id,
            f"{logprobs_node.path} does not have one number for each of the {len(ids_N)} ids of {ids_node.path}",
        )
    return sort_sets(KeptSets(offsets_T1, ids_N, logprobs_N))


def sort_sets(kept: KeptSets) -> KeptSets:
    """Ids ascending within each token, log-probabilities moved along. Nothing is added, removed or merged.

    >>> sort_sets(KeptSets(np.array([0, 3, 4]), np.array([9, 3, 5, 1]), np.array([-1.0, -2.0, -3.0, 0.0])))[1:]
    (array([3, 5, 9, 1]), array([-2., -3., -1.,  0.]))
    """
    offsets_T1, ids_N, logprobs_N = kept
    within = np.ones(max(len(ids_N) - 1, 0), bool)
    ends = offsets_T1[1:-1]
    within[ends[(ends > 0) & (ends < len(ids_N))] - 1] = False
    if not np.any((ids_N[1:] < ids_N[:-1]) & within):
        return kept
    token_N = row_index(offsets_T1)
    if logprobs_N is None and ids_N.min() >= 0 and ids_N.max() < 1 << 32:
        # Token in the upper half, id in the lower: one plain sort is several times faster than sorting positions.
        ordered_N = np.sort(token_N << 32 | ids_N) & ((1 << 32) - 1)
        return KeptSets(offsets_T1, ordered_N)
    order_N = np.lexsort((ids_N, token_N))
    return KeptSets(offsets_T1, ids_N[order_N], None if logprobs_N is None else logprobs_N[order_N])


def logprobs_of(token_ids_T: IntArray, kept: KeptSets) -> FloatArray:
    """The entry of each sampled token in its kept distribution; masked where the token is not in its set."""
    found_T = np.full(len(token_ids_T), np.nan)
    hidden_T = np.ones(len(token_ids_T), bool)
    if kept.logprobs_N is not None and len(kept.offsets_T1) == len(token_ids_T) + 1:
        hits = np.flatnonzero(kept.ids_N == np.repeat(token_ids_T, kept.sizes_T))
        tokens = row_index(kept.offsets_T1)[hits]
        found_T[tokens], hidden_T[tokens] = kept.logprobs_N[hits], False
    marked: FloatArray = np.ma.MaskedArray(found_T, hidden_T)
    return marked


def check_sampled(told_T: IntArray, token_ids_T: IntArray, path: str, rollout_id: str) -> None:
    """That a list of entries per token is about the sampled tokens. Errors: ViolationError, InvalidInput."""
    if len(told_T) != len(token_ids_T):
        raise violation(
            FindingKind.LENGTHS, rollout_id, f"{len(token_ids_T)} tokens, but {path} has {len(told_T)} entries"
        )
    other = np.flatnonzero(told_T != token_ids_T)
    if len(other):
        raise InvalidInput(
            f"{path}[{other[0]}] is about token {told_T[other[0]]}, but the response has {token_ids_T[other[0]]} "
            "there; expected the sampled tokens in order"
        )


def mark_missing(values_N: FloatArray) -> FloatArray:
    """The same numbers; where the engine's marker for missing stands, masked and NaN."""
    hidden = np.asarray(values_N) == MISSING_LOGPROB
    if np.ma.is_masked(values_N):
        hidden |= np.ma.getmaskarray(values_N)
    if not hidden.any():
        return values_N
    marked: FloatArray = np.ma.MaskedArray(np.where(hidden, np.nan, np.asarray(values_N)), hidden)
    return marked


def as_numpy(value: Any) -> npt.NDArray[Any] | None:
    """A tensor of any library or a NumPy array as NumPy; None for what is neither."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "dtype") or not callable(getattr(value, "numpy", None)):
        return None
    if "bfloat16" in str(value.dtype):  # NumPy has none
        value = value.astype("float32") if hasattr(value, "astype") else value.float()
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "cpu"):
        value = value.cpu()
    return np.asarray(value.numpy())


def _as_list(node: Node) -> Sequence[Any]:
    value = node.value
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise node.refuse("a list")
    return list(value)


def _rows(node: Node) -> tuple[Sequence[Any], IntArray]:
    rows = _as_list(node)
    if not _NO_LISTS.isdisjoint(map(type, rows)):
        position = next(t for t, row in enumerate(rows) if type(row) in _NO_LISTS)
        raise Node(rows[position], f"{node.path}[{position}]").refuse("a list")
    return rows, offsets_of(np.fromiter(map(len, rows), np.int64, count=len(rows)))


_NO_LISTS = frozenset({str, bytes, bytearray, dict, int, float, bool, type(None)})
"""What may stand in JSON or msgpack where a list of numbers should."""
_BOOLEANS = frozenset({bool, np.bool_})
"""Types that pass for numbers. (NumPy 1 lets its own be an index, with a warning.)"""


def _integers(values: Sequence[Any], node: Node, rows: Sequence[Any] | None = None) -> IntArray:
    """Where `values` are flattened, `rows` are the lists that they come from."""
    flat: npt.NDArray[Any]
    try:
        try:
            flat = _as_array("I", values)  # twice as fast as 64 bits, and ids are no larger
        except OverflowError:
            flat = _as_array("q", values)
    except TypeError:
        raise _first_unfit(values, node, rows, "a whole number", _is_whole) from None
    except OverflowError:
        if not all(map(_is_whole, values)):
            raise _first_unfit(values, node, rows, "a whole number", _is_whole) from None
        flat = _as_array("q", [min(max(int(value), -_BEYOND), _BEYOND) for value in values])
    # A boolean passes for 0 or 1: only what is one of these is looked at once more.
    if _has_boolean(values, flat < 2):
        raise _first_unfit(values, node, rows, "a whole number", _is_whole)
    return flat.astype(np.int64)


def _numbers(values: Sequence[Any], node: Node, rows: Sequence[Any] | None = None) -> FloatArray:
    """As `_integers`; null becomes the marker for missing."""
    try:
        try:
            flat = _as_array("d", values)
        except TypeError:
            flat = _as_array("d", [MISSING_LOGPROB if value is None else value for value in values])
    except TypeError:
        raise _first_unfit(values, node, rows, "a number or null", _is_number) from None
    except OverflowError:
        raise SchemaError(f"{node.path} holds a number beyond float64; expected log-probabilities") from None
    if _has_boolean(values, (flat == 0) | (flat == 1)):
        raise _first_unfit(values, node, rows, "a number or null", _is_number)
    return flat


def _has_boolean(values: Sequence[Any], where: npt.NDArray[np.bool_]) -> bool:
    """Whether one stands `where`; picking entries is dearer than looking at them, so all are looked at if many are."""
    places = np.flatnonzero(where)
    few = 4 * len(places) < len(values)
    kinds = set(map(type, map(values.__getitem__, places.tolist()) if few else values))
    return bool(_BOOLEANS & kinds)


def _as_array(code: str, values: Sequence[Any]) -> npt.NDArray[Any]:
    """Of Python's own array type, which takes nothing but numbers of its kind, where NumPy would cut and parse."""
    numbers = array(code, values)
    return np.frombuffer(numbers, _DTYPES[code]) if numbers else np.zeros(0, _DTYPES[code])


_DTYPES = {"I": np.uintc, "q": np.int64, "d": np.float64}


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and type(value) not in _BOOLEANS


def _is_number(value: object) -> bool:
    return value is None or (hasattr(value, "__float__") and type(value) not in _BOOLEANS)


def _first_unfit(
    values: Sequence[Any], node: Node, rows: Sequence[Any] | None, expected: str, fits: Callable[[object], bool]
) -> SchemaError:
    """The error for the first value that is none of the expected."""
    number = next((n for n, value in enumerate(values) if not fits(value)), None)
    if number is None:
        return node.refuse(f"a list, every entry {expected}")
    place = f"[{number}]"
    if rows is not None:
        offsets = offsets_of([len(row) for row in rows])
        row = int(np.searchsorted(offsets, number, side="right")) - 1
        place = f"[{row}][{number - offsets[row]}]"
    return Node(values[number], node.path + place).refuse(expected)


def _within_64_bits(values: npt.NDArray[Any]) -> IntArray:
    if values.dtype == np.uint64:
        values = np.minimum(values, np.uint64(_BEYOND))
    return values.astype(np.int64)
