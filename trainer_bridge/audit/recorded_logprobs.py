"""A trainer's own log-probabilities, recorded in a column: scores without a model.

The column holds one number for each of `token_ids`, over the kept set. Which weights they are of is known where a
column of the same name with `_version` behind it says so: a version for each response, or one for each token. Where
that is the version that drew the token, b should be the same, and two faults can be told from l and m alone:

    full_vocabulary  l + m        renormalised_twice  l - m

Legend: T sampled tokens, B responses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from keptset.schemas.columns import BY_NAME, LogprobDomain
from keptset.schemas.errors import DamagedFile, InvalidInput, SchemaError, StorageError
from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import Ragged, is_list_like, without_list_views
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.audit.audited_batch import TokenScores
from keptset.trainer_bridge.audit.explanations import from_scores
from keptset.trainer_bridge.audit.planning import Unit
from keptset.trainer_bridge.audit.reading.files import read
from keptset.trainer_bridge.audit.residuals import Floats, affected_responses, residuals
from keptset.trainer_bridge.audit.weights import drawn_by
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION, Bools, Ints, SampledTokens, sampled_tokens

VERSION_SUFFIX = "_version"


@dataclass(frozen=True, kw_only=True)
class RecordedColumn:
    """Makes the scorer of a column. Errors: InvalidInput for a column of the schema, which no trainer recorded."""

    column: str

    def __post_init__(self) -> None:
        if self.column in BY_NAME:
            raise InvalidInput(
                f"{self.column} is a column of the schema, so the record would be held against itself; name the "
                "column in which the trainer recorded its own log-probabilities, x_ and a name"
            )

    def __call__(self) -> RecordedScorer:
        return RecordedScorer(column=self.column)

    def require(self, units: Iterable[Unit], *, unguarded: bool) -> None:
        """Look for the column in the files of these units, up to the first that has it; what cannot be read is passed
        over here.

        Errors: InvalidInput where files can be read and none has it.
        """
        by_file: dict[str, Unit] = {}
        for unit in units:
            by_file.setdefault(unit.file.shown, unit)
        looked_at: list[str] = []
        for unit in by_file.values():
            with contextlib.suppress(DamagedFile, SchemaError, StorageError):
                for batch in read(unit.file, unit.first, unit.first + 1, start=unit.start, unguarded=unguarded):
                    if self.column in batch.arrow.schema.names:
                        return
                    own = ", ".join(batch.extra_columns) or "none"
                    looked_at.append(f"the caller's own columns of {unit.file.shown} are: {own}")
        if looked_at:
            raise InvalidInput(f"no file has a column {self.column}; {looked_at[0]}")


@dataclass(frozen=True, kw_only=True)
class RecordedScorer:
    """Scores of a batch from its own column."""

    column: str

    def score(self, batch: RolloutBatch) -> TokenScores:
        """l of the sampled tokens; responses whose column cannot be read are counted in `refused`."""
        tokens = sampled_tokens(batch)
        kept_T, refused = self._column(batch, tokens)
        same_T = self._same(batch, tokens) & ~np.isnan(kept_T)
        over_kept_B = np.array([domain == LogprobDomain.KEPT.value for domain in tokens.logprob_domain_B], bool)
        expected_T = np.where(same_T & over_kept_B[tokens.row_T], kept_T, np.nan)
        explained = self._explained(tokens, expected_T)
        return TokenScores(
            kept_T=kept_T,
            full_T=None,
            same_version_T=same_T,
            explained=explained,
            hints={kind: np.zeros(tokens.num_tokens, np.int64) for kind in explained},
            expected_T=expected_T,
            refused=refused,
        )

    def _column(self, batch: RolloutBatch, tokens: SampledTokens) -> tuple[Floats, dict[str, int]]:
        if self.column not in batch.arrow.schema.names:
            there = ", ".join(batch.extra_columns) or "none"
            return _nothing(tokens), {f"no column {self.column}; the caller's own are: {there}": len(batch)}
        column = _numbers(batch.column(self.column), pa.float64())
        if column is None:
            return _nothing(tokens), {f"{self.column} does not hold lists of numbers": len(batch)}
        return _per_token(column, tokens, self.column)

    def _same(self, batch: RolloutBatch, tokens: SampledTokens) -> Bools:
        """Whether the trainer's weights are those that drew the token."""
        name = self.column + VERSION_SUFFIX
        none_T = np.zeros(tokens.num_tokens, bool)
        if name not in batch.arrow.schema.names:
            return none_T
        array = batch.column(name)
        if is_list_like(array.type):
            column = _numbers(array, pa.float64())
            version_T = _nothing(tokens) if column is None else _per_token(column, tokens, name)[0]
        elif pa.types.is_integer(array.type):
            version_T = array.cast(pa.float64()).to_numpy(zero_copy_only=False)[tokens.row_T]
        else:
            return none_T
        own_T: Ints = tokens.policy_versions_T
        of_one_version_T = drawn_by(tokens, (None,)) >= 0
        same_T: Bools = (version_T == own_T) & (own_T != UNKNOWN_VERSION) & of_one_version_T
        return same_T

    def _explained(self, tokens: SampledTokens, expected_T: Floats) -> dict[FindingKind, Floats]:
        explained: dict[FindingKind, Floats] = {}
        m_T = tokens.log_kept_mass_T.astype(np.float64)
        for affected in affected_responses(tokens, *residuals(tokens, expected_T)):
            at = affected.tokens
            for form, value_T in from_scores(expected_T[at], m_T[at]).items():
                explained.setdefault(form.kind, _nothing(tokens))[at] = value_T
        return explained


def _nothing(tokens: SampledTokens) -> Floats:
    return np.full(tokens.num_tokens, np.nan)


def _numbers(array: pa.Array, item: pa.DataType) -> Ragged | None:
    """A list column as numbers; None where it holds something else."""
    if not is_list_like(array.type):
        return None
    plain = without_list_views(array)
    kind = plain.type.value_type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        return None
    return Ragged.from_arrow(plain.cast(pa.list_(item)))


def _per_token(column: Ragged, tokens: SampledTokens, name: str) -> tuple[Floats, dict[str, int]]:
    """Values of the sampled tokens, NaN where there are none, and the responses whose list does not fit."""
    response = tokens.batch.token_ids
    fits_B = column.lengths == response.lengths
    null_B = np.zeros(len(response), bool) if column.row_valid is None else ~column.row_valid
    fits_B &= ~null_B
    begin_B = np.asarray(column.offsets, np.int64)[:-1]
    good = np.flatnonzero(fits_B[tokens.row_T])
    values_T = _nothing(tokens)
    values_T[good] = column.values[begin_B[tokens.row_T[good]] + tokens.position_T[good]]
    values_T[~np.isfinite(values_T)] = np.nan
    told = {
        f"{name} is null": int(null_B.sum()),
        f"{name} has another length than token_ids": int((~fits_B & ~null_B).sum()),
    }
    return values_T, {reason: number for reason, number in told.items() if number}
