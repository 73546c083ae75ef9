"""Many engines on Ray: prompts stream in, batches stream out, and what an actor takes with it is done again.

Requests go to the least loaded actor. Each actor has at most two turns queued, so that it never waits for the driver,
and a consumer that does not ask for the next batch stops the handing out of new turns and the pulling of prompts. A
lost actor is replaced and its unanswered requests go to the front of the queue; their row seeds travel with them, so
they are answered as they would have been.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from keptset.rollout.actor import RolloutWorker, Turn
from keptset.rollout.checkpoint_engine import CheckpointEngine
from keptset.rollout.config import EngineConfig
from keptset.rollout.engine_protocol import CachePolicy, EngineFactory, Running
from keptset.rollout.metrics import PoolMetrics
from keptset.rollout.pool.delivery import Delivery
from keptset.rollout.pool.dispatch import Dispatcher
from keptset.rollout.pool.events import log_event
from keptset.rollout.pool.fleet import Fleet
from keptset.rollout.pool.ledger import Entry, Ledger, failure_text
from keptset.rollout.pool.placement import Placement, PlacementStrategy
from keptset.rollout.pool.resources import check_resources, check_settings, check_times, start_ray
from keptset.rollout.pool.seat import TURNS_QUEUED, reason_of
from keptset.rollout.pool.weight_sync import WeightSync, as_arrays
from keptset.rollout.request import Request
from keptset.schemas.errors import InvalidInput, RolloutError
from keptset.schemas.rollout_batch import RolloutBatch


class RolloutPool:
    """N engines on Ray actors, as a context manager.

    Starts a local Ray where none is running and `address` is None, and ends it with the pool; joins a cluster where
    `address` names one ("auto": the one this machine belongs to). Not thread-safe.
    """

    def __init__(
        self,
        engine: str | Path | EngineFactory,
        config: EngineConfig | None = None,
        *,
        actors: int = 1,
        gpus_per_actor: float = 0,
        threads_per_actor: int = 1,
        address: str | None = None,
        placement: PlacementStrategy | Any = None,
        max_restarts: int = 3,
        max_attempts: int = 3,
        turn_seconds: float = 1.0,
        turn_timeout_seconds: float = 600.0,
        start_timeout_seconds: float = 1800.0,
        model_id: str | None = None,
        name: str = "rollout",
    ) -> None:
        """`engine`: a checkpoint folder for keptset's own engine, or what makes another one in each actor.

        `config`: the own engine's; of another one's it tells base seed, slots, and whether row seeds may repeat.
        `gpus_per_actor` may be a fraction. `placement`: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD for a placement
        group of the pool's own, or a group of yours, of which any bundle is taken; None leaves it to Ray.

        An actor that is not loaded after `start_timeout_seconds`, or whose turn takes `turn_timeout_seconds`, counts as
        lost. `max_restarts`: after so many replacements in a row that answered nothing, an actor is not replaced any
        more. `max_attempts`: a request that was with so many lost actors is given up. `name`: in logs and metrics.

        Errors: InvalidInput for a setting that cannot be; the engine's own, such as CheckpointError, where it cannot be
        made; RolloutError where the actors do not start in time.
        """
        check_settings(actors, gpus_per_actor, threads_per_actor, max_restarts, max_attempts)
        check_times(
            turn_seconds=turn_seconds,
            turn_timeout_seconds=turn_timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
        )
        self.config = config or EngineConfig()
        self.name = name
        slots = self.config.slots
        self._ledger = Ledger(
            base_seed=self.config.base_seed,
            max_attempts=max_attempts,
            allow_shared_seed=self.config.allow_shared_seed,
        )
        self._dispatcher = Dispatcher(room=TURNS_QUEUED * slots, group_lead=max(1, slots // 2))
        self._turn_seconds = turn_seconds
        self._streaming = self._is_closed = False
        self._unsettled: set[Delivery] = set()
        self._fleet: Fleet | None = None
        self._placement: Placement | None = None
        self._ends_ray = not ray.is_initialized()
        own = start_ray(address) if self._ends_ray else False
        self._connection = ray.get_runtime_context().get_worker_id()
        try:
            check_resources(own=own, actors=actors, cpus=threads_per_actor, gpus=gpus_per_actor)
            self._metrics = PoolMetrics({"pool": name})
            placed = self._placement = Placement(
                placement, actors=actors, cpus=threads_per_actor, gpus=gpus_per_actor, seconds=start_timeout_seconds
            )
            # Ray repeats nothing by itself: what is done again is the ledger's to know.
            actor = ray.remote(max_restarts=0, max_task_retries=0)(RolloutWorker)
            factory = (
                CheckpointEngine(folder=Path(engine), config=self.config, model_id=model_id)
                if isinstance(engine, str | Path)
                else engine
            )
            self._fleet = Fleet(
                lambda number: actor.options(**placed.options(number)).remote(
                    factory, threads=threads_per_actor, metric_tags={"pool": name, "actor": str(number)}
                ),
                actors=actors,
                needs=placed.needs,
                name=name,
                max_restarts=max_restarts,
                max_losses=(max_restarts + 1) * actors + max_attempts,
                turn_limit=turn_timeout_seconds,
                start_limit=start_timeout_seconds,
                metrics=self._metrics,
                on_lost=self._lost,
            )
            self._fleet.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the actors, and Ray where the pool started it. Closing twice is no error."""
        if self._is_closed:
            return
        self._is_closed = True
        # Where Ray was shut down meanwhile, to ask it or the next one for our actors would end this process.
        is_there = ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._connection
        if self._fleet is not None:
            self._fleet.close(kill=is_there)
        if not is_there:
            return
        if self._placement is not None:
            self._placement.remove()
        if self._ends_ray:
            ray.shutdown()

    @property
    def failures(self) -> Mapping[str, str]:
        """Rollout ids of requests that were refused or given up so far, with the reason."""
        return dict(self._ledger.failures)

    @property
    def restarts(self) -> int:
        """Actors replaced so far."""
        return self._actors.restarts

    @property
    def version(self) -> int | None:
        """Version of the weights last sent; None: the engines have those they began with."""
        return self._actors.version

    def process_ids(self) -> list[int]:
        """Processes of the actors, once all that are to be there are loaded."""
        return self._actors.process_ids()

    def run(
        self, requests: Iterable[Request | None], progress: Callable[[Turn], None] | None = None
    ) -> Iterator[RolloutBatch]:
        """`stream`, with the batches themselves: each is fetched before it is handed out."""
        for delivery in self.stream(requests, progress=progress):
            batch = delivery.get()
            if batch is not None:
                yield batch

    def stream(
        self,
        requests: Iterable[Request | None],
        *,
        window: int = 16,
        progress: Callable[[Turn], None] | None = None,
    ) -> Iterator[Delivery]:
        """Responses to these requests in batches, as references, as they end. Every accepted request is answered once.

        `requests` may be endless: it is pulled, in the consumer's thread, only when an actor has room. It says with
        None that it has nothing at present. At most `window` deliveries may be unsettled when the next is asked for.
        `progress` is called after every turn of every actor. Leaving the iteration early ends what is in flight. What
        is found lost after the iteration ended is answered by the next one, even over no requests.

        Errors: InvalidInput for a second stream beside this one, more than `window` unsettled deliveries, or, after
        everything before it is delivered, a rollout id or a row seed that comes twice; RolloutError naming the
        requests that were refused or given up, with the reasons, after everything else is delivered.
        """
        fleet = self._actors
        if self._streaming:
            raise InvalidInput(f"pool {self.name} runs a stream already; end it first")
        self._streaming = True
        failed_before = set(self._ledger.failures)
        self._ledger.open(requests)
        try:
            while self._hand_out(fleet):
                delivery = self._next_delivery(fleet, progress)
                if delivery is not None:
                    yield delivery
                    self._check_between(window)
        finally:
            self._streaming = False
            self._ledger.close()
            fleet.forget_owed()
        if self._ledger.repeated is not None:
            raise self._ledger.repeated
        failures = {name: why for name, why in self._ledger.failures.items() if name not in failed_before}
        if failures or self._ledger.left_because is not None:
            raise RolloutError(failure_text(failures, self._ledger.left_because))

    def update_weights(
        self, version: int, weights: Any, *, running: Running = "continue", cache: CachePolicy = "recompute"
    ) -> WeightSync:
        """Bring weights to every actor, through the object store once. Returns when each that is there has them.

        `weights`: tensors or arrays by name, or a reference to such arrays (`weight_sync.as_arrays`) in the store. May
        be called between two batches of a stream: an actor takes them after the turns it has queued, and from then on
        its tokens carry `version`. One that is replaced later is given them before its first request.

        Errors: InvalidInput for a version that is not above the last one, and for weights that do not fit; nothing is
        changed then.
        """
        fleet, begin = self._actors, time.monotonic()
        if fleet.version is not None and version <= fleet.version:
            raise InvalidInput(f"version is {version}; the actors have {fleet.version}, and versions only rise")
        reference, nbytes = weights, None
        if not isinstance(weights, ray.ObjectRef):
            arrays = as_arrays(weights)
            nbytes = sum(array.nbytes for array in arrays.values())
            reference = ray.put(arrays)
        stored = time.monotonic() - begin
        took = fleet.update_weights(version, reference, running, cache)
        seconds = time.monotonic() - begin
        self._metrics.sync(seconds)
        log_event(logging.INFO, "weights_synced", pool=self.name, version=version, seconds=round(seconds, 3))
        return WeightSync(version=version, seconds=seconds, store_seconds=stored, load_seconds=took, nbytes=nbytes)

    @property
    def _actors(self) -> Fleet:
        if self._is_closed or self._fleet is None:
            raise InvalidInput(f"pool {self.name} is closed")
        return self._fleet

    def _hand_out(self, fleet: Fleet) -> bool:
        """Give work to whoever has room for it. False where nothing is left to do."""
        fleet.fill()
        fleet.queue_turns(self._dispatcher.hand_out(self._ledger, fleet.seats), self._turn_seconds)
        owed = sum(len(seat.owed) for seat in fleet.seats)
        self._metrics.state(self._ledger.waiting, owed, sum(seat.is_live for seat in fleet.seats))
        if fleet.is_lost and not self._ledger.is_exhausted:
            self._given_up(self._ledger.give_up_all(f"no actor is left: {fleet.seats[-1].reason}"))
        return owed > 0 or not self._ledger.is_exhausted

    def _next_delivery(self, fleet: Fleet, progress: Callable[[Turn], None] | None) -> Delivery | None:
        """Wait for a turn to end and book what it brought; None where that is no response."""
        seat = fleet.await_turn()
        if seat is None:
            return None
        try:
            turn, reference = seat.take_turn()
        except RayError as error:
            fleet.lose(seat, reason_of(error))
            return None
        for rollout_id, reason in turn.refused.items():
            self._ledger.refuse(seat.owed.pop(rollout_id), reason)
        self._metrics.failed(len(turn.refused))
        self._ledger.deliver([seat.owed.pop(rollout_id) for rollout_id in turn.finished])
        if turn.oldest_version is not None and fleet.version is not None:
            self._metrics.lag(fleet.version - turn.oldest_version)
        if progress is not None:
            progress(turn)
        if not turn.finished:
            return None
        fleet.answered(seat)
        delivery = Delivery(
            reference=reference,
            rollout_ids=turn.finished,
            actor=seat.number,
            oldest_version=turn.oldest_version,
            settle=self._settle,
        )
        self._unsettled.add(delivery)
        return delivery

    def _settle(self, delivery: Delivery, lost_because: str | None) -> None:
        if delivery not in self._unsettled:
            return
        self._unsettled.remove(delivery)
        if lost_because is None:
            self._ledger.acknowledge(delivery.rollout_ids)
            return
        log_event(
            logging.WARNING,
            "batch_lost",
            pool=self.name,
            actor=delivery.actor,
            responses=len(delivery.rollout_ids),
            reason=lost_because,
        )
        self._given_up(self._ledger.lost_on_the_way(delivery.rollout_ids, lost_because))

    def _lost(self, owed: list[Entry], reason: str) -> None:
        self._given_up(self._ledger.lost(owed, reason))

    def _given_up(self, entries: list[Entry]) -> None:
        self._metrics.failed(len(entries))
        for entry in entries:
            log_event(
                logging.ERROR, "request_given_up", pool=self.name, rollout_id=entry.rollout_id, reasons=entry.losses
            )

    def _check_between(self, window: int) -> None:
        """What the consumer may not have done with the last delivery in hand."""
        if self._is_closed:
            raise RolloutError(f"pool {self.name} was closed while a stream ran")
        if len(self._unsettled) > window:
            raise InvalidInput(
                f"{len(self._unsettled)} deliveries are unsettled, more than window = {window}; fetch them with get(), "
                "or say done() when another process has read them"
            )
