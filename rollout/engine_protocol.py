"""What the pool asks of an engine, so that it can host one that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from keptset.rollout.request import Request
from keptset.schemas.rollout_batch import RolloutBatch

Running = Literal["continue", "requeue"]
"""What becomes of requests under way when the weights change: they go on, or start again from their prompts."""
CachePolicy = Literal["keep", "recompute"]
"""What becomes of keys and values of those that go on: the old weights' are kept, or computed anew."""


class Engine(Protocol):
    """Accepts requests at any time and answers them in its own order, each accepted one exactly once.

    A pool calls it from one thread of one process. Requests arrive with row seed and rollout id settled; the response
    carries that rollout id. A request that cannot be answered is answered all the same, with finish_reason `error` and
    what went wrong in `error`. An exception out of any method but `submit` and `update_weights` means that the engine
    is lost, with whatever it had accepted; the pool then replaces it.
    """

    @property
    def version(self) -> int:
        """Version of the weights that tokens are drawn with now."""

    @property
    def unfinished(self) -> int:
        """Requests accepted and not yet returned."""

    @property
    def tokens_drawn(self) -> int:
        """Tokens drawn since the engine was made."""

    def submit(self, request: Request) -> object:
        """Accept a request. Errors: InvalidInput for one that cannot be served; the others go on."""

    def advance(self, seconds: float) -> RolloutBatch | None:
        """Work until about `seconds` have passed or nothing is left; what ended meanwhile, None where nothing did."""

    def abort(self, rollout_id: str) -> bool:
        """End a request; a later `advance` returns it as far as it got, with finish_reason `abort`.

        False: it is not in flight.
        """

    def update_weights(self, version: int, weights: Mapping[str, Any], *, running: Running, cache: CachePolicy) -> None:
        """Take other weights between two steps; tokens drawn from now on carry `version` in policy_versions.

        `weights` are arrays by name, read-only and shared with other processes of this machine. Errors: InvalidInput
        for weights or choices that cannot be, before anything is changed.
        """


EngineFactory = Callable[[], Engine]
"""Makes an engine in the actor's process; it must pickle, and its own imports are best made when it is called."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What an engine is at."""

    running: int
    """Requests that are being decoded."""
    waiting: int
    """Requests accepted that wait for a slot or for memory."""
    kv_use: float | None = None
    """Share of the key-value memory that is promised to running requests; None: unknown."""


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine may tell its load; the pool then shows it among its metrics."""

    @property
    def load(self) -> EngineLoad:
        """The present load."""
