"""Where the head's gradient goes, where it is not left to autograd: in float32 whatever the weights' dtype.

Autograd takes a dense gradient in the weights' dtype, rounded once per call; added up over many calls in bfloat16 it
would stop growing at 256 times its terms. A buffer, or rows, are added up in float32 over as many calls as there are.

Legend: V rows of the head as it lies here, U rows that a call touched, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import Ints, Tensor
from keptset.trainer_bridge.scoring.head import Head
from keptset.trainer_bridge.scoring.head_hand import HeadHand, head_hand_for


@dataclass(frozen=True, kw_only=True)
class GradientRows:
    """Buffers that one backward pass adds into."""

    ids_U: Ints | None
    """Ascending rows of the head that the buffers stand for; None: all of them."""
    weight_UH: Tensor | None
    """None where no gradient of the weight is asked for; likewise the bias."""
    bias_U: Tensor | None
    fresh: bool
    """Whether they hold nothing but zeros so far."""

    def places(self, ids_M: Ints) -> Ints:
        """Where in the buffers these rows of the head are; all of them are there."""
        return ids_M if self.ids_U is None else np.searchsorted(self.ids_U, ids_M)


class HeadGradient(Protocol):
    """Takes part in `score_from_hidden(..., head_gradient=...)`."""

    def buffers(self) -> tuple[Tensor, ...]:
        """Those that it holds before any pass."""

    def check(self, hand: HeadHand, head: Head) -> None:
        """InvalidInput where it cannot take this head's gradient."""

    def rows(self, hand: HeadHand, head: Head, ids_M: Ints | None) -> GradientRows:
        """Buffers that a pass adds into, which touches rows `ids_M` (None: all of them)."""


class DenseHeadGradient:
    """A buffer of the whole head that every backward pass adds into; the weights' own `.grad` stays untouched.

    Like the `main_grad` of trainers that keep master weights: zero it, or hand it to the optimizer, once per step. One
    backward pass at a time: two threads that add into one buffer lose what they add at once.
    """

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None = None) -> None:
        """`weight_VH` and `bias_V` are the buffers, float32 (or float64 for float64 hidden states)."""
        self.weight_VH = weight_VH
        self.bias_V = bias_V

    def buffers(self) -> tuple[Tensor, ...]:
        return (self.weight_VH,) if self.bias_V is None else (self.weight_VH, self.bias_V)

    def check(self, hand: HeadHand, head: Head) -> None:
        """InvalidInput where a buffer is missing, left over, or of another shape or dtype."""
        for name, buffer, of in (("weight", self.weight_VH, head.weight_VH), ("bias", self.bias_V, head.bias_V)):
            if buffer is None and of is None:
                continue
            if buffer is None or of is None:
                raise InvalidInput(f"the head has {'no ' if of is None else 'a '}bias; give a buffer for it just then")
            if [int(n) for n in buffer.shape] != [int(n) for n in of.shape]:
                raise InvalidInput(
                    f"the buffer of the {name} has shape {list(buffer.shape)}, the {name} {list(of.shape)}"
                )
            if buffer.dtype != hand.zeros([1]).dtype:
                raise InvalidInput(
                    f"the buffer of the {name} is in {buffer.dtype}; gradients are summed in {hand.zeros([1]).dtype}"
                )

    def rows(self, hand: HeadHand, head: Head, ids_M: Ints | None) -> GradientRows:
        return GradientRows(ids_U=None, weight_UH=self.weight_VH, bias_U=self.bias_V, fresh=False)


class RowSparseHeadGradient:
    """Only the rows that were touched: the ids of the kept sets, each once per backward pass.

    A pass that scored tokens over the whole vocabulary touches every row.
    """

    def __init__(self) -> None:
        self._passes: list[GradientRows] = []

    def buffers(self) -> tuple[Tensor, ...]:
        return ()

    def check(self, hand: HeadHand, head: Head) -> None:
        """Any head will do."""

    def rows(self, hand: HeadHand, head: Head, ids_M: Ints | None) -> GradientRows:
        num_rows, hidden_size = (int(n) for n in head.weight_VH.shape)
        ids_U = np.arange(num_rows) if ids_M is None else np.unique(ids_M)
        rows = GradientRows(
            ids_U=ids_U,
            weight_UH=hand.zeros([len(ids_U), hidden_size]),
            bias_U=None if head.bias_V is None else hand.zeros([len(ids_U)]),
            fresh=True,
        )
        self._passes.append(rows)
        return rows

    def clear(self) -> None:
        """Forget every pass, after an optimizer step."""
        self._passes.clear()

    def merged(self) -> GradientRows | None:
        """All passes so far as one, each row once; None where there was none.

        Rows are those of the head as it lies here: add `shard.first` for vocabulary ids.
        """
        if len(self._passes) > 1:
            self._passes = [_sum(self._passes)]
        return self._passes[0] if self._passes else None


def _sum(passes: list[GradientRows]) -> GradientRows:
    first_UH = passes[0].weight_UH
    assert first_UH is not None  # `rows` asks for the weight's gradient in every pass
    hand = head_hand_for(first_UH)
    ids = [np.zeros(0, np.int64) if one.ids_U is None else one.ids_U for one in passes]
    ids_U = np.unique(np.concatenate(ids))
    weight_UH = hand.zeros([len(ids_U), int(first_UH.shape[1])])
    bias_U = None if passes[0].bias_U is None else hand.zeros([len(ids_U)])
    for of_one, one in zip(ids, passes, strict=True):
        if not len(of_one):
            continue
        at = hand.ints(np.searchsorted(ids_U, of_one))
        hand.add_rows(weight_UH, at, None, one.weight_UH)
        if bias_U is not None:
            hand.add_rows(bias_U, at, None, one.bias_U)
    return GradientRows(ids_U=ids_U, weight_UH=weight_UH, bias_U=bias_U, fresh=False)
