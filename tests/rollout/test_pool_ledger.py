"""Who gets which request, and that each leaves once: bookkeeping alone, no Ray actor runs."""

from collections import Counter
from dataclasses import dataclass, field, replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

pytest.importorskip("ray", reason="needs the package ray")

from keptset.rollout.pool import ledger as ledger_module
from keptset.rollout.pool.dispatch import Dispatcher
from keptset.rollout.pool.ledger import Ledger
from keptset.rollout.request import Request
from keptset.schemas.sampling_params import SamplingParams

ROOM = 4


@dataclass
class Desk:
    number: int
    owed: dict = field(default_factory=dict)
    is_live: bool = True
    takes_turns: bool = True


def asked(count, name="p", group=None):
    prompt = np.array([1], np.int32)
    return [Request(prompt_id=f"{name}{i}", prompt_token_ids=prompt, group_id=group) for i in range(count)]


def opened(requests, **settings):
    ledger = Ledger(**({"base_seed": 0, "max_attempts": 3} | settings))
    ledger.open(requests)
    return ledger


@hypothesis.given(st.data())
def test_every_request_is_answered_once_or_given_up_whatever_happens(data):
    count, desks = data.draw(st.integers(0, 30)), [Desk(number) for number in range(data.draw(st.integers(1, 3)))]
    poison = data.draw(st.sets(st.integers(0, 29), max_size=3))
    ledger = opened(asked(count))
    dispatcher = Dispatcher(room=ROOM, group_lead=2)
    answered: Counter = Counter()
    for _ in range(1000):
        dispatcher.hand_out(ledger, desks)
        if ledger.is_exhausted and not any(desk.owed for desk in desks):
            break
        for desk in desks:
            assert len(desk.owed) <= ROOM
            if any(entry.suspect for entry in desk.owed.values()):
                assert len(desk.owed) == 1, "a suspect runs alone"
        busy = [desk for desk in desks if desk.owed]
        desk = data.draw(st.sampled_from(busy))
        dies = any(int(entry.request.prompt_id[1:]) in poison for entry in desk.owed.values())
        if dies:
            ledger.lost(desk.owed.values(), "killed")
            desk.owed.clear()
            continue
        name = data.draw(st.sampled_from(sorted(desk.owed)))
        entry = desk.owed.pop(name)
        ledger.deliver([entry])
        if data.draw(st.integers(0, 9)):
            ledger.acknowledge([name])
            answered[name] += 1
        elif not ledger.lost_on_the_way([name], "gone"):
            assert name not in ledger.failures
    else:
        pytest.fail("it never ends")
    names = {request.resolved(0).rollout_id for request in asked(count)}
    assert set(answered) | set(ledger.failures) == names
    assert not set(answered) & set(ledger.failures)
    assert max(answered.values(), default=1) == 1
    bad = {request.resolved(0).rollout_id for i, request in enumerate(asked(count)) if i in poison}
    assert bad <= set(ledger.failures)
    for name in set(ledger.failures) - bad:
        assert "gone" in ledger.failures[name], "an innocent request is never given up for another's deed"


def test_a_lost_request_keeps_its_seed_and_id_and_goes_first():
    ledger = opened(asked(3))
    first = ledger.next()
    again = first.request
    ledger.lost([first], "killed")
    assert ledger.next().request is again and again.params.seed is not None
    assert [ledger.next().request.prompt_id for _ in range(2)] == ["p1", "p2"]
    assert ledger.next() is None


def test_the_source_is_pulled_no_further_than_there_is_room():
    pulled = []
    source = (pulled.append(request) or request for request in asked(100))
    ledger, desks = opened(source), [Desk(0), Desk(1)]
    dispatcher = Dispatcher(room=ROOM, group_lead=1)
    dispatcher.hand_out(ledger, desks)
    dispatcher.hand_out(ledger, desks)
    assert len(pulled) == 2 * ROOM
    desks[0].owed.clear()
    desks[1].is_live = False
    dispatcher.hand_out(ledger, desks)
    assert len(pulled) == 3 * ROOM


def test_the_least_loaded_comes_first_and_a_group_stays_together_up_to_its_lead():
    desks = [Desk(0), Desk(1)]
    dispatcher = Dispatcher(room=8, group_lead=2)
    given = dispatcher.hand_out(opened([*asked(3, "a", "g"), *asked(2, "b", "h"), *asked(2, "c")]), desks)
    where = {entry.request.prompt_id: number for number, entries in given.items() for entry in entries}
    assert where == {"a0": 0, "a1": 0, "a2": 1, "b0": 1, "b1": 1, "c0": 0, "c1": 0}


def test_a_repeated_id_is_told_within_the_last_million_and_forgotten_beyond(monkeypatch):
    monkeypatch.setattr(ledger_module, "REMEMBERED", 3)
    ledger = opened([*asked(4), *asked(1)])
    assert [ledger.next() is not None for _ in range(5)] == [True] * 5
    ledger = opened([*asked(3), *asked(1), *asked(1, "q")])
    assert [ledger.next() is not None for _ in range(5)] == [True, True, True, False, False]
    assert "rollout id p0/0/" in str(ledger.repeated)


def test_what_failed_or_was_answered_in_one_stream_may_be_asked_again_in_the_next():
    ledger = opened(asked(2), max_attempts=1)
    first, second = ledger.next(), ledger.next()
    assert ledger.lost([first], "killed") == [first] and list(ledger.failures) == [first.rollout_id]
    ledger.deliver([second])
    ledger.close()
    ledger.open(asked(2))
    assert ledger.next().rollout_id == first.rollout_id
    assert ledger.next() is None and second.rollout_id in str(ledger.repeated), "it is still on its way"


def test_a_repeated_row_seed_ends_the_source_unless_allowed():
    """Engines see those in flight with themselves alone; two actors would draw the same side by side."""
    alike = [replace(request, params=SamplingParams(seed=5)) for request in asked(3)]
    ledger = opened(alike)
    assert ledger.next().seed == 5 and ledger.next() is None and ledger.is_exhausted
    assert "p1/0/" in str(ledger.repeated) and "row seed 5 is another's" in str(ledger.repeated)
    ledger = opened(alike, allow_shared_seed=True)
    assert [ledger.next().seed for _ in alike] == [5] * 3


def test_when_no_actor_is_left_all_that_wait_fail_and_the_source_is_left():
    ledger = opened(asked(5))
    entries = [ledger.next(), ledger.next()]
    ledger.lost(entries[:1], "killed")
    failed = ledger.give_up_all("no actor is left")
    assert failed == entries[:1] and ledger.is_exhausted
    assert ledger.failures == {entries[0].rollout_id: "no actor is left"} and ledger.left_because == "no actor is left"
