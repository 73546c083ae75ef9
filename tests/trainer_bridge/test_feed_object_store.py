"""Batches through Ray's object store: compact when stored, views when read, clear when lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import MissingDependency, SchemaError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.feed import object_store


@pytest.fixture(scope="module")
def cluster() -> Iterator[ModuleType]:
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield ray
    ray.shutdown()


def a_batch(responses: int, tokens: int = 8) -> RolloutBatch:
    builder = BatchBuilder(Identity(vocab_size=100, engine="test"))
    for number in range(responses):
        ids = np.arange(tokens) % 100
        builder.add(
            Response(
                rollout_id=f"r{number}",
                prompt_id="p",
                token_ids=ids,
                finish_reason="stop",
                kept_offsets=np.arange(tokens + 1),
                kept_ids=ids,
                extra={"x_reward": float(number)},
            )
        )
    return builder.build()


def test_a_batch_comes_back_equal_with_its_identity_and_own_columns(cluster: ModuleType) -> None:
    batch = a_batch(3)
    back = object_store.get(object_store.put(batch))
    assert back.arrow.equals(batch.arrow, check_metadata=True)
    assert back.identity == batch.identity
    assert back.column("x_reward").to_pylist() == [0.0, 1.0, 2.0]


def test_numbers_are_read_only_views_of_shared_memory(cluster: ModuleType) -> None:
    back = object_store.get(object_store.put(a_batch(200, 500)))
    values = back.kept_ids.inner.values
    assert not values.flags.writeable
    import pyarrow as pa

    assert pa.total_allocated_bytes() < 50 * 2**20
    assert values[:3].tolist() == [0, 1, 2]


def test_a_slice_is_stored_without_its_parent(cluster: ModuleType) -> None:
    from ray.experimental import get_local_object_locations

    parent = a_batch(2000, 200)
    reference = object_store.put(parent.slice(7, 2))
    stored = get_local_object_locations([reference])[reference]["object_size"]
    assert stored < 100_000 < parent.arrow.nbytes / 10
    assert object_store.get(reference).rollout_ids == ["r7", "r8"]


def test_batches_come_in_the_order_in_which_they_are_ready(cluster: ModuleType) -> None:
    def roll_out(rollout_id: str, seconds: float) -> RolloutBatch:
        time.sleep(seconds)
        builder = BatchBuilder(Identity())
        builder.add(Response(rollout_id=rollout_id, prompt_id="p", token_ids=np.array([1]), finish_reason="stop"))
        return builder.build()

    remote = cluster.remote(num_cpus=0.5)(roll_out)
    references = [remote.remote("slow", 1.0), remote.remote("fast", 0.0)]
    assert [batch.rollout_ids for batch in object_store.as_ready(references)] == [["fast"], ["slow"]]
    assert list(object_store.as_ready([])) == []


def test_a_batch_that_does_not_come_in_time_may_still_come(cluster: ModuleType) -> None:
    remote = cluster.remote(num_cpus=0.5)(lambda: time.sleep(1.0) or a_batch(1))
    reference = remote.remote()
    with pytest.raises(StorageError, match=r"no batch behind .* after 0\.05 s; it may still come"):
        object_store.get(reference, timeout_seconds=0.05)
    assert len(object_store.get(reference)) == 1


def test_a_reference_to_something_else_is_refused(cluster: ModuleType) -> None:
    with pytest.raises(SchemaError, match="refers to dict, not to a batch"):
        object_store.get(cluster.put({"rollout_id": "r"}))


def test_a_store_without_room_says_so(cluster: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: object) -> None:
        raise cluster.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(cluster, "put", full)
    with pytest.raises(StorageError, match="no room for RolloutBatch.*larger object_store_memory"):
        object_store.put(a_batch(1))


def test_a_batch_lost_with_its_owner_is_told(cluster: ModuleType) -> None:
    class Owner:
        def make(self) -> list[object]:
            return [object_store.put(a_batch(300, 400))]

    owner = cluster.remote(num_cpus=0)(Owner).remote()
    (reference,) = cluster.get(owner.make.remote())
    cluster.kill(owner)
    # The machine lets go of what a dead process owned once it has heard of the death, which takes it a while.
    give_up = time.monotonic() + 60
    with pytest.raises(StorageError, match="is lost with what held it; roll its prompts out again"):
        while time.monotonic() < give_up:
            object_store.get(reference, timeout_seconds=30)
            time.sleep(0.1)


def test_without_ray_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"needs Ray; install keptset with the extra \[rollout\]"):
        object_store.put(a_batch(1))
