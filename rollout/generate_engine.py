"""An engine around any function that answers a list of requests in one call, such as another library's `generate`.

The function gives what an adapter made of its output (`keptset.schemas.adapters`). Rows get the names, samples and own
columns of their requests here; what the adapter could not read becomes a response with finish_reason `error`.

Legend: B responses, T tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np
import pyarrow as pa

from keptset.rollout.engine_protocol import CachePolicy, EngineLoad, Running
from keptset.rollout.request import Request
from keptset.schemas.adapters.collect import Adapted
from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, RolloutError
from keptset.schemas.ragged import Ragged
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches

Generate = Callable[[Sequence[Request]], Adapted]
LoadWeights = Callable[[Mapping[str, Any]], None]
End = tuple[str, str | None]
"""finish_reason and error of a response."""


class GenerateEngine:
    """Satisfies `Engine`. Requests wait, and go out in calls of up to `most` at a time.

    `generate` must give each row its request's rollout id as prompt_id: pass them to the adapter as `prompt_ids`. A
    call is not interrupted: a turn lasts as long as its last call, so `most` bounds how long that is.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        most: int = 32,
        load_weights: LoadWeights | None = None,
        version: int = 0,
        check: Callable[[Request], None] | None = None,
        base_seed: int = 0,
    ) -> None:
        """`load_weights`: how the other engine takes arrays by name; None: it takes none.

        `check` raises InvalidInput for a request that cannot be served, such as one that is too long.
        """
        if most < 1:
            raise InvalidInput(f"most is {most}; it must be >= 1")
        self.version = version
        """Version of the weights; rows that name none are given it, since no call spans an update."""
        self.tokens_drawn = 0
        self._generate, self._most, self._load_weights = generate, most, load_weights
        self._check, self._base_seed = check, base_seed
        self._waiting: deque[Request] = deque()
        self._aborted: list[Request] = []
        self._identity = Identity()

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._aborted)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=len(self._waiting))

    def submit(self, request: Request) -> Request:
        """Accept a request; returns it with row seed and rollout id settled. Errors: those of `check`."""
        request = request.resolved(self._base_seed)
        if self._check is not None:
            self._check(request)
        self._waiting.append(request)
        return request

    def advance(self, seconds: float) -> RolloutBatch | None:
        """One call or more, until `seconds` have passed or nothing waits. Errors: as `generate`'s own, RolloutError
        where it answered what it was not asked."""
        begin = monotonic()
        parts: list[RolloutBatch] = []
        asked, self._aborted = self._aborted, []
        empty: dict[str, End] = {request.rollout_id or "": ("abort", None) for request in asked}
        while self._waiting and (not parts or monotonic() - begin < seconds):
            requests = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            adapted = self._generate(requests)
            parts += self._good(adapted, requests)
            answered = {name for batch in parts for name in batch.column("prompt_id").to_pylist()}
            empty |= _unanswered(adapted, [request for request in requests if request.rollout_id not in answered])
            asked = [*asked, *requests]
        if empty:
            # Last, since an engine's answers tell its identity.
            parts.append(self._without_tokens([r for r in asked if r.rollout_id in empty], empty))
        if not parts:
            return None
        batch = _named(concat_batches(parts), {request.rollout_id or "": request for request in asked})
        self.tokens_drawn += batch.num_tokens
        return batch

    def abort(self, rollout_id: str) -> bool:
        """End a request that still waits; it is returned without tokens."""
        for request in self._waiting:
            if request.rollout_id == rollout_id:
                self._waiting.remove(request)
                self._aborted.append(request)
                return True
        return False

    def update_weights(self, version: int, weights: Mapping[str, Any], *, running: Running, cache: CachePolicy) -> None:
        """Hand the weights on; no call is under way, so `running` and `cache` have nothing to decide.

        Errors: InvalidInput where the engine takes none; those of `load_weights`.
        """
        if self._load_weights is None:
            raise InvalidInput("this engine takes no new weights: GenerateEngine was made without load_weights")
        self._load_weights(weights)
        self.version = version

    def _good(self, adapted: Adapted, requests: Sequence[Request]) -> list[RolloutBatch]:
        """The responses of one call. Errors: RolloutError where they are not to what was asked, once each."""
        if adapted.batches:
            self._identity = adapted.batches[0].identity
        batches = [_with_versions(batch, self.version) for batch in adapted.batches if len(batch)]
        asked = {request.rollout_id for request in requests}
        answered = [name for batch in batches for name in batch.column("prompt_id").to_pylist()]
        strange = [name for name in answered if name not in asked]
        if strange or len(set(answered)) < len(answered):
            told = (
                f"prompt_id {strange[0]!r}, which is none of those asked" if strange else "one request more than once"
            )
            raise RolloutError(
                f"generate answered {told}; give the adapter prompt_ids=[r.rollout_id for r in requests]"
            )
        return batches

    def _without_tokens(self, requests: Sequence[Request], ends: Mapping[str, End]) -> RolloutBatch:
        builder = BatchBuilder(self._identity)
        nothing = np.zeros(0, np.int32)
        for request in requests:
            name = request.rollout_id or ""
            reason, error = ends[name]
            builder.add(
                Response(
                    rollout_id=name,
                    prompt_id=name,
                    prompt_token_ids=request.prompt_token_ids,
                    token_ids=nothing,
                    kept_offsets=np.zeros(1, np.int64),
                    kept_ids=nothing,
                    finish_reason=reason,
                    error=error,
                    params=request.params,
                )
            )
        return builder.build()


