"""What corrections did to importance weights, in counts and sums that can be added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightLevel = Literal["token", "sequence", "geometric", "one"]
"""`one`: every weight starts as 1, and steps can only take tokens and responses out."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one correction did to what the ones before it had left."""

    name: str
    """Correction and level, as `mask_token`; `staleness`."""
    lower: float
    upper: float
    tokens: int
    """Tokens cut down to the bound (Truncate), weighed down or taken out (staleness), or taken out (the others)."""
    responses: int
    """Responses with such a token."""


@dataclass(frozen=True, kw_only=True)
class CorrectionReport:
    """What became of the weights, in counts and sums that can be added."""

    weights: WeightLevel
    """Level of the weights."""
    ratio_over: str
    """Which tokens entered: `trainable` or `sampled`."""
    over: str
    """What the trainer scored over: `kept` or `full`."""
    counted_tokens: int
    """Tokens that entered, those taken out by a correction among them."""
    steps: tuple[StepReport, ...]
    dropped_tokens: int
    """Counted tokens of weight 0, by a correction or for their age."""
    dropped_responses: int
    """Responses that have counted tokens, and all of them dropped."""
    weight_sum: float
    """Sum of the weights that are left when `BatchNormalise` begins (or at the end): over tokens, or over responses
    where weights are of level `sequence` or `geometric`."""
    weight_count: int
    """How many of them."""
    largest_weight: float | None
    """After every step; None where nothing is left."""
    excluded_tokens: dict[str, int]
    """Tokens left out as violations, by kind; they are not counted above."""
    excluded_responses: dict[str, int]
    """Responses left out so, by kind; empty where every level is `token`."""

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Names and numbers for a logger; what has no data is left out."""
        numbers: dict[str, float | None] = {
            "counted_tokens": self.counted_tokens,
            "dropped_tokens": self.dropped_tokens,
            "dropped_responses": self.dropped_responses,
            "mean_weight": self.weight_sum / self.weight_count if self.weight_count else None,
            "largest_weight": self.largest_weight,
        }
        for step in self.steps:
            numbers |= {f"{step.name}/tokens": step.tokens, f"{step.name}/responses": step.responses}
        numbers |= {f"excluded_tokens/{kind}": n for kind, n in self.excluded_tokens.items()}
        numbers |= {f"excluded_responses/{kind}": n for kind, n in self.excluded_responses.items()}
        return {f"{prefix}correction/{name}": float(n) for name, n in numbers.items() if n is not None}
