"""What each slot of an engine is at, and which tokens the next pass computes.

A sequence is prompt + committed tokens. Its first `cached` tokens have keys and values, its first `known` are decided;
what lies between is computed next: one token while decoding, more after admission or when a cache is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from keptset.rollout.models import Segment
from keptset.rollout.request import Request
from keptset.rollout.speculative import lookup_draft

Ids = npt.NDArray[np.int32]


@dataclass(kw_only=True)
class Slot:
    """A request under way."""

    request: Request
    sequence: Ids
    """Room for prompt and response; the response ends with reason `length` when it is used up."""
    known: int
    cached: int = 0
    source: int | None = None
    """A slot that computes the same prompt; this one takes it over when it is done."""
    draft: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """Tokens guessed to follow, computed in the same pass."""

    @classmethod
    def of(cls, request: Request, max_length: int) -> Slot:
        """A slot at the beginning of its prompt."""
        prompt = request.prompt_token_ids
        sequence = np.zeros(min(len(prompt) + request.params.max_new_tokens, max_length), np.int32)
        sequence[: len(prompt)] = prompt
        return cls(request=request, sequence=sequence, known=len(prompt))

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def is_full(self) -> bool:
        return self.known == len(self.sequence)

    def append(self, token: int) -> None:
        """One more committed token."""
        self.sequence[self.known] = token
        self.known += 1


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Tokens of one forward pass and the rows of it that are drawn from."""

    token_ids_T: Ids
    segments: list[Segment]
    slots_D: list[int]
    """Slots that reach their last known token in this pass."""
    row_D: npt.NDArray[np.int64]
    """Row of the pass that predicts the slot's next token; those of its draft follow."""


def live(slots: list[Slot | None]) -> Iterator[tuple[int, Slot]]:
    """Slots that are taken, with their number."""
    return ((index, slot) for index, slot in enumerate(slots) if slot is not None)


def plan_pass(slots: list[Slot | None], prefill_tokens: int, row: Callable[[int], int]) -> Pass | None:
    """Single tokens with their drafts first, then longer runs as far as the budget goes; None where nothing waits.

    `row` tells where in the cache a slot lies.
    """
    pieces: list[tuple[int, Segment, Ids]] = []
    budget = prefill_tokens
    decoding = [(i, slot) for i, slot in live(slots) if slot.known - slot.cached == 1 and slot.source is None]
    for index, slot in decoding:
        slot.draft = _draft(slot)
        tokens = np.concatenate([slot.sequence[slot.cached : slot.known], slot.draft])
        pieces.append((index, Segment(slot=row(index), start=slot.cached, length=len(tokens)), tokens))
    for index, slot in live(slots):
        length = min(slot.known - slot.cached, budget)
        if slot.known - slot.cached > 1 and length > 0 and slot.source is None:
            slot.draft = slot.draft[:0]
            segment = Segment(slot=row(index), start=slot.cached, length=length)
            pieces.append((index, segment, slot.sequence[slot.cached : slot.cached + length]))
            budget -= length
    if not pieces:
        return None
    slots_D, row_D, begin = [], [], 0
    for index, segment, _ in pieces:
        taken = slots[index]
        assert taken is not None
        pending = taken.known - taken.cached
        taken.cached += min(segment.length, pending)
        if segment.length >= pending:
            slots_D.append(index)
            row_D.append(begin + pending - 1)
        begin += segment.length
    return Pass(
        token_ids_T=np.concatenate([tokens for _, _, tokens in pieces]),
        segments=[segment for _, segment, _ in pieces],
        slots_D=slots_D,
        row_D=np.array(row_D, np.int64),
    )


def _draft(slot: Slot) -> Ids:
    """A guess that still fits: the last token of a response is drawn, never drafted."""
    most = min(slot.request.params.draft_tokens, len(slot.sequence) - slot.known - 1)
    return lookup_draft(slot.sequence[: slot.known], most) if most > 0 else slot.draft[:0]
