"""The logits of listed ids, from hidden states: one dot product for each pair of a position and a kept id.

    z_m = h_row(m) . W_id(m) + bias_id(m)      dh_row += d_m W_id      dW_id += d_m h_row      dbias_id += d_m

Pairs go in chunks whose rows stay in a cache; on a host NumPy does them (`host_pairs`). A dense product over the union
of a chunk's ids computes more than it saves: see docs/scoring.md for the measurement.

Legend: M pairs, C pairs of one chunk, R positions, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keptset.trainer_bridge.scoring.hand import Ints, Tensor
from keptset.trainer_bridge.scoring.head import Head
from keptset.trainer_bridge.scoring.head_hand import HeadHand
from keptset.trainer_bridge.scoring.host_pairs import HostPairs, HostWork, add_weighted_rows, dots, weighted_rows


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Positions and rows of the head that meet."""

    rows_M: Ints
    ids_M: Ints
    """Rows of the head as it lies here: ids less the first of the shard."""

    @cached_property
    def on_host(self) -> HostPairs:
        """For NumPy."""
        return HostPairs(self.rows_M, self.ids_M)

    def take(self, index: Ints) -> Pairs:
        """Some of them."""
        return Pairs(rows_M=self.rows_M[index], ids_M=self.ids_M[index])


def _chunks(hand: HeadHand, num: int, hidden_size: int, scratch_bytes: int) -> Iterator[slice]:
    """As many pairs as two rows each, in the working dtype, fit into a cache and into the bound."""
    step = max(1, min(hand.cache_bytes, scratch_bytes) // (2 * hand.item_bytes * hidden_size))
    return (slice(begin, min(begin + step, num)) for begin in range(0, num, step))


def _on_host(hand: HeadHand, scratch_bytes: int) -> HostWork:
    return HostWork(dtype=hand.working_dtype, scratch_bytes=scratch_bytes, threads=hand.threads)


def pair_logits(hand: HeadHand, hidden_RH: Tensor, head: Head, pairs: Pairs, scratch_bytes: int) -> Tensor:
    """The logits of M >= 1 pairs, [M]."""
    arrays = hand.host_arrays(hidden_RH, head.weight_VH)
    ids_M = hand.ints(pairs.ids_M)
    if arrays is not None:
        states_RH, weight_VH = arrays
        z_M = hand.floats(dots(states_RH, weight_VH, pairs.on_host, _on_host(hand, scratch_bytes)))
    else:
        rows_M = hand.ints(pairs.rows_M)
        z_M = hand.concatenate(
            [
                hand.dots(hand.rows_at(head.weight_VH, ids_M[chunk]), hand.rows_at(hidden_RH, rows_M[chunk]))
                for chunk in _chunks(hand, len(pairs.rows_M), int(hidden_RH.shape[1]), scratch_bytes)
            ]
        )
    if head.bias_V is not None:
        z_M = z_M + hand.rows_at(head.bias_V.reshape([-1, 1]), ids_M).reshape([-1])
    return z_M


def hidden_gradient(
    hand: HeadHand, hidden_RH: Tensor, head: Head, pairs: Pairs, gradient_M: Tensor, scratch_bytes: int
) -> Tensor:
    """What the pairs' logits pass on to the hidden states, [R, H]; exactly 0 for rows without a pair."""
    num_rows = int(hidden_RH.shape[0])
    arrays = hand.host_arrays(head.weight_VH)
    if arrays is not None and len(pairs.ids_M):
        how, d_M = _on_host(hand, scratch_bytes), hand.to_host(gradient_M)
        return hand.adopt(weighted_rows(arrays[0], pairs.on_host, d_M, num_rows, how))
    gradient_RH = hand.zeros([num_rows, int(hidden_RH.shape[1])])
    rows_M, ids_M = hand.ints(pairs.rows_M), hand.ints(pairs.ids_M)
    for chunk in _chunks(hand, len(pairs.rows_M), int(gradient_RH.shape[1]), scratch_bytes):
        weight_CH = hand.rows_at(head.weight_VH, ids_M[chunk])
        hand.add_rows(gradient_RH, rows_M[chunk], gradient_M[chunk], weight_CH)
    return gradient_RH


def add_weight_gradient(
    hand: HeadHand,
    hidden_RH: Tensor,
    pairs: Pairs,
    places_M: Ints,
    gradient_M: Tensor,
    gradient_UH: Tensor,
    scratch_bytes: int,
    *,
    fresh: bool,
) -> None:
    """Add what the pairs' logits pass on into rows `places_M` of the gradient of the weight.

    `fresh`: it holds nothing but zeros so far."""
    arrays, into_UH = hand.host_arrays(hidden_RH), hand.host_memory(gradient_UH)
    if arrays is not None and into_UH is not None and len(pairs.ids_M):
        how, order = _on_host(hand, scratch_bytes), np.argsort(places_M, kind="stable")
        d_M = hand.to_host(gradient_M)[order]
        by_place = HostPairs(places_M[order], pairs.rows_M[order])
        add_weighted_rows(into_UH, arrays[0], by_place, d_M, how, fresh=fresh)
        return
    rows_M, at_M = hand.ints(pairs.rows_M), hand.ints(places_M)
    for chunk in _chunks(hand, len(pairs.rows_M), int(hidden_RH.shape[1]), scratch_bytes):
        hidden_CH = hand.rows_at(hidden_RH, rows_M[chunk])
        hand.add_rows(gradient_UH, at_M[chunk], gradient_M[chunk], hidden_CH)


def nonzero_pairs(hand: HeadHand, pairs: Pairs, gradient_M: Tensor) -> tuple[Pairs, Tensor]:
    """Without the pairs whose gradient is 0, whatever their rows hold: 0 * nan counts as 0."""
    kept = np.flatnonzero(hand.to_host(gradient_M) != 0)
    if len(kept) == len(pairs.ids_M):
        return pairs, gradient_M
    return pairs.take(kept), hand.take(gradient_M, hand.ints(kept))
