"""Actors that die, hang, run out of memory or break their contract: who is answered, who is given up, what is said."""

import itertools
import logging
import os
import signal
import time

import pytest

ray = pytest.importorskip("ray", reason="needs the package ray")

from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.pool import RolloutPool  # noqa: E402
from keptset.rollout.pool.resources import check_resources, start_ray  # noqa: E402
from keptset.schemas.errors import InvalidInput, RolloutError  # noqa: E402
from keptset.schemas.rollout_batch import concat_batches  # noqa: E402
from keptset.schemas.validation import validate  # noqa: E402

CONFIG = EngineConfig(slots=4)
KILL, HANG, MEMORY, RAISE, REFUSE, TWICE = range(40, 46)


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def collected(stream):
    """Rollout id to tokens of everything a stream gives, and the error at its end."""
    batches, error = [], None
    try:
        for batch in stream:
            batches.append(batch)
    except RolloutError as ended:
        error = ended
    batch = concat_batches(batches)
    assert validate(batch) == []
    assert len(set(batch.rollout_ids)) == len(batch)
    return {name: batch.token_ids[row].tolist() for row, name in enumerate(batch.rollout_ids)}, error


@pytest.mark.parametrize("deed", [KILL, HANG, MEMORY, RAISE], ids=["killed", "hangs", "out of memory", "raises"])
def test_what_a_lost_actor_had_is_answered_as_it_would_have_been(deed, scripted, ask, answers, tmp_path, caplog):
    requests = ask(20)
    requests[7:7] = ask(1, deed, name="bad", extra={"x_once": str(tmp_path / "done")})
    with RolloutPool(scripted(), CONFIG, actors=2, turn_seconds=0.02, turn_timeout_seconds=2) as pool:
        before = set(pool.process_ids())
        with caplog.at_level(logging.INFO, "keptset.rollout"):
            answered, error = collected(pool.run(requests))
        assert error is None
        assert answered == answers(ask(20) + ask(1, name="bad"))
        assert pool.restarts == 1
        assert len(pool.process_ids()) == 2 and len(set(pool.process_ids()) & before) == 1
    events = [
        (record.event, record.fields.get("reason", "")) for record in caplog.records if record.name == "keptset.rollout"
    ]
    assert "actor_restarted" in dict(events)
    told = {KILL: "process has died", HANG: "no answer within 2 s", MEMORY: "MemoryError", RAISE: "the device is gone"}
    assert told[deed] in dict(events)["actor_lost"]


def test_a_hung_actor_is_noticed_while_the_others_keep_busy(scripted, ask, tmp_path):
    (stuck,) = ask(1, HANG, name="bad", extra={"x_once": str(tmp_path / "done")})

    def endless():
        yield stuck
        for number in itertools.count():
            yield from ask(1, name=f"n{number}-")

    with RolloutPool(scripted(), CONFIG, actors=2, turn_seconds=0.01, turn_timeout_seconds=1.5) as pool:
        deadline = time.monotonic() + 60
        # The consumer is so slow that whoever works is always done by then.
        for batch in pool.run(endless(), progress=lambda turn: time.sleep(0.05)):
            if any(name.startswith("bad0/") for name in batch.rollout_ids):
                break
            assert time.monotonic() < deadline
        assert pool.restarts == 1


def test_actors_killed_again_and_again_at_any_moment_cost_no_answer(scripted, ask, answers):
    requests = ask(60, tokens=20)
    with RolloutPool(scripted(pause=0.005), CONFIG, actors=2, turn_seconds=0.05, max_attempts=9) as pool:
        kills = []

        def kill_now_and_then(turn):
            if len(kills) < 3 and time.monotonic() - (kills[-1] if kills else 0) > 0.3:
                os.kill(pool.process_ids()[len(kills) % 2], signal.SIGKILL)
                kills.append(time.monotonic())

        answered, error = collected(pool.run(requests, progress=kill_now_and_then))
        assert error is None and answered == answers(requests)
        assert pool.restarts == 3


@pytest.mark.parametrize("poisoned", [1, 2])
def test_prompts_that_always_kill_their_actor_are_given_up_by_name_and_take_no_other_with_them(
    poisoned, scripted, ask, answers
):
    requests = ask(5)
    at = 2 if poisoned == 1 else 0
    requests[at:at] = ask(poisoned, KILL, name="poison")
    with RolloutPool(scripted(), CONFIG, actors=1, turn_seconds=0.02) as pool:
        answered, error = collected(pool.run(requests))
        assert answered == answers(ask(5))
        assert f"{poisoned} requests were not answered: poison0/0/" in str(error)
        assert "lost 3 times, the last time: its worker process has died" in str(error)
        assert len(pool.failures) == poisoned and all(name.startswith("poison") for name in pool.failures)
        assert pool.restarts == 2 + poisoned
        again, error = collected(pool.run(ask(3, name="later")))
        assert len(again) == 3 and error is None, "what failed before is not told again"


