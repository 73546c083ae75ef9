"""The actors of a pool: started, watched, replaced where they are lost, and given the same weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from keptset.rollout.engine_protocol import CachePolicy, Running
from keptset.rollout.metrics import PoolMetrics
from keptset.rollout.pool.events import log_event
from keptset.rollout.pool.ledger import Entry
from keptset.rollout.pool.seat import Seat, own_error, reason_of
from keptset.schemas.errors import InvalidInput, RolloutError

IDLE_SECONDS = 0.05
"""Between two looks where no actor has anything to do."""


class Fleet:
    """Seats and who sits in them."""

    def __init__(
        self,
        spawn: Callable[[int], Any],
        *,
        actors: int,
        needs: str,
        name: str,
        max_restarts: int,
        max_losses: int,
        turn_limit: float,
        start_limit: float,
        metrics: PoolMetrics,
        on_lost: Callable[[list[Entry], str], None],
    ) -> None:
        """`spawn` makes the actor of a seat, `needs` tells its resources. `on_lost` is told what a lost one owed, and
        why it was lost.

        A seat is closed after `max_restarts` replacements in a row that answered nothing, all of them are after
        `max_losses` actors were lost in a row while nobody answered anything.
        """
        self.seats = [Seat(number=number, spawn=spawn) for number in range(actors)]
        self.restarts = 0
        """Actors replaced so far."""
        self.version: int | None = None
        """Version of the weights last sent; None: the engines have those they began with."""
        self._needs = needs
        self._name, self._max_restarts, self._metrics, self._on_lost = name, max_restarts, metrics, on_lost
        self._turn_limit, self._start_limit = turn_limit, start_limit
        self._weights: Any = None
        self._max_losses, self._losses = max_losses, 0
        self._order = list(self.seats)

    @property
    def is_lost(self) -> bool:
        """Whether no actor is left, and none will come."""
        return all(seat.is_closed for seat in self.seats)

    def start(self) -> None:
        """Fill every seat and wait until all are loaded.

        Errors: the worker's own, such as CheckpointError; RolloutError where they are not there in time.
        """
        for seat in self.seats:
            seat.fill(self._start_limit, None, None)
        try:
            ray.get([seat.awaited for seat in self.seats], timeout=self._start_limit)
        except GetTimeoutError as error:
            raise RolloutError(
                f"{len(self.seats)} actors are not loaded within {self._start_limit:g} s; each needs {self._needs}, "
                f"and free are {ray.available_resources()}"
            ) from error
        except RayError as error:
            raise own_error(error) from error
        for seat in self.seats:
            seat.came_back()
        log_event(logging.INFO, "actors_started", pool=self._name, actors=len(self.seats))

    def fill(self, *, at_once: bool = False) -> None:
        """Start actors for seats whose last one was lost, unless they are to wait a while longer."""
        for seat in self.seats:
            if seat.handle is None and not seat.is_closed and (at_once or time.monotonic() >= seat.deadline):
                self.restarts += 1
                self._metrics.restart()
                log_event(logging.INFO, "actor_restarted", pool=self._name, actor=seat.number)
                seat.fill(self._start_limit, self.version, self._weights)

    def close(self, *, kill: bool = True) -> None:
        """End every actor; without `kill` they are gone already, and are only forgotten."""
        for seat in self.seats:
            seat.end(kill=kill)
            seat.owed.clear()

    def await_turn(self) -> Seat | None:
        """Wait for an actor to end a turn, the one served longest ago first. None where something else came up first.

        Looks after actors that are loading, and those that are overdue.
        """
        awaited = {seat.awaited: seat for seat in self._order if seat.awaited is not None}
        waits = [seat.deadline for seat in self.seats if seat.is_watched]
        if not awaited:
            time.sleep(max(0.0, min([*waits, time.monotonic() + IDLE_SECONDS]) - time.monotonic()))
            return None
        timeout = max(0.0, min(waits) - time.monotonic())
        ready, _ = ray.wait(list(awaited), num_returns=1, timeout=timeout)
        if self._lose_overdue(awaited) or not ready:
            return None
        seat = awaited[ready[0]]
        self._order.remove(seat)
        self._order.append(seat)
        if seat.is_live:
            return seat
        try:
            seat.came_back()
        except RayError as error:
            self.lose(seat, reason_of(error))
        return None

    def _lose_overdue(self, awaited: Mapping[Any, Seat]) -> bool:
        """Give up actors past their deadline, unless what is awaited is there and only nobody has looked since."""
        now = time.monotonic()
        late = {reference: seat for reference, seat in awaited.items() if now >= seat.deadline}
        if not late:
            return False
        _, missing = ray.wait(list(late), num_returns=len(late), timeout=0)
        for reference in missing:
            self.lose(late[reference], f"no answer within {late[reference].limit:g} s")
        return bool(missing)

    def answered(self, seat: Seat) -> None:
        """This actor has answered something: it works."""
        seat.losses = self._losses = 0

    def lose(self, seat: Seat, reason: str) -> None:
        """Give this actor up, with what it owes."""
        owed = seat.vacate(reason, self._max_restarts)
        self._losses += 1
        level = logging.ERROR if seat.is_closed else logging.WARNING
        event = "actor_given_up" if seat.is_closed else "actor_lost"
        log_event(level, event, pool=self._name, actor=seat.number, reason=reason, owed=len(owed))
        self._on_lost(owed, reason)
        if self._losses > self._max_losses and not self.is_lost:
            log_event(logging.ERROR, "pool_given_up", pool=self._name, losses=self._losses, reason=reason)
            for other in self.seats:
                other.is_closed, other.reason = True, reason
                self._on_lost(other.vacate(reason, 0), "the pool was given up")

    def forget_owed(self) -> None:
        """Nobody wants what is in flight any more."""
        for seat in self.seats:
            if seat.owed:
                abandoned = list(seat.owed)
                seat.owed.clear()
                seat.turns.clear()
                seat.send(self._turn_limit, seat.handle.abandon.remote(abandoned))

    def queue_turns(self, given: Mapping[int, list[Entry]], seconds: float) -> None:
        """Hand over requests, by seat, and keep everyone who owes something busy."""
        for seat in self.seats:
            entries = given.get(seat.number, [])
            while seat.takes_turns and seat.owed:
                seat.queue_turn(self._turn_limit, entries, seconds)
                entries = []

    def update_weights(self, version: int, weights: Any, running: Running, cache: CachePolicy) -> tuple[float, ...]:
        """Send weights, by reference, to all; returns what each that was loaded took to load them.

        Errors: InvalidInput where no engine takes them; nothing is changed then.
        """
        sent = {
            seat: seat.handle.update_weights.remote(version, weights, running, cache)
            for seat in self.seats
            if seat.handle is not None
        }
        took: list[float] = []
        refused: dict[Seat, InvalidInput] = {}
        for seat, errand in sent.items():
            if not seat.is_live:
                # It takes no turn before it has them; nobody else waits for it.
                seat.send(self._start_limit, errand)
                continue
            try:
                took.append(ray.get(errand, timeout=self._turn_limit * (len(seat.turns) + 1)))
            except GetTimeoutError:
                self.lose(seat, "new weights were not loaded in time")
            except RayTaskError as error:
                own = own_error(error)
                if isinstance(own, InvalidInput):
                    refused[seat] = own
                else:
                    self.lose(seat, reason_of(error))
            except RayError as error:
                self.lose(seat, reason_of(error))
        if refused and not took:
            raise next(iter(refused.values()))
        self.version, self._weights = version, weights
        for seat, refusal in refused.items():
            self.lose(seat, str(refusal))
        return tuple(took)

    def process_ids(self) -> list[int]:
        """Processes of the actors, once each seat that is to be filled is."""
        while True:
            self.fill(at_once=True)
            pids = [self._process_id(seat) for seat in self.seats if not seat.is_closed]
            if None not in pids:
                return [pid for pid in pids if pid is not None]

    def _process_id(self, seat: Seat) -> int | None:
        """None where the actor turns out to be lost."""
        try:
            while seat.errands:
                seat.came_back(self._start_limit)
            pid: int = ray.get(seat.handle.load.remote(), timeout=self._start_limit)
        except RayError as error:
            self.lose(seat, reason_of(error))
            return None
        return pid
