import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")
ray = pytest.importorskip("ray", reason="needs the package ray")

from keptset.rollout.actor import RolloutWorker  # noqa: E402
from keptset.rollout.checkpoint_engine import CheckpointEngine  # noqa: E402
from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.engine import RolloutEngine  # noqa: E402
from keptset.rollout.engine_protocol import ReportsLoad  # noqa: E402
from keptset.rollout.models import load_decoder  # noqa: E402
from keptset.rollout.pool import RolloutPool, local_actors  # noqa: E402
from keptset.rollout.request import Request  # noqa: E402
from keptset.schemas.errors import CheckpointError, InvalidInput, RolloutError  # noqa: E402
from keptset.schemas.rollout_batch import concat_batches  # noqa: E402
from keptset.schemas.sampling_params import SamplingParams  # noqa: E402
from keptset.schemas.validation import validate  # noqa: E402

FOLDER = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "llama_tied"
CONFIG = EngineConfig(slots=4)


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def requests(count, new_tokens=20):
    rng = np.random.default_rng(3)
    params = SamplingParams(top_p=0.9, max_new_tokens=new_tokens)
    return [
        Request(prompt_id=f"p{i}", prompt_token_ids=rng.integers(0, 160, 8).astype(np.int32), params=params)
        for i in range(count)
    ]


def tokens_by_id(batches):
    batch = concat_batches(batches)
    assert validate(batch) == []
    assert len(set(batch.rollout_ids)) == len(batch)
    return {name: batch.token_ids[row].tolist() for row, name in enumerate(batch.rollout_ids)}


@pytest.fixture(scope="module")
def expected():
    batch = RolloutEngine(load_decoder(FOLDER), CONFIG).generate(requests(40))
    return {name: batch.token_ids[row].tolist() for row, name in enumerate(batch.rollout_ids)}


def test_two_actors_answer_every_request_once_and_as_one_engine_would(expected):
    turns = []
    with RolloutPool(FOLDER, CONFIG, actors=2, turn_seconds=0.05) as pool:
        answered = tokens_by_id(list(pool.run(requests(40), progress=turns.append)))
        assert len(set(pool.process_ids())) == 2
    assert answered == expected
    assert sum(turn.tokens_drawn for turn in turns) == sum(map(len, expected.values()))
    assert ray.is_initialized(), "the pool must leave a Ray that it did not start"


def test_requests_of_a_killed_actor_are_answered_once_by_its_replacement(expected):
    with RolloutPool(FOLDER, CONFIG, actors=2, turn_seconds=0.05) as pool:
        victim = pool.process_ids()[0]
        batches = []
        for batch in pool.run(requests(40)):
            batches.append(batch)
            if victim:
                os.kill(victim, signal.SIGKILL)
                victim = None
        assert pool.restarts == 1
        assert len(pool.process_ids()) == 2
    assert tokens_by_id(batches) == expected


def test_after_too_many_lost_actors_the_error_names_what_is_unanswered():
    with RolloutPool(FOLDER, CONFIG, actors=1, turn_seconds=0.05, max_restarts=0) as pool:
        running = pool.run(requests(40))
        next(running)
        os.kill(pool.process_ids()[0], signal.SIGKILL)
        with pytest.raises(
            RolloutError,
            match=r"8 requests were not answered: p\d+/0/.*no actor is left: its worker process has died.* not begun",
        ):
            list(running)


def test_new_weights_under_way_are_recorded_token_by_token_and_used_from_then_on():
    weights = {name: 1.5 * value.numpy() for name, value in load_decoder(FOLDER).weights().items()}
    updated = RolloutEngine(load_decoder(FOLDER), CONFIG)
    updated.update_weights(1, weights)
    batch = updated.generate(requests(40, new_tokens=60))
    after = {name: batch.token_ids[row].tolist() for row, name in enumerate(batch.rollout_ids)}
    with RolloutPool(FOLDER, CONFIG, actors=2, turn_seconds=0.05) as pool:
        batches = []
        for batch in pool.run(requests(40, new_tokens=60)):
            if not batches:
                assert len(pool.update_weights(1, weights).load_seconds) == 2
            batches.append(batch)
    found = tokens_by_id(batches)
    versions = {name: batch.policy_versions[row] for batch in batches for row, name in enumerate(batch.rollout_ids)}
    whole = [name for name, row in versions.items() if (row == 1).all()]
    assert len(whole) > 10
    assert {name: found[name] for name in whole} == {name: after[name] for name in whole}
    assert all((np.diff(row) >= 0).all() for row in versions.values())


def test_refused_requests_are_named_after_the_others_are_answered():
    good, bad = requests(6), Request(prompt_id="too-long", prompt_token_ids=np.zeros(300, np.int32))
    answered = []
    with RolloutPool(FOLDER, CONFIG) as pool, pytest.raises(RolloutError, match="too-long has 300 tokens"):
        for batch in pool.run([bad, *good]):
            answered += batch.rollout_ids
    assert len(answered) == 6


def test_an_unusable_checkpoint_is_the_same_error_as_without_ray(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        RolloutPool(tmp_path, CONFIG)


def test_a_request_asked_for_twice_is_refused():
    with RolloutPool(FOLDER, CONFIG) as pool, pytest.raises(InvalidInput, match="asked for twice"):
        list(pool.run([*requests(2), *requests(1)]))


def test_no_actors_is_wrong_use():
    with pytest.raises(InvalidInput, match="actors is 0"):
        RolloutPool(FOLDER, CONFIG, actors=0)


def test_a_turn_ends_in_time_and_keeps_what_is_unfinished():
    worker = RolloutWorker(CheckpointEngine(folder=FOLDER, config=CONFIG))
    begin = time.monotonic()
    turn, batch = worker.turn([request.resolved(0) for request in requests(40, new_tokens=200)], seconds=0.1)
    assert turn.unfinished == 40 and batch is None
    load = worker.engine.load
    assert isinstance(worker.engine, ReportsLoad) and (load.running, load.waiting) == (4, 36)
    assert 0 < load.kv_use <= 1
    assert time.monotonic() - begin < 5
    turn, batch = worker.turn([], seconds=600)
    assert turn.unfinished == 0 and len(batch) == 40 and set(turn.finished) == set(batch.rollout_ids)


def test_this_machine_carries_as_many_actors_as_cores_and_memory_allow():
    assert local_actors(1) == len(os.sched_getaffinity(0))
    assert local_actors(2**50) == 1
