"""`keptset audit --ray`: the units of an audit as a Ray Data job, added up here in their order.

A task works a run of consecutive units and hands back the sums of each: those of floats are the same to the last digit
only where they are added up as a machine alone would do it. They come as they are asked for: Ray holds tasks back while
nobody takes what others have done.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import pickle
import re
import socket
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from keptset.rollout.cpu_threads import CHOSEN, configure
from keptset.schemas.errors import InvalidInput, KeptsetError, MissingDependency, RolloutError, StorageError
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.partial import Partial
from keptset.trainer_bridge.audit.planning import Unit
from keptset.trainer_bridge.audit.report import AuditReport
from keptset.trainer_bridge.audit.runner import audit
from keptset.trainer_bridge.audit.unit_audit import audit_unit

LONGEST_RUN = 8
"""Units of a task, some seconds of work; fewer where every CPU would not get _TASKS_EACH tasks."""
_TASKS_EACH = 4
_RETRIES = 3
"""Of a task whose process or node is lost; Ray Data alone would try for ever."""
_ANSWER_SECONDS = 10.0
_BLOCK_BYTES = 2**23
"""Above what a task hands back."""
_ADDRESS = re.compile(r"auto|local|ray://.+|[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+")


def audit_on_ray(paths: Sequence[str | Path], options: AuditOptions, address: str | None) -> AuditReport:
    """`audit`, worked by the Ray at `address` or RAY_ADDRESS, or by one that is started here and ended with it.

    Errors: as `audit`; MissingDependency without Ray Data; InvalidInput where there is no Ray to join; StorageError
    where a node cannot see the files.
    """
    for package in ("ray", "pandas"):
        if find_spec(package) is None:
            raise MissingDependency(f"--ray needs the package {package}: pip install 'keptset[ray]'")
    with _joined(address):
        return audit(paths, options, spread=_spread)


def with_left_out_values(arguments: Sequence[str]) -> list[str]:
    """Arguments in which `--ray` has its value, empty where none is given; a path behind it stays a path.

    >>> with_left_out_values(["--ray", "runs/17", "--json"])
    ['--ray=', 'runs/17', '--json']
    >>> with_left_out_values(["runs/17", "--ray", "10.0.0.7:6379"])
    ['runs/17', '--ray=10.0.0.7:6379']
    """
    told: list[str] = []
    left = list(arguments)
    while left and left[0] != "--":
        argument = left.pop(0)
        if argument == "--ray":
            argument = "--ray=" + (left.pop(0) if left and _ADDRESS.fullmatch(left[0]) else "")
        told.append(argument)
    return told + left


@contextlib.contextmanager
def _joined(address: str | None) -> Iterator[None]:
    import ray

    from keptset.rollout.pool.resources import start_ray

    if ray.is_initialized():
        yield
        return
    _ask(address or os.environ.get("RAY_ADDRESS") or "local")
    try:
        start_ray(address)
    except RolloutError as error:
        raise InvalidInput(str(error)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _ask(address: str) -> None:
    """Ray itself would knock for minutes. Errors: InvalidInput where nobody answers at a host and port."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InvalidInput(
            f"no Ray answers at {address} ({error}): start one with `ray start --head`, name another, or leave the "
            "address out to have Ray started here"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Done:
    """What a task hands back."""

    first: int
    """Its first unit's number."""
    sums: tuple[Partial, ...]
    """Of its units, one by one, up to a failure."""
    failure: KeptsetError | None
    not_there: tuple[str, ...]
    """Files that this node does not see."""
    node: str


