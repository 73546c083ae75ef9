"""Continuous batching: requests join and leave between steps, prompts are prefilled in chunks beside decoding.

One step is one forward pass over the next token of every decoding slot and the next chunk of waiting prompts, then one
truncation and one draw for all rows that reached their last known token.

Legend: T tokens of the pass, B rows drawn from, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import paddle

from keptset import __version__
from keptset.rollout.config import EngineConfig
from keptset.rollout.logit_processors import PROCESSOR_ORDER, LogitProcessors
from keptset.rollout.models import Decoder, Segment
from keptset.rollout.recorder import Recorder
from keptset.rollout.request import Request
from keptset.rollout.sampling import draw, uniforms
from keptset.rollout.truncation import FILTER_ORDER, truncate
from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput
from keptset.schemas.rollout_batch import RolloutBatch


@dataclass
class _Slot:
    """A request under way. Its sequence is prompt + committed tokens; the first `cached` of them are in the cache."""

    request: Request
    limit: int
    """Tokens of prompt + response at which it ends with reason `length`."""
    cached: int = 0
    last_token: int = -1

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)


class RolloutEngine:
    """Generates responses with one decoder and records what each token was drawn from.

    Submit requests, call `step` while `unfinished`, collect what it returns; or `generate` for the simple case.
    Not thread-safe. The responses' row seeds decide their tokens, not the batch they run in.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig | None = None,
        *,
        model_id: str | None = None,
        tokenizer_digest: str | None = None,
        version: int = 0,
    ) -> None:
        self.config = config or EngineConfig()
        self.decoder = decoder
        self.version = version
        """Version of the weights, recorded with every token."""
        context = decoder.config.max_position_embeddings
        if self.config.max_length is not None and self.config.max_length > context:
            raise InvalidInput(f"max_length is {self.config.max_length}, the model's context is {context}")
        self.max_length = self.config.max_length or context
        self.identity = Identity(
            vocab_size=decoder.config.vocab_size,
            model_id=model_id,
            model_digest=decoder.config.digest,
            tokenizer_digest=tokenizer_digest,
            engine="keptset",
            engine_version=__version__,
            filter_order=FILTER_ORDER,
            processor_order=PROCESSOR_ORDER,
            logits_dtype="float32",
        )
        self._waiting: deque[Request] = deque()
        self._slots: list[_Slot | None] = [None] * self.config.slots
        self._seeds: set[int] = set()
        self._cache = decoder.new_cache(self.config.slots, self.max_length)
        self._processors = LogitProcessors(decoder.config.vocab_size)
        self._recorder = Recorder(
            slots=self.config.slots,
            vocab_size=decoder.config.vocab_size,
            distribution_share=self.config.distribution_share,
        )
        self.tokens_drawn = 0
        """Tokens committed since the engine was made."""

    @property
    def unfinished(self) -> int:
        """Requests accepted and not yet returned."""
        return len(self._waiting) + sum(slot is not None for slot in self._slots)

    def submit(self, request: Request) -> Request:
        """Accept a request; returns it with row seed and rollout id settled.

        Errors: InvalidInput for a prompt that is empty, longer than the context or outside the vocabulary, a stop
        token or bias outside the vocabulary, or a row seed already in flight.
        """
        request = request.resolved(self.config.base_seed)
        vocab_size = self.decoder.config.vocab_size
        request.check(vocab_size, self.max_length)
        seed = request.params.seed
        assert seed is not None
        if seed in self._seeds and not self.config.allow_shared_seed:
            raise InvalidInput(
                f"{request.rollout_id}: row seed {seed} is already in flight, so its draws would repeat another row's; "
                "give each sample its own sample_index or seed, or set allow_shared_seed"
            )
        self._seeds.add(seed)
        self._waiting.append(request)
        return request

    def step(self) -> list[Response]:
        """One forward pass. Returns the responses that ended with it."""
        self._admit()
        segments, tokens = self._plan()
        if not segments:
            return []
        with paddle.no_grad():
            hidden_TH = self.decoder.forward(np.concatenate(tokens), segments, self._cache)
            rows = self._rows_to_draw(segments)
            if not rows:
                return []
            ends = np.cumsum([segment.length for segment in segments]) - 1
            last = paddle.to_tensor(ends[[index for index, _ in rows]], dtype="int64", place=hidden_TH.place)
            logits_BV = self.decoder.logits(paddle.index_select(hidden_TH, last))
        return self._draw([slot for _, slot in rows], logits_BV)

    def generate(self, requests: Iterable[Request]) -> RolloutBatch:
        """Run these requests to their end and return them as one batch, in the order given."""
        order = {self.submit(request).rollout_id: index for index, request in enumerate(requests)}
        done: list[Response] = []
        while self.unfinished:
            done += self.step()
        builder = BatchBuilder(self.identity)
        for response in sorted(done, key=lambda response: order[response.rollout_id]):
            builder.add(response)
        return builder.build()

    def _admit(self) -> None:
        for index, slot in enumerate(self._slots):
            if slot is None and self._waiting:
                request = self._waiting.popleft()
                limit = min(len(request.prompt_token_ids) + request.params.max_new_tokens, self.max_length)
                self._slots[index] = _Slot(request=request, limit=limit)
                self._recorder.open(index, request)
                self._processors.open(index, request.params, request.prompt_token_ids)

    def _live(self) -> Iterator[tuple[int, _Slot]]:
        return ((index, slot) for index, slot in enumerate(self._slots) if slot is not None)

    def _plan(self) -> tuple[list[Segment], list[npt.NDArray[np.int32]]]:
        """Segments of the next pass: decoding rows first, then prompt chunks as far as the budget goes."""
        segments, tokens, budget = [], [], self.config.prefill_tokens
        for index, slot in self._live():
            if slot.cached >= slot.prompt_length:
                segments.append(Segment(slot=index, start=slot.cached, length=1))
                tokens.append(np.array([slot.last_token], np.int32))
        for index, slot in self._live():
            length = min(slot.prompt_length - slot.cached, budget)
            if length > 0:
                segments.append(Segment(slot=index, start=slot.cached, length=length))
                chunk = slot.request.prompt_token_ids[slot.cached : slot.cached + length]
                tokens.append(np.asarray(chunk, np.int32))
                budget -= length
        return segments, tokens

    def _rows_to_draw(self, segments: list[Segment]) -> list[tuple[int, int]]:
        """Note what is cached now; (segment, slot) of those that stand at the end of what they know."""
        rows = []
        for number, segment in enumerate(segments):
            slot = self._slots[segment.slot]
            assert slot is not None
            slot.cached += segment.length
            if slot.cached >= slot.prompt_length:
                rows.append((number, segment.slot))
        return rows

    def _draw(self, slots: list[int], logits_BV: paddle.Tensor) -> list[Response]:
        running = [slot for index in slots if (slot := self._slots[index]) is not None]
        params = [slot.request.params for slot in running]
        kept = truncate(self._processors.apply(slots, logits_BV), params)
        seeds = np.array([p.seed for p in params], np.int64)
        positions = np.array([slot.cached for slot in running], np.int64)
        token_ids, logprobs = draw(kept, uniforms(seeds, positions))
        good = np.array([row not in kept.errors for row in range(len(slots))], bool)
        slot_index = np.array(slots, np.int64)
        self._recorder.commit(
            slot_index[good], token_ids[good], logprobs[good], kept if good.all() else kept.take(good), self.version
        )
        self._processors.commit(slot_index[good], token_ids[good])
        self.tokens_drawn += int(good.sum())
        finished = []
        for row, (index, slot, token) in enumerate(zip(slots, running, token_ids.tolist(), strict=True)):
            slot.last_token = token
            if row in kept.errors:
                finished.append(self._finish(index, "error", kept.errors[row]))
            elif token in slot.request.params.stop_token_ids:
                finished.append(self._finish(index, "stop"))
            elif slot.cached + 1 >= slot.limit:
                finished.append(self._finish(index, "length"))
        return finished

    def _finish(self, index: int, reason: str, error: str | None = None) -> Response:
        slot = self._slots[index]
        assert slot is not None
        self._slots[index] = None
        self._processors.close(index)
        assert slot.request.params.seed is not None
        self._seeds.discard(slot.request.params.seed)
        return self._recorder.close(index, reason, error)
