"""One rank's share of a layout that is cut along the sequence, as context parallelism does.

    contiguous   rank r of R holds piece r of R                              (all-gather attention, Ulysses)
    zigzag       rank r holds pieces r and 2R - 1 - r of 2R                  (ring attention: causal work is even)

A padded grid is cut by columns. A packed axis is cut as a whole by `contiguous`, row by row by `zigzag`. A token is
scored by the rank that holds the position before it, whoever holds the token itself: what is looked for is settled on
the whole layout, before it is cut.

Legend: T sampled tokens, of the whole layout or of one slice; L padded, P packed length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from keptset.schemas.errors import InvalidInput
from keptset.schemas.ragged import span_index
from keptset.trainer_bridge.alignment import PackedBatch, PaddedBatch
from keptset.trainer_bridge.sampled_tokens import Bools, Ints, SampledTokens

Scheme = Literal["contiguous", "zigzag"]


@dataclass(frozen=True, kw_only=True)
class ContextSlice:
    """What one rank consumes. Its arrays have the local shape: [B, L / R] of a padded layout, [P / R] of a packed one.

    `score_aligned(slice, logits)` takes the rank's own logits, unshifted, and scores the rank's own tokens.
    """

    rank: int
    num_ranks: int
    scheme: Scheme
    whole: PaddedBatch | PackedBatch
    """What was cut. Attention over a packed axis needs its cu_seqlens_B1."""
    input_ids: Ints
    position_ids: Ints
    """Those of the whole layout: a piece goes on where its row left off."""
    attention_mask: Bools
    """False on padding; all True in a packed layout."""
    response_mask: Bools
    """True at every response token's own position that lies here."""
    loss_mask: Bools
    """True at the own position of tokens that are sampled and trainable, where that lies here."""
    position_index: Ints
    """Of each local position: its flat position in the whole layout."""
    token_index_T: Ints
    """Which of the whole layout's sampled tokens are scored here, ascending."""
    logit_index_T: Ints
    """Into the local flat axis: the position whose logits predict each of them."""
    tokens: SampledTokens
    """Those tokens."""

    @property
    def num_positions(self) -> int:
        """Rows of the logits that this rank makes."""
        return int(self.input_ids.size)


def context_slice(
    aligned: PaddedBatch | PackedBatch, rank: int, num_ranks: int, *, scheme: Scheme = "zigzag"
) -> ContextSlice:
    """The share of one rank.

    Errors: InvalidInput where ranks do not fit, or the layout is no multiple of the pieces: say so to `to_padded` by
    `length`, to `to_packed` by `row_multiple`.
    """
    if not 0 <= rank < num_ranks:
        raise InvalidInput(f"rank is {rank} of {num_ranks}; it must lie in [0, num_ranks)")
    position_index = _positions(aligned, rank, num_ranks, scheme)
    where = np.full(aligned.num_positions, -1, np.int64)
    where[position_index.reshape(-1)] = np.arange(position_index.size)
    local_T = where[aligned.logit_index_T]
    token_index_T = np.flatnonzero(local_T >= 0)
    flat = _flat(aligned)
    return ContextSlice(
        rank=rank,
        num_ranks=num_ranks,
        scheme=scheme,
        whole=aligned,
        input_ids=flat.input_ids[position_index],
        position_ids=flat.position_ids[position_index],
        attention_mask=flat.attention_mask[position_index],
        response_mask=flat.response_mask[position_index],
        loss_mask=flat.loss_mask[position_index],
        position_index=position_index,
        token_index_T=token_index_T,
        logit_index_T=local_T[token_index_T],
        tokens=aligned.tokens.take(token_index_T),
    )


def gather_order(aligned: PaddedBatch | PackedBatch, num_ranks: int, *, scheme: Scheme = "zigzag") -> Ints:
    """Where each of the batch's sampled tokens stands [T] among all ranks' scores, rank after rank.

    `numpy.concatenate(scores of rank 0, 1, ...)[gather_order(...)]` are the scores in the order of the batch.

    Errors: as `context_slice`.
    """
    slices = [context_slice(aligned, rank, num_ranks, scheme=scheme) for rank in range(num_ranks)]
    return np.argsort(np.concatenate([part.token_index_T for part in slices]), kind="stable")


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """A layout's arrays on one axis."""

    input_ids: Ints
    position_ids: Ints
    attention_mask: Bools
    response_mask: Bools
    loss_mask: Bools


def _flat(aligned: PaddedBatch | PackedBatch) -> _Flat:
    if isinstance(aligned, PaddedBatch):
        return _Flat(
            input_ids=aligned.input_ids_BL.reshape(-1),
            position_ids=aligned.position_ids_BL.reshape(-1),
            attention_mask=aligned.attention_mask_BL.reshape(-1),
            response_mask=aligned.response_mask_BL.reshape(-1),
            loss_mask=aligned.loss_mask_BL.reshape(-1),
        )
    return _Flat(
        input_ids=aligned.input_ids_P,
        position_ids=aligned.position_ids_P,
        attention_mask=np.ones(aligned.num_positions, bool),
        response_mask=aligned.response_mask_P,
        loss_mask=aligned.loss_mask_P,
    )


def _positions(aligned: PaddedBatch | PackedBatch, rank: int, num_ranks: int, scheme: Scheme) -> Ints:
    """Flat positions of the whole layout that a rank holds, in its local shape."""
    if scheme == "contiguous":
        pieces, mine = num_ranks, [rank]
    elif scheme == "zigzag":
        pieces, mine = 2 * num_ranks, [rank, 2 * num_ranks - 1 - rank]
    else:
        raise InvalidInput(f"scheme is {scheme!r}; it must be 'contiguous' or 'zigzag'")
    if isinstance(aligned, PaddedBatch):
        rows, length = aligned.input_ids_BL.shape
        if length % pieces:
            raise InvalidInput(
                f"{scheme} over {num_ranks} ranks cuts rows into {pieces} pieces, and they have {length} positions: "
                f"give to_padded a length that is a multiple, say {-(-length // pieces) * pieces}"
            )
        size = length // pieces
        columns = np.concatenate([np.arange(piece * size, (piece + 1) * size) for piece in mine])
        return np.asarray(np.arange(rows)[:, None] * length + columns)
    bounds_B1 = aligned.cu_seqlens_B1.astype(np.int64)
    starts_B, lengths_B = bounds_B1[:-1], bounds_B1[1:] - bounds_B1[:-1]
    if scheme == "contiguous":
        starts_B, lengths_B = np.zeros(1, np.int64), np.array([aligned.num_positions])
    if (lengths_B % pieces).any():
        cut = "the axis" if scheme == "contiguous" else "each row"
        raise InvalidInput(
            f"{scheme} over {num_ranks} ranks cuts {cut} into {pieces} pieces, and one has "
            f"{lengths_B[lengths_B % pieces != 0][0]} positions: give to_packed row_multiple={pieces}"
        )
    sizes_B = lengths_B // pieces
    return span_index(
        np.stack([starts_B + piece * sizes_B for piece in mine], 1).reshape(-1), np.repeat(sizes_B, len(mine))
    )
