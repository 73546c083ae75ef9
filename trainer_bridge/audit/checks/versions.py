"""How far behind the weights were that drew each token, and how the record changes from version to version.

A token's lag is the newest version that its stream (a spool writer, or a file) had recorded up to the token's response,
less the token's own. Sees tokens that were drawn by old weights beside newer ones. Cannot see how far ahead the trainer
was by then, and takes a file for one stream: an archive made of several writers' files looks stale where the next one
begins.

Legend: B sound responses, S their sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Evidence, NotTested, Outcome
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.examples import NUM_EXAMPLES, order_of
from keptset.trainer_bridge.audit.lags import NOTHING_YET, AgedResponse, Ints, OpenStream, Pairs, may_be_shown
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.report import AuditReport, VersionRow
from keptset.trainer_bridge.audit.version_table import VersionTable
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION

NAME = "staleness"


@dataclass
class _Version:
    tokens: int = 0
    excess: ExactSum = field(default_factory=ExactSum)
    mass: ExactSum = field(default_factory=ExactSum)
    lag: int = 0
    """Of all its tokens together."""

    def merge(self, other: _Version) -> None:
        self.tokens += other.tokens
        self.excess.merge(other.excess)
        self.mass.merge(other.mass)
        self.lag += other.lag


class Versions(Check):
    """Staleness, and the table of versions."""

    name = NAME

    def __init__(self, options: AuditOptions) -> None:
        self._bound = options.max_version_lag
        self._versions = VersionTable(_Version)
        self._open: dict[str, OpenStream] = {}
        self._newest: dict[str, int] = {}
        """Of each stream whose lags are counted."""
        self._late_tokens = self._late_responses = self._largest = 0
        self._late: list[AgedResponse] = []

    def add(self, batch: AuditedBatch) -> None:
        tokens, recorded = batch.sound_tokens, batch.recorded
        self._versions.see(batch.tokens.policy_versions_T)  # as all tables by version do, for equal rows
        mass_S = np.exp(tokens.log_kept_mass_T.astype(np.float64))
        for row, where in self._versions.groups(tokens.policy_versions_T):
            row.tokens += len(mass_S[where])
            row.excess.add(recorded.excess_S[where][recorded.surprisal_known_S[where]])
            row.mass.add_known(mass_S[where])
        known = np.flatnonzero(tokens.policy_versions_T != UNKNOWN_VERSION)
        if len(known):
            self._add_lags(batch, known)

    def _add_lags(self, batch: AuditedBatch, known: Ints) -> None:
        stream, tokens = self._stream(batch.stream), batch.sound_tokens
        rows, versions = tokens.row_T[known], tokens.policy_versions_T[known]
        begins = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        newest_R = np.maximum.accumulate(np.maximum(np.maximum.reduceat(versions, begins), stream.newest))
        oldest_R = np.minimum.reduceat(versions, begins)
        counts_R = np.diff(begins, append=len(known))
        later = OpenStream(newest=int(newest_R[-1]), tokens=[Pairs.of(versions, np.repeat(newest_R, counts_R))])
        if self._bound is not None:
            later.responses.append(Pairs.of(oldest_R, newest_R))
            place_B = np.flatnonzero(batch.counted_B & batch.sound_B)
            for number in np.flatnonzero(may_be_shown(oldest_R, newest_R, self._bound)).tolist():
                of_response = slice(begins[number], begins[number] + counts_R[number])
                token = int(known[of_response][np.argmin(versions[of_response])])
                rollout_id, position = tokens.locate(token)
                later.shown.append(
                    AgedResponse(
                        order=order_of(batch, int(place_B[tokens.row_T[token]]), position),
                        rollout_id=rollout_id,
                        position=position or 0,
                        oldest=int(oldest_R[number]),
                        newest=int(newest_R[number]),
                    )
                )
        stream.append(later, self._bound)

    def _stream(self, name: str) -> OpenStream:
        return self._open.setdefault(name, OpenStream(newest=self._newest.get(name, NOTHING_YET)))

    def merge(self, other: Versions) -> None:
        assert not other._newest, "what comes after is merged before its lags are counted"
        self._versions.merge(other._versions)
        for name, stream in other._open.items():
            self._stream(name).append(stream, self._bound)

    def settle(self) -> None:
        """Count lags, and let go of the pairs that they are made of."""
        for name, stream in self._open.items():
            self._newest[name] = stream.newest
            for pairs in stream.tokens:
                lag_P = pairs.lag_P
                for row, where in self._versions.groups(pairs.version_P):
                    row.lag += int(lag_P[where] @ pairs.count_P[where])
                if self._bound is not None:
                    self._late_tokens += int(pairs.count_P[lag_P > self._bound].sum())
                    self._largest = max(self._largest, int(lag_P.max()))
            if self._bound is not None:
                for pairs in stream.responses:
                    self._late_responses += int(pairs.count_P[pairs.lag_P > self._bound].sum())
                self._late += [shown for shown in stream.shown if shown.newest - shown.oldest > self._bound]
        self._late = sorted(self._late, key=lambda late: late.order)[:NUM_EXAMPLES]
        self._open = {}

    def outcome(self) -> Outcome:
        self.settle()
        if self._bound is None:
            reason = "no bound was asked for: say how many versions a token may lag behind (--max-version-lag)"
            return Outcome(not_tested=(NotTested(check=NAME, reason=reason, asked_for=False),))
        if not self._newest:
            reason = "no policy versions are recorded: have the engine record which weights draw each token"
            return Outcome(not_tested=(NotTested(check=NAME, reason=reason),))
        if not self._late_tokens:
            return Outcome()
        evidence = Evidence(
            kind=FindingKind.STALENESS,
            severity=Severity.WARNING,
            count=self._late_tokens,
            responses=self._late_responses,
            summary=f"{self._late_tokens:,} tokens in {self._late_responses:,} responses lag more than {self._bound} "
            f"versions behind, the most by {self._largest}",
            advice=ADVICE[FindingKind.STALENESS].act,
            examples=tuple(
                Example(
                    rollout_id=late.rollout_id,
                    position=late.position,
                    detail=f"version {late.oldest}, recorded when version {late.newest} had drawn",
                )
                for late in self._late
            ),
        )
        return Outcome(evidence=(evidence,))

    def contribute(self, report: AuditReport) -> AuditReport:
        self.settle()
        rows = []
        for first, last, row in self._versions.rows():
            known = first != UNKNOWN_VERSION
            rows.append(
                VersionRow(
                    version=first if known else None,
                    last_version=last if known else None,
                    tokens=row.tokens,
                    mean_lag=row.lag / row.tokens if known else None,
                    surprisal_excess=row.excess.mean,
                    kept_mass_mean=row.mass.mean,
                    mean_log_ratio=None,
                    mean_abs_log_ratio=None,
                    mean_ratio=None,
                    ratio_std_error=None,
                )
            )
        return replace(report, versions=tuple(rows))
