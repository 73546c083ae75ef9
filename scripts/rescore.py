"""A decoder as the trainer's side: recorded responses scored again, in one pass and token by token.

The two ways and two batchings of the same weights differ only by rounding; how far is what SEMANTICS calls the floors.

Legend: P positions (tokens of prompt and response), B responses, T sampled tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import paddle

from keptset.rollout.models import Decoder, Segment
from keptset.schemas.ragged import offsets_of, span_index
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.alignment import PackedBatch, to_packed
from keptset.trainer_bridge.passes import POSITIONS_PER_PASS, in_passes
from keptset.trainer_bridge.sampled_tokens import Ints, SampledTokens
from keptset.trainer_bridge.scoring import Scores, score_aligned
from keptset.trainer_bridge.scoring.aligned import LogitsOf


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """Two scores of every sampled token under the same weights, and what was recorded about it."""

    tokens: SampledTokens
    kept_T: npt.NDArray[np.float64]
    """l over the recorded kept set."""
    full_T: npt.NDArray[np.float64]
    """l over the whole vocabulary; NaN where it was not asked for."""


def rescore(
    decoder: Decoder,
    batch: RolloutBatch,
    *,
    full_share: float = 1.0,
    positions_per_pass: int = POSITIONS_PER_PASS,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Rescored]:
    """One forward pass over prompt + response of each row, several rows packed into a pass; one entry a pass.

    `progress` is told the response tokens of each pass. Errors: those of `score_aligned`.
    """
    passes = []
    for part in in_passes(batch, positions_per_pass):
        packed = to_packed(part)
        hidden = hidden_in_one_pass(decoder, packed.input_ids_P, np.diff(packed.cu_seqlens_B1))
        passes.append(_scored(decoder, packed, hidden, full_share))
        progress(part.num_tokens)
    return passes


def rescore_through_cache(decoder: Decoder, batch: RolloutBatch) -> Rescored:
    """The same scores over the kept set, computed as a sampler does: prompt first, then token by token."""
    packed = to_packed(batch)
    lengths = np.diff(packed.cu_seqlens_B1).astype(np.int64)
    hidden = hidden_through_cache(decoder, packed.input_ids_P, lengths, lengths - batch.token_ids.lengths)
    return _scored(decoder, packed, hidden, 0.0)


def hidden_in_one_pass(decoder: Decoder, ids_P: Ints, lengths_B: Ints) -> paddle.Tensor:
    """Hidden states [P, H] of whole sequences that lie back to back."""
    segments = [Segment(slot=i, start=0, length=int(n)) for i, n in enumerate(lengths_B) if n]
    with paddle.no_grad():
        return decoder.forward(ids_P.astype(np.int32), segments)


def hidden_through_cache(decoder: Decoder, ids_P: Ints, lengths_B: Ints, prompt_lengths_B: Ints) -> paddle.Tensor:
    """The same, with each token of a response in a pass of its own."""
    lengths, prompts = np.asarray(lengths_B, np.int64), np.asarray(prompt_lengths_B, np.int64)
    starts = offsets_of(lengths)[:-1]
    cache = decoder.new_cache(len(lengths), int(lengths.max(initial=1)))
    positions, hiddens = [], []
    with paddle.no_grad():
        for step in range(int((lengths - prompts).max(initial=0)) + 1):
            rows = np.flatnonzero(lengths - prompts >= step)
            begin = prompts[rows] + step - 1 if step else np.zeros(len(rows), np.int64)
            size = np.ones(len(rows), np.int64) if step else prompts[rows]
            segments = [
                Segment(slot=int(r), start=int(b), length=int(n)) for r, b, n in zip(rows, begin, size, strict=True)
            ]
            at = span_index(starts[rows] + begin, size)
            hiddens.append(decoder.forward(ids_P[at].astype(np.int32), segments, cache))
            positions.append(at)
        order = np.argsort(np.concatenate(positions))
        joined = paddle.concat(hiddens)
        return paddle.index_select(joined, paddle.to_tensor(order, place=joined.place))


def logits_of(decoder: Decoder, hidden_PH: paddle.Tensor) -> LogitsOf:
    """Positions to their logits [R, V], from hidden states."""

    def logits(positions: Ints) -> paddle.Tensor | npt.NDArray[np.float32]:
        index = paddle.to_tensor(positions, dtype="int64", place=hidden_PH.place)
        with paddle.no_grad():
            logits_RV = decoder.logits(paddle.index_select(hidden_PH, index))
        # On the host NumPy scores faster, and in float64.
        return logits_RV.numpy() if logits_RV.place.is_cpu_place() else logits_RV

    return logits


def _scored(decoder: Decoder, packed: PackedBatch, hidden_PH: paddle.Tensor, full_share: float) -> Rescored:
    with paddle.no_grad():
        scores: Scores = score_aligned(packed, logits_of(decoder, hidden_PH), full_share=full_share)
    full = np.full(packed.tokens.num_tokens, np.nan)
    if scores.full_logprobs_T is not None:
        full = np.asarray(scores.full_logprobs_T, np.float64)
    return Rescored(tokens=packed.tokens, kept_T=np.asarray(scores.logprobs_T, np.float64), full_T=full)
