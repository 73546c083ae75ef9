"""What Prometheus reads of a pool, from a driver in a process of its own.

A process that has left one Ray and started another does not always get its gauges through to Ray 2.49's metrics.
"""

import os
import re
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="needs the package ray")

from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.pool import RolloutPool  # noqa: E402

OWN_PROCESS = "KEPTSET_TEST_IN_ITS_OWN_PROCESS"


@pytest.fixture
def pool(scripted):
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"metrics_report_interval_ms": 500},
    )
    with RolloutPool(scripted(), EngineConfig(slots=4), actors=2, turn_seconds=0.01, name="shared") as pool:
        yield pool
    ray.shutdown()


def test_prometheus_finds_what_the_pool_does(request):
    if os.environ.get(OWN_PROCESS):
        _look(request.getfixturevalue("pool"), request.getfixturevalue("ask"))
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        f"{__file__}::{request.node.name}",
    ]
    ended = subprocess.run(
        command, env={**os.environ, OWN_PROCESS: "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if "1 skipped" in ended.stdout:
        pytest.skip(ended.stdout.strip().splitlines()[-2])


def _look(pool, ask):
    sum(len(batch) for batch in pool.run(ask(60)))
    pool.update_weights(1, {"w": np.zeros(3)})
    sum(len(batch) for batch in pool.run(ask(60, name="q")))
    # Every process reports by itself, and not all of it at once: what counts is there once all of it has come.
    gauges = ["queue_length", "owed", "running", "waiting", "tokens_per_second"]
    counts = {"tokens_total": 480, "responses_total": 120, "version_lag_count": 1, "weight_sync_seconds_count": 1}
    least = {**counts, "actors": 2, "kept_size_count": 1, "kept_mass_count": 1, **dict.fromkeys(gauges, 0)}
    found = _exported('pool="shared"', least)
    assert found["tokens_total"] >= 480 and found["responses_total"] >= 120
    assert found["actors"] == 2
    assert found["kept_size_bucket 2.5"] == 0 < found["kept_size_bucket 4.5"] == found["kept_size_count"]
    assert found["kept_mass_bucket 0.7"] == 0 < found["kept_mass_bucket 0.8"] == found["kept_mass_count"]
    assert found["version_lag_bucket 0.5"] == found["version_lag_count"] > 0
    assert found["weight_sync_seconds_count"] == 1
    assert found.keys() >= set(gauges)


def _exported(tag, least):
    """Metric (and bucket) to its sum over the processes of one pool, once those in `least` are that large."""
    port = ray.nodes()[0]["MetricsExportPort"]
    if port <= 0:
        pytest.skip("metrics need the package ray[default]")
    deadline = time.monotonic() + 60
    found = {}
    while any(found.get(name, -1) < bound for name, bound in least.items()) and time.monotonic() < deadline:
        time.sleep(0.5)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        found = {}
        for name, tags, value in re.findall(r"^ray_keptset_rollout_(\w+)\{(.*?)\} (\S+)$", page, re.MULTILINE):
            bound = re.search(r'le="(.*?)"', tags)
            if tag in tags:
                key = name if bound is None else f"{name} {bound[1]}"
                found[key] = found.get(key, 0.0) + float(value)
        # Ray 2.49 adds up what it exports in floating point: 480 may read 479.99999999999994.
        found = {name: round(value, 6) for name, value in found.items()}
    return found
