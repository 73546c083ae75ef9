"""Tokens drawn from weights that lie several versions back: how many, and what is done about them.

    lag_t = current version - version of the weights that drew token t

Beyond `max_lag` a token is dropped (weight 0) or weighs decay ** (lag - max_lag). Everything is counted; nothing is
done without being asked for.

Legend: T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION, SampledTokens
from keptset.trainer_bridge.violations import Locate, locate_by_index

Beyond = Literal["keep", "drop", "down_weight"]
Per = Literal["token", "response"]
UnknownVersion = Literal["raise", "keep", "drop"]


@dataclass(frozen=True, kw_only=True)
class StalenessReport:
    """Counts that can be added over batches; `mean_lag` and `max_lag_seen` are None where no version is known."""

    max_lag: int
    """The bound that was asked for."""
    beyond: Beyond
    """What happens beyond it."""
    per: Per
    """Whether a token goes by its own lag, or by the largest of its response."""
    tokens_by_lag: Mapping[int, int]
    """Sampled tokens of each lag that occurs."""
    unknown_tokens: int
    """Sampled tokens whose version is not recorded."""
    tokens_beyond: int
    responses_beyond: int
    """Responses with such a token."""
    tokens_dropped: int
    """With weight 0: beyond the bound, or of unknown version where those are dropped."""
    tokens_down_weighted: int

    @property
    def mean_lag(self) -> float | None:
        known = sum(self.tokens_by_lag.values())
        return sum(lag * n for lag, n in self.tokens_by_lag.items()) / known if known else None

    @property
    def max_lag_seen(self) -> int | None:
        return max(self.tokens_by_lag, default=None)

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Names and numbers for a logger; what has no data is left out."""
        numbers = {
            "mean_lag": self.mean_lag,
            "max_lag_seen": self.max_lag_seen,
            "unknown_tokens": self.unknown_tokens,
            "tokens_beyond": self.tokens_beyond,
            "responses_beyond": self.responses_beyond,
            "tokens_dropped": self.tokens_dropped,
            "tokens_down_weighted": self.tokens_down_weighted,
        }
        return {f"{prefix}staleness/{name}": float(value) for name, value in numbers.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StalenessWeights:
    """What each sampled token weighs for its age."""

    weights_T: NDArray[np.float64]
    """1 within the bound, 0 where dropped, between them where weighed down."""
    lag_T: NDArray[np.float64]
    """Versions behind; NaN where unknown."""
    report: StalenessReport


def version_lag(
    policy_versions_T: ArrayLike, current_version: int, locate: Locate = locate_by_index
) -> NDArray[np.float64]:
    """Versions behind `current_version` [T]; NaN where a version is unknown (-1).

    Errors: InvalidInput where a token is newer than `current_version`.

    >>> version_lag([3, 5, -1], 5).tolist()
    [2.0, 0.0, nan]
    """
    versions_T: NDArray[np.int64] = np.asarray(policy_versions_T, np.int64)
    newer = np.flatnonzero(versions_T > current_version)
    if len(newer):
        rollout, position = locate(int(newer[0]))
        raise InvalidInput(
            f"{rollout} token {position} was drawn at version {versions_T[newer[0]]}, after the current version "
            f"{current_version} ({len(newer)} tokens): give the version of the weights that are trained now"
        )
    return np.where(versions_T == UNKNOWN_VERSION, np.nan, current_version - versions_T.astype(np.float64))


def staleness_weights(
    policy_versions_T: ArrayLike,
    row_T: ArrayLike,
    current_version: int,
    *,
    max_lag: int,
    beyond: Beyond = "drop",
    decay: float = 0.5,
    per: Per = "token",
    unknown: UnknownVersion = "raise",
    locate: Locate = locate_by_index,
) -> StalenessWeights:
    """Weigh tokens given as bare arrays by the age of the weights that drew them.

    `row_T` is each token's response. `per` = `response`: the oldest token decides for its whole response, as losses
    over sequence or geometric ratios need it. `decay` in (0, 1) is used by `down_weight` alone. A token of unknown
    version stops the call, weighs 1 (`keep`) or 0 (`drop`).

    Errors: InvalidInput where a name or number is out of range, a version is unknown and `unknown` is `raise`, or a
    token is newer than `current_version`.

    >>> weighed = staleness_weights([3, 5, 5], [0, 0, 1], 5, max_lag=1)
    >>> weighed.weights_T.tolist(), weighed.report.tokens_dropped
    ([0.0, 1.0, 1.0], 1)
    """
    _check(max_lag, beyond, decay, per, unknown)
    lag_T = version_lag(policy_versions_T, current_version, locate)
    rows: NDArray[np.int64] = np.asarray(row_T, np.int64)
    if rows.shape != lag_T.shape:
        raise InvalidInput(f"row_T has shape {rows.shape}; there are {len(lag_T)} policy versions")
    unknown_T = np.isnan(lag_T)
    if unknown == "raise" and unknown_T.any():
        rollout, position = locate(int(np.argmax(unknown_T)))
        raise InvalidInput(
            f"the version of {rollout} token {position} is unknown ({int(unknown_T.sum())} tokens): have the engine "
            f"record policy_versions, or say unknown='keep' or 'drop'"
        )
    age_T = np.where(unknown_T, 0.0, lag_T)
    if per == "response" and len(rows):
        oldest_B = np.zeros(int(rows.max()) + 1)
        np.maximum.at(oldest_B, rows, age_T)
        age_T = oldest_B[rows]
    beyond_T = age_T > max_lag
    weights_T = np.ones(len(lag_T))
    if beyond == "drop":
        weights_T[beyond_T] = 0.0
    elif beyond == "down_weight":
        weights_T[beyond_T] = decay ** (age_T[beyond_T] - max_lag)
    if unknown == "drop":
        weights_T[_spread(unknown_T, rows, per)] = 0.0
    lags, counts = np.unique(lag_T[~unknown_T].astype(np.int64), return_counts=True)
    report = StalenessReport(
        max_lag=max_lag,
        beyond=beyond,
        per=per,
        tokens_by_lag=dict(zip(lags.tolist(), counts.tolist(), strict=True)),
        unknown_tokens=int(unknown_T.sum()),
        tokens_beyond=int(beyond_T.sum()),
        responses_beyond=len(np.unique(rows[beyond_T])),
        tokens_dropped=int((weights_T == 0).sum()),
        tokens_down_weighted=int(((weights_T > 0) & (weights_T < 1)).sum()),
    )
    return StalenessWeights(weights_T=weights_T, lag_T=lag_T, report=report)


def staleness_weights_of(
    tokens: SampledTokens,
    current_version: int,
    *,
    max_lag: int,
    beyond: Beyond = "drop",
    decay: float = 0.5,
    per: Per = "token",
    unknown: UnknownVersion = "raise",
) -> StalenessWeights:
    """Weigh the sampled tokens of a batch. Arguments and errors: as `staleness_weights`."""
    return staleness_weights(
        tokens.policy_versions_T,
        tokens.row_T,
        current_version,
        max_lag=max_lag,
        beyond=beyond,
        decay=decay,
        per=per,
        unknown=unknown,
        locate=tokens.locate,
    )


def _spread(marked_T: NDArray[np.bool_], rows: NDArray[np.int64], per: Per) -> NDArray[np.bool_]:
    return np.isin(rows, rows[marked_T]) if per == "response" else marked_T


def _check(max_lag: int, beyond: str, decay: float, per: str, unknown: str) -> None:
    if max_lag < 0:
        raise InvalidInput(f"max_lag is {max_lag}; it must be >= 0")
    for name, value, allowed in (
        ("beyond", beyond, ("keep", "drop", "down_weight")),
        ("per", per, ("token", "response")),
        ("unknown", unknown, ("raise", "keep", "drop")),
    ):
        if value not in allowed:
            raise InvalidInput(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    if not 0 < decay < 1:
        raise InvalidInput(f"decay is {decay}; it must lie in (0, 1): to drop what is too old, say beyond='drop'")