def _spread(units: Sequence[Unit], options: AuditOptions) -> Iterator[tuple[int, Partial]]:
    """`Spread` over Ray."""
    import ray
    from ray.exceptions import RayError

    from keptset.scripts.audit_scorers import OpenModel

    if not units:
        return
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if not cpus:
        print("keptset: this Ray has no CPU; waiting for a node that has", file=sys.stderr)
    length = min(max(len(units) // (_TASKS_EACH * max(cpus, 1)), 1), LONGEST_RUN)
    runs = [{"units": pickle.dumps(units[at : at + length])} for at in range(0, len(units), length)]
    threads = _cores_of_a_node() if isinstance(options.scorer, OpenModel) else None
    asked = {"options": options.for_worker(), "folder": os.getcwd(), "threads": threads}
    try:
        with _data_settings():
            with warnings.catch_warnings():  # of Ray Data's at its own options, and at _limits
                warnings.simplefilter("ignore", DeprecationWarning)
                tasks = ray.data.from_items(runs, override_num_blocks=len(runs)).map(
                    _work, fn_kwargs=asked, num_cpus=threads or 1, concurrency=options.workers, **_limits()
                )
            number = units[0].number
            for told in _blocks(tasks):
                done: _Done = pickle.loads(zlib.decompress(told))
                assert done.first == number, "Ray Data keeps the order of its blocks"
                _check_files(done)
                for partial in done.sums:
                    yield 1, partial
                if done.failure is not None:
                    raise done.failure
                number += len(done.sums)
    except RayError as error:
        raise KeptsetError(
            f"the audit failed on Ray: {_told(error)}. Every node needs this Python, the same keptset (`ray job submit "
            "--working-dir` brings it), pyarrow and numpy, and memory for a task on each of its CPUs"
        ) from error


def _blocks(tasks: Any) -> Iterator[bytes]:
    """What the tasks hand back, fetched when it is asked for. `iter_rows` of old Ray fetches as fast as it comes."""
    import ray
    from ray.data.block import BlockAccessor

    bundles = tasks.iter_internal_ref_bundles()
    try:
        for bundle in bundles:
            for block in bundle.block_refs:
                yield from BlockAccessor.for_block(ray.get(block)).to_arrow()["done"].to_pylist()
    finally:
        # Ends the job while its Ray is still there: a job that outlives it takes the process down.
        del bundles


def _told(error: Exception) -> str:
    """What went wrong: the last error that the traces of Ray and of the task name."""
    named = re.findall(r"^[\w.]+Error: .+", str(error), re.MULTILINE)
    return (named or [f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]])[-1].rstrip(".")


def _work(row: dict[str, Any], *, options: AuditOptions, folder: str, threads: int | None) -> dict[str, Any]:
    """The task: a run of units, worked where the command was started if this node has that folder."""
    import ray

    units: Sequence[Unit] = pickle.loads(row["units"])
    pa.set_memory_pool(pa.system_memory_pool())
    pa.set_cpu_count(1)
    if threads is not None:
        configure(threads)
        os.environ.pop(CHOSEN, None)  # now an order, which the scorer leaves alone
    sums: list[Partial] = []
    failure: KeptsetError | None = None
    names = dict.fromkeys(unit.file.shown for unit in units if not unit.file.remote)
    with _in_folder(folder):
        try:
            for unit in units:
                sums.append(audit_unit(unit, options))
        except KeptsetError as error:
            failure = error
        not_there = tuple(name for name in names if not os.path.exists(name))
    done = _Done(
        first=units[0].number,
        sums=tuple(sums),
        failure=failure,
        not_there=not_there,
        node=ray.util.get_node_ip_address(),
    )
    # Histograms, mostly empty: a fraction of their size.
    return {"done": zlib.compress(pickle.dumps(done, protocol=5), level=1)}


def _check_files(done: _Done) -> None:
    """Errors: StorageError where the task's node does not see a file that is there."""
    for name in done.not_there:
        if os.path.exists(name):
            raise StorageError(
                f"node {done.node} does not see {os.path.abspath(name)}: on a cluster, paths must mean the same files "
                "on every node; name a folder that all of them mount, or an address such as s3://"
            )


def _cores_of_a_node() -> int:
    """CPUs of the smallest node that has any: a model is loaded once a node and takes all of them."""
    import ray

    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return min((count for count in cores if count), default=1)


@contextlib.contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Relative paths mean what they meant to the command; a node without the folder is told by what it cannot find."""
    before = os.getcwd()
    with contextlib.suppress(OSError):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _limits() -> dict[str, Any]:
    """The limit of retries. Ray Data has no other argument for it, and deprecates this one in 2.60."""
    import ray

    name = "ray_remote_args_fn"
    known = name in inspect.signature(ray.data.Dataset.map).parameters
    return {name: lambda: {"max_retries": _RETRIES}} if known else {}


@contextlib.contextmanager
def _data_settings() -> Iterator[None]:
    """Ray Data quiet, blocks in their order, and a task not taken for one that makes 128 MB."""
    from ray.data import DataContext

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = DataContext.get_current()
    order = context.execution_options.preserve_order
    before = {name: getattr(context, name) for name in ("enable_progress_bars", "target_max_block_size")}
    context.enable_progress_bars, context.target_max_block_size = False, _BLOCK_BYTES
    context.execution_options.preserve_order = True
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = order
