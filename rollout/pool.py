"""Many engines on Ray: requests go to the least loaded, responses come back as batches.

Each actor has at most two turns queued, so that it never waits for the driver, and a consumer that does not ask for
the next batch stops the handing out of new turns. A lost actor is replaced and its unanswered requests go to the
front of the queue; their row seeds travel with them, so they are answered as they would have been.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from keptset.rollout.actor import RolloutWorker, Turn
from keptset.rollout.config import EngineConfig
from keptset.rollout.cpu_threads import usable_cores
from keptset.rollout.request import Request
from keptset.schemas.errors import InvalidInput, KeptsetError, RolloutError
from keptset.schemas.rollout_batch import RolloutBatch

TURNS_QUEUED = 2


@dataclass
class _Member:
    """One actor and what it owes."""

    handle: Any
    owed: dict[str, Request] = field(default_factory=dict)
    """Requests handed over and not yet answered, by rollout id."""
    turns: deque[tuple[Any, Any]] = field(default_factory=deque)
    """References of (turn, batch), oldest first."""


def local_actors(checkpoint_bytes: int) -> int:
    """How many single-threaded actors this machine carries: one per usable core, as far as memory goes."""
    cores = usable_cores()
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, available // max(1, 3 * checkpoint_bytes)))


class RolloutPool:
    """N engines on Ray actors, as a context manager.

    Starts a local Ray where none is running and `address` is None, and ends it with the pool; joins a cluster where
    `address` names one ("auto": the one this machine belongs to).
    """

    def __init__(
        self,
        folder: str | Path,
        config: EngineConfig | None = None,
        *,
        actors: int = 1,
        gpus_per_actor: float = 0,
        threads_per_actor: int = 1,
        address: str | None = None,
        max_restarts: int = 3,
        turn_seconds: float = 1.0,
        model_id: str | None = None,
    ) -> None:
        if actors < 1:
            raise InvalidInput(f"actors is {actors}; it must be >= 1")
        self.config = config or EngineConfig()
        self.max_restarts = max_restarts
        self.turn_seconds = turn_seconds
        self.restarts = 0
        """Actors replaced so far."""
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            options: dict[str, Any] = {"include_dashboard": False} if address is None else {}
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
        self._make = (
            ray.remote(RolloutWorker)
            .options(num_cpus=threads_per_actor, num_gpus=gpus_per_actor, max_restarts=0)
            .remote
        )
        self._arguments = ((str(folder), self.config), {"threads": threads_per_actor, "model_id": model_id})
        self._members = [self._spawn() for _ in range(actors)]
        self._wait_ready()

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the actors, and Ray where the pool started it."""
        for member in self._members:
            ray.kill(member.handle)
        self._members = []
        if self._owns_ray:
            ray.shutdown()

    def process_ids(self) -> list[int]:
        """Processes of the actors."""
        pids: list[int] = ray.get([member.handle.load.remote() for member in self._members])
        return pids

    def run(
        self, requests: Iterable[Request], progress: Callable[[Turn], None] | None = None
    ) -> Iterator[RolloutBatch]:
        """Responses to these requests, in batches as they end; every accepted request is answered exactly once.

        `progress` is called after every turn of every actor. Errors: RolloutError naming the prompts that were
        refused or that stayed unanswered after `max_restarts` lost actors, raised after everything else is delivered.
        """
        queue = deque(self._numbered(requests))
        refused: dict[str, str] = {}
        while queue or any(member.owed for member in self._members):
            self._hand_out(queue)
            oldest = {member.turns[0][0]: member for member in self._members if member.turns}
            ready, _ = ray.wait(list(oldest), num_returns=1)
            member = oldest[ready[0]]
            try:
                turn, batch = ray.get(list(member.turns[0]))
            except RayActorError as error:
                self._replace(member, queue, error)
                continue
            except RayTaskError as error:
                raise _own_error(error) from error
            member.turns.popleft()
            for rollout_id in (*turn.finished, *turn.refused):
                member.owed.pop(rollout_id)
            refused |= turn.refused
            if progress is not None:
                progress(turn)
            if batch is not None:
                yield batch
        if refused:
            told = "; ".join(f"{rollout_id}: {reason}" for rollout_id, reason in list(refused.items())[:5])
            raise RolloutError(f"{len(refused)} requests were refused: {told}")

    def _numbered(self, requests: Iterable[Request]) -> Iterator[Request]:
        seen: set[str] = set()
        for request in requests:
            request = request.resolved(self.config.base_seed)
            assert request.rollout_id is not None
            if request.rollout_id in seen:
                raise InvalidInput(
                    f"rollout id {request.rollout_id} was asked for twice; give samples their own sample_index"
                )
            seen.add(request.rollout_id)
            yield request

    def _hand_out(self, queue: deque[Request]) -> None:
        """Give every actor its fair share of what is unanswered, as far as it has room, and a turn to work on it."""
        unanswered = len(queue) + sum(len(member.owed) for member in self._members)
        share = min(-(-unanswered // len(self._members)), TURNS_QUEUED * self.config.slots)
        for member in sorted(self._members, key=lambda member: len(member.owed)):
            while len(member.turns) < TURNS_QUEUED:
                given = [queue.popleft() for _ in range(min(share - len(member.owed), len(queue)))]
                if not given and (not member.owed or member.turns):
                    break
                member.owed |= {request.rollout_id or "": request for request in given}
                turn = member.handle.turn.options(num_returns=2).remote(given, self.turn_seconds)
                member.turns.append(tuple(turn))

    def _spawn(self) -> _Member:
        arguments, options = self._arguments
        return _Member(handle=self._make(*arguments, **options))

    def _wait_ready(self) -> None:
        """Errors: the worker's own, such as CheckpointError, where it cannot load."""
        try:
            self.process_ids()
        except (RayActorError, RayTaskError) as error:
            self.close()
            raise _own_error(error) from error

    def _replace(self, member: _Member, queue: deque[Request], error: RayActorError) -> None:
        self.restarts += 1
        if self.restarts > self.max_restarts:
            unanswered = [request.prompt_id for request in (*member.owed.values(), *queue)]
            raise RolloutError(
                f"{self.restarts} actors were lost, more than max_restarts = {self.max_restarts}; "
                f"{len(unanswered)} requests are unanswered, the first of prompt {unanswered[0]}: {error}"
            )
        queue.extendleft(reversed(member.owed.values()))
        self._members[self._members.index(member)] = self._spawn()


def _own_error(error: RayActorError | RayTaskError) -> KeptsetError:
    """The worker's error as it was raised, or what Ray says in one of ours."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, KeptsetError) else RolloutError(f"a rollout actor failed: {error}")
