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
from numpy.typing import NDArray

from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.trainer_bridge.audit.advice import ADVICE
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Evidence, NotTested, Outcome
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.examples import NUM_EXAMPLES, Order, order_of
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.report import AuditReport, VersionRow
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION

NAME = "staleness"
_NOTHING_YET = -1
_BITS = 32
"""Of a version, which is an int32 in the schema."""


@dataclass
class _Version:
    tokens: int = 0
    excess: ExactSum = field(default_factory=ExactSum)
    mass: ExactSum = field(default_factory=ExactSum)

    def merge(self, other: _Version) -> None:
        self.tokens += other.tokens
        self.excess.merge(other.excess)
        self.mass.merge(other.mass)


@dataclass
class _Lagging:
    """Responses whose oldest token has one version, recorded when the newest was another."""

    responses: int
    order: Order
    rollout_id: str
    position: int

    def merge(self, other: _Lagging) -> None:
        self.responses += other.responses
        if other.order < self.order:
            self.order, self.rollout_id, self.position = other.order, other.rollout_id, other.position


@dataclass
class _Stream:
    newest: int = _NOTHING_YET
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    """(version, newest when it was recorded) -> tokens."""
    oldest: dict[tuple[int, int], _Lagging] = field(default_factory=dict)

    def merge(self, other: _Stream) -> None:
        """What came after: it was recorded when at least our newest was there."""
        for (version, newest), count in other.tokens.items():
            key = (version, max(newest, self.newest))
            self.tokens[key] = self.tokens.get(key, 0) + count
        for (version, newest), theirs in other.oldest.items():
            self.keep((version, max(newest, self.newest)), replace(theirs))
        self.newest = max(self.newest, other.newest)

    def keep(self, key: tuple[int, int], lagging: _Lagging) -> None:
        if key in self.oldest:
            self.oldest[key].merge(lagging)
        else:
            self.oldest[key] = lagging


def _counts(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct values, ascending, and how often each occurs. Usually it is one, and then nothing is sorted."""
    if values.min() == values.max():
        return values[:1], np.array([len(values)])
    return np.unique(values, return_counts=True)


class Versions(Check):
    """Staleness, and the table of versions."""

    name = NAME

    def __init__(self, options: AuditOptions) -> None:
        self._bound = options.max_version_lag
        self._versions: dict[int, _Version] = {}
        self._streams: dict[str, _Stream] = {}

    def add(self, batch: AuditedBatch) -> None:
        tokens, recorded = batch.sound_tokens, batch.recorded
        versions_S = tokens.policy_versions_T
        if not len(versions_S):
            return
        mass_S = np.exp(tokens.log_kept_mass_T.astype(np.float64))
        distinct, _ = _counts(versions_S)
        for version in distinct.tolist():
            here_S = np.ones(len(versions_S), bool) if len(distinct) == 1 else versions_S == version
            row = self._versions.setdefault(version, _Version())
            row.tokens += int(here_S.sum())
            row.excess.add(recorded.excess_S[here_S & recorded.surprisal_known_S])
            row.mass.add_known(mass_S[here_S])
        self._add_lags(batch)

    def _add_lags(self, batch: AuditedBatch) -> None:
        tokens = batch.sound_tokens
        known = np.flatnonzero(tokens.policy_versions_T != UNKNOWN_VERSION)
        if not len(known):
            return
        stream = self._streams.setdefault(batch.stream, _Stream())
        rows, versions = tokens.row_T[known], tokens.policy_versions_T[known]
        begins = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        newest_R = np.maximum.accumulate(np.maximum(np.maximum.reduceat(versions, begins), stream.newest))
        oldest_R = np.minimum.reduceat(versions, begins)
        stream.newest = int(newest_R[-1])
        counts_R = np.diff(begins, append=len(known))
        pairs, counts = _counts(versions << _BITS | np.repeat(newest_R, counts_R))
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            key = divmod(pair, 1 << _BITS)
            stream.tokens[key] = stream.tokens.get(key, 0) + count
        pairs, first, counts = np.unique(oldest_R << _BITS | newest_R, return_index=True, return_counts=True)
        place_B = np.flatnonzero(batch.counted_B & batch.sound_B)
        for pair, number, count in zip(pairs.tolist(), first.tolist(), counts.tolist(), strict=True):
            oldest, newest = divmod(pair, 1 << _BITS)
            begin = begins[number]
            token = int(known[begin + np.argmax(versions[begin : begin + counts_R[number]] == oldest)])
            rollout_id, position = tokens.locate(token)
            order = order_of(batch, int(place_B[tokens.row_T[token]]), position)
            stream.keep((oldest, newest), _Lagging(count, order, rollout_id, position or 0))

    def merge(self, other: Versions) -> None:
        for version, theirs in other._versions.items():
            self._versions.setdefault(version, _Version()).merge(theirs)
        for name, stream in other._streams.items():
            self._streams.setdefault(name, _Stream()).merge(stream)

    def outcome(self) -> Outcome:
        if self._bound is None:
            reason = "no bound was asked for: say how many versions a token may lag behind (--max-version-lag)"
            return Outcome(not_tested=(NotTested(check=NAME, reason=reason, asked_for=False),))
        if not self._streams:
            reason = "no policy versions are recorded: have the engine record which weights draw each token"
            return Outcome(not_tested=(NotTested(check=NAME, reason=reason),))
        streams = self._streams.values()
        tokens = sum(n for s in streams for (version, newest), n in s.tokens.items() if newest - version > self._bound)
        if not tokens:
            return Outcome()
        late = [
            (entry, newest, version)
            for s in streams
            for (version, newest), entry in s.oldest.items()
            if newest - version > self._bound
        ]
        late.sort(key=lambda found: found[0].order)
        responses = sum(entry.responses for entry, _, _ in late)
        largest = max(newest - version for _, newest, version in late)
        evidence = Evidence(
            kind=FindingKind.STALENESS,
            severity=Severity.WARNING,
            count=tokens,
            responses=responses,
            summary=f"{tokens:,} tokens in {responses:,} responses lag more than {self._bound} versions behind, the "
            f"most by {largest}",
            advice=ADVICE[FindingKind.STALENESS].act,
            examples=tuple(
                Example(
                    rollout_id=entry.rollout_id,
                    position=entry.position,
                    detail=f"version {version}, recorded when version {newest} had drawn",
                )
                for entry, newest, version in late[:NUM_EXAMPLES]
            ),
        )
        return Outcome(evidence=(evidence,))

    def contribute(self, report: AuditReport) -> AuditReport:
        lags: dict[int, list[int]] = {}
        for stream in self._streams.values():
            for (version, newest), count in stream.tokens.items():
                total = lags.setdefault(version, [0, 0])
                total[0] += (newest - version) * count
                total[1] += count
        rows = []
        for version, row in sorted(self._versions.items()):
            lag, count = lags.get(version, (0, 0))
            rows.append(
                VersionRow(
                    version=None if version == UNKNOWN_VERSION else version,
                    tokens=row.tokens,
                    mean_lag=lag / count if count else None,
                    surprisal_excess=row.excess.mean,
                    kept_mass_mean=row.mass.mean,
                    mean_log_ratio=None,
                    mean_abs_log_ratio=None,
                    mean_ratio=None,
                    ratio_std_error=None,
                )
            )
        return replace(report, versions=tuple(rows))
