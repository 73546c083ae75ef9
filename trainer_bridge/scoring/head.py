"""The head that turns hidden states into logits, whole or one rank's rows of it.

    z = h W^T + bias

Legend: V vocabulary, or the rows of it that this rank holds; H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import Tensor, framework_of
from keptset.trainer_bridge.scoring.head_hand import head_hand_for


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which rows of a vocabulary-parallel head this rank holds.

    All ranks of the group score the same tokens with the same hidden states, and enter forward and backward together.
    """

    first: int
    """Vocabulary id of the first row held here; the rows follow it without gap."""
    vocab_size: int
    """V of the whole head."""
    group: Any = None
    """Process group of the framework (torch.distributed, paddle.distributed); None: its default group."""
    sum_hidden_gradient: bool = True
    """True: every rank gets the whole gradient of the hidden states, by one more sum across the group. False: each gets
    the part of its own rows, for a caller that sums by itself (sequence parallelism reduces and scatters)."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Weight and bias of the head, in any floating dtype."""

    weight_VH: Tensor
    """As a linear layer stores it: one row per vocabulary id."""
    bias_V: Tensor | None = None
    shard: Shard | None = None
    """None: the whole head is here."""

    @property
    def first(self) -> int:
        """Vocabulary id of the first row."""
        return 0 if self.shard is None else self.shard.first

    @property
    def end(self) -> int:
        """Vocabulary id behind the last row."""
        return self.first + int(self.weight_VH.shape[0])

    @property
    def vocab_size(self) -> int:
        """V of the whole head."""
        return self.end if self.shard is None else self.shard.vocab_size

    def check(self, hidden_RH: Tensor) -> None:
        """InvalidInput where hidden states, weight, bias and shard do not fit each other."""
        head_hand_for(hidden_RH)  # refuses what is of no framework, or no floats
        weight, hidden = [int(n) for n in self.weight_VH.shape], [int(n) for n in hidden_RH.shape]
        if len(weight) != 2:
            raise InvalidInput(f"the head's weight has shape {weight}; it must be [vocabulary, hidden]")
        if len(hidden) != 2:
            raise InvalidInput(f"hidden states have shape {hidden}; reshape them to [positions, hidden]")
        if hidden[1] != weight[1]:
            hint = "; the head must be given as [vocabulary, hidden]: transpose it" if hidden[1] == weight[0] else ""
            raise InvalidInput(f"hidden states have shape {hidden}, the head's weight {weight}{hint}")
        if self.bias_V is not None and [int(n) for n in self.bias_V.shape] != weight[:1]:
            raise InvalidInput(f"the head's bias has shape {list(self.bias_V.shape)}; its weight has {weight[0]} rows")
        if self.first < 0 or self.end > self.vocab_size:
            raise InvalidInput(
                f"a shard holds ids [{self.first}, {self.end}), outside a vocabulary of {self.vocab_size}"
            )
        for name, other in (("weight", self.weight_VH), ("bias", self.bias_V)):
            if other is not None and framework_of(other) != framework_of(hidden_RH):
                raise InvalidInput(f"the head's {name} is a {type(other)}, the hidden states are a {type(hidden_RH)}")
            if other is not None and _is_double(other) and not _is_double(hidden_RH):
                raise InvalidInput(f"the head's {name} is in float64, the hidden states are not: give both in float64")


def check_head(head: object, hidden_RH: Tensor) -> None:
    """InvalidInput where what was given as the head is none, or does not fit the hidden states."""
    if not isinstance(head, Head):
        raise InvalidInput(f"the head is a {type(head)}; give Head(weight_VH=..., bias_V=...) of its weight and bias")
    head.check(hidden_RH)


def _is_double(values: Tensor) -> bool:
    return str(values.dtype).endswith("float64")
