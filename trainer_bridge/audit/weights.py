"""Which weights drew each token, and their logits within one forward pass.

Legend: T sampled tokens, P positions of a pass, R rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from keptset.schemas.columns import KvPolicy
from keptset.trainer_bridge.alignment import PackedBatch
from keptset.trainer_bridge.audit.scorer import Scorer
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION, Ints, SampledTokens
from keptset.trainer_bridge.scoring.aligned import LogitsOf
from keptset.trainer_bridge.scoring.hand import Tensor, hand_for

ELSEWHERE = -1
"""Stands for weights that are not at hand, or for no single version's."""


def drawn_by(tokens: SampledTokens, versions: tuple[int | None, ...]) -> Ints:
    """Index into `versions` of the weights that drew each token [T]; ELSEWHERE where they are not among them.

    A model of untold version is taken to have drawn everything. What was drawn after an update in flight, over a cache
    of the old weights, belongs to no version.
    """
    version_T = tokens.policy_versions_T
    if versions == (None,):
        drawn_T = np.zeros(tokens.num_tokens, np.int64)
    else:
        known = np.array([-2 if version is None else version for version in versions], np.int64)
        drawn_T = np.minimum(np.searchsorted(known, version_T), len(known) - 1)
        drawn_T[known[drawn_T] != version_T] = ELSEWHERE
    policy_B = np.array([word == KvPolicy.KEPT.value for word in tokens.batch.column("kv_policy").to_pylist()], bool)
    if policy_B.any():
        begin_T = np.searchsorted(tokens.row_T, tokens.row_T)
        moved_T = (version_T != version_T[begin_T]) | (version_T == UNKNOWN_VERSION)
        drawn_T[policy_B[tokens.row_T] & moved_T] = ELSEWHERE
    return drawn_T


@dataclass(frozen=True, kw_only=True)
class WeightsOfPass:
    """One pass of packed rows under as many versions as are asked for, each computed once."""

    scorer: Scorer
    packed: PackedBatch
    drawn_T: Ints
    _logits: dict[int, LogitsOf] = field(default_factory=dict)

    def logits_of(self, index: int) -> LogitsOf:
        """Logits under the version at this index."""
        if index not in self._logits:
            lengths_B = np.diff(self.packed.cu_seqlens_B1).astype(np.int64)
            version = self.scorer.versions[index]
            self._logits[index] = self.scorer.logits_of(self.packed.input_ids_P, lengths_B, version)
        return self._logits[index]

    def logits_drawn(self, tokens: Ints) -> Tensor:
        """Logits [R, V] of tokens of the pass under the weights that drew each; none of them drawn elsewhere."""
        positions, drawn = self.packed.logit_index_T[tokens], self.drawn_T[tokens]
        indices = np.unique(drawn)
        if len(indices) == 1:
            return self.logits_of(int(indices[0]))(positions)
        logits = np.empty((len(tokens), self.scorer.vocab_size), np.float32)
        for index in indices.tolist():
            of_version = self.logits_of(index)(positions[drawn == index])
            logits[drawn == index] = hand_for(of_version).to_host(of_version)
        return logits
