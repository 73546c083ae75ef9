"""Recorded b against what it should be, with the weights that drew each token; and the fault that explains it better.

Sees a fault of b, of the sets, or of the versions wherever it moves b by more than paths differ. Cannot see one that
moves nothing: no temperature at T = 1, a whole vocabulary where nothing was cut. A token after an update in flight with
the old cache kept belongs to no version, and is left out. How faults are told from paths: see `explained`.

Legend: T sampled tokens.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from keptset.schemas.columns import LogprobDomain
from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch, TokenScores
from keptset.trainer_bridge.audit.check import Check, Evidence, HypothesisTest, NotTested, Outcome
from keptset.trainer_bridge.audit.examples import FirstExamples, order_of
from keptset.trainer_bridge.audit.explained import (
    Decision,
    Fit,
    FitCounts,
    Mask,
    Tally,
    bin_of,
    decide,
    kinds_of,
    residual_of,
)
from keptset.trainer_bridge.audit.explanations import EXPLANATIONS
from keptset.trainer_bridge.audit.mean_ratio import MeanRatio
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.residuals import (
    MIN_AFFECTED,
    STRONG,
    Affected,
    Floats,
    affected_responses,
    misfit,
    residuals,
)
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION, SampledTokens

TEST = "mean ratio at equal weights"
"""Of the responses that no fault explains; `, apart` for those further out than the others."""
NEARLY = 2.0
"""A fault that leaves more than this times what the best one leaves does not fit."""
EXACT = 1e-6
"""Nats: faults that leave no more fit alike."""
_ERRORS = (FindingKind.MEMBER, FindingKind.LOGPROB, FindingKind.DISTRIBUTION)
_HINTED = (FindingKind.MASK_SHIFTED, FindingKind.WRONG_VERSION)


class Explanations(Check):
    """Responses by how far their b is off and what would explain it."""

    name = "explanations"

    def __init__(self, options: AuditOptions) -> None:
        self.counts = FitCounts()
        self.hints: Counter[tuple[FindingKind, int]] = Counter()
        self.examples: dict[FindingKind | int, FirstExamples] = {}
        """By a fault that fits, or by the bin of a response that none fits."""
        self.mean_ratios: dict[int, MeanRatio] = {}
        """exp(expected - b), by bin of the response."""
        self.versions: tuple[int, int] | None = None
        """Least and greatest."""
        self.versions_told = True
        self.without_expectation = 0
        """Tokens whose b nothing can be held against."""

    def add(self, batch: AuditedBatch) -> None:
        scores, tokens = batch.scores, batch.tokens
        if scores is None or not tokens.num_tokens:
            return
        self._see_versions(tokens, scores)
        expected_T = np.full(tokens.num_tokens, np.nan) if scores.expected_T is None else scores.expected_T
        self.without_expectation += int(np.isnan(expected_T).sum())
        residual_T, compared_T = residuals(tokens, expected_T)
        affected = affected_responses(tokens, residual_T, compared_T)
        compared_B = np.bincount(tokens.row_T[compared_T], minlength=len(batch.counted))
        enough = [one for one in affected if not one.few]
        self.counts.clean += int((compared_B >= MIN_AFFECTED).sum()) - len(enough)
        rows = np.flatnonzero(batch.counted_B)
        errors = {kind: set(batch.rows_by_kind.get(kind, np.zeros(0, np.int64)).tolist()) for kind in _ERRORS}
        ratio_T = expected_T - tokens.behavior_logprobs_T
        for one in affected:
            row = int(rows[one.row])
            fit, best = _fit(one, tokens, scores, frozenset(kind for kind in _ERRORS if row in errors[kind]))
            self.counts.add(fit, len(one.at_A))
            if not (one.few or fit.errors) and tokens.logprob_domain_B[one.row] == LogprobDomain.KEPT.value:
                finite = one.tokens[np.isfinite(ratio_T[one.tokens])]
                of_bin = self.mean_ratios.setdefault(fit.bin, MeanRatio())
                of_bin.add(ratio_T[finite], tokens.behavior_logprobs_T[finite].astype(np.float64))
            self._show(batch, row, one, fit, best, expected_T)

    def _see_versions(self, tokens: SampledTokens, scores: TokenScores) -> None:
        known = tokens.policy_versions_T[tokens.policy_versions_T != UNKNOWN_VERSION]
        self.versions_told &= scores.versions_told
        if len(known):
            self._widen((int(known.min()), int(known.max())))

    def _widen(self, seen: tuple[int, int] | None) -> None:
        if seen is not None:
            have = self.versions or seen
            self.versions = min(have[0], seen[0]), max(have[1], seen[1])

    def _show(
        self,
        batch: AuditedBatch,
        row: int,
        one: Affected,
        fit: Fit,
        best: dict[FindingKind, tuple[Floats, int]],
        expected_T: Floats,
    ) -> None:
        tokens = batch.tokens
        at = int(one.at_A[0])
        token = int(one.tokens[at])
        position, b = int(tokens.position_T[token]), float(tokens.behavior_logprobs_T[token])
        order = order_of(batch, row, position)
        told = f"b {b:.4f}, expected {expected_T[token]:.4f}"
        for kind in kinds_of(fit.at_all):
            value_T, hint = best[kind]
            if kind in _HINTED and not fit.few:
                self.hints[kind, hint] += 1
            form = {FindingKind.MASK_SHIFTED: f" ({hint:+d})", FindingKind.WRONG_VERSION: f" ({hint})"}.get(kind, "")
            detail = f"{told}; {value_T[at]:.4f} under {kind.value}{form}"
            example = Example(rollout_id=tokens.rollout_ids[one.row], position=position, detail=detail)
            self.examples.setdefault(kind, FirstExamples()).add(order, example)
        if not fit.at_all:
            example = Example(rollout_id=tokens.rollout_ids[one.row], position=position, detail=told)
            self.examples.setdefault(fit.bin, FirstExamples()).add(order, example)

    def merge(self, other: Explanations) -> None:
        self.counts.merge(other.counts)
        self.hints.update(other.hints)
        for key, examples in other.examples.items():
            self.examples.setdefault(key, FirstExamples()).merge(examples)
        for number, ratios in other.mean_ratios.items():
            self.mean_ratios.setdefault(number, MeanRatio()).merge(ratios)
        self._widen(other.versions)
        self.versions_told &= other.versions_told
        self.without_expectation += other.without_expectation

    def outcome(self) -> Outcome:
        reason = self._not_tested()
        if reason is not None:
            return Outcome(not_tested=(NotTested(check=self.name, reason=reason),))
        decision = decide(self.counts)
        evidence = [self._named(kind, tally, decision) for kind, tally in decision.named.items()]
        tests, told = [], []
        for name, tally in decision.unexplained:
            ratios = MeanRatio()
            for number in sorted(tally.bins):
                ratios.merge(self.mean_ratios.get(number, MeanRatio()))
            obstacle = ratios.obstacle()
            if obstacle is None:
                tests.append((ratios.test(TEST if name == "alike" else f"{TEST}, {name}"), tally, ratios))
            else:
                reason = f"b of {tally.responses} responses is off by {tally.residual:.2g} nats in the median, and no "
                told.append(NotTested(check=self.name, reason=f"{reason}fault fits; {obstacle}"))
        if tests:
            # One kind is one finding: of two groups the one that says more.
            evidence.append(self._mismatch(*min(tests, key=lambda entry: entry[0].p_value)))
        return Outcome(evidence=tuple(evidence), tests=tuple(test for test, _, _ in tests), not_tested=tuple(told))

    def _not_tested(self) -> str | None:
        if not self.versions_told and self.versions is not None and self.versions[0] != self.versions[1]:
            low, high = self.versions
            return (
                f"tokens were drawn by versions {low} to {high}, and which of them the model is was not told: "
                f"--model {high}=FOLDER; folders of several versions may be given"
            )
        if not self.counts.responses:
            return (
                f"the weights that drew them are not at hand for {self.without_expectation} tokens, or nothing but the "
                f"trainer's log-probabilities is: --model VERSION=FOLDER"
            )
        return None

    def _evidence(
        self, kind: FindingKind, tally: Tally, summary: str, examples: FirstExamples, test: str | None = None
    ) -> Evidence:
        return Evidence(
            kind=kind,
            severity=Severity.ERROR,
            count=tally.tokens,
            responses=tally.responses,
            summary=summary,
            advice=ADVICE[kind].act,
            examples=examples.examples,
            test=test,
            together=tally.together,
        )

    def _named(self, kind: FindingKind, tally: Tally, decision: Decision) -> Evidence:
        hints = {hint: number for (of, hint), number in self.hints.items() if of is kind}
        form = ""
        if hints:
            hint = min(hints, key=lambda hint: (-hints[hint], hint))
            form = f", version {hint}" if kind is FindingKind.WRONG_VERSION else f", {_shift(hint)}"
        return self._evidence(
            kind,
            tally,
            f"{kind.meaning}{form}: of {self.counts.responses} responses {tally.responses} are off by "
            f"{tally.residual:.2g} nats in the median, and this fits them; the median response is off by "
            f"{residual_of(decision.median_bin):.2g}",
            self.examples.get(kind, FirstExamples()),
        )

    def _mismatch(self, test: HypothesisTest, tally: Tally, ratios: MeanRatio) -> Evidence:
        return self._evidence(
            FindingKind.LOGPROB_MISMATCH,
            tally,
            f"b of {tally.responses} responses is off by {tally.residual:.2g} nats in the median, no fault fits, and "
            f"the ratios to what it should be have mean {ratios.mean:.4f} +- {ratios.std_error:.2g}: over an honest "
            f"path it would be 1",
            self._unexplained(tally),
            test.name,
        )

    def _unexplained(self, tally: Tally) -> FirstExamples:
        examples = FirstExamples()
        for number in tally.bins:
            examples.merge(self.examples.get(number, FirstExamples()))
        return examples


def _shift(hint: int) -> str:
    return "one before" if hint < 0 else "one after"


def _fit(
    one: Affected, tokens: SampledTokens, scores: TokenScores, errors: frozenset[FindingKind]
) -> tuple[Fit, dict[FindingKind, tuple[Floats, int]]]:
    """How a response stands, and under each fault that was tried its b [tokens] and the form."""
    b_T = tokens.behavior_logprobs_T.astype(np.float64)
    misfits: dict[FindingKind, float] = {}
    best: dict[FindingKind, tuple[Floats, int]] = {}
    for kind, value_T in scores.explained.items():
        left = misfit(one, b_T, value_T[one.tokens])
        if not np.isnan(left):
            misfits[kind] = left
            hints = scores.hints.get(kind)
            best[kind] = value_T[one.tokens], 0 if hints is None else int(hints[one.tokens[0]])
    least = max(EXACT, NEARLY * min(misfits.values(), default=np.inf))

    def mask(part: float) -> Mask:
        fitting = [kind for kind, left in misfits.items() if left <= min(one.residual * part, least)]
        return sum(1 << EXPLANATIONS.index(kind) for kind in fitting)

    fit = Fit(bin=bin_of(one.residual), well=mask(1 / STRONG), at_all=mask(1 / 2), errors=errors, few=one.few)
    return fit, best
