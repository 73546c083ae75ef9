"""`ray job submit --working-dir .` from a checkout: the cluster's workers import keptset from what was uploaded."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

JOB = """
    import ray

    import keptset.rollout, keptset.scripts.main, keptset.trainer_bridge
    from keptset.schemas.errors import StorageError

    @ray.remote
    def on_a_worker():
        import keptset.schemas.sampling_params
        return keptset.schemas.sampling_params.__file__

    ray.init()
    print("driver:", keptset.__file__)
    print("worker:", ray.get(on_a_worker.remote()))
"""
CHECKPOINT = Path(__file__).parent / "data" / "tiny_checkpoints" / "llama_tied"


@pytest.fixture
def dashboard() -> Iterator[str]:
    """The address of a one-node cluster's dashboard, on loopback and on ports of its own."""
    # A path of pytest's would be too long for the sockets that Ray keeps in it.
    folder = tempfile.mkdtemp(prefix="ray-")
    gcs, dashboard, agent, agent_http, metrics, client = free_ports(6)
    command = [
        *(ray_command(), "start", "--head", "--block", "--num-cpus=1", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={folder}", "--object-store-memory=80000000"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-grpc-port={agent}", f"--dashboard-agent-listen-port={agent_http}"),
        *(f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}", "--min-worker-port=0"),
    ]
    log = Path(folder, "start.log")
    with log.open("w") as output:
        head = subprocess.Popen(command, stdout=output, stderr=output, env=environment(), start_new_session=True)
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_for(address, head, log)
        yield address
    finally:
        head.send_signal(signal.SIGTERM)  # a blocking head ends the processes that it started
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_runs_on_the_uploaded_checkout(dashboard: str, repository: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(repository, checkout, ignore=shutil.ignore_patterns("__pycache__", ".*", "data"))
    (checkout / "job.py").write_text(textwrap.dedent(JOB))

    done = submitted(dashboard, checkout, "job.py")
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith(("driver:", "worker:")))
    uploaded = Path(answers["driver"]).parent
    assert "working_dir_files" in uploaded.parts
    assert answers["worker"] == str(uploaded / "schemas" / "sampling_params.py")

    if all(find_spec(package) for package in ("paddle", "safetensors")):
        # As docs/rollout.md has it.
        prompts, spool = tmp_path / "prompts.jsonl", tmp_path / "spool"
        prompts.write_text("".join(f'{{"token_ids": [{i}, 1]}}\n' for i in range(3)))
        options = ("--model", str(CHECKPOINT), "--max-new-tokens", "4", "--ignore-eos", "--address", "auto")
        command = (
            "-m",
            "keptset.scripts.main",
            "rollout",
            str(prompts),
            "-o",
            str(spool),
            *options,
            "--placement",
            "SPREAD",
        )
        assert "3 responses, 12 tokens in" in submitted(dashboard, checkout, *command).stdout


def submitted(dashboard: str, checkout: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A job that is over, and went well."""
    job = [ray_command(), "job", "submit", "--address", dashboard, "--working-dir", ".", "--", sys.executable]
    done = subprocess.run(
        [*job, *arguments], cwd=checkout, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def ray_command() -> str:
    return str(Path(sys.executable).with_name("ray"))


def environment() -> dict[str, str]:
    """Without the path by which this test run finds keptset, and without a cluster or token of the caller's."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    return {**inherited, "RAY_AUTH_MODE": "disabled"}


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def wait_for(address: str, head: "subprocess.Popen[bytes]", log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and head.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/api/jobs/", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.2)
    pytest.fail(f"Ray did not start within {seconds} s:\n{log.read_text()}")
