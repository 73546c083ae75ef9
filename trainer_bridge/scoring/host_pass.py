"""A pass that NumPy does for another framework, in the memory of its tensors on the host.

A pass is a few large reads and many operations on few numbers; NumPy takes a tenth of Paddle's time for each of those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import Ints, Tensor
from keptset.trainer_bridge.scoring.head import Head
from keptset.trainer_bridge.scoring.head_gradient import GradientRows, HeadGradient
from keptset.trainer_bridge.scoring.head_hand import HeadHand
from keptset.trainer_bridge.scoring.hidden_pass import HiddenJob, HiddenPass
from keptset.trainer_bridge.scoring.numpy_head_hand import NumpyHeadHand


class HostPass:
    """See `HiddenPass`, of which it is one to its caller."""

    def __init__(self, hand: HeadHand, one_pass: HiddenPass) -> None:
        self._hand, self._pass = hand, one_pass

    @classmethod
    def of(
        cls, hand: HeadHand, work: HiddenJob, hidden_RH: Tensor, head: Head, asks: tuple[bool, ...]
    ) -> HostPass | None:
        """None where NumPy is the framework, cannot reach the tensors, or is no faster: products over a vocabulary, and
        what goes to other ranks, are the framework's own."""
        plan, share, sink = work.job.plan, work.job.share, work.head_gradient
        over_vocabulary = len(plan.full_F) + (0 if share is None else len(share.full_F))
        if isinstance(hand, NumpyHeadHand) or over_vocabulary or head.shard is not None:
            return None
        bias = () if head.bias_V is None else (head.bias_V,)
        arrays = hand.host_arrays(hidden_RH, head.weight_VH, *bias)
        if arrays is None or (sink is not None and hand.host_arrays(*sink.buffers()) is None):
            return None
        states_RH, weight_VH, *biases = arrays
        inner = NumpyHeadHand(states_RH, hand.working_dtype)
        if sink is not None:
            work = replace(work, head_gradient=_SinkInNumpy(hand, head, sink))
        own = Head(weight_VH=weight_VH, bias_V=biases[0] if biases else None)
        return cls(hand, HiddenPass(inner, work, states_RH, own, asks))

    def forward(self) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
        values, entropy_T, full_T = self._pass.forward()
        with np.errstate(over="ignore", invalid="ignore"):  # what float32 does not hold is infinite there
            return (
                tuple(self._hand.floats(value) for value in values),
                None if entropy_T is None else self._hand.floats(entropy_T),
                None if full_T is None else self._hand.floats(full_T),
            )

    def backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        hand = self._hand
        found = self._pass.backward(tuple(None if one is None else hand.to_host(one) for one in gradients))
        return tuple(None if one is None else hand.adopt(one) for one in found)


@dataclass(frozen=True)
class _SinkInNumpy:
    """A head gradient of the framework, as NumPy adds into it."""

    hand: HeadHand
    head: Head
    sink: HeadGradient

    def buffers(self) -> tuple[Tensor, ...]:
        return self.sink.buffers()

    def check(self, hand: HeadHand, head: Head) -> None:
        self.sink.check(self.hand, self.head)

    def rows(self, hand: HeadHand, head: Head, ids_M: Ints | None) -> GradientRows:
        rows = self.sink.rows(self.hand, self.head, ids_M)
        return replace(rows, weight_UH=self._memory(rows.weight_UH), bias_U=self._memory(rows.bias_U))

    def _memory(self, buffer: Tensor | None) -> NDArray[np.floating] | None:
        if buffer is None:
            return None
        memory = self.hand.host_memory(buffer)
        if memory is None:
            raise InvalidInput(
                "a buffer of the head's gradient was replaced between forward and backward by one that does not lie in "
                "one piece on the host: keep the buffers that the forward pass had"
            )
        return memory
