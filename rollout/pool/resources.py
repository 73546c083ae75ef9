"""The Ray that a pool runs on, and what it has room for."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from keptset.rollout.cpu_threads import usable_cores
from keptset.rollout.pool.events import log_event
from keptset.schemas.errors import InvalidInput, RolloutError


def local_actors(checkpoint_bytes: int) -> int:
    """How many single-threaded actors this machine carries: one per usable core, as far as memory goes."""
    cores = usable_cores()
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, available // max(1, 3 * checkpoint_bytes)))


def start_ray(address: str | None) -> bool:
    """Join the Ray at `address`, or where none is named start one here; returns whether it is this process's own.

    Errors: RolloutError naming the address where there is nothing to join.
    """
    # RAY_ADDRESS is how a job finds the cluster that runs it. Without either, Ray would look for any cluster on this
    # machine, somebody else's among them: only "local" always starts one.
    joins = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {} if joins else {"include_dashboard": False}
    try:
        ray.init(address=joins or "local", log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:
        # Of a node that does not come up in time Ray says so with a bare Exception.
        if type(error) is not Exception and not isinstance(error, (ConnectionError, RuntimeError, ValueError)):
            raise
        where = f"at {joins!r}" if joins else "on this machine"
        raise RolloutError(
            f"Ray {where} cannot be used: {str(error).rstrip('.')}. Start a cluster with `ray start --head`, name its "
            "address, or leave the address out to have Ray started here"
        ) from error
    return not joins


def check_resources(*, own: bool, actors: int, cpus: float, gpus: float) -> None:
    """Actors that can never be placed would be waited for in silence.

    Errors: InvalidInput on a Ray of the pool's own; a cluster may still grow, so there it is a warning.
    """
    there = ray.cluster_resources()
    for resource, each in (("CPU", cpus), ("GPU", gpus)):
        if actors * each > there.get(resource, 0):
            told = (
                f"{actors} actors of {each:g} {resource} need {actors * each:g}, and this Ray has "
                f"{there.get(resource, 0):g}: ask for fewer actors, or less for each"
            )
            if own:
                raise InvalidInput(told)
            log_event(logging.WARNING, "waiting_for_room", reason=told)


def check_settings(actors: int, gpus: float, threads: int, max_restarts: int, max_attempts: int) -> None:
    least = {"actors": (actors, 1), "threads_per_actor": (threads, 1), "max_attempts": (max_attempts, 1)}
    least |= {"max_restarts": (max_restarts, 0)}
    for name, (value, bound) in least.items():
        if value < bound:
            raise InvalidInput(f"{name} is {value}; it must be >= {bound}")
    if gpus < 0:
        raise InvalidInput(f"gpus_per_actor is {gpus}; it must be >= 0")


def check_times(**seconds: float) -> None:
    for name, value in seconds.items():
        if not value > 0:
            raise InvalidInput(f"{name} is {value}; it must be > 0")
