"""What every test run needs before the first test module is imported."""

import importlib.metadata
import os
from pathlib import Path

import hypothesis
import pytest

from keptset.rollout import cpu_threads

# Before any test module imports Paddle.
cpu_threads.configure()

REPOSITORY = Path(__file__).resolve().parents[1]

# Examples are the same in every run where a failure must be seen again, and new ones at a developer's desk.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("desk", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")

# Ray would send usage reports from test runs otherwise.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout under test."""
    return REPOSITORY


def pytest_report_header() -> str:
    """Which builds a run was made with: the two test targets differ in little else."""
    names = ("numpy", "paddlepaddle", "paddlepaddle-gpu", "pyarrow", "ray")
    return ", ".join(f"{name} {found[0].version}" for name in names if (found := _distribution(name)))


def _distribution(name: str) -> list[importlib.metadata.Distribution]:
    return list(importlib.metadata.distributions(name=name))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu_because() if gpu_tests else None
    for item in gpu_tests:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu_because() -> str | None:
    try:
        import paddle
    except ModuleNotFoundError:
        return "Paddle is not installed"
    if not paddle.device.is_compiled_with_cuda():
        return f"paddlepaddle {paddle.__version__} is a CPU build; install the extra [gpu]"
    if paddle.device.cuda.device_count() == 0:
        return "Paddle finds no CUDA device"
    return None
