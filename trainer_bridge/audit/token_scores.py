"""A model's scores of a batch: l over K and over the vocabulary, the b to be expected, and what explains another one.

Rows go through the model in passes of bounded size, and logits exist for a bounded number of tokens at once. Under
several versions of the weights the newest is the trainer's own, *now*: l is its. The b to be expected is that of the
version that drew the token, over the domain in which b was recorded.

Legend: T sampled tokens, B responses, P positions of a pass.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from keptset.schemas.columns import LogprobDomain
from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.audit.audited_batch import TokenScores
from keptset.trainer_bridge.audit.best_forms import explain
from keptset.trainer_bridge.audit.explanations import BatchSets
from keptset.trainer_bridge.audit.floors import FloorSums
from keptset.trainer_bridge.audit.model_places import PlacesRead
from keptset.trainer_bridge.audit.refusals import refusals
from keptset.trainer_bridge.audit.residuals import Floats, affected_responses, residuals
from keptset.trainer_bridge.audit.scorer import Scorer
from keptset.trainer_bridge.audit.weights import ELSEWHERE, WeightsOfPass, drawn_by
from keptset.trainer_bridge.passes import POSITIONS_PER_PASS, in_passes
from keptset.trainer_bridge.sampled_tokens import Ints, SampledTokens, sampled_tokens
from keptset.trainer_bridge.scoring.aligned import LogitsOf, full_vocabulary_job_of, job_of
from keptset.trainer_bridge.scoring.hand import Tensor, hand_for
from keptset.trainer_bridge.scoring.plan import plan_full_vocabulary
from keptset.trainer_bridge.scoring.run import Job, run_in_chunks

MAX_ELEMENTS = 1 << 24
"""Logits that exist at once: 64 MiB of float32."""
FLOOR_SHARE = 1 / 32
"""Of the responses, on which floors are measured, and at least one of each batch: chosen by their ids, so that it does
not matter who scores them."""
FLOOR_TOKENS = 64
"""Of each of them, from its beginning: each takes a step of the model of its own."""
FLOOR_POSITIONS = 512
"""Positions in a pass of the batch floor; the scores themselves use another number, and the rows another order."""


@dataclass(frozen=True, kw_only=True)
class ModelScorer:
    """Scores batches with a model."""

    scorer: Scorer
    positions_per_pass: int = POSITIONS_PER_PASS

    def score(self, batch: RolloutBatch) -> TokenScores:
        """Scores of the sampled tokens; responses that cannot be scored are counted in `refused`."""
        tokens = sampled_tokens(batch)
        good_B, told = refusals(tokens, self.scorer.vocab_size, self.scorer.max_positions)
        into = _Collected(tokens.num_tokens)
        good = batch if good_B.all() else batch.filter(good_B)
        if len(good):
            self._score(good, np.flatnonzero(good_B[tokens.row_T]), into)
        return TokenScores(
            kept_T=into.kept_T,
            full_T=into.full_T,
            same_version_T=into.same_T,
            explained=into.explained,
            hints=into.hints,
            expected_T=into.expected_T,
            places_T=into.places_T,
            versions_told=self.scorer.versions != (None,),
            refused=told,
            floors=self._floors(good),
        )

    def _score(self, batch: RolloutBatch, at_T: Ints, into: _Collected) -> None:
        sets = BatchSets(sampled_tokens(batch))
        now = len(self.scorer.versions) - 1
        row, token = 0, 0
        for part in in_passes(batch, self.positions_per_pass):
            packed = to_packed(part)
            tokens = packed.tokens
            weights = WeightsOfPass(scorer=self.scorer, packed=packed, drawn_T=drawn_by(tokens, self.scorer.versions))
            every = np.arange(tokens.num_tokens)
            kept_T, full_T, now_T = _kept_and_full(tokens, packed.logit_index_T, weights.logits_of(now), self.scorer)
            expected_T, places_T = np.full(tokens.num_tokens, np.nan), np.full(tokens.num_tokens, np.nan)
            for index in np.unique(weights.drawn_T[weights.drawn_T != ELSEWHERE]).tolist():
                drawn = np.flatnonzero(weights.drawn_T == index)
                *scores, places_T[drawn] = kept_T[drawn], full_T[drawn], now_T[drawn]
                if index != now:
                    rows = packed.logit_index_T[drawn]
                    *scores, places_T[drawn] = _kept_and_full(
                        tokens.take(drawn), rows, weights.logits_of(index), self.scorer
                    )
                expected_T[drawn] = self._expected(weights, index, drawn, *scores)
            at = at_T[token : token + tokens.num_tokens]
            into.kept_T[at] = np.where(np.isfinite(kept_T), kept_T, np.nan)
            into.full_T[at] = full_T
            into.expected_T[at] = expected_T
            into.same_T[at] = weights.drawn_T == now
            residual_T, compared_T = residuals(tokens, expected_T)
            for affected in affected_responses(tokens, residual_T, compared_T):
                places_T[affected.tokens] = np.nan
                for kind, (value_T, hint) in explain(weights, affected, sets, row + affected.row).items():
                    into.explain(kind, at[every[affected.tokens]], value_T, hint)
            into.places_T[at] = places_T
            row, token = row + len(part), token + tokens.num_tokens

    def _expected(self, weights: WeightsOfPass, index: int, drawn: Ints, kept_T: Floats, full_T: Floats) -> Floats:
        """What b should be, by the domain that each response says its own to be of."""
        tokens = weights.packed.tokens.take(drawn)
        domain_T = np.array(tokens.logprob_domain_B)[tokens.row_T]
        expected_T = np.where(domain_T == LogprobDomain.KEPT.value, kept_T, np.nan)
        expected_T = np.where(domain_T == LogprobDomain.FULL.value, full_T, expected_T)
        raw = np.flatnonzero(domain_T == LogprobDomain.RAW.value)
        if len(raw):
            plan = plan_full_vocabulary(
                tokens.token_ids_T[raw], np.ones(len(raw)), vocab_size=self.scorer.vocab_size, locate=tokens.locate
            )
            job = Job(plan=plan, share=None, entropy=False)
            rows = weights.packed.logit_index_T[drawn[raw]]
            expected_T[raw] = _run(job, weights.logits_of(index), rows, self.scorer.vocab_size)[0]
        return expected_T

    def _floors(self, batch: RolloutBatch) -> FloorSums | None:
        if not len(batch):
            return None
        place_B = np.array([_hashed(rollout_id) for rollout_id in batch.rollout_ids])
        chosen_B = place_B <= max(FLOOR_SHARE, float(place_B.min()))
        floors = FloorSums()
        now = self.scorer.versions[-1]
        for part in in_passes(batch.filter(chosen_B), self.positions_per_pass):
            one_pass = self._kept(part)
            tokens = sampled_tokens(part)
            choice_T = np.isfinite(one_pass) & (tokens.kept_sizes_T > 1) & (tokens.position_T < FLOOR_TOKENS)
            order = np.arange(len(part))[::-1]
            other = np.concatenate([self._kept(few) for few in in_passes(part.take(order), FLOOR_POSITIONS)])
            by_row = np.split(
                other, np.cumsum(np.bincount(sampled_tokens(part.take(order)).row_T, minlength=len(part)))[:-1]
            )
            batch_T = np.concatenate(by_row[::-1]) - one_pass
            stepwise_T = self._stepwise(part, now)
            path_T = None if stepwise_T is None else (stepwise_T - one_pass)[choice_T]
            floors.add(path_T=path_T, batch_T=batch_T[choice_T])
        return floors

    def _stepwise(self, batch: RolloutBatch, version: int | None) -> Floats | None:
        """l over the recorded sets of each response's first tokens, step by step, NaN for the others; None where the
        model has no cache to go through."""
        packed = to_packed(batch)
        lengths_B, of_response_B = np.diff(packed.cu_seqlens_B1).astype(np.int64), batch.token_ids.lengths
        ends_B = lengths_B - np.maximum(of_response_B - FLOOR_TOKENS, 0)
        within_P = np.arange(len(packed.input_ids_P)) - np.repeat(packed.cu_seqlens_B1[:-1], lengths_B)
        kept_P = within_P < np.repeat(ends_B, lengths_B)
        logits_of = self.scorer.stepwise_logits_of(
            packed.input_ids_P[kept_P], ends_B, lengths_B - of_response_B, version
        )
        if logits_of is None:
            return None
        first = np.flatnonzero(packed.tokens.position_T < FLOOR_TOKENS)
        place_P = np.cumsum(kept_P) - 1
        values_T = np.full(packed.tokens.num_tokens, np.nan)
        rows_T = place_P[packed.logit_index_T[first]]
        values_T[first] = _kept_only(packed.tokens.take(first), rows_T, logits_of, self.scorer)
        return values_T

    def _kept(self, batch: RolloutBatch) -> Floats:
        packed = to_packed(batch)
        lengths_B = np.diff(packed.cu_seqlens_B1).astype(np.int64)
        logits_of = self.scorer.logits_of(packed.input_ids_P, lengths_B, self.scorer.versions[-1])
        return _kept_only(packed.tokens, packed.logit_index_T, logits_of, self.scorer)


class _Collected:
    """The columns of TokenScores in the making."""

    def __init__(self, num_tokens: int) -> None:
        self.kept_T = np.full(num_tokens, np.nan)
        self.full_T = np.full(num_tokens, np.nan)
        self.expected_T = np.full(num_tokens, np.nan)
        self.places_T = np.full(num_tokens, np.nan)
        self.same_T = np.zeros(num_tokens, bool)
        self.explained: dict[FindingKind, Floats] = {}
        self.hints: dict[FindingKind, Ints] = {}

    def explain(self, kind: FindingKind, at: Ints, value_T: Floats, hint: int) -> None:
        num_tokens = len(self.kept_T)
        self.explained.setdefault(kind, np.full(num_tokens, np.nan))[at] = value_T
        self.hints.setdefault(kind, np.zeros(num_tokens, np.int64))[at] = hint


def _hashed(rollout_id: str) -> float:
    digest = hashlib.blake2b(rollout_id.encode(), digest_size=8, key=b"keptset floors").digest()
    return float(int.from_bytes(digest, "little") * 2.0**-64)


def _kept_and_full(
    tokens: SampledTokens, rows_T: Ints, logits_of: LogitsOf, scorer: Scorer
) -> tuple[Floats, Floats, Floats]:
    """l over K and over the vocabulary, and the tokens' places in K.

    -inf over K where the token lies outside it, NaN where nothing can be said.
    """
    kept_T, full_T, places_T = (np.full(tokens.num_tokens, np.nan) for _ in range(3))
    listed, absent = np.flatnonzero(~tokens.absent_T), np.flatnonzero(tokens.absent_T & (tokens.temperature_T > 0))
    if len(listed):
        job = job_of(tokens.take(listed), scorer.vocab_size, on_violation="exclude", entropy=False, full_share=1.0)
        read = PlacesRead(tokens=tokens.take(listed), rows_T=rows_T[listed], plan=job.plan)
        kept_T[listed], full_T[listed] = _run(job, read.watching(logits_of), rows_T[listed], scorer.vocab_size)
        places_T[listed] = read.u_T
        kept_T[listed[job.plan.violations.bad_T]] = -np.inf
    if len(absent):
        job = full_vocabulary_job_of(tokens.take(absent), scorer.vocab_size, entropy=False)
        full_T[absent], _ = _run(job, logits_of, rows_T[absent], scorer.vocab_size)
    return kept_T, full_T, places_T


def _kept_only(tokens: SampledTokens, rows_T: Ints, logits_of: LogitsOf, scorer: Scorer) -> Floats:
    kept_T = np.full(tokens.num_tokens, np.nan)
    listed = np.flatnonzero(~tokens.absent_T)
    if len(listed):
        job = job_of(tokens.take(listed), scorer.vocab_size, on_violation="exclude", entropy=False, full_share=0.0)
        kept_T[listed], _ = _run(job, logits_of, rows_T[listed], scorer.vocab_size)
    return kept_T


def _run(job: Job, logits_of: LogitsOf, rows_T: Ints, vocab_size: int) -> tuple[Floats, Floats]:
    scores = run_in_chunks(job, logits_of, rows_T, vocab_size=vocab_size, max_elements=MAX_ELEMENTS)
    nothing = np.full(len(rows_T), np.nan)
    full = nothing if scores.full_logprobs_T is None else _host(scores.full_logprobs_T)
    return _host(scores.logprobs_T), full


def _host(values: Tensor) -> Floats:
    host: Floats = np.array(hand_for(values).to_host(values), np.float64)
    return host
