"""What a loss gives: a number with a gradient, and an account of what went into it.

Legend: T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.corrections import Corrected
from keptset.trainer_bridge.ratios import Level, LogRatios
from keptset.trainer_bridge.reduction import Entries, Reduce
from keptset.trainer_bridge.scoring.hand import Tensor


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """Counts that can be added over parts of a batch, and the value."""

    name: str
    """Of the loss, as `ppo_clip`; of KL and entropy with what they are over, as `kl_k3_kept`, `entropy_full`."""
    level: Level
    """What an entry is: a token (`token`) or a response (`sequence`, `geometric`)."""
    over: str
    """What the trainer scored over: `kept` or `full`."""
    ratio_over: str
    """Which tokens could enter: `trainable` or `sampled`."""
    reduce: Reduce
    value: float | None
    """In float64; None where nothing counted: "no data", while the loss itself is then 0 with gradient 0."""
    entries: int
    """Tokens or responses that counted, those of weight 0 among them."""
    tokens: int
    """Tokens behind them: what `token_mean` divides by."""
    responses: int
    """Responses behind them: what `response_mean` divides by."""
    dropped: int
    """Entries of weight 0: a correction took them out."""
    clipped_above: int
    """Entries whose gradient was cut at the upper bound (for CISPO: whose weight was), or 0 where nothing clips."""
    clipped_below: int
    clipped_dual: int
    excluded_tokens: dict[str, int]
    """Tokens left out as violations, by kind."""
    excluded_responses: dict[str, int]
    """Responses left out so, by kind; empty where only tokens are."""

    @classmethod
    def of(
        cls,
        name: str,
        ratios: LogRatios,
        entries: Entries,
        weights: Corrected | None,
        *,
        reduce: Reduce,
        value: float,
        clipped_above: int = 0,
        clipped_below: int = 0,
        clipped_dual: int = 0,
    ) -> LossReport:
        """The account of these entries."""
        by_level = {} if entries.level == "token" else ratios.excluded_responses()
        return cls(
            name=name,
            level=entries.level,
            over=ratios.over,
            ratio_over=ratios.ratio_over,
            reduce=reduce,
            value=value if len(entries.row_C) else None,
            entries=len(entries.row_C),
            tokens=int(entries.counted_T.sum()),
            responses=len(np.unique(entries.row_C)),
            dropped=int((entries.weight_C == 0).sum()),
            clipped_above=clipped_above,
            clipped_below=clipped_below,
            clipped_dual=clipped_dual,
            excluded_tokens=_larger(
                ratios.violations.counts(), {} if weights is None else weights.report.excluded_tokens
            ),
            excluded_responses=_larger(by_level, {} if weights is None else weights.report.excluded_responses),
        )

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Names and numbers for a logger; shares are of the entries that were not dropped. What has no data is left
        out."""
        live = self.entries - self.dropped
        numbers: dict[str, float | None] = {
            "value": self.value,
            "entries": self.entries,
            "tokens": self.tokens,
            "responses": self.responses,
            "dropped": self.dropped,
            "clipped_above_share": self.clipped_above / live if live else None,
            "clipped_below_share": self.clipped_below / live if live else None,
            "clipped_dual_share": self.clipped_dual / live if live else None,
        }
        numbers |= {f"excluded_tokens/{kind}": n for kind, n in self.excluded_tokens.items()}
        numbers |= {f"excluded_responses/{kind}": n for kind, n in self.excluded_responses.items()}
        return {f"{prefix}{self.name}_{self.level}/{key}": float(n) for key, n in numbers.items() if n is not None}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A term to be minimised; terms add up."""

    value: Tensor
    """Scalar of the framework and on the device of the log-probabilities, differentiable where they are."""
    gradient_T: NDArray[np.float64]
    """d value / d l of each sampled token, what `value` passes on to the log-probabilities."""
    report: LossReport
    gradient_N: NDArray[np.float64] | None = None
    """d value / d log p of each kept id, for terms over whole kept distributions; gradient_T is then 0."""


def _larger(mine: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, int]:
    """A correction may have excluded what the ratios of the loss would not have, and the other way round."""
    return {
        kind: max(mine.get(kind, 0), theirs.get(kind, 0)) for kind in (*mine, *(k for k in theirs if k not in mine))
    }
