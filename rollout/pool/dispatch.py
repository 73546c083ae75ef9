"""Which actor gets which request: the least loaded one, a group's requests together, suspects alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from keptset.rollout.pool.ledger import Entry, Ledger


class Desk(Protocol):
    """What dispatching needs to know of an actor."""

    number: int
    owed: dict[str, Entry]
    """Requests that it has and has not answered, by rollout id."""

    @property
    def is_live(self) -> bool:
        """Whether it is there and loaded."""

    @property
    def takes_turns(self) -> bool:
        """Whether another turn may be queued at it now."""


class Dispatcher:
    """Hands out what a ledger has, as far as there is room; nothing is pulled that has no place to go."""

    def __init__(self, *, room: int, group_lead: int) -> None:
        """`room`: requests an actor may owe. `group_lead`: how many more than the least loaded one it may owe because
        the request's group is there, whose prompt an engine computes once."""
        self._room, self._group_lead = room, group_lead
        self._group: tuple[str, int] | None = None

    def hand_out(self, ledger: Ledger, desks: Sequence[Desk]) -> Mapping[int, list[Entry]]:
        """New requests for each desk, by its number; they are owed from now on."""
        given: dict[int, list[Entry]] = {}

        def give(desk: Desk, entry: Entry) -> None:
            desk.owed[entry.rollout_id] = entry
            given.setdefault(desk.number, []).append(entry)

        live = [desk for desk in desks if desk.is_live]
        apart = self._apart(ledger, live)
        if apart is not None and ledger.has_suspects and not apart.owed and apart.takes_turns:
            give(apart, ledger.next_suspect())
        open_desks = [desk for desk in live if desk.takes_turns and desk is not apart]
        while free := [desk for desk in open_desks if len(desk.owed) < self._room]:
            entry = ledger.next()
            if entry is None:
                break
            give(self._choose(entry, free), entry)
        return given

    def _apart(self, ledger: Ledger, live: Sequence[Desk]) -> Desk | None:
        """The desk that is for suspects at present: it has one, or is to have one as soon as it has nothing else."""
        for desk in live:
            if any(entry.suspect for entry in desk.owed.values()):
                return desk
        if not ledger.has_suspects or not live:
            return None
        return min(live, key=lambda desk: len(desk.owed))

    def _choose(self, entry: Entry, free: Sequence[Desk]) -> Desk:
        least = min(free, key=lambda desk: len(desk.owed))
        group = entry.request.group_id or entry.request.prompt_id
        if self._group is not None and self._group[0] == group:
            for desk in free:
                if desk.number == self._group[1] and len(desk.owed) < len(least.owed) + self._group_lead:
                    return desk
        self._group = (group, least.number)
        return least
