"""Token columns of a batch brought side by side, with the rows left out that cannot be.

Reports what stands in the way: kinds `lengths` (columns of a response that differ in length) and `nulls` (items that
are null where none may be). The rows concerned are not looked at further: behind a misplaced null or a missing item
every other check would only repeat the same fault in other words.

Legend: B responses, T tokens over all responses, N kept ids over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from keptset.schemas.columns import SET_COLUMNS, TOKEN_COLUMNS, TOKEN_MASKS
from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import AnyArray, BoolArray, IntArray, NestedRagged, Ragged
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.validation.collector import Collector, Indices, always

_NO_NULL_ITEMS = ("token_ids", *TOKEN_MASKS)


@dataclass(frozen=True)
class TokenColumn:
    """One number per token."""

    values_T: AnyArray
    valid_T: BoolArray | None
    """False where the item is null or its whole list is; None where no token is null."""
    known_T: BoolArray | None
    """False where the whole list is null; None where none is."""


@dataclass(frozen=True)
class SetColumn:
    """One set per token."""

    offsets_T1: IntArray
    values_N: AnyArray
    valid_T: BoolArray | None
    known_T: BoolArray | None


@dataclass(frozen=True)
class TokenView:
    """The rows whose token columns line up."""

    batch: RolloutBatch
    rows_B: Indices
    """Their rows in the batch that was given."""

    @cached_property
    def offsets_B1(self) -> IntArray:
        return self.batch.token_ids.offsets

    @cached_property
    def token_ids_T(self) -> AnyArray:
        return self.batch.token_ids.values

    @cached_property
    def sampled_T(self) -> BoolArray:
        return self.batch.sampled.values.astype(bool, copy=False)

    @cached_property
    def lengths_B(self) -> IntArray:
        return np.diff(self.offsets_B1)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets_B1[-1])

    def locate(self, tokens: Indices) -> tuple[Indices, Indices]:
        """Row in the batch that was given, and position in the response, of flat token indices."""
        rows = np.searchsorted(self.offsets_B1, tokens, side="right") - 1
        return self.rows_B[rows], tokens - self.offsets_B1[rows]

    def spread(self, values_B: AnyArray) -> AnyArray:
        """A value per response as one that broadcasts over tokens: a single item where all are equal, else [T]."""
        if len(values_B) and (values_B == values_B[0]).all():
            return values_B[:1]
        return np.repeat(values_B, self.lengths_B)

    def column(self, name: str) -> TokenColumn | None:
        """A column of numbers; None where every row is null."""
        ragged: Ragged | None = getattr(self.batch, name)
        if ragged is None:
            return None
        if ragged.row_valid is None:
            return TokenColumn(ragged.values, ragged.valid, None)
        known_T = np.repeat(ragged.row_valid, self.lengths_B)
        values_T = np.full(self.num_tokens, _filler(ragged.values), ragged.values.dtype)
        values_T[known_T] = ragged.values
        return TokenColumn(values_T, _scatter(known_T, ragged.valid), known_T)

    def sets(self, name: str) -> SetColumn | None:
        """A column of sets; None where every row is null."""
        nested: NestedRagged | None = getattr(self.batch, name)
        if nested is None:
            return None
        inner = nested.inner
        if nested.row_valid is None:
            return SetColumn(inner.offsets, inner.values, inner.row_valid, None)
        known_T = np.repeat(nested.row_valid, self.lengths_B)
        lengths_T = np.zeros(self.num_tokens + 1, np.int64)
        lengths_T[1:][known_T] = inner.lengths
        return SetColumn(np.cumsum(lengths_T), inner.values, _scatter(known_T, inner.row_valid), known_T)


def _scatter(known_T: BoolArray, valid: BoolArray | None) -> BoolArray:
    valid_T = known_T.copy()
    if valid is not None:
        valid_T[known_T] = valid
    return valid_T


def _filler(values: AnyArray) -> float | int:
    return float("nan") if values.dtype.kind == "f" else 0 if values.dtype.kind == "b" else -1


def line_up(batch: RolloutBatch, collector: Collector) -> TokenView:
    """The view of the rows that can be looked at token by token; what is wrong with the others is reported."""
    usable_B = np.ones(len(batch), bool)
    for ragged in (batch.token_ids, batch.sampled):
        if ragged.row_valid is not None:
            usable_B &= ragged.row_valid
    _find_lengths(batch, usable_B, collector)
    for name in _NO_NULL_ITEMS:
        ragged = getattr(batch, name)
        if ragged is not None and ragged.valid is not None:
            rows, positions = _places(ragged.offsets, np.flatnonzero(~ragged.valid))
            collector.add(FindingKind.NULLS, rows, positions, always(f"{name} is null"))
            usable_B[rows] = False
    for name in SET_COLUMNS:
        nested = getattr(batch, name)
        if nested is not None and nested.inner.valid is not None:
            tokens, _ = _places(nested.inner.offsets, np.flatnonzero(~nested.inner.valid))
            rows, positions = _places(nested.row_offsets, np.unique(tokens))
            collector.add(FindingKind.NULLS, rows, positions, always(f"an entry of {name} is null"))
            usable_B[rows] = False
    if usable_B.all():
        return TokenView(batch, np.arange(len(batch)))
    rows = np.flatnonzero(usable_B)
    return TokenView(batch.take(rows), rows)


def _places(offsets_R1: IntArray, items: Indices) -> tuple[Indices, Indices]:
    """List and place within it of flat item indices."""
    rows = np.searchsorted(offsets_R1, items, side="right") - 1
    return rows, items - offsets_R1[rows]


def _find_lengths(batch: RolloutBatch, usable_B: BoolArray, collector: Collector) -> None:
    """Reports rows whose columns differ in length and takes them out of `usable_B`."""
    expected_B = batch.token_ids.lengths
    lengths: dict[str, npt.NDArray[np.integer]] = {}
    differs_B = np.zeros(len(batch), bool)
    for name in (*TOKEN_COLUMNS, *SET_COLUMNS):
        column = getattr(batch, name)
        if column is None:
            continue
        offsets = column.row_offsets if isinstance(column, NestedRagged) else column.offsets
        actual_B = np.diff(offsets)
        differs = actual_B != expected_B
        if column.row_valid is not None:
            differs &= column.row_valid
        lengths[name] = np.where(differs, actual_B, expected_B)
        differs_B |= differs
    rows = np.flatnonzero(differs_B & usable_B)

    def detail(i: int) -> str:
        row = rows[i]
        told = [f"{name} {values[row]}" for name, values in lengths.items() if values[row] != expected_B[row]]
        return f"token_ids has {expected_B[row]} entries, {', '.join(told)}"

    collector.add(FindingKind.LENGTHS, rows, None, detail)
    usable_B &= ~differs_B
