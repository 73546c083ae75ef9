"""A place in the pool: the Ray actor that fills it now, what it owes, and what is awaited of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from keptset.rollout.pool.ledger import Entry
from keptset.schemas.errors import KeptsetError, RolloutError

TURNS_QUEUED = 2
"""Turns an actor has at most, so that it never waits for the driver."""
_LONGEST_PAUSE_SECONDS = 30.0
_REASON_CHARACTERS = 300


@dataclass(eq=False)
class Seat:
    """Actors come and go; the seat stays."""

    number: int
    spawn: Callable[[int], Any]
    """A new actor for this seat."""
    owed: dict[str, Entry] = field(default_factory=dict)
    """Requests handed over and not yet answered, by rollout id."""
    turns: deque[tuple[Any, Any]] = field(default_factory=deque)
    """References of (turn, batch), oldest first."""
    handle: Any = None
    """None while the seat is empty."""
    errands: deque[Any] = field(default_factory=deque)
    """References of what the actor must have done before it takes turns, in order: loading, forgetting."""
    losses: int = 0
    """Actors lost in a row that had answered nothing."""
    is_closed: bool = False
    """Whether it stays empty."""
    reason: str = ""
    """Why its last actor was lost."""
    limit: float = 0.0
    """Seconds that what is awaited may take."""
    _not_before: float = 0.0
    _since: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether there is an actor, loaded."""
        return self.handle is not None and not self.errands

    @property
    def takes_turns(self) -> bool:
        """Whether it can be given something to do now."""
        return self.is_live and len(self.turns) < TURNS_QUEUED

    @property
    def is_watched(self) -> bool:
        """Whether its deadline counts: something is awaited of its actor, or it is to have another one."""
        return not self.is_closed and (self.handle is None or self.awaited is not None)

    @property
    def awaited(self) -> Any:
        """The reference that this seat is waiting for, None where it is idle or empty."""
        if self.errands:
            return self.errands[0]
        return self.turns[0][0] if self.turns else None

    @property
    def deadline(self) -> float:
        """Until when that must have come, or for an empty seat when it is to be filled; on the monotonic clock."""
        return self._since + self.limit if self.handle is not None else self._not_before

    def fill(self, limit: float, version: int | None, weights: Any) -> None:
        """Start an actor; it takes turns once it is loaded with these weights, for which it has `limit` seconds."""
        self.handle = self.spawn(self.number)
        self.send(limit, self.handle.load.remote(version, weights))

    def send(self, limit: float, errand: Any) -> None:
        """No turn before this is done."""
        if not self.errands:
            self._since = time.monotonic()
        self.limit = limit
        self.errands.append(errand)

    def came_back(self, timeout: float | None = None) -> None:
        """The first errand is done, or will be within `timeout` seconds. Errors: RayError where it failed."""
        ray.get(self.errands[0], timeout=timeout)
        self.errands.popleft()
        self._since = time.monotonic()

    def queue_turn(self, limit: float, given: list[Entry], seconds: float) -> None:
        """Hand over requests and let the actor work; each turn has `limit` seconds from when the one before ended."""
        if not self.turns:
            self._since = time.monotonic()
        self.limit = limit
        turn = self.handle.turn.options(num_returns=2).remote([entry.request for entry in given], seconds)
        self.turns.append(tuple(turn))

    def take_turn(self) -> tuple[Any, Any]:
        """The oldest turn and the reference of its batch. Errors: RayError where the actor is lost or failed."""
        turn, batch = self.turns[0]
        try:
            turn = ray.get(turn)
        except RayTaskError:
            with suppress(RayError):  # Ray prints an error that nobody asked for, and it stands for the batch as well
                ray.get(batch)
            raise
        self.turns.popleft()
        self._since = time.monotonic()
        return turn, batch

    def end(self, *, kill: bool = True) -> None:
        """End the actor, whatever it is doing."""
        if self.handle is not None and kill:
            ray.kill(self.handle)
        self.turns.clear()
        self.errands.clear()
        self.handle = None

    def vacate(self, reason: str, max_restarts: int) -> list[Entry]:
        """End the actor. Returns what it owed; the seat is closed where too many were lost in a row."""
        owed = list(self.owed.values())
        self.end()
        if not any(entry.suspect for entry in owed):  # else it was the request's doing
            self.losses += 1
        self.owed.clear()
        self.reason, self.is_closed = reason, self.is_closed or self.losses > max_restarts
        # At once the first time; then slower, for what has to pass by itself.
        pause = 0.0 if self.losses < 2 else min(2.0 ** (self.losses - 2), _LONGEST_PAUSE_SECONDS)
        self._not_before = time.monotonic() + pause
        return owed


def own_error(error: BaseException) -> KeptsetError:
    """The worker's error as it was raised, or what Ray says in one of ours."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, KeptsetError) else RolloutError(f"a rollout actor failed: {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """Why an actor was lost, in a line."""
    told = str(error)
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None) or error
        told = f"{type(cause).__name__}: {cause}"
    elif isinstance(error, RayActorError):
        # Ray tells the actor's whole address first, and guesses at the end.
        told = told.rpartition("The actor is dead because ")[2].partition(" Some common causes")[0]
    line = " ".join(told.split()) or type(error).__name__
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]} ..."
