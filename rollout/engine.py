"""Continuous batching: requests join and leave between steps, prompts are prefilled in chunks beside decoding.

One step is one forward pass over what every slot has pending, then rounds of one truncation and one draw for all slots
together: one round where nothing is drafted, and one more for each further drafted token that a slot really drew.

Legend: T tokens of the pass, D slots that draw, B rows of one round, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from keptset import __version__
from keptset.rollout.config import EngineConfig
from keptset.rollout.engine_protocol import CachePolicy, EngineLoad, Running
from keptset.rollout.kv_room import KvRoom
from keptset.rollout.logit_processors import PROCESSOR_ORDER, LogitProcessors
from keptset.rollout.models import Decoder
from keptset.rollout.recorder import Recorder
from keptset.rollout.request import Request
from keptset.rollout.sampling import draw, uniforms
from keptset.rollout.slots import Pass, Slot, live, plan_pass
from keptset.rollout.stop_strings import StopStrings
from keptset.rollout.tokenizer import Tokenizer
from keptset.rollout.top_logprobs import top_logprobs
from keptset.rollout.truncation import FILTER_ORDER, truncate
from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, RolloutError
from keptset.schemas.rollout_batch import RolloutBatch


class RolloutEngine:
    """Generates responses with one decoder and records what each token was drawn from.

    Submit requests, call `step` (or `advance`) while `unfinished`, collect what it returns; or `generate` for the
    simple case. Not thread-safe. The responses' row seeds decide their tokens, not the batch they run in.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig | None = None,
        *,
        model_id: str | None = None,
        tokenizer: Tokenizer | None = None,
        tokenizer_digest: str | None = None,
        version: int = 0,
    ) -> None:
        """`tokenizer` is needed for stop strings only."""
        self.config = config or EngineConfig()
        self.decoder = decoder
        self.version = version
        """Version of the weights, recorded with every token."""
        self.tokens_drawn = 0
        """Tokens committed since the engine was made."""
        self.passes = 0
        """Forward passes since the engine was made."""
        context = decoder.config.max_position_embeddings
        if self.config.max_length is not None and self.config.max_length > context:
            raise InvalidInput(f"max_length is {self.config.max_length}, the model's context is {context}")
        self.max_length = self.config.max_length or context
        self.identity = Identity(
            vocab_size=decoder.config.vocab_size,
            model_id=model_id,
            model_digest=decoder.config.digest,
            tokenizer_digest=tokenizer_digest or (tokenizer.digest if tokenizer else None),
            engine="keptset",
            engine_version=__version__,
            filter_order=FILTER_ORDER,
            processor_order=PROCESSOR_ORDER,
            logits_dtype="float32",
        )
        self._waiting: deque[Request] = deque()
        self._slots: list[Slot | None] = [None] * self.config.slots
        self._seeds: set[int] = set()
        self._ended: list[Response] = []
        self._paused = self._broken = False
        self._room = KvRoom(
            decoder, slots=self.config.slots, max_length=self.max_length, kv_tokens=self.config.kv_tokens
        )
        self._processors = LogitProcessors(decoder.config.vocab_size)
        self._stop_strings = StopStrings(tokenizer)
        self._recorder = Recorder(
            slots=self.config.slots,
            vocab_size=decoder.config.vocab_size,
            distribution_share=self.config.distribution_share,
        )

    @property
    def unfinished(self) -> int:
        """Requests accepted and not yet returned."""
        return len(self._waiting) + sum(slot is not None for slot in self._slots) + len(self._ended)

    @property
    def load(self) -> EngineLoad:
        """What is decoded, what waits, and how much of the key-value memory is promised."""
        running = sum(slot is not None for slot in self._slots)
        capacity = self.config.kv_tokens or self.config.slots * self.max_length
        return EngineLoad(running=running, waiting=len(self._waiting), kv_use=self._room.reserved_tokens / capacity)

    def submit(self, request: Request) -> Request:
        """Accept a request; returns it with row seed and rollout id settled.

        Errors: InvalidInput for a prompt that is empty, longer than the context or outside the vocabulary, a setting
        that names an id outside it, stop strings without a tokenizer, or a row seed already in flight.
        """
        request = request.resolved(self.config.base_seed)
        request.check(self.decoder.config.vocab_size, self.max_length)
        self._room.check(request.prompt_id, len(Slot.of(request, self.max_length).sequence))
        self._stop_strings.check(request)
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
        """One forward pass. Returns the responses that ended with it, or were aborted since the last.

        Errors: RolloutError where an earlier step raised.
        """
        if self._broken:
            raise RolloutError("an earlier step failed, and what it left is not to be trusted; make a new engine")
        ended, self._ended = self._ended, []
        if self._paused:
            return ended
        self._broken = True  # until this pass is through: one that raises leaves slots and cache at odds
        ended += self._pass()
        self._broken = False
        return ended

    def _pass(self) -> list[Response]:
        self._admit()
        self._share_prompts()
        work = plan_pass(self._slots, self.config.prefill_tokens, self._room.row)
        if work is None:
            return []
        self.passes += 1
        with paddle.no_grad():
            hidden_TH = self.decoder.forward(work.token_ids_T, work.segments, self._room.cache)
            self._share_prompts()  # before a draw that may be the source's last
            return self._draw(work, hidden_TH)

    def advance(self, seconds: float) -> RolloutBatch | None:
        """Steps, at least one, until `seconds` have passed or nothing is left to do.

        Returns what ended meanwhile, None where nothing did.
        """
        builder, begin = BatchBuilder(self.identity), time.monotonic()
        while self.unfinished:
            ended = self.step()
            for response in ended:
                builder.add(response)
            if time.monotonic() - begin >= seconds or (self._paused and not ended):
                break
        return builder.build() if len(builder) else None

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

    def pause(self) -> None:
        """Let steps do nothing; what is accepted stays."""
        self._paused = True

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        self._paused = False

    def abort(self, rollout_id: str) -> bool:
        """End a request with reason `abort`; the next step returns it as far as it got. False: not in flight."""
        for index, slot in live(self._slots):
            if slot.request.rollout_id == rollout_id:
                self._ended.append(self._finish(index, "abort"))
                return True
        for request in self._waiting:
            if request.rollout_id == rollout_id:
                self._waiting.remove(request)
                self._ended.append(self._unstarted(request))
                self._forget_seed(request)
                return True
        return False

    def update_weights(
        self,
        version: int,
        weights: Mapping[str, Any],
        *,
        running: Running = "continue",
        cache: CachePolicy = "recompute",
    ) -> None:
        """Replace the weights between two steps; tokens drawn from now on carry `version`.

        `running`: requests under way go on, or start again from their prompts. `cache`: for those that go on, keep the
        old weights' keys and values (b then belongs to no single version) or compute them anew; `kv_policy` of their
        responses says which. Errors: InvalidInput for weights that do not fit, before anything is changed.
        """
        self.decoder.load_weights(weights)
        self.version = version
        for index, slot in reversed(list(live(self._slots))):
            if running == "requeue" or slot.known == slot.prompt_length:
                self._processors.close(index)
                self._recorder.discard(index)
                self._room.release(index, clear=True)
                self._slots[index] = None
                self._waiting.appendleft(slot.request)
                continue
            self._recorder.note_kv_policy(index, "kept" if cache == "keep" else "recomputed")
            if cache == "recompute":
                slot.cached = 0
                self._room.clear([index])

    def _admit(self) -> None:
        for index, slot in enumerate(self._slots):
            if slot is None and self._waiting:
                admitted = Slot.of(self._waiting[0], self.max_length)
                if not self._room.admit(index, len(admitted.sequence)):
                    return
                request = self._waiting.popleft()
                admitted.source = self._same_prompt(admitted)
                self._slots[index] = admitted
                self._recorder.open(index, request)
                self._processors.open(index, request.params, request.prompt_token_ids)

    def _same_prompt(self, new: Slot) -> int | None:
        """A slot whose cache holds, or will hold, this prompt under the present weights."""
        if new.prompt_length < 2:
            return None
        prompt = new.request.prompt_token_ids
        for index, slot in live(self._slots):
            old_cache = self._recorder.kv_policy(index) == "kept"
            if slot.source is None and not old_cache and np.array_equal(slot.request.prompt_token_ids, prompt):
                return index
        return None

    def _share_prompts(self) -> None:
        """Copy prompts that are computed now to the slots that wait for them, which compute only the last token."""
        ready: dict[int, list[int]] = {}
        for index, slot in live(self._slots):
            if slot.source is None:
                continue
            source = self._slots[slot.source]
            if source is None or not np.array_equal(source.request.prompt_token_ids, slot.request.prompt_token_ids):
                slot.source = None
            elif source.cached >= source.prompt_length:
                ready.setdefault(slot.source, []).append(index)
        for source_index, targets in ready.items():
            self._room.copy(source_index, targets)
            for target in targets:
                filled = self._slots[target]
                assert filled is not None
                filled.cached, filled.source = filled.prompt_length - 1, None

    def _draw(self, work: Pass, hidden_TH: paddle.Tensor) -> list[Response]:
        """Draw along each slot's draft for as long as the draws agree with it."""
        ended: list[Response] = []
        drawing, row_D = work.slots_D, work.row_D
        depth = 0
        while drawing:
            rows = paddle.to_tensor(row_D + depth, dtype="int64", place=hidden_TH.place)
            logits_BV = self.decoder.logits(paddle.index_select(hidden_TH, rows))
            drafts = [slot.draft for index in drawing if (slot := self._slots[index]) is not None]
            ended += self._draw_round(drawing, logits_BV)
            goes_on = []
            for index, draft in zip(drawing, drafts, strict=True):
                slot = self._slots[index]
                agrees = slot is not None and depth < len(draft) and slot.sequence[slot.known - 1] == draft[depth]
                if agrees and slot is not None:
                    slot.cached += 1
                goes_on.append(agrees)
            row_D = row_D[np.array(goes_on, bool)]
            drawing = [index for index, on in zip(drawing, goes_on, strict=True) if on]
            depth += 1
        return ended

    def _draw_round(self, slots_B: list[int], logits_BV: paddle.Tensor) -> list[Response]:
        """One token for each of these slots."""
        running = [slot for index in slots_B if (slot := self._slots[index]) is not None]
        params = [slot.request.params for slot in running]
        logits_BV = self._processors.apply(slots_B, logits_BV)
        kept = truncate(logits_BV, params)
        seeds = np.array([p.seed for p in params], np.int64)
        positions = np.array([slot.known for slot in running], np.int64)
        token_ids, logprobs = draw(kept, uniforms(seeds, positions))
        top = top_logprobs(logits_BV, kept, [p.top_logprobs for p in params])
        good = np.array([row not in kept.errors for row in range(len(slots_B))], bool)
        errors = kept.errors
        if errors:
            kept, top = kept.take(good), None if top is None else top.without_empty(good)
        index_B: npt.NDArray[np.int64] = np.array(slots_B, np.int64)[good]
        self._recorder.commit(index_B, token_ids[good], logprobs[good], kept, self.version, top)
        self._processors.commit(index_B, token_ids[good])
        self.tokens_drawn += int(good.sum())
        ended = []
        for row, (index, slot, token) in enumerate(zip(slots_B, running, token_ids.tolist(), strict=True)):
            if not good[row]:
                ended.append(self._finish(index, "error", errors[row]))
                continue
            slot.append(token)
            response_ids = slot.sequence[slot.prompt_length : slot.known]
            if token in slot.request.params.stop_token_ids or self._stop_strings.complete(slot.request, response_ids):
                ended.append(self._finish(index, "stop"))
            elif slot.is_full:
                ended.append(self._finish(index, "length"))
        return ended

    def _unstarted(self, request: Request) -> Response:
        """The empty response of a request that is aborted before it had a slot."""
        recorder = Recorder(slots=1, vocab_size=self.decoder.config.vocab_size, distribution_share=0.0)
        recorder.open(0, request)
        return recorder.close(0, "abort")

    def _finish(self, index: int, reason: str, error: str | None = None) -> Response:
        slot = self._slots[index]
        assert slot is not None
        self._slots[index] = None
        self._room.release(index, clear=reason not in ("stop", "length"))
        self._processors.close(index)
        self._forget_seed(slot.request)
        return self._recorder.close(index, reason, error)

    def _forget_seed(self, request: Request) -> None:
        assert request.params.seed is not None
        self._seeds.discard(request.params.seed)
