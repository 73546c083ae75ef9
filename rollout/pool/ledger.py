"""Where every accepted request is: waiting, owed by an actor, delivered. It leaves answered once, or given up by name.

A request that was with a lost actor goes to another, until it was with `max_attempts` of them; then it is given up. On
its last attempt it is a suspect, to be run alone: a request that kills its actor then takes no other one with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from keptset.rollout.request import Request
from keptset.schemas.errors import InvalidInput

REMEMBERED = 1_000_000
"""Rollout ids and row seeds of a stream remembered to tell a repeated one, some hundred bytes each; beyond that the
oldest are forgotten."""


@dataclass(kw_only=True)
class Entry:
    """One accepted request."""

    request: Request
    """With its row seed and rollout id settled, so that every attempt draws the same."""
    losses: list[str] = field(default_factory=list)
    """Why each attempt so far came to nothing."""
    suspect: bool = False
    """Whether it must run alone."""

    @property
    def rollout_id(self) -> str:
        assert self.request.rollout_id is not None
        return self.request.rollout_id

    @property
    def seed(self) -> int:
        """The row seed."""
        assert self.request.params.seed is not None
        return self.request.params.seed


class Ledger:
    """The requests of one stream at a time, pulled from their source only when there is room for them."""

    def __init__(self, *, base_seed: int, max_attempts: int, allow_shared_seed: bool = False) -> None:
        """`allow_shared_seed`: whether two requests of a stream may have the same row seed."""
        self._base_seed, self._max_attempts, self._allow_shared_seed = base_seed, max_attempts, allow_shared_seed
        self._source: Iterator[Request | None] | None = None
        self._returned: deque[Entry] = deque()
        self._suspects: deque[Entry] = deque()
        self._delivered: dict[str, Entry] = {}
        self._asked: dict[int, None] = {}
        self._seeds: dict[int, None] = {}
        self.failures: dict[str, str] = {}
        """Rollout ids of requests that were refused or given up, with the reason."""
        self.repeated: InvalidInput | None = None
        """What the source asked for a second time, where it was stopped."""
        self.left_because: str | None = None
        """Why the source was left before its end."""

    @property
    def waiting(self) -> int:
        """Accepted requests that no actor has."""
        return len(self._returned) + len(self._suspects)

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing waits and nothing more will come."""
        return self._source is None and not self.waiting

    @property
    def unacknowledged(self) -> int:
        """Delivered responses that may yet turn out to be lost."""
        return len(self._delivered)

    def open(self, source: Iterable[Request | None]) -> None:
        """A stream begins. What was lost after the last one ended is served first."""
        self._source = iter(source)
        there = [*self._delivered.values(), *self._waiting()]
        self._asked = {hash(entry.rollout_id): None for entry in there}
        self._seeds = {entry.seed: None for entry in there}
        self.repeated = self.left_because = None

    def close(self) -> None:
        """The stream is over, finished or not: what waits is forgotten."""
        self._source = None
        self._returned.clear()
        self._suspects.clear()

    def next(self) -> Entry | None:
        """A request to hand out, those of lost actors first; None where there is none now.

        A source says with None that it has nothing at present. A rollout id or a row seed that comes a second time in a
        stream ends the source: see `repeated`.
        """
        if self._returned:
            return self._returned.popleft()
        if self._source is None:
            return None
        try:
            request = next(self._source)
        except StopIteration:
            self._source = None
            return None
        if request is None:
            return None
        entry = Entry(request=request.resolved(self._base_seed))
        self.repeated = self._repeats(entry)
        if self.repeated is not None:
            self._source = None
            return None
        for seen, mark in ((self._asked, hash(entry.rollout_id)), (self._seeds, entry.seed)):
            seen[mark] = None
            if len(seen) > REMEMBERED:
                del seen[next(iter(seen))]
        return entry

    def _repeats(self, entry: Entry) -> InvalidInput | None:
        if hash(entry.rollout_id) in self._asked:
            return InvalidInput(
                f"rollout id {entry.rollout_id} was asked for twice; give samples their own sample_index"
            )
        if entry.seed in self._seeds and not self._allow_shared_seed:
            return InvalidInput(
                f"{entry.rollout_id}: row seed {entry.seed} is another's of this stream too, and one would repeat the "
                "other's draws; give each its own, leave params.seed out, or set allow_shared_seed"
            )
        return None

    def next_suspect(self) -> Entry:
        """A request that must run alone."""
        return self._suspects.popleft()

    def lost(self, entries: Iterable[Entry], reason: str) -> list[Entry]:
        """These were with an actor that is lost, or their responses are. Returns those that are given up."""
        given_up: list[Entry] = []
        again: list[Entry] = []
        for entry in entries:
            entry.losses.append(reason)
            if len(entry.losses) >= self._max_attempts:
                self.failures[entry.rollout_id] = _told(entry)
                given_up.append(entry)
            elif len(entry.losses) == self._max_attempts - 1:
                entry.suspect = True
                self._suspects.append(entry)
            else:
                again.append(entry)
        self._returned.extendleft(reversed(again))
        return given_up

    def refuse(self, entry: Entry, reason: str) -> None:
        """An engine would not accept this request."""
        self.failures[entry.rollout_id] = reason

    def deliver(self, entries: Iterable[Entry]) -> None:
        """Responses to these are on their way to the consumer."""
        self._delivered |= {entry.rollout_id: entry for entry in entries}

    def acknowledge(self, rollout_ids: Iterable[str]) -> None:
        """The consumer has these responses."""
        for rollout_id in rollout_ids:
            self._delivered.pop(rollout_id, None)

    def lost_on_the_way(self, rollout_ids: Iterable[str], reason: str) -> list[Entry]:
        """Delivered responses that the consumer could not get. Returns those that are given up."""
        found = [self._delivered.pop(rollout_id, None) for rollout_id in rollout_ids]
        return self.lost([entry for entry in found if entry is not None], reason)

    def give_up_all(self, reason: str) -> list[Entry]:
        """No actor is left: all that wait fail, and the source is pulled no further. Returns those."""
        failed = [*self._waiting()]
        for entry in failed:
            entry.losses.append(reason)
            self.failures[entry.rollout_id] = reason
        self.left_because = None if self._source is None else reason
        self.close()
        return failed

    def _waiting(self) -> Iterator[Entry]:
        yield from self._returned
        yield from self._suspects


def _told(entry: Entry) -> str:
    attempts = len(entry.losses)
    return entry.losses[0] if attempts == 1 else f"lost {attempts} times, the last time: {entry.losses[-1]}"


def failure_text(failures: Mapping[str, str], left_because: str | None = None, *, shown: int = 5) -> str:
    """A sentence that names the first of them, and says why the source was left.

    >>> failure_text({"p1/0": "killed", "p2/0": "too long"}, "no actor is left", shown=1)
    '2 requests were not answered: p1/0 (killed); and 1 more. Others were not begun: no actor is left'
    """
    told = "; ".join(f"{rollout_id} ({reason})" for rollout_id, reason in list(failures.items())[:shown])
    more = f"; and {len(failures) - shown} more" if len(failures) > shown else ""
    parts = [f"{len(failures)} requests were not answered: {told}{more}"] if failures else []
    parts += [f"Others were not begun: {left_because}"] if left_because is not None else []
    return ". ".join(parts)
