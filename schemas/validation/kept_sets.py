"""Checks of the kept sets: ids in the vocabulary, strictly ascending, holding the sampled token, no larger than top_k.

Sets are read in blocks that stay in cache. A block costs five passes over its ids while nothing is wrong in it; only a
block with a fault is looked at token by token (still without a loop over tokens).

Legend: T tokens, N kept ids, C tokens of a block, M ids of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow.compute as pc

from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import AnyArray, BoolArray, IntArray
from keptset.schemas.validation.collector import Collector, Indices, always
from keptset.schemas.validation.responses import outside, range_detail
from keptset.schemas.validation.tokens_view import SetColumn, TokenView

BLOCK_IDS = 2**16
"""Ids looked at together: their temporaries fit the second-level cache."""


def check_kept_sets(view: TokenView, sets: SetColumn | None, collector: Collector) -> None:
    """Kinds `nulls`, `range`, `sorted`, `empty_set`, `member`, `set_size` for response tokens and their kept sets."""
    tokens_T, vocab_size = view.token_ids_T, view.batch.identity.vocab_size
    foreign_T = outside(tokens_T, vocab_size)
    if foreign_T is not None:
        tokens = np.flatnonzero(foreign_T)
        collector.add(
            FindingKind.RANGE,
            *view.locate(tokens),
            lambda i: range_detail(int(tokens_T[tokens[i]]), vocab_size, "token_ids"),
        )
    _check_top_ids(view, collector)
    if sets is None or not view.num_tokens:
        return
    check_set_nulls(view, sets, "kept_ids", collector)
    lengths_T = np.diff(sets.offsets_T1)
    has_set_T = np.ones(view.num_tokens, bool) if sets.valid_T is None else sets.valid_T
    drawn_T = has_set_T & view.sampled_T
    empty = np.flatnonzero(drawn_T & (lengths_T == 0))
    collector.add(FindingKind.EMPTY_SET, *view.locate(empty), lambda i: "sampled, and its kept set has no member")
    _check_sizes(view, lengths_T, collector)

    # A token outside the vocabulary is in no sound set: that is told once, as `range`.
    wanted_T = drawn_T & (lengths_T > 0)
    if foreign_T is not None:
        wanted_T &= ~foreign_T
    found = [_block_faults(sets, block, tokens_T, wanted_T, vocab_size) for block in blocks(sets.offsets_T1)]
    for number, kind in enumerate((FindingKind.RANGE, FindingKind.SORTED, FindingKind.MEMBER)):
        at = np.concatenate([faults[number] for faults in found])
        collector.add(kind, *view.locate(at), partial(_detail, kind, sets, at, tokens_T, vocab_size))


def blocks(offsets_T1: IntArray) -> Iterator[tuple[int, int]]:
    """Token ranges that cover all tokens with about BLOCK_IDS ids each; a larger set stays whole."""
    total = int(offsets_T1[-1])
    cuts = np.searchsorted(offsets_T1, np.arange(BLOCK_IDS, total, BLOCK_IDS))
    edges = np.unique(np.concatenate([[0], cuts, [len(offsets_T1) - 1]]))
    yield from zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)


def check_set_nulls(view: TokenView, sets: SetColumn, name: str, collector: Collector) -> None:
    """Inner lists must be null exactly where the token was not sampled."""
    if sets.valid_T is None and view.sampled_T.all():
        return
    valid_T = np.ones(view.num_tokens, bool) if sets.valid_T is None else sets.valid_T
    expected_T = view.sampled_T if sets.known_T is None else view.sampled_T & sets.known_T
    holes, surplus = np.flatnonzero(expected_T & ~valid_T), np.flatnonzero(valid_T & ~expected_T)
    collector.add(FindingKind.NULLS, *view.locate(holes), always(f"{name} is null though the token was sampled"))
    collector.add(
        FindingKind.NULLS, *view.locate(surplus), always(f"{name} is not null though the token was not sampled")
    )


def _check_sizes(view: TokenView, lengths_T: AnyArray, collector: Collector) -> None:
    top_k_B = pc.fill_null(view.batch.column("top_k"), 0).to_numpy(zero_copy_only=False)
    limit_T = view.spread(np.where(top_k_B > 0, top_k_B, np.iinfo(np.int32).max))
    large = np.flatnonzero(lengths_T > limit_T)

    def detail(i: int) -> str:
        limit = limit_T[large[i] if len(limit_T) > 1 else 0]
        return f"kept set has {lengths_T[large[i]]} members, top_k is {limit}"

    collector.add(FindingKind.SET_SIZE, *view.locate(large), detail)


def _block_faults(
    sets: SetColumn, block: tuple[int, int], tokens_T: AnyArray, wanted_T: BoolArray, vocab_size: int | None
) -> tuple[Indices, Indices, Indices]:
    """Tokens of the block whose sets are out of range, not ascending, or without the sampled token."""
    start, stop = block
    offsets_C1 = sets.offsets_T1[start : stop + 1].astype(np.int64)
    ids_M = sets.values_N[offsets_C1[0] : offsets_C1[-1]]
    offsets_C1 -= offsets_C1[0]
    lengths_C = np.diff(offsets_C1)
    wanted_C = wanted_T[start:stop]
    if not len(ids_M):  # then no token is wanted either
        return _NONE, _NONE, _NONE

    foreign_M = outside(ids_M, vocab_size)
    ascends_M1 = np.empty(len(ids_M) + 1, bool)
    np.greater(ids_M[1:], ids_M[:-1], out=ascends_M1[1:-1])
    ascends_M1[offsets_C1] = True
    hit_M = np.repeat(tokens_T[start:stop], lengths_C) == ids_M
    if not wanted_C.all():
        hit_M &= np.repeat(wanted_C, lengths_C)
    ascending = bool(ascends_M1.all())
    # An ascending set is hit at most once, so as many hits as wanted tokens means that each has its own.
    if ascending and foreign_M is None and np.count_nonzero(hit_M) == np.count_nonzero(wanted_C):
        return _NONE, _NONE, _NONE
    missed_C = wanted_C & ~_any_in(hit_M, offsets_C1)
    foreign_C = _NONE if foreign_M is None else np.flatnonzero(_any_in(foreign_M, offsets_C1))
    unsorted_C = _NONE if ascending else np.flatnonzero(_any_in(~ascends_M1[:-1], offsets_C1))
    return start + foreign_C, start + unsorted_C, start + np.flatnonzero(missed_C)


_NONE = np.zeros(0, np.int64)


def _any_in(flags_M: BoolArray, offsets_C1: IntArray) -> BoolArray:
    """For each list whether any of its items is flagged."""
    counts = np.concatenate([[0], np.cumsum(flags_M)])
    flagged: BoolArray = counts[offsets_C1[1:]] > counts[offsets_C1[:-1]]
    return flagged


def _detail(kind: FindingKind, sets: SetColumn, at: Indices, tokens_T: AnyArray, vocab_size: int | None, i: int) -> str:
    members = sets.values_N[sets.offsets_T1[at[i]] : sets.offsets_T1[at[i] + 1]]
    if kind is FindingKind.RANGE:
        return range_detail(int(members[outside(members, vocab_size)][0]), vocab_size, "kept_ids")
    if kind is FindingKind.SORTED:
        place = int(np.flatnonzero(members[1:] <= members[:-1])[0])
        return f"kept_ids go from {members[place]} to {members[place + 1]} at place {place + 1}"
    return f"token {tokens_T[at[i]]} is not among its {len(members)} kept ids"


def _check_top_ids(view: TokenView, collector: Collector) -> None:
    """`top_ids` and `top_logprobs` are given together, entry by entry; ids lie in the vocabulary."""
    given, scored = view.sets("top_ids"), view.sets("top_logprobs")
    if given is None and scored is None:
        return
    nothing = SetColumn(
        np.zeros(view.num_tokens + 1, np.int64), np.zeros(0, np.int32), np.zeros(view.num_tokens, bool), None
    )
    ids, logprobs = given or nothing, scored or nothing
    vocab_size = view.batch.identity.vocab_size
    foreign_N = outside(ids.values_N, vocab_size)
    if foreign_N is not None:
        items = np.flatnonzero(foreign_N)
        tokens = np.searchsorted(ids.offsets_T1, items, side="right") - 1
        collector.add(
            FindingKind.RANGE,
            *view.locate(tokens),
            lambda i: range_detail(int(ids.values_N[items[i]]), vocab_size, "top_ids"),
        )
    valid_T, scored_T = (np.True_ if column.valid_T is None else column.valid_T for column in (ids, logprobs))
    lone = np.flatnonzero(np.broadcast_to(valid_T != scored_T, view.num_tokens))
    collector.add(FindingKind.NULLS, *view.locate(lone), always("of top_ids and top_logprobs only one is null"))
    compare_lengths(view, ("top_ids", ids), ("top_logprobs", logprobs), collector)


def compare_lengths(
    view: TokenView, one: tuple[str, SetColumn], other: tuple[str, SetColumn], collector: Collector
) -> Indices:
    """Reports tokens where both columns are given and differ in length; returns them."""
    (name, ours), (other_name, theirs) = one, other
    ours_T, theirs_T = np.diff(ours.offsets_T1), np.diff(theirs.offsets_T1)
    differ_T = ours_T != theirs_T
    for column in (ours, theirs):
        if column.valid_T is not None:
            differ_T &= column.valid_T
    tokens = np.flatnonzero(differ_T)
    collector.add(
        FindingKind.LENGTHS,
        *view.locate(tokens),
        lambda i: f"{name} has {ours_T[tokens[i]]} entries, {other_name} {theirs_T[tokens[i]]}",
    )
    return tokens
