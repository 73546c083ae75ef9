"""Where two recordings of the same responses part: tokens, flags, sets, b, m, versions, position by position.

What two recordings say is compared as far as their contexts are the same: behind the first token that differs nothing
is. At that token the sets, m and the version still are of one context, and b is not.

Legend: R responses that both hold, in one order on both sides; P positions that both have, flat; D positions that
differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from keptset.schemas.ragged import NestedRagged, Ragged, row_index, span_index

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

COLUMNS = (
    "rollout_id",
    "token_ids",
    "sampled",
    "support",
    "kept_ids",
    "behavior_logprobs",
    "log_kept_mass",
    "policy_versions",
)
"""What is compared."""
ASPECTS = ("token_ids", "sampled", "support", "kept_ids", "behavior_logprobs", "log_kept_mass", "policy_versions")
"""In the order in which one follows from another."""
NOWHERE = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class Parted:
    """How one aspect parts over R responses."""

    compared_R: Ints
    """Places compared."""
    differing_R: Ints
    first_R: Ints
    """First position that differs; NOWHERE where none does."""
    distance_D: Floats | None
    """|difference| wherever both have a number, equal or not; None for what is no number."""


class Pairs:
    """Two recordings of R responses, row by row."""

    def __init__(self, here: pa.RecordBatch | pa.Table, there: pa.RecordBatch | pa.Table, tolerance: float) -> None:
        self._sides = tuple(_Side(side) for side in (here, there))
        self._tolerance = tolerance
        a, b = self._sides
        self._common_R: Ints = np.minimum(a.lengths_R, b.lengths_R)
        self._row_P = np.repeat(np.arange(len(self._common_R)), self._common_R)
        self._position_P = np.arange(len(self._row_P)) - np.repeat(
            np.cumsum(self._common_R) - self._common_R, self._common_R
        )
        self._at_P = tuple(span_index(side.begin_R, self._common_R) for side in self._sides)
        self._same_token_P: Bools = a.token_ids[self._at_P[0]] == b.token_ids[self._at_P[1]]
        first_R = self._first(~self._same_token_P)
        cut_R = (a.lengths_R != b.lengths_R) & (first_R == NOWHERE)
        self.until_R: Ints = np.where(cut_R, self._common_R, first_R)
        """First position whose token differs, or that only one of them has."""

    def parted(self, aspect: str) -> Parted:
        """How this aspect parts."""
        if aspect == "token_ids":
            parted_R = self.until_R != NOWHERE
            return Parted(
                compared_R=self._common_R, differing_R=parted_R.astype(np.int64), first_R=self.until_R, distance_D=None
            )
        if aspect == "support":
            a, b = (side.support for side in self._sides)
            differs_R = a != b
            first_R = np.where(differs_R, 0, NOWHERE)
            ones = np.ones(len(differs_R), np.int64)
            return Parted(compared_R=ones, differing_R=differs_R.astype(np.int64), first_R=first_R, distance_D=None)
        if aspect == "kept_ids":
            return self._sets()
        if aspect in ("behavior_logprobs", "log_kept_mass"):
            return self._numbers(aspect, own_token=aspect == "behavior_logprobs")
        return self._exact(aspect)

    def _first(self, differs_P: Bools) -> Ints:
        first_R = np.full(len(self._common_R), NOWHERE)
        at = np.flatnonzero(differs_P)
        rows, index = np.unique(self._row_P[at], return_index=True)
        first_R[rows] = self._position_P[at[index]]
        return first_R

    def _in_context(self, *, own_token: bool) -> Bools:
        """Positions with the same tokens before them, and the same token where b is compared."""
        until_P = self.until_R[self._row_P]
        same_P: Bools = self._position_P < until_P if own_token else self._position_P <= until_P
        return same_P

    def _told(self, compared_P: Bools, differs_P: Bools, distance_D: Floats | None = None) -> Parted:
        count = len(self._common_R)
        return Parted(
            compared_R=np.bincount(self._row_P[compared_P], minlength=count),
            differing_R=np.bincount(self._row_P[differs_P], minlength=count),
            first_R=self._first(differs_P),
            distance_D=distance_D,
        )

    def _numbers(self, aspect: str, *, own_token: bool) -> Parted:
        a_P, b_P = (side.per_token(aspect)[at] for side, at in zip(self._sides, self._at_P, strict=True))
        compared_P = self._in_context(own_token=own_token) & ~(np.isnan(a_P) & np.isnan(b_P))
        both_P = compared_P & np.isfinite(a_P) & np.isfinite(b_P)
        with np.errstate(invalid="ignore"):
            distance_P = np.abs(a_P - b_P)
        differs_P = compared_P & ~((distance_P <= self._tolerance) | (a_P == b_P))
        return self._told(compared_P, differs_P, distance_P[both_P])

    def _exact(self, aspect: str) -> Parted:
        a_P, b_P = (side.per_token(aspect)[at] for side, at in zip(self._sides, self._at_P, strict=True))
        compared_P = self._in_context(own_token=aspect == "sampled")
        compared_P &= ~(np.isnan(a_P) & np.isnan(b_P))
        return self._told(compared_P, compared_P & (a_P != b_P))

    def _sets(self) -> Parted:
        a, b = self._sides
        has_R = a.has_sets_R & b.has_sets_R
        compared_P = self._in_context(own_token=False) & has_R[self._row_P]
        at = np.flatnonzero(compared_P)
        begins, sizes = zip(*(side.set_spans(self._row_P[at], self._position_P[at]) for side in (a, b)), strict=True)
        differs = sizes[0] != sizes[1]
        alike = np.flatnonzero(~differs)
        index = [span_index(begin[alike], size[alike]) for begin, size in zip(begins, sizes, strict=True)]
        token_N = np.repeat(alike, sizes[0][alike])
        unequal_N = a.set_ids[index[0]] != b.set_ids[index[1]]
        differs[token_N[unequal_N]] = True
        differs_P = np.zeros(len(compared_P), bool)
        differs_P[at[differs]] = True
        return self._told(compared_P, differs_P)


class _Side:
    """One recording's columns as arrays."""

    def __init__(self, rows: pa.RecordBatch | pa.Table) -> None:
        self._rows = rows
        tokens = Ragged.from_arrow(self._column("token_ids"))
        self.token_ids = tokens.values
        self.lengths_R: Ints = tokens.lengths.astype(np.int64)
        self.begin_R: Ints = np.asarray(tokens.offsets[:-1], np.int64)
        self.support = np.array(self._column("support").to_pylist(), object)
        self._row_T = row_index(tokens.offsets)
        nested = NestedRagged.from_arrow(self._column("kept_ids"))
        self._set_rows_R1 = np.asarray(nested.row_offsets, np.int64)
        self._set_offsets = np.asarray(nested.inner.offsets, np.int64)
        self.set_ids = nested.inner.values
        whole_R = np.diff(self._set_rows_R1) == self.lengths_R
        self.has_sets_R: Bools = whole_R if nested.row_valid is None else whole_R & nested.row_valid

    def _column(self, name: str) -> pa.Array:
        column = self._rows.column(name)
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

    def per_token(self, name: str) -> Floats:
        """One number for each of `token_ids`; NaN where there is none, or the list is of another length."""
        column = Ragged.from_arrow(self._column(name))
        values_T = np.full(len(self.token_ids), np.nan)
        fits_R = column.lengths == self.lengths_R
        if column.row_valid is not None:
            fits_R &= column.row_valid
        fits_T = fits_R[self._row_T]
        values = column.values.astype(np.float64)
        if column.valid is not None:
            values[~column.valid] = np.nan
        values_T[fits_T] = values[np.repeat(fits_R, column.lengths)]
        return values_T

    def set_spans(self, rows: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Where the sets of these tokens begin, and how large they are."""
        token = self._set_rows_R1[rows] + positions
        begin = self._set_offsets[token]
        return begin, self._set_offsets[token + 1] - begin