def test_an_engine_that_answers_nothing_is_given_up_soon_however_much_is_asked(scripted, ask):
    with RolloutPool(scripted(), CONFIG, actors=2, turn_seconds=0.02, max_restarts=1, max_attempts=2) as pool:
        with pytest.raises(
            RolloutError, match="the device is gone.*not begun: no actor is left: RuntimeError: the device"
        ):
            list(pool.run(ask(1000, RAISE)))
        assert pool.restarts <= 6
        with pytest.raises(RolloutError, match="Others were not begun: no actor is left"):
            list(pool.run(ask(3)))


def test_an_actor_that_never_comes_up_again_leaves_the_rest_to_the_others(scripted, ask, answers, tmp_path, caplog):
    flag = tmp_path / "broken"
    make = scripted()

    def breaks():
        if flag.exists():
            raise OSError("no such device")
        return make()

    with RolloutPool(breaks, CONFIG, actors=2, turn_seconds=0.02, max_restarts=1) as pool:
        flag.touch()
        os.kill(pool.process_ids()[0], signal.SIGKILL)
        answered, error = collected(pool.run(ask(30)))
        assert error is None and answered == answers(ask(30))
        os.kill(pool.process_ids()[0], signal.SIGKILL)
        with pytest.raises(RolloutError, match=r"answered: p\d+/0/.*no actor is left: .*not begun"):
            list(pool.run(ask(100)))
    assert "no such device" in caplog.text


def test_an_engine_that_answers_twice_is_stopped_before_anybody_hears_it(scripted, ask, answers):
    requests = [*ask(1, TWICE, name="twice", tokens=2), *ask(3, tokens=200)]
    # Long enough for both answers to come in one turn, however busy the machine is.
    with RolloutPool(scripted(pause=0.001), CONFIG, turn_seconds=0.5, max_attempts=2) as pool:
        answered, error = collected(pool.run(requests))
        assert set(answers(ask(3, tokens=200))) == {name for name in answered if name.startswith("p")}
    assert "the engine answered twice0/0/" in str(error) and "which is not in flight" in str(error)


def test_refused_requests_are_named_and_the_others_answered(scripted, ask):
    with RolloutPool(scripted(), CONFIG, turn_seconds=0.02) as pool:
        answered, error = collected(pool.run([*ask(3), *ask(2, REFUSE, name="bad")]))
        assert len(answered) == 3
        assert "2 requests were not answered: bad0/0/" in str(error) and "prompt bad1 is refused" in str(error)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"actors": 0}, "actors is 0"),
        ({"threads_per_actor": 0}, "threads_per_actor is 0"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"turn_seconds": 0}, "turn_seconds is 0"),
        ({"turn_timeout_seconds": -1.0}, "turn_timeout_seconds is -1.0"),
        ({"gpus_per_actor": -0.5}, "gpus_per_actor is -0.5"),
        ({"placement": "TOGETHER"}, "placement is 'TOGETHER'"),
    ],
)
def test_settings_that_cannot_be_are_wrong_use(scripted, settings, told):
    with pytest.raises(InvalidInput, match=told):
        RolloutPool(scripted(), CONFIG, **settings)


def test_more_actors_than_a_machine_by_itself_carries_are_refused_and_a_cluster_is_given_time(caplog):
    check_resources(own=True, actors=4, cpus=1, gpus=0)
    with pytest.raises(InvalidInput, match="5 actors of 1 CPU need 5, and this Ray has 4: ask for fewer"):
        check_resources(own=True, actors=5, cpus=1, gpus=0)
    with pytest.raises(InvalidInput, match="1 actors of 0.5 GPU need 0.5, and this Ray has 0"):
        check_resources(own=True, actors=1, cpus=1, gpus=0.5)
    check_resources(own=False, actors=5, cpus=1, gpus=0)
    assert "waiting_for_room" in caplog.text


@pytest.mark.parametrize(("address", "variable"), [("auto", None), (None, "10.0.0.1:6379")])
def test_a_cluster_that_is_not_there_is_named(monkeypatch, address, variable):
    def nobody(**options):
        assert "include_dashboard" not in options, "that is for whoever starts a cluster"
        raise ConnectionError("no one answers")

    monkeypatch.setattr(ray, "init", nobody)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(RolloutError, match=f"Ray at '{address or variable}' cannot be used: no one answers. Start a"):
        start_ray(address)


@pytest.mark.parametrize(("raised", "seen"), [(Exception("timed out"), RolloutError), (OSError("full"), OSError)])
def test_a_ray_of_the_pools_own_that_does_not_come_up_in_time_is_told(monkeypatch, raised, seen):
    """Ray says so with a bare Exception; anything more precise is somebody else's to read."""

    def slow(**options):
        raise raised

    monkeypatch.setattr(ray, "init", slow)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(seen, match="Ray on this machine cannot be used: timed out" if seen is RolloutError else "full"):
        start_ray(None)


def test_actors_that_cannot_be_placed_are_an_error_that_says_what_is_free(scripted):
    with pytest.raises(RolloutError, match=r"3 actors .* within 1 s; each needs 2 CPU, and free are"):
        RolloutPool(scripted(), CONFIG, actors=3, threads_per_actor=2, start_timeout_seconds=1)
