"""Scores of rollouts with planted faults, without running the model for each fault anew.

No fault changes prompts or tokens, so hidden states are computed once and kept in the cache; logits come from them as
they are asked for. Where only b was changed, what b would be under each near fault is known beforehand, too.
`KnownScorer` then says what `ModelScorer` would, token by token.

Legend: B responses, T tokens over them, P positions of a pass, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import gather_spans, offsets_of
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.scripts.audit_planting import Scored
from keptset.scripts.bench_audit_power_rollouts import Progress
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.audit.audited_batch import TokenScores
from keptset.trainer_bridge.audit.best_forms import best_forms, further_away
from keptset.trainer_bridge.audit.explanations import BatchSets, Form, from_logits
from keptset.trainer_bridge.audit.residuals import affected_responses, residuals
from keptset.trainer_bridge.audit.token_scores import ModelScorer
from keptset.trainer_bridge.audit.weights import WeightsOfPass, drawn_by
from keptset.trainer_bridge.passes import in_passes
from keptset.trainer_bridge.sampled_tokens import Ints, sampled_tokens
from keptset.trainer_bridge.scoring.aligned import LogitsOf

if TYPE_CHECKING:
    from keptset.rollout.models import Decoder

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]

MOVED = 0.1
"""Each weight of version 1's head is that of version 0 times 1 + MOVED N, N standard normal. The rest is the same, so
that hidden states are."""
_ROWS = 64
"""Responses in a file of hidden states, after which an interrupted run goes on."""


def heads_of(decoder: Decoder) -> dict[int, Floats32]:
    """The head [V, H] of versions 0 and 1."""
    head: Floats32 = decoder.head_weight.numpy()
    moved = np.random.default_rng(1).standard_normal(head.shape, np.float32)
    return {0: head, 1: head * (1 + np.float32(MOVED) * moved)}


def hidden_states(folder: Path, decoder: Decoder, batch: RolloutBatch, progress: Progress) -> Floats32:
    """Hidden states [T, H] that predict the tokens of a batch; kept in `folder`."""
    from keptset.scripts.rescore import hidden_in_one_pass

    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for begin in range(0, len(batch), _ROWS):
        part = batch.slice(begin, _ROWS)
        path = folder / f"version-0-{begin}-{len(part)}.npy"
        if not path.exists():
            hidden = []
            for rows in in_passes(part):
                packed = to_packed(rows)
                states = hidden_in_one_pass(decoder, packed.input_ids_P, np.diff(packed.cu_seqlens_B1)).numpy()
                hidden.append(states[packed.logit_index_T])
            with open(path.with_suffix(".partial"), "wb") as file:
                np.save(file, np.concatenate(hidden))
            path.with_suffix(".partial").rename(path)
        found.append(np.load(path))
        progress("scoring", (begin + len(part)) / len(batch))
    return np.concatenate(found)


@dataclass(frozen=True)
class _Place:
    """Of a response's hidden states: the first row, and the position that it is of."""

    first: int
    prompt: int
    length: int


class HiddenScorer:
    """`Scorer` over hidden states of known responses and the heads of one or several versions of the weights."""

    max_positions: int | None = None

    def __init__(self, heads: Mapping[int, Floats32], batch: RolloutBatch, hidden_TH: Floats32) -> None:
        """Heads [V, H] by version; hidden states that predict the tokens of the batch."""
        import paddle

        self._heads = {version: paddle.to_tensor(np.ascontiguousarray(head.T)) for version, head in heads.items()}
        self._hidden_TH = hidden_TH
        self.vocab_size: int = len(next(iter(heads.values())))
        prompts = batch.prompt_token_ids
        assert prompts is not None, "every prompt was recorded"
        starts = offsets_of(batch.token_ids.lengths)
        self._places = {
            np.concatenate([prompts[row], batch.token_ids[row]]).astype(np.int64).tobytes(): _Place(
                int(starts[row]), len(prompts[row]), len(batch.token_ids[row])
            )
            for row in range(len(batch))
        }

    @property
    def versions(self) -> tuple[int | None, ...]:
        return tuple(sorted(self._heads))

    def of_versions(self, versions: tuple[int, ...]) -> HiddenScorer:
        """The same with some of its versions."""
        other = object.__new__(HiddenScorer)
        other.__dict__ = {**self.__dict__, "_heads": {version: self._heads[version] for version in versions}}
        return other

    def logits_of(self, ids_P: Ints, lengths_B: Ints, version: int | None) -> LogitsOf:
        """See `Scorer`."""
        import paddle

        assert version is not None
        at_P = np.full(len(ids_P), -1, np.int64)
        for begin, length in zip(offsets_of(lengths_B).tolist(), lengths_B.tolist(), strict=False):
            place = self._places[np.asarray(ids_P[begin : begin + length], np.int64).tobytes()]
            first = begin + place.prompt - 1
            at_P[first : first + place.length] = place.first + np.arange(place.length)
        hidden_TH, head_HV = self._hidden_TH, self._heads[version]

        def logits(positions: Ints) -> Floats32:
            assert (at_P[positions] >= 0).all(), "only positions that predict a token are kept"
            found: Floats32 = paddle.matmul(paddle.to_tensor(hidden_TH[at_P[positions]]), head_HV).numpy()
            return found

        return logits

    def stepwise_logits_of(self, ids_P: Ints, lengths_B: Ints, prompt_lengths_B: Ints, version: int | None) -> None:
        """See `Scorer`. Hidden states are those of one pass."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the weights that drew a batch say of its tokens, whatever b is."""

    kept_T: Floats
    full_T: Floats
    near: Mapping[Form, Floats]
    """b under each fault that changes neither weights nor responses."""

    @classmethod
    def of(cls, batch: RolloutBatch, scorer: HiddenScorer, progress: Progress) -> Known:
        """Every near fault of every response."""
        scores = ModelScorer(scorer=scorer.of_versions((0,))).score(batch)
        tokens = sampled_tokens(batch)
        sets, starts = BatchSets(tokens), offsets_of(batch.token_ids.lengths)
        near: dict[Form, Floats] = {}
        for row in range(len(batch)):
            packed = to_packed(batch.slice(row, 1))
            lengths_B = np.diff(packed.cu_seqlens_B1).astype(np.int64)
            logits = scorer.logits_of(packed.input_ids_P, lengths_B, 0)(packed.logit_index_T)
            at = np.arange(starts[row], starts[row + 1])
            for form, value_T in from_logits(logits, tokens.take(at), sets, row).items():
                near.setdefault(form, np.full(tokens.num_tokens, np.nan))[at] = value_T
            progress("explaining", (row + 1) / len(batch))
        assert scores.full_T is not None
        return cls(kept_T=scores.kept_T, full_T=scores.full_T, near=near)

    def save(self, path: Path) -> None:
        """Errors: OSError."""
        columns: dict[str, Any] = {f"{form.order}_{form.hint}": value_T for form, value_T in self.near.items()}
        with open(path.with_suffix(".partial"), "wb") as file:
            np.savez(file, kept=self.kept_T, full=self.full_T, **columns)
        path.with_suffix(".partial").rename(path)

    @classmethod
    def load(cls, path: Path) -> Known:
        """What was saved."""
        with np.load(path) as columns:
            near = {Form(*map(int, name.split("_"))): columns[name] for name in columns.files if "_" in name}
            return cls(kept_T=columns["kept"], full_T=columns["full"], near=near)

    def take(self, tokens: Ints) -> Known:
        """The same of some of the tokens."""
        near = {form: value_T[tokens] for form, value_T in self.near.items()}
        return Known(kept_T=self.kept_T[tokens], full_T=self.full_T[tokens], near=near)

    def scored(self) -> Scored:
        """What planting needs."""
        explained = {form.kind: value_T for form, value_T in self.near.items() if form.kind is not _SHIFTED}
        return Scored(kept_T=self.kept_T, explained=explained)


