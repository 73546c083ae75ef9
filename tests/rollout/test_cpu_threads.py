"""Paddle's CPU settings: chosen for the machine, never against the user, and early enough to count."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keptset.rollout import cpu_threads
from keptset.rollout.cpu_threads import configure, usable_cores
from keptset.schemas.errors import InvalidInput

REPOSITORY = Path(__file__).resolve().parents[2]
AVX512 = "avx avx2 avx512f avx512cd avx512bw avx512dq avx512vl"
ZEN5 = f"processor : 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse {AVX512}\n\nprocessor : 1\n"
ZEN3 = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu sse avx avx2\n"
INTEL = ZEN5.replace("AuthenticAMD", "GenuineIntel")


def on(monkeypatch: pytest.MonkeyPatch, cpu_info: str) -> dict[str, str]:
    """An environment of nothing on this processor."""
    monkeypatch.setattr(cpu_threads, "_cpu_info", lambda: cpu_info)
    return {}


@pytest.mark.parametrize(
    ("cpu_info", "code_path"),
    [
        (ZEN5, "7"),
        (ZEN3, "5"),
        (ZEN5.replace(" avx512vl", ""), "5"),
        (INTEL, None),
        (ZEN3.replace("avx2", ""), None),
        ("", None),
    ],
)
def test_the_code_path_is_set_on_amd_alone(
    monkeypatch: pytest.MonkeyPatch, cpu_info: str, code_path: str | None
) -> None:
    environ = on(monkeypatch, cpu_info)
    configure(environ=environ)
    assert environ.get("MKL_DEBUG_CPU_TYPE") == code_path


def test_all_usable_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = on(monkeypatch, ZEN5)
    configure(environ=environ)
    assert environ["MKL_NUM_THREADS"] == str(usable_cores())
    environ = on(monkeypatch, ZEN5)
    settings = configure(1, environ=environ)
    assert dict(settings.environment) == {"MKL_NUM_THREADS": "1", "MKL_DEBUG_CPU_TYPE": "7"}
    assert dict(settings.environment).items() <= environ.items()
    assert settings.from_user == ()


def test_a_child_process_chooses_anew_what_its_parent_chose_and_keeps_what_the_user_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = on(monkeypatch, ZEN5)
    configure(2, environ=environ)
    settings = configure(1, environ=environ)
    assert environ["MKL_NUM_THREADS"] == "1"
    assert settings.from_user == ()
    environ["MKL_NUM_THREADS"] = "3"
    settings = configure(2, environ=environ)
    assert environ["MKL_NUM_THREADS"] == "3"
    assert settings.from_user == ("MKL_NUM_THREADS",)


def test_the_users_values_win(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ZEN5)
    environ = {"MKL_NUM_THREADS": "3", "MKL_DEBUG_CPU_TYPE": "4"}
    settings = configure(2, environ=environ)
    assert dict(settings.environment) == {"MKL_NUM_THREADS": "3", "MKL_DEBUG_CPU_TYPE": "4"}
    assert dict(settings.environment).items() <= environ.items()
    assert settings.from_user == ("MKL_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")


@pytest.mark.parametrize(
    "environ",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
)
def test_the_users_memory_policy_wins(environ: dict[str, str]) -> None:
    assert not configure(1, environ=dict(environ)).keeps_memory


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused(threads: int) -> None:
    with pytest.raises(InvalidInput, match=f"threads is {threads}"):
        configure(threads, environ={})


def test_a_containers_share_bounds_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(cpu_threads, "_CPU_SHARE", limit)
    assert usable_cores() == 16
    for text, cores in (("max 100000\n", 16), ("150000 100000\n", 2), ("50000 100000", 1), ("9900000 100000", 16)):
        limit.write_text(text)
        assert usable_cores() == cores


def test_importing_it_brings_in_neither_paddle_nor_numpy() -> None:
    code = (
        "import sys; from keptset.rollout import cpu_threads; "
        "print([name for name in ('paddle', 'numpy', 'ray') if name in sys.modules])"
    )
    assert _python(code) == "[]"


def test_products_are_right_under_the_settings() -> None:
    """The code path is forced upon MKL: its results are compared with float64 in a fresh process."""
    pytest.importorskip("paddle")
    code = """
import json
from keptset.rollout.cpu_threads import configure
configure(1)
import numpy as np, paddle
rng = np.random.default_rng(0)
worst = 0.0
for m, k, n in [(1, 576, 960), (16, 576, 1536), (3, 64, 128), (257, 129, 65)]:
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    product = paddle.matmul(paddle.to_tensor(a.astype("float32")), paddle.to_tensor(b.astype("float32"))).numpy()
    worst = max(worst, float(np.abs(product - a @ b).max() / np.sqrt(k)))
print(json.dumps(worst))
"""
    assert json.loads(_python(code)) < 1e-5


def _python(code: str) -> str:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")} | {"PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    return run.stdout.strip().splitlines()[-1]