def _unanswered(adapted: Adapted, requests: Sequence[Request]) -> dict[str, End]:
    """Why these requests have no response, as far as what was rejected tells."""
    known = {rejected.rollout_id: rejected.reason for rejected in adapted.rejected if rejected.rollout_id is not None}
    nameless = [rejected.reason for rejected in adapted.rejected if rejected.rollout_id is None]
    otherwise = f"a response could not be read: {nameless[0]}" if nameless else "the engine returned no response"
    # Adapters name a response prompt_id/number.
    return {
        name: ("error", known.get(f"{name}/0", otherwise))
        for request in requests
        if (name := request.rollout_id) is not None
    }


def _with_versions(batch: RolloutBatch, version: int) -> RolloutBatch:
    """The same rows with `version` at every sampled token, unless they tell their own."""
    if batch.policy_versions is not None:
        return batch
    sampled = batch.sampled
    versions_T = np.full(len(sampled.values), version, np.int32)
    column = Ragged(sampled.offsets, versions_T, sampled.values.astype(bool)).to_arrow(pa.int32())
    return _replaced(batch, {"policy_versions": column})


def _named(batch: RolloutBatch, asked: Mapping[str, Request]) -> RolloutBatch:
    """The same rows under the names of their requests, with the caller's own columns."""
    names = batch.column("prompt_id").to_pylist()
    requests = [asked[name] for name in names]
    own = {
        "rollout_id": pa.array(names, pa.string()),
        "prompt_id": pa.array([request.prompt_id for request in requests], pa.string()),
        "group_id": pa.array([request.group_id for request in requests], pa.string()),
        "sample_index": pa.array([request.sample_index for request in requests], pa.int32()),
    }
    for name in sorted({name for request in requests for name in request.extra}):
        own[name] = pa.array([request.extra.get(name) for request in requests])
    return _replaced(batch, own)


def _replaced(batch: RolloutBatch, columns: Mapping[str, pa.Array]) -> RolloutBatch:
    arrow = batch.arrow
    for name, values in columns.items():
        at = arrow.schema.get_field_index(name)
        if at < 0:
            arrow = arrow.append_column(pa.field(name, values.type), values)
        else:
            arrow = arrow.set_column(at, arrow.schema.field(at), values)
    return RolloutBatch.from_arrow(arrow)
