"""Real responses to plant faults in, and what models say of them: sampled and scored when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.ragged import gather_spans, offsets_of
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.scripts.audit_planting import Scored
from keptset.scripts.bench_audit_power_kinds import Material
from keptset.scripts.bench_audit_power_rollouts import Progress, Source, varied
from keptset.trainer_bridge.audit.options import BatchScorer

if TYPE_CHECKING:
    from keptset.scripts.bench_audit_power_scores import HiddenScorer, Known


class Drawn:
    """Honest responses of version 0 of the weights, and scores under versions 0 and 1."""

    def __init__(self, folder: Path, results: Path, source: Source, responses: int, progress: Progress) -> None:
        """What does not depend on the audit is kept in `folder`, the rest in `results`."""
        self._folder, self._results, self._source = folder, results, source
        self.responses, self.progress = responses, progress

    @cached_property
    def batch(self) -> RolloutBatch:
        """A quarter more than are planted into at a time."""
        # One in five settings has no processors, and as many responses are needed that have.
        return varied(self._folder, self._source, self.responses * 5 // 4, self.progress)

    @cached_property
    def _hidden(self) -> HiddenScorer:
        from keptset.rollout.models import load_decoder
        from keptset.scripts.bench_audit_power_scores import HiddenScorer, heads_of, hidden_states

        decoder = load_decoder(self._source.model)
        hidden_TH = hidden_states(self._folder / "hidden", decoder, self.batch, self.progress)
        return HiddenScorer(heads_of(decoder), self.batch, hidden_TH)

    @cached_property
    def _known(self) -> Known:
        from keptset.scripts.bench_audit_power_scores import Known

        path = self._results / "known.npz"
        if not path.exists():
            Known.of(self.batch, self._hidden, self.progress).save(path)
        return Known.load(path)

    @cached_property
    def material(self) -> Material:
        """For planting."""
        from keptset.scripts.bench_audit_power_scores import KnownScorer, Opened
        from keptset.trainer_bridge.audit.token_scores import ModelScorer

        def scored(part: RolloutBatch) -> Scored:
            place = {rollout_id: row for row, rollout_id in enumerate(self.batch.rollout_ids)}
            rows = np.array([place[rollout_id] for rollout_id in part.rollout_ids], np.int64)
            return self._known.take(gather_spans(offsets_of(self.batch.token_ids.lengths), rows)[1]).scored()

        def scorer(versions: tuple[int, ...]) -> Callable[[], BatchScorer]:
            live = ModelScorer(scorer=self._hidden.of_versions(versions))
            return Opened(KnownScorer(batch=self.batch, known=self._known, live=live))

        return Material(batch=self.batch, scored=scored, scorer=scorer)

    @cached_property
    def masses(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Log kept mass of every token, of both versions."""
        from keptset.trainer_bridge.audit.token_scores import ModelScorer

        scores = ModelScorer(scorer=self._hidden.of_versions((1,))).score(self.batch)
        assert scores.full_T is not None
        return self._known.full_T - self._known.kept_T, scores.full_T - scores.kept_T
