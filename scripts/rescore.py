"""A decoder as the trainer's side: recorded responses scored again, in one pass and token by token.

The two ways and two batchings of the same weights differ only by rounding; how far is what SEMANTICS calls the floors.

Legend: T sampled tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import paddle

from keptset.rollout.models import Decoder, Segment
from keptset.schemas.ragged import offsets_of, row_index
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.alignment import PackedBatch, to_packed
from keptset.trainer_bridge.sampled_tokens import SampledTokens
from keptset.trainer_bridge.scoring import Scores, score_aligned

POSITIONS_PER_PASS = 2048
"""Tokens of prompt and response in one forward pass."""


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
    for part in _parts(batch, positions_per_pass):
        packed = to_packed(part)
        bounds = packed.cu_seqlens_B1
        segments = [Segment(slot=i, start=0, length=int(n)) for i, n in enumerate(np.diff(bounds)) if n]
        with paddle.no_grad():
            hidden = decoder.forward(packed.input_ids_P.astype(np.int32), segments)
        passes.append(_scored(decoder, packed, hidden, full_share))
        progress(part.num_tokens)
    return passes


def rescore_through_cache(decoder: Decoder, batch: RolloutBatch) -> Rescored:
    """The same scores over the kept set, computed as a sampler does: prompt first, then token by token."""
    packed = to_packed(batch)
    starts, lengths = packed.cu_seqlens_B1[:-1].astype(np.int64), np.diff(packed.cu_seqlens_B1)
    prompts = lengths - batch.token_ids.lengths
    cache = decoder.new_cache(len(batch), int(lengths.max(initial=1)))
    positions, hiddens = [], []
    with paddle.no_grad():
        for step in range(int(batch.token_ids.lengths.max(initial=0)) + 1):
            rows = np.flatnonzero(lengths - prompts >= step)
            begin = prompts[rows] + step - 1 if step else np.zeros(len(rows), np.int64)
            size = np.ones(len(rows), np.int64) if step else prompts[rows]
            segments = [
                Segment(slot=int(r), start=int(b), length=int(n)) for r, b, n in zip(rows, begin, size, strict=True)
            ]
            offsets = offsets_of(size)
            at = np.arange(offsets[-1]) - offsets[:-1][row_index(offsets)] + (starts[rows] + begin)[row_index(offsets)]
            hiddens.append(decoder.forward(packed.input_ids_P[at].astype(np.int32), segments, cache))
            positions.append(at)
        order = np.argsort(np.concatenate(positions))
        joined = paddle.concat(hiddens)
        hidden = paddle.index_select(joined, paddle.to_tensor(order, place=joined.place))
    return _scored(decoder, packed, hidden, 0.0)


def _scored(decoder: Decoder, packed: PackedBatch, hidden_PH: paddle.Tensor, full_share: float) -> Rescored:
    def logits_of(positions: npt.NDArray[np.int64]) -> paddle.Tensor | npt.NDArray[np.float32]:
        index = paddle.to_tensor(positions, dtype="int64", place=hidden_PH.place)
        logits = decoder.logits(paddle.index_select(hidden_PH, index))
        # On the host NumPy scores faster, and in float64.
        return logits.numpy() if logits.place.is_cpu_place() else logits

    with paddle.no_grad():
        scores: Scores = score_aligned(packed, logits_of, full_share=full_share)
    full = np.full(packed.tokens.num_tokens, np.nan)
    if scores.full_logprobs_T is not None:
        full = np.asarray(scores.full_logprobs_T, np.float64)
    return Rescored(tokens=packed.tokens, kept_T=np.asarray(scores.logprobs_T, np.float64), full_T=full)


def _parts(batch: RolloutBatch, positions: int) -> Iterator[RolloutBatch]:
    """Consecutive rows of at most this many positions together, but always one."""
    prompt = batch.prompt_token_ids
    lengths = batch.token_ids.lengths + (0 if prompt is None else prompt.lengths)
    begin, held = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if row > begin and held + length > positions:
            yield batch.slice(begin, row - begin)
            begin, held = row, 0
        held += length
    if begin < len(batch):
        yield batch.slice(begin, len(batch) - begin)
