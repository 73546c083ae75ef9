"""One engine in one process: a plain class that the pool makes a Ray actor of.

The pool drives a worker by turns: hand in requests, let the engine run for a while, take what ended. Requests that
have not ended stay in flight between turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from keptset.rollout import cpu_threads
from keptset.rollout.engine_protocol import CachePolicy, Engine, EngineFactory, EngineLoad, ReportsLoad, Running
from keptset.rollout.metrics import WorkerMetrics
from keptset.rollout.request import Request
from keptset.schemas.errors import InvalidInput, RolloutError
from keptset.schemas.rollout_batch import RolloutBatch

_LAST_ADVANCE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn of a worker brought, without the responses themselves."""

    finished: tuple[str, ...]
    """Rollout ids of the responses in the turn's batch."""
    refused: Mapping[str, str]
    """Rollout ids of requests that could not be accepted, with the reason."""
    unfinished: int
    """Requests still in flight."""
    tokens_drawn: int
    """Tokens drawn in this turn."""
    seconds: float
    """Wall time of this turn."""
    version: int
    """Version of the weights at its end."""
    oldest_version: int | None
    """The oldest that a token of the batch was drawn with; None where there is no batch or it does not tell."""


class RolloutWorker:
    """An engine, made when it is first needed."""

    def __init__(
        self, make_engine: EngineFactory, *, threads: int | None = None, metric_tags: Mapping[str, str] | None = None
    ) -> None:
        """`threads`: for the engine's CPU work. `metric_tags`: report to Ray's metrics under these; None: do not."""
        cpu_threads.configure(threads)
        self._make_engine = make_engine
        self._metrics = None if metric_tags is None else WorkerMetrics(metric_tags)
        self._accepted: set[str] = set()
        self._held: set[int] = set()

    @cached_property
    def engine(self) -> Engine:
        """The engine. Errors: those of its factory, such as CheckpointError."""
        engine = self._make_engine()
        self._held.add(engine.version)
        return engine

    def load(self, version: int | None = None, weights: Mapping[str, Any] | None = None) -> int:
        """Make the engine now, and give it these weights. Returns the process's id, for logs and tests that kill it."""
        assert self.engine is not None
        if version is not None and weights is not None:
            self.update_weights(version, weights, "continue", "recompute")
        return os.getpid()

    def turn(self, requests: Sequence[Request], seconds: float) -> tuple[Turn, RolloutBatch | None]:
        """Accept requests and run until `seconds` have passed or nothing is left.

        A request that cannot be accepted is named in the turn; the others go on. The batch holds no memory but its own.
        Errors: RolloutError where the engine breaks its contract, see `Engine`; whatever the engine raises.
        """
        begin, drawn_before = time.monotonic(), self.engine.tokens_drawn
        refused: dict[str, str] = {}
        for request in requests:
            assert request.rollout_id is not None
            try:
                self.engine.submit(request)
            except InvalidInput as error:
                refused[request.rollout_id] = str(error)
            else:
                self._accepted.add(request.rollout_id)
        batch = self.engine.advance(seconds)
        if batch is not None:
            self._check_out(batch)
            batch = batch.compact()
        turn = Turn(
            finished=() if batch is None else tuple(batch.rollout_ids),
            refused=refused,
            unfinished=self.engine.unfinished,
            tokens_drawn=self.engine.tokens_drawn - drawn_before,
            seconds=time.monotonic() - begin,
            version=self.engine.version,
            oldest_version=min(_versions(batch), default=None),
        )
        if self._metrics is not None:
            self._metrics.turn(turn.tokens_drawn, turn.seconds, self._load(), batch)
        return turn, batch

    def update_weights(self, version: int, weights: Mapping[str, Any], running: Running, cache: CachePolicy) -> float:
        """Give the engine other weights; returns the seconds it took. Errors: as `Engine.update_weights`."""
        begin = time.monotonic()
        self.engine.update_weights(version, weights, running=running, cache=cache)
        if self.engine.version != version:
            raise RolloutError(f"the engine was given version {version} and says it has {self.engine.version}")
        self._held.add(version)
        return time.monotonic() - begin

    def abandon(self, rollout_ids: Iterable[str]) -> None:
        """Nobody wants these any more: end them and drop what comes of them.

        Errors: RolloutError where the engine does not let go of them.
        """
        for rollout_id in self._accepted.intersection(rollout_ids):
            self.engine.abort(rollout_id)
        deadline = time.monotonic() + _LAST_ADVANCE_SECONDS
        while self.engine.unfinished:
            self.engine.advance(0.1)
            if time.monotonic() > deadline:
                raise RolloutError(f"{self.engine.unfinished} aborted requests are still in the engine")
        self._accepted.clear()

    def _check_out(self, batch: RolloutBatch) -> None:
        """Each response answers a request that is in flight, with weights that were here."""
        for rollout_id in batch.rollout_ids:
            if rollout_id not in self._accepted:
                raise RolloutError(f"the engine answered {rollout_id}, which is not in flight; it was asked for once")
            self._accepted.remove(rollout_id)
        foreign = _versions(batch) - self._held
        if foreign:
            raise RolloutError(
                f"the batch says version {min(foreign)}, which this engine never held; it held {sorted(self._held)}"
            )

    def _load(self) -> EngineLoad:
        engine = self.engine
        return engine.load if isinstance(engine, ReportsLoad) else EngineLoad(running=engine.unfinished, waiting=0)


def _versions(batch: RolloutBatch | None) -> set[int]:
    """Versions that the batch's tokens were drawn with."""
    versions = None if batch is None else batch.policy_versions
    if versions is None:
        return set()
    known = versions.values if versions.valid is None else versions.values[versions.valid]
    return set(np.unique(known).tolist())
