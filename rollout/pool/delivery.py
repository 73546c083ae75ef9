"""A batch on its way to the consumer: a reference into Ray's object store, and what to say once it arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keptset.schemas.rollout_batch import RolloutBatch

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True, kw_only=True, eq=False)
class Delivery:
    """Responses that ended, in the object store of the node that drew them.

    `get` it here, or send `reference` to another process and say `done` when that has read it, `lost` where Ray says
    that the object is lost. Until then the pool can answer its prompts again.
    """

    reference: ObjectRef[RolloutBatch]
    rollout_ids: tuple[str, ...]
    """Of its responses, in the batch's order."""
    actor: int
    """Number of the actor that drew them."""
    oldest_version: int | None
    """The oldest weights that one of its tokens was drawn with; None where the engine does not tell."""
    settle: Callable[[Delivery, str | None], None] = field(repr=False)
    """The pool's: what became of it, None for well."""

    def get(self, *, timeout_seconds: float | None = None) -> RolloutBatch | None:
        """The batch; None where it was lost with its node, and its prompts will be answered again.

        Errors: ray.exceptions.GetTimeoutError where it does not come in time.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            batch: RolloutBatch = ray.get(self.reference, timeout=timeout_seconds)
        except GetTimeoutError:
            raise
        except RayError as error:
            self.lost(f"{type(error).__name__} of a finished batch")
            return None
        self.done()
        return batch

    def done(self) -> None:
        """The batch has been read; its prompts are answered for good."""
        self.settle(self, None)

    def lost(self, reason: str = "the consumer found it lost") -> None:
        """The batch cannot be read any more; its prompts are answered again, under the same ids and row seeds."""
        self.settle(self, reason)
