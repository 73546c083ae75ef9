"""How far tokens lag behind the newest version that their stream had recorded up to them, one unit of work by itself.

    lag = max(newest recorded before the unit, newest in it so far) - version

What was recorded before may not be known yet, so a unit keeps every pair (version, newest so far) that it has. The sum
of all units from the first on knows it: there lags are numbers, and the pairs are let go of.

Legend: P pairs, R responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.audit.examples import NUM_EXAMPLES, Order

NOTHING_YET = -1
Ints = NDArray[np.int64]
_BITS = 32
"""Of a version, which is an int32 in the schema."""
_ALREADY, _NEVER = -2, 2**62


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Versions beside the newest when they were recorded, and how often each such pair occurs."""

    version_P: Ints
    newest_P: Ints
    count_P: Ints

    @classmethod
    def of(cls, versions: Ints, newest: Ints) -> Pairs:
        """Those that occur. Usually it is one, and then nothing is sorted."""
        pairs = versions << _BITS | newest
        if pairs.min() == pairs.max():
            distinct, counts = pairs[:1], np.array([len(pairs)])
        else:
            distinct, counts = np.unique(pairs, return_counts=True)
        return cls(version_P=distinct >> _BITS, newest_P=distinct & (2**_BITS - 1), count_P=counts)

    def after(self, newest: int) -> Pairs:
        """The same, recorded when that version had drawn."""
        return replace(self, newest_P=np.maximum(self.newest_P, newest))

    @property
    def lag_P(self) -> Ints:
        return self.newest_P - self.version_P


@dataclass(frozen=True, kw_only=True)
class AgedResponse:
    """A response with its oldest version, the newest when it was recorded, and where the oldest begins."""

    order: Order
    rollout_id: str
    position: int
    oldest: int
    newest: int


def may_be_shown(oldest_R: Ints, newest_R: Ints, bound: int) -> NDArray[np.bool_]:
    """Which responses are among the first NUM_EXAMPLES that lag beyond the bound, for some newest version before.

    Never more than bound + 2 times NUM_EXAMPLES.
    """
    # A response lags where a version above this was there before it: each that lags already, or needs no higher one,
    # and comes first is shown in its stead.
    needed_R = np.where(newest_R - oldest_R > bound, _ALREADY, oldest_R + bound)
    before_R = pushed_R = needed_R
    for _ in range(NUM_EXAMPLES):  # the lowest before each response, the second lowest, ...
        before_R = np.concatenate([[_NEVER], np.minimum.accumulate(pushed_R)[:-1]])
        pushed_R = np.maximum(before_R, pushed_R)
    shown_R: NDArray[np.bool_] = needed_R < before_R
    return shown_R


@dataclass
class OpenStream:
    """What was recorded in a stream, in its order, where what came before may be missing."""

    newest: int = NOTHING_YET
    tokens: list[Pairs] = field(default_factory=list)
    responses: list[Pairs] = field(default_factory=list)
    """Of oldest versions; empty where there is no bound."""
    shown: list[AgedResponse] = field(default_factory=list)
    """Those that `may_be_shown`, in their order."""

    def append(self, later: OpenStream, bound: int | None) -> None:
        """What came after: it was recorded when at least our newest was there."""
        self.tokens += [pairs.after(self.newest) for pairs in later.tokens]
        self.responses += [pairs.after(self.newest) for pairs in later.responses]
        if bound is not None and later.shown:
            after = [replace(response, newest=max(response.newest, self.newest)) for response in later.shown]
            self.shown = _those_shown([*self.shown, *after], bound)
        self.newest = max(self.newest, later.newest)


def _those_shown(responses: Sequence[AgedResponse], bound: int) -> list[AgedResponse]:
    oldest_R = np.array([response.oldest for response in responses], np.int64)
    newest_R = np.array([response.newest for response in responses], np.int64)
    return [responses[row] for row in np.flatnonzero(may_be_shown(oldest_R, newest_R, bound)).tolist()]
