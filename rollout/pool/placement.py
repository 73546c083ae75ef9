"""Where actors run: what each needs, and a placement group where one is asked for."""

from __future__ import annotations

from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from keptset.schemas.errors import InvalidInput, RolloutError

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Together or apart, as far as possible or else not at all."""
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class Placement:
    """Resources of the actors of a pool."""

    def __init__(
        self, asked: PlacementStrategy | PlacementGroup | None, *, actors: int, cpus: int, gpus: float, seconds: float
    ) -> None:
        """`asked`: a strategy for a group of the pool's own with a bundle per actor, a group of the caller's, or None.

        Errors: InvalidInput for what is neither; RolloutError where the group is not placed within `seconds`.
        """
        self._needs = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
        self._owned = isinstance(asked, str)
        self._group: PlacementGroup | None = None
        if isinstance(asked, str):
            if asked not in _STRATEGIES:
                raise InvalidInput(f"placement is {asked!r}; it must be one of {', '.join(_STRATEGIES)}")
            self._group = placement_group([self._needs] * actors, strategy=asked)
            self._wait(asked, actors, seconds)
        elif asked is not None:
            if not isinstance(asked, PlacementGroup):
                raise InvalidInput(f"placement is {asked!r}; it must be a strategy's name or a placement group")
            self._group = asked

    @property
    def needs(self) -> str:
        """What an actor takes, for people."""
        return ", ".join(f"{amount:g} {kind}" for kind, amount in self._needs.items())

    def options(self, number: int) -> dict[str, Any]:
        """Options of the actor with this number."""
        options: dict[str, Any] = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0)}
        if self._group is not None:
            # In a group of the caller's there may be other bundles; any that has room will do.
            bundle = number if self._owned else -1
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, bundle)
        return options

    def remove(self) -> None:
        """Give the resources back; a group of the caller's stays."""
        if self._owned and self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _wait(self, strategy: str, actors: int, seconds: float) -> None:
        assert self._group is not None
        try:
            ray.get(self._group.ready(), timeout=seconds)
        except GetTimeoutError as error:
            self.remove()
            raise RolloutError(
                f"{actors} bundles of {self.needs} cannot be placed {strategy} within {seconds:g} s; "
                f"free are {ray.available_resources()}"
            ) from error
