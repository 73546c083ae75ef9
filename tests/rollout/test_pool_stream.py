"""What a consumer sees: references and backpressure, weights under way, placement."""

import itertools
import os
import signal
import time

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="needs the package ray")

from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.pool import RolloutPool  # noqa: E402
from keptset.schemas.errors import InvalidInput, RolloutError  # noqa: E402
from keptset.trainer_bridge.feed import object_store  # noqa: E402

CONFIG = EngineConfig(slots=4)
KILL = 40


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(scripted, local_ray):
    with RolloutPool(scripted(), CONFIG, actors=2, turn_seconds=0.01, placement="PACK", name="shared") as pool:
        yield pool


def test_a_slow_consumer_of_endless_prompts_bounds_what_is_pulled_and_held(pool, ask):
    """The bound: what two actors may owe, and the one delivery in hand."""
    (request,) = ask(1)
    pulled = itertools.count()

    def endless():
        for number in pulled:
            yield type(request)(
                prompt_id=f"e{number}", prompt_token_ids=request.prompt_token_ids, params=request.params
            )

    taken, ahead = 0, []
    for delivery in pool.stream(endless()):
        taken += len(delivery.rollout_ids)
        delivery.done()
        time.sleep(0.02)
        ahead.append(next(pulled) - taken)
        if taken > 200:
            break
    room = 2 * 2 * CONFIG.slots
    assert max(ahead) <= room + len(ahead), "each look at the counter takes a number"
    assert taken > 200


def test_references_go_to_another_process_and_are_settled_by_word(pool, ask, answers):
    @ray.remote
    def read(batch):
        return {name: batch.token_ids[row].tolist() for row, name in enumerate(batch.rollout_ids)}

    found = {}
    for delivery in pool.stream(ask(20)):
        found |= ray.get(read.remote(delivery.reference))
        assert object_store.get(delivery.reference).rollout_ids == list(delivery.rollout_ids)
        delivery.done()
    assert found == answers(ask(20))


def _tokens(batch):
    return {name: batch.token_ids[row].tolist() for row, name in enumerate(batch.rollout_ids)}


def test_a_batch_said_to_be_lost_is_drawn_again_under_the_same_ids_and_seeds(pool, ask, answers):
    found, lost = {}, 0
    for delivery in pool.stream(ask(20)):
        if lost < 2:
            lost += 1
            delivery.lost()
            delivery.done()  # too late: it is settled
            continue
        batch = delivery.get()
        assert not found.keys() & set(batch.rollout_ids)
        found |= _tokens(batch)
    assert lost == 2 and found == answers(ask(20))


def test_what_is_lost_after_the_stream_comes_with_the_next(pool, ask, answers):
    deliveries = list(pool.stream(ask(12)))
    for delivery in deliveries[1:]:
        delivery.done()
    deliveries[0].lost("its node went away")
    again = list(pool.run([]))
    assert sorted(name for batch in again for name in batch.rollout_ids) == sorted(deliveries[0].rollout_ids)


def test_a_request_whose_batches_are_lost_every_time_is_given_up(pool, ask):
    with pytest.raises(RolloutError, match="late0/0/.*lost 3 times, the last time: gone"):
        for delivery in pool.stream(ask(1, name="late")):
            delivery.lost("gone")


def test_a_consumer_that_settles_nothing_is_stopped(pool, ask):
    with pytest.raises(InvalidInput, match="4 deliveries are unsettled, more than window = 3; fetch them"):
        held = []
        for delivery in pool.stream(ask(500), window=3):
            held.append(delivery)
    assert len(held) == 4
    for delivery in held:
        delivery.done()


def test_a_consumer_may_leave_and_ask_for_the_same_again(pool, ask, answers):
    stream = pool.run(ask(50, tokens=100))
    next(stream)
    stream.close()
    found = {}
    for batch in pool.run(ask(8)):
        found |= _tokens(batch)
    assert found == answers(ask(8))


def test_a_source_that_has_nothing_at_present_is_asked_again(pool, ask):
    waiting = iter([*ask(2), None, None, *ask(2, name="q"), None])
    assert sum(len(batch) for batch in pool.run(waiting)) == 4


def test_one_stream_at_a_time(pool, ask):
    stream = pool.run(ask(50, tokens=50))
    next(stream)
    with pytest.raises(InvalidInput, match="pool shared runs a stream already"):
        next(pool.run(ask(1)))
    stream.close()


