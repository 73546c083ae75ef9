"""Runs of tokens that go through the decoder together, and how attention batches them.

Segments of similar length form a group, attended in one batched product: all single tokens (decoding) are one group,
longer runs are grouped so that the longest of a group is at most about 1.4 times the shortest. Padding queries repeat a
segment's last token and their results are dropped.

Dims: S segments, T tokens, N segments of a group, L queries of each, W keys of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keptset.schemas.errors import InvalidInput

# Scores a group may hold, over all heads: few enough to stay near the processor's cache, enough to amortise a call.
_MOST_SCORES = 1 << 21

# Runs of up to this many tokens are one group: there, another call costs more than padding.
_SHORT = 8


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`length` consecutive tokens of one sequence."""

    slot: int
    """Cache slot of the sequence; ignored without a cache."""
    start: int
    """Position of the first token in the sequence; 0 without a cache."""
    length: int
    """Tokens, >= 1."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Segments attended in one product."""

    rows_NL: np.ndarray
    """Flat token of each query, int64."""
    real_NL: np.ndarray
    """False where the query is padding."""
    visible_NL: np.ndarray
    """How many keys each query sees: its own position + 1."""
    slots_N: np.ndarray
    """Cache slots; zeros without a cache."""
    key_rows_NW: np.ndarray
    """Flat token of each key among the tokens of this call (used without a cache)."""

    @property
    def width(self) -> int:
        """Keys that the longest-sighted query sees."""
        return int(self.visible_NL.max())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Segments as arrays."""

    starts_S: np.ndarray
    lengths_S: np.ndarray
    slots_S: np.ndarray
    offsets_S: np.ndarray
    """Flat token each segment begins at."""

    @property
    def positions_T(self) -> np.ndarray:
        return np.arange(int(self.lengths_S.sum())) + np.repeat(self.starts_S - self.offsets_S, self.lengths_S)

    @property
    def slots_T(self) -> np.ndarray:
        return np.repeat(self.slots_S, self.lengths_S)

    @property
    def ends_S(self) -> np.ndarray:
        return self.starts_S + self.lengths_S


def layout_of(segments: Sequence[Segment], num_tokens: int, max_positions: int) -> Layout:
    """Check segments against the tokens they describe.

    Errors: InvalidInput where there is none, one is empty or starts before 0, one passes `max_positions`, or their
    lengths do not add up to `num_tokens`.
    """
    if not segments:
        raise InvalidInput("no segments; forward needs at least one")
    table_S3 = np.array([(s.slot, s.start, s.length) for s in segments], dtype=np.int64)
    slots_S, starts_S, lengths_S = table_S3.T
    wrong = (lengths_S < 1) | (starts_S < 0) | (starts_S + lengths_S > max_positions)
    if wrong.any():
        i = int(wrong.argmax())
        raise InvalidInput(
            f"segment {i} is {segments[i]}; it must hold at least one token and lie within the model's "
            f"{max_positions} positions"
        )
    if lengths_S.sum() != num_tokens:
        raise InvalidInput(f"segments describe {lengths_S.sum()} tokens, and {num_tokens} token ids were given")
    return Layout(starts_S=starts_S, lengths_S=lengths_S, slots_S=slots_S, offsets_S=np.cumsum(lengths_S) - lengths_S)


def groups_of(layout: Layout, num_heads: int) -> list[Group]:
    """All segments, grouped; within a group in ascending order of slots."""
    longer_S = np.ceil(2 * np.log2(np.maximum(layout.lengths_S, _SHORT)))
    buckets_S = np.where(layout.lengths_S == 1, 0, longer_S)
    order_S = np.lexsort((layout.slots_S, buckets_S))
    cuts = np.flatnonzero(np.diff(buckets_S[order_S])) + 1
    return [group for bucket in np.split(order_S, cuts) for group in _within_budget(layout, bucket, num_heads)]


def _within_budget(layout: Layout, bucket: np.ndarray, num_heads: int) -> Iterator[Group]:
    """Cut a bucket so that no group exceeds `_MOST_SCORES`; one segment above it is cut by queries."""
    length, width = int(layout.lengths_S[bucket].max()), int(layout.ends_S[bucket].max())
    together = max(1, _MOST_SCORES // (num_heads * length * width))
    queries = max(1, min(length, _MOST_SCORES // (num_heads * width)))
    for first in range(0, len(bucket), together):
        members = bucket[first : first + together]
        for begin in range(0, int(layout.lengths_S[members].max()), queries):
            yield _group(layout, members, begin, queries)


def _group(layout: Layout, members: np.ndarray, begin: int, queries: int) -> Group:
    """Queries [begin, begin + queries) of each member."""
    lengths_N1 = layout.lengths_S[members][:, None]
    offsets_N1 = layout.offsets_S[members][:, None]
    local_L = np.arange(begin, min(begin + queries, int(lengths_N1.max())))
    within_NL = np.minimum(local_L, lengths_N1 - 1)
    visible_NL = layout.starts_S[members][:, None] + within_NL + 1
    return Group(
        rows_NL=offsets_N1 + within_NL,
        real_NL=local_L < lengths_N1,
        visible_NL=visible_NL,
        slots_N=layout.slots_S[members],
        key_rows_NW=offsets_N1 + np.minimum(np.arange(int(visible_NL.max())), lengths_N1 - 1),
    )
