"""Where in a trainer's layout the logits that predict each response token sit.

A causal model's logits at position i predict the token at i + 1, so the token at own position i is scored at i - 1;
the first token of a response is predicted at the last position of its prompt.

    padded:  flat index of own position = row * L + padding on the left + prompt length + position in the response
    packed:  cu_seqlens[row]            +                                 prompt length + position in the response

Either can be cut along the sequence for context parallelism: see `context_split`.

Legend: B responses, L padded length, P packed length, T sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput, ViolationError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity
from keptset.schemas.ragged import offsets_of, row_index
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.sampled_tokens import Bools, Ints, SampledTokens, sampled_tokens


class Aligned(Protocol):
    """What scoring needs of a layout."""

    @property
    def num_positions(self) -> int:
        """Rows of the logits that this layout expects."""

    @property
    def logit_index_T(self) -> Ints:
        """The row of the logits that predicts each token."""

    @property
    def tokens(self) -> SampledTokens:
        """The sampled tokens that are scored, in the order of logit_index_T."""


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """Prompt and response of each row on a grid [B, L]."""

    input_ids_BL: Ints
    position_ids_BL: Ints
    """0 at the first token of the prompt, and on the padding."""
    attention_mask_BL: Bools
    """False on the padding."""
    response_mask_BL: Bools
    """True at every response token's own position, sampled or not."""
    loss_mask_BL: Bools
    """True at the own position of tokens that are sampled and trainable."""
    logit_index_T: Ints
    """Into [B * L]: the position whose logits predict sampled token t; its own position is one further."""
    tokens: SampledTokens
    """The sampled tokens, in the order of logit_index_T: behaviour log-probabilities, kept ids and offsets."""

    @property
    def num_positions(self) -> int:
        """B * L: rows of the logits that this layout expects."""
        return int(self.input_ids_BL.size)

    def on_grid(self, values_T: ArrayLike, fill: float) -> NDArray[np.generic]:
        """Values of the sampled tokens at their own positions [B, L], `fill` elsewhere."""
        values_T = np.asarray(values_T)
        grid = np.full(self.num_positions, fill, values_T.dtype)
        grid[self.logit_index_T + 1] = values_T
        return grid.reshape(self.input_ids_BL.shape)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Prompt and response of each row, row after row on one axis [P].

    A row that is padded is padded at its end, where causal attention lets nothing of it be seen."""

    input_ids_P: Ints
    position_ids_P: Ints
    """Start again at 0 in each row; 0 on padding."""
    cu_seqlens_B1: NDArray[np.int32]
    """Row r is [cu_seqlens[r], cu_seqlens[r + 1]), its padding included; int32 as attention kernels take it."""
    max_seqlen: int
    """Of the longest row, its padding included."""
    response_mask_P: Bools
    loss_mask_P: Bools
    logit_index_T: Ints
    """Into [P]: the position whose logits predict sampled token t."""
    tokens: SampledTokens

    @property
    def num_positions(self) -> int:
        """P: rows of the logits that this layout expects."""
        return len(self.input_ids_P)


def to_padded(
    batch: RolloutBatch, *, pad_token_id: int, side: Literal["left", "right"], length: int | None = None
) -> PaddedBatch:
    """Lay a batch out on a grid, padded on one side to `length` (None: the longest row).

    Errors: ViolationError of kind `prompt` where the first token was sampled and no prompt precedes it; InvalidInput
    where a row is longer than `length`: rows are never cut.

    >>> from keptset.schemas.builder import BatchBuilder, Response
    >>> from keptset.schemas.columns import Identity
    >>> builder = BatchBuilder(Identity(vocab_size=9))
    >>> builder.add(Response(rollout_id="r", prompt_id="p", finish_reason="stop",
    ...     prompt_token_ids=np.array([5, 6]), token_ids=np.array([7, 8]),
    ...     kept_offsets=np.array([0, 1, 3]), kept_ids=np.array([7, 2, 8])))
    >>> padded = to_padded(builder.build(), pad_token_id=0, side="left", length=5)
    >>> padded.input_ids_BL.tolist(), padded.logit_index_T.tolist()
    ([[0, 5, 6, 7, 8]], [2, 3])
    """
    if side not in ("left", "right"):
        raise InvalidInput(f"side is {side!r}; it must be 'left' or 'right'")
    rows = _Rows(batch)
    longest = int(rows.length_B.max(initial=0))
    width = longest if length is None else length
    if longest > width:
        row = int(np.argmax(rows.length_B))
        raise InvalidInput(
            f"response {batch.rollout_ids[row]} has {longest} tokens with its prompt, more than length = {width}; "
            f"give a larger length or filter the batch"
        )
    padding_B = width - rows.length_B if side == "left" else np.zeros_like(rows.length_B)
    start_B = np.arange(len(rows.length_B)) * width + padding_B
    shape = (len(rows.length_B), width)
    where = rows.place(start_B)
    return PaddedBatch(
        input_ids_BL=_ids(shape, pad_token_id, rows.ids_P, where.all_P),
        position_ids_BL=_ids(shape, 0, rows.position_P, where.all_P),
        attention_mask_BL=_mask(shape, where.all_P),
        response_mask_BL=_mask(shape, where.response_A),
        loss_mask_BL=_mask(shape, where.sampled_T[rows.tokens.trainable_T]),
        logit_index_T=where.sampled_T - 1,
        tokens=rows.tokens,
    )


def to_packed(batch: RolloutBatch, *, row_multiple: int = 1, pad_token_id: int = 0) -> PackedBatch:
    """Lay a batch out on one axis, each row padded at its end to a multiple of `row_multiple` (1: no padding).

    Errors: ViolationError of kind `prompt` where the first token was sampled and no prompt precedes it; InvalidInput
    where `row_multiple` is below 1.
    """
    if row_multiple < 1:
        raise InvalidInput(f"row_multiple is {row_multiple}; it must be >= 1, where 1 pads nothing")
    rows = _Rows(batch)
    length_B = -(-rows.length_B // row_multiple) * row_multiple
    cu_seqlens_B1 = offsets_of(length_B)
    where = rows.place(cu_seqlens_B1[:-1])
    shape = (int(cu_seqlens_B1[-1]),)
    return PackedBatch(
        input_ids_P=_ids(shape, pad_token_id, rows.ids_P, where.all_P),
        position_ids_P=_ids(shape, 0, rows.position_P, where.all_P),
        cu_seqlens_B1=cu_seqlens_B1.astype(np.int32),
        max_seqlen=int(length_B.max(initial=0)),
        response_mask_P=_mask(shape, where.response_A),
        loss_mask_P=_mask(shape, where.sampled_T[rows.tokens.trainable_T]),
        logit_index_T=where.sampled_T - 1,
        tokens=rows.tokens,
    )


def _ids(shape: tuple[int, ...], fill: int, values: Ints, at: Ints) -> Ints:
    flat: Ints = np.full(int(np.prod(shape)), fill, np.int64)
    flat[at] = values
    return flat.reshape(shape)


def _mask(shape: tuple[int, ...], at: Ints) -> Bools:
    flat: Bools = np.zeros(int(np.prod(shape)), bool)
    flat[at] = True
    return flat.reshape(shape)


@dataclass(frozen=True)
class _Places:
    all_P: Ints
    """Own positions of every prompt and response token."""
    response_A: Ints
    """Own positions of every response token."""
    sampled_T: Ints
    """Own positions of the sampled tokens."""


class _Rows:
    """Prompt and response of each row joined: ids and positions back to back, before any layout."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.tokens = sampled_tokens(batch)
        response = batch.token_ids
        prompt = batch.prompt_token_ids
        self._prompt_length_B = np.zeros(len(response), np.int64) if prompt is None else prompt.lengths.astype(np.int64)
        _require_prompts(self.tokens, self._prompt_length_B)
        self._response_offsets_B1 = np.asarray(response.offsets, np.int64)
        self.length_B: Ints = self._prompt_length_B + np.diff(self._response_offsets_B1)
        self._packed_B1 = offsets_of(self.length_B)
        row_P = row_index(self._packed_B1)
        self.position_P: Ints = np.arange(len(row_P)) - self._packed_B1[row_P]
        in_prompt_P = self.position_P < self._prompt_length_B[row_P]
        self.ids_P: Ints = np.empty(len(row_P), np.int64)
        self.ids_P[~in_prompt_P] = response.values
        if prompt is not None:
            self.ids_P[in_prompt_P] = prompt.values
        self._row_P = row_P
        self._in_prompt_P = in_prompt_P

    def place(self, start_B: Ints) -> _Places:
        """Flat positions in a layout whose rows begin at `start_B`."""
        all_P = start_B[self._row_P] + self.position_P
        response_A = all_P[~self._in_prompt_P]
        tokens = self.tokens
        return _Places(
            all_P=all_P,
            response_A=response_A,
            sampled_T=response_A[self._response_offsets_B1[tokens.row_T] + tokens.position_T],
        )


def _require_prompts(tokens: SampledTokens, prompt_length_B: Ints) -> None:
    first_T = tokens.position_T == 0
    rows = tokens.row_T[first_T & (prompt_length_B[tokens.row_T] == 0)]
    if not len(rows):
        return
    examples = tuple(
        Example(rollout_id=tokens.rollout_ids[row], position=0, detail="sampled, and nothing stands before it")
        for row in rows[:3].tolist()
    )
    finding = Finding(
        kind=FindingKind.PROMPT, severity=Severity.ERROR, count=len(rows), responses=len(rows), examples=examples
    )
    raise ViolationError(f"no logits predict the first token: {finding}; record prompt_token_ids", (finding,))