def test_a_request_asked_for_twice_ends_the_source_and_is_told_after_the_rest(pool, ask):
    taken = 0
    with pytest.raises(InvalidInput, match="p0/0/.* was asked for twice"):
        for batch in pool.run([*ask(3), *ask(1), *ask(9, name="never")]):
            taken += len(batch)
    assert taken == 3


def test_a_stream_of_a_closed_pool_is_refused(scripted, ask):
    pool = RolloutPool(scripted(), CONFIG, turn_seconds=0.01)
    stream = pool.run(ask(100, tokens=50))
    next(stream)
    pool.close()
    pool.close()
    with pytest.raises(RolloutError, match="pool rollout was closed while a stream ran"):
        next(stream)
    with pytest.raises(InvalidInput, match="pool rollout is closed"):
        next(pool.run(ask(1)))


def test_a_group_stays_together_and_the_rest_is_spread_evenly(pool, ask):
    pool.process_ids()  # both are done with what came before
    where = {}
    groups = [request for group in "ab" for request in ask(2, name=f"{group}-", group_id=group)]
    for delivery in pool.stream([*groups, *ask(4)]):
        where |= dict.fromkeys(delivery.rollout_ids, delivery.actor)
        delivery.done()
    actors = {group: {actor for name, actor in where.items() if name.startswith(group)} for group in "ab"}
    assert len(actors["a"]) == len(actors["b"]) == 1 and actors["a"] != actors["b"]
    assert sorted([*where.values()].count(actor) for actor in (0, 1)) == [4, 4]


def test_weights_go_through_the_store_once_and_no_token_has_a_version_its_actor_did_not_hold(
    scripted, ask, monkeypatch
):
    stored = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    with RolloutPool(scripted(pause=0.002), CONFIG, actors=2, turn_seconds=0.02) as pool:
        seen, current = [], 0
        for batch in pool.run(ask(60, tokens=30)):
            versions = batch.policy_versions
            assert max(versions.values) <= current
            assert all((np.diff(versions[row]) >= 0).all() for row in range(len(batch)))
            seen += np.unique(versions.values).tolist()
            if current < 3:
                current += 1
                sync = pool.update_weights(current, {"w": np.full(200_000, current, np.float32)})
                assert sync.version == current == pool.version and sync.nbytes == 800_000
                assert 0 < sync.store_seconds < sync.seconds and len(sync.load_seconds) == 2
        assert max(seen) == 3
        assert len(stored) == 3
        os.kill(pool.process_ids()[0], signal.SIGKILL)
        while pool.restarts == 0:
            pool.process_ids()  # the other one shall not be done before it is there again
        late = list(pool.run(ask(30, name="late")))
        assert pool.restarts == 1
        assert {version for batch in late for version in batch.policy_versions.values.tolist()} == {3}


def test_weights_that_do_not_fit_and_versions_that_fall_change_nothing(scripted, ask):
    with RolloutPool(scripted(), CONFIG, actors=2, turn_seconds=0.02) as pool:
        with pytest.raises(InvalidInput, match="weight 'w' is missing"):
            pool.update_weights(1, {"v": np.zeros(3)})
        assert pool.version is None
        with pytest.raises(InvalidInput, match="weight 'w' is str; it must be a tensor"):
            pool.update_weights(1, {"w": "none"})
        reference = ray.put({"w": np.zeros(3)})
        assert pool.update_weights(5, reference).nbytes is None
        with pytest.raises(InvalidInput, match="version is 5; the actors have 5, and versions only rise"):
            pool.update_weights(5, reference)
        assert sum(len(batch) for batch in pool.run(ask(4))) == 4


def test_placement_groups_of_the_pools_own_go_with_it_and_the_callers_stay(pool, scripted, ask):
    from ray.util import placement_group, placement_group_table

    group = placement_group([{"CPU": 1}])
    with RolloutPool(scripted(), CONFIG, placement=group, turn_seconds=0.01) as second:
        assert sum(len(batch) for batch in second.run(ask(3))) == 3
    states = {entry["strategy"]: entry["state"] for entry in placement_group_table().values()}
    assert placement_group_table(group)["state"] == "CREATED" and states["PACK"] == "CREATED"
    ray.util.remove_placement_group(group)
    with pytest.raises(RolloutError, match=r"3 bundles of 1 CPU cannot be placed STRICT_SPREAD within 1 s; free are"):
        RolloutPool(scripted(), CONFIG, actors=3, placement="STRICT_SPREAD", start_timeout_seconds=1)
