"""A Ray cluster of several nodes on this machine, of which one is taken away."""

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="needs the package ray")
pytest.importorskip("ray.cluster_utils")

from ray.cluster_utils import Cluster  # noqa: E402

from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.pool import RolloutPool  # noqa: E402

CONFIG = EngineConfig(slots=4)
QUICK = {
    # A node is missed within a second or so, and every batch, however small, stays in the store of its node.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
    "max_direct_call_object_size": 0,
}


@pytest.fixture(scope="module")
def cluster():
    """A head that runs no actor, and two nodes with room for one each."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": 2**27, "_system_config": QUICK},
    )
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=2**27) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


def test_a_node_taken_away_midway_costs_no_answer_and_the_pool_comes_back_to_its_size(cluster, scripted, ask, answers):
    cluster, nodes = cluster
    requests = ask(80, tokens=20)
    with RolloutPool(
        scripted(pause=0.002), CONFIG, actors=2, turn_seconds=0.05, placement="SPREAD", start_timeout_seconds=120
    ) as pool:
        pool.update_weights(1, {"w": np.zeros(3)})
        found, held, lost = {}, [], 0
        for number, delivery in enumerate(pool.stream(requests, window=1000)):
            if number < 4:
                held.append(delivery)  # nobody has fetched these when the node goes
                continue
            if number == 4:
                cluster.remove_node(_other_than_ours(nodes), allow_graceful=False)
                cluster.add_node(num_cpus=1, object_store_memory=2**27)
                held.append(delivery)
                for old in held:
                    batch = old.get(timeout_seconds=60)
                    lost += batch is None
                    _add(found, batch)
                continue
            _add(found, delivery.get(timeout_seconds=60))
        assert found == answers(requests)
        assert pool.restarts == 1 and lost >= 1
        assert len(set(pool.process_ids())) == 2
        used = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        assert len(used) == 3


@pytest.mark.parametrize("again", [False, True], ids=["and is away", "and was started anew"])
def test_a_pool_that_outlives_its_ray_is_closed_without_a_word(cluster, scripted, ask, again):
    cluster, _ = cluster
    with RolloutPool(scripted(pause=0.01), CONFIG, turn_seconds=0.05) as pool:
        stream = pool.run(ask(100, tokens=50))
        next(stream)
        ray.shutdown()
        if again:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    stream.close()
    if not again:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")


def _other_than_ours(nodes):
    """Without the node that this process is connected to, which may be any of this machine's, all would end."""
    ours = ray.get_runtime_context().get_node_id()
    return next(node for node in nodes if node.node_id != ours)


def _add(found, batch):
    if batch is not None:
        for row, name in enumerate(batch.rollout_ids):
            assert name not in found, "answered twice"
            found[name] = batch.token_ids[row].tolist()
            assert set(batch.policy_versions[row].tolist()) == {1}
