"""Settings of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from keptset.schemas.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine batches, and what it records beyond the sampled tokens."""

    slots: int = 16
    """Responses decoded together in one step."""
    prefill_tokens: int = 512
    """Prompt tokens computed beside the decoding rows in one step, at most; longer prompts go in chunks."""
    max_length: int | None = None
    """Longest prompt + response in tokens; None: the model's context. Key-value memory grows as requests need it."""
    kv_tokens: int | None = None
    """Tokens whose keys and values may be held at once, all slots together; None: as many as slots and lengths need.
    Requests wait for room in the order they came."""
    base_seed: int = 0
    """Row seeds are derived from it, the prompt's id and the sample's index; change it from step to step."""
    allow_shared_seed: bool = False
    """Whether two requests in flight may share a row seed, which makes their draws dependent."""
    distribution_share: float = 0.0
    """Share of responses whose whole kept distribution is recorded, chosen by a hash of the rollout id."""

    def __post_init__(self) -> None:
        for name in ("slots", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be >= 1")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise InvalidInput(f"kv_tokens is {self.kv_tokens}; it must be >= 1, or None for no bound")
        if self.max_length is not None and self.max_length < 2:
            raise InvalidInput(f"max_length is {self.max_length}; it must hold a prompt and a response, so be >= 2")
        if not 0 <= self.base_seed < 2**63:
            raise InvalidInput(f"base_seed is {self.base_seed}; it must lie in [0, 2**63)")
        if not 0 <= self.distribution_share <= 1:
            raise InvalidInput(f"distribution_share is {self.distribution_share}; it must lie in [0, 1]")
