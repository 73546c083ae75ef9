"""The few operations in which array frameworks differ, behind one protocol; the maths on top is written once.

A hand is made for one array and follows it: its device, its dtype. Index arrays are uploaded to where the array is,
results are left there. Sums are accumulated in float32, or float64 where the array is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput

Tensor = Any
"""An array of the framework that the hand speaks for."""
Ints = NDArray[np.int64]
LOWEST = float(np.finfo(np.float32).min)
"""No finite float32 is less: `x < LOWEST` is how -inf is told, since Paddle's exp of it need not be 0."""


class Hand(Protocol):
    """What scoring and ratios need of a framework. [R, V] are logits; M, A, T are flat axes."""

    @property
    def block_elements(self) -> int:
        """Logits to work on at once: few enough for a cache, or enough to be worth a launch."""

    def without_logits(self) -> Hand:
        """The same hand holding on to no logits: `gather` and `rows` are gone, their memory can go too."""

    def exact(self) -> AbstractContextManager[object]:
        """Within it no gradient is recorded and nothing is computed narrower than asked."""

    def ints(self, values: Ints) -> Tensor:
        """Index array where the logits are."""

    def floats(self, values: NDArray[np.floating]) -> Tensor:
        """Floats of the working dtype where the logits are."""

    def gather(self, flat_M: Ints) -> Tensor:
        """Logits at flat indices into [R * V], in the working dtype."""

    def rows(self, rows: Ints) -> Tensor:
        """Whole rows [len(rows), V] of the logits, a copy in the working dtype."""

    def to_host(self, values: Tensor) -> NDArray[np.float64]:
        """The numbers alone, as NumPy."""

    def take(self, values: Tensor, index: Tensor) -> Tensor:
        """values[index] along the only axis."""

    def put(self, values: Tensor, index: Tensor, new: Tensor) -> Tensor:
        """`values` with `new` at distinct places of its flattened axis; may write in place."""

    def segment_max(self, values_M: Tensor, starts_A1: Ints, segment_M: Tensor) -> Tensor:
        """Largest of each contiguous, nonempty segment."""

    def segment_sum(self, values_M: Tensor, starts_A1: Ints, segment_M: Tensor) -> Tensor:
        """Sum of each contiguous, nonempty segment."""

    def row_max(self, values_RV: Tensor) -> Tensor:
        """Largest of each row, [R, 1]."""

    def row_sum(self, values_RV: Tensor) -> Tensor:
        """Sum of each row, [R, 1]."""

    def exp(self, values: Tensor) -> Tensor: ...

    def log(self, values: Tensor) -> Tensor: ...

    def abs(self, values: Tensor) -> Tensor:
        """|x| of each."""

    def is_zero(self, values: Tensor) -> Tensor:
        """Where a value is exactly 0, of either sign; NaN is not."""

    def where(self, condition: Tensor, left: Tensor | float, right: Tensor) -> Tensor: ...

    def concatenate(self, parts: list[Tensor]) -> Tensor: ...

    def new_gradient(self) -> Tensor:
        """Zeros [R, V] in the working dtype, to be filled by `put` and `put_rows`."""

    def put_rows(self, gradient_RV: Tensor, rows: Ints, new: Tensor) -> Tensor:
        """`gradient_RV` with whole rows replaced; may write in place."""

    def finish_gradient(self, gradient_RV: Tensor) -> Tensor:
        """In the dtype of the logits."""

    def attach(self, value_T: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        """`value_T` as a function of the logits: `backward` maps its gradient [T] to theirs [R, V].

        A framework without gradients returns `value_T`.
        """


def framework_of(array: Tensor) -> Literal["numpy", "paddle", "torch"]:
    """Which framework an array is of. InvalidInput where it is of none that scoring knows."""
    if isinstance(array, np.ndarray):
        return "numpy"
    if type(array).__module__.split(".")[0] == "paddle":
        return "paddle"
    if hasattr(array, "__torch_function__"):  # subclasses too, whatever their module
        return "torch"
    raise InvalidInput(f"got a {type(array)}; scoring takes NumPy arrays, Paddle tensors and torch tensors")


def hand_for(array: Tensor) -> Hand:
    """The hand that speaks the framework of an array and follows its device. InvalidInput where none does."""
    framework = framework_of(array)
    hand: Hand
    if framework == "numpy":
        from keptset.trainer_bridge.scoring.numpy_hand import NumpyHand

        hand = NumpyHand(array)
    elif framework == "paddle":
        from keptset.trainer_bridge.scoring.paddle_hand import PaddleHand

        hand = PaddleHand(array)
    else:
        from keptset.trainer_bridge.scoring.torch_hand import TorchHand

        hand = TorchHand(array)
    return hand


def logits_hand(logits_RV: Tensor) -> Hand:
    """The hand for logits. InvalidInput where they are not [R, V]."""
    hand = hand_for(logits_RV)
    if len(logits_RV.shape) != 2:
        raise InvalidInput(f"logits have shape {list(logits_RV.shape)}; reshape them to [positions, vocabulary]")
    return hand