_SHIFTED = FindingKind.MASK_SHIFTED


@dataclass(frozen=True, kw_only=True)
class KnownScorer:
    """`BatchScorer` for responses of a batch, some of them spoilt."""

    batch: RolloutBatch
    """As they were drawn, by version 0."""
    known: Known
    """Of that."""
    live: ModelScorer
    """For where more than b was changed, or no near fault explains a b."""

    def score(self, batch: RolloutBatch) -> TokenScores:
        """As `live` does, but for the floors, which are not measured where all is known."""
        found = self._known_of(batch) if self.live.scorer.versions == (0,) else None
        return self.live.score(batch) if found is None else self._explained(batch, found)

    def _known_of(self, batch: RolloutBatch) -> Known | None:
        """What is known of the batch; None where another column than b is not as it was drawn."""
        places = {rollout_id: row for row, rollout_id in enumerate(self.batch.rollout_ids)}
        rows = [places[rollout_id] for rollout_id in batch.rollout_ids]
        drawn = self.batch.arrow.take(pa.array(rows, pa.int64()))
        for name in ("prompt_token_ids", "token_ids", "kept_ids", "log_kept_mass", "policy_versions", "temperature"):
            if not drawn.column(name).equals(batch.column(name)):
                return None
        starts = offsets_of(self.batch.token_ids.lengths)
        _, tokens = gather_spans(starts, np.array(rows, np.int64))
        return self.known.take(tokens)

    def _explained(self, batch: RolloutBatch, known: Known) -> TokenScores:
        """The scores, with each fault in its best form; the model is asked only where no near fault explains b."""
        tokens = sampled_tokens(batch)
        sets = BatchSets(tokens)
        b_T = tokens.behavior_logprobs_T.astype(np.float64)
        explained: dict[FindingKind, Floats] = {}
        hints: dict[FindingKind, Ints] = {}
        for affected in affected_responses(tokens, *residuals(tokens, known.kept_T)):
            row, at = affected.row, affected.tokens
            here = replace(affected, tokens=np.arange(len(at)))
            packed = to_packed(batch.slice(row, 1))
            drawn_T = drawn_by(packed.tokens, self.live.scorer.versions)
            alone = WeightsOfPass(scorer=self.live.scorer, packed=packed, drawn_T=drawn_T)
            near = {form: value_T[at] for form, value_T in known.near.items()}
            best = best_forms(affected, b_T, near, further_away(alone, here, sets, row))
            for kind, (value_T, hint) in best.items():
                explained.setdefault(kind, np.full(len(b_T), np.nan))[at] = value_T
                hints.setdefault(kind, np.zeros(len(b_T), np.int64))[at] = hint
        return TokenScores(
            kept_T=known.kept_T,
            full_T=known.full_T,
            same_version_T=np.ones(len(b_T), bool),
            explained=explained,
            hints=hints,
            expected_T=known.kept_T,
        )


@dataclass(frozen=True, eq=False)
class Opened:
    """A scorer that is there already, as an audit's options ask for one."""

    scorer: Any

    def __call__(self) -> Any:
        return self.scorer

    def __reduce__(self) -> Any:
        return str, ("known scores",)
