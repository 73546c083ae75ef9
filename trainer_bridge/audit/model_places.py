"""Places of sampled tokens in a model's kept distributions, read from logits on their way to a score.

    u = mass of the members more probable than y (ties by lower id) + v p(y)

over the recorded set, under the weights that drew the token: what the draw test takes where no distribution was
recorded.

Legend: T sampled tokens of a pass, P positions asked for together, A tokens of those with two kept ids or more, M kept
ids over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.ragged import row_index
from keptset.trainer_bridge.audit.uniforms import stream_starts, stream_uniforms
from keptset.trainer_bridge.sampled_tokens import Ints, SampledTokens
from keptset.trainer_bridge.scoring.aligned import LogitsOf
from keptset.trainer_bridge.scoring.hand import Tensor, logits_hand
from keptset.trainer_bridge.scoring.kept_softmax import kept_softmax
from keptset.trainer_bridge.scoring.plan import Plan

Floats = NDArray[np.float64]


@dataclass(kw_only=True)
class PlacesRead:
    """u of the tokens of one plan, filled in as their logits come by."""

    tokens: SampledTokens
    rows_T: Ints
    """Position of the logits that predict each token, ascending."""
    plan: Plan
    u_T: Floats = field(init=False)
    """NaN where no listed set of two or more was met."""

    def __post_init__(self) -> None:
        self.u_T = np.full(self.tokens.num_tokens, np.nan)

    def watching(self, logits_of: LogitsOf) -> LogitsOf:
        """The same logits, looked at as they pass. Positions of one call must ascend."""

        def watched(positions: Ints) -> Tensor:
            logits_PV = logits_of(positions)
            self._read(positions, logits_PV)
            return logits_PV

        return watched

    def _read(self, positions: Ints, logits_PV: Tensor) -> None:
        begin, last = np.searchsorted(self.rows_T, positions[[0, -1]])
        plan = self.plan.part(int(begin), int(last) + 1)
        if not len(plan.active_A):
            return
        hand = logits_hand(logits_PV)
        rows = np.searchsorted(positions, self.rows_T[begin : last + 1])
        with hand.exact():
            done = kept_softmax(hand, plan, rows, int(logits_PV.shape[1]), entropy=False)
        at = begin + plan.active_A
        starts_B = stream_starts(self.tokens.rollout_ids)
        v_A = stream_uniforms(starts_B[self.tokens.row_T[at]], self.tokens.position_T[at])
        self.u_T[at] = places(hand.to_host(done.probabilities_M), plan.starts_A1, plan.member_A, v_A)


def places(p_M: Floats, starts_A1: Ints, member_A: Ints, v_A: Floats) -> Floats:
    """u [A] of the members `member_A` (indices into M) of sets whose ids ascend.

    >>> places(np.array([0.5, 0.25, 0.25]), np.array([0, 3]), np.array([2]), np.array([0.5])).tolist()
    [0.875]
    """
    segment_M = row_index(starts_A1)
    own_A = p_M[member_A]
    own_M = own_A[segment_M]
    lower_M = np.arange(len(p_M)) < member_A[segment_M]
    before_M = (p_M > own_M) | ((p_M == own_M) & lower_M)
    mass_A = np.add.reduceat(np.where(before_M, p_M, 0.0), starts_A1[:-1])
    return np.asarray(mass_A + v_A * own_A)
