"""The sampled tokens of a batch, flat, with everything that was recorded about each: what scoring and ratios consume.

Only tokens that the policy drew have a behaviour log-probability and a kept set; forced and injected ones are left
out here, once. Settings are per response and tokens per response vary: every setting is expanded to its tokens here,
and nowhere else.

Legend: B responses, T sampled tokens over all responses, N kept ids over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from keptset.schemas.columns import LogprobDomain, Support
from keptset.schemas.errors import InvalidInput, ScoringRefused, ViolationError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity
from keptset.schemas.ragged import AnyArray, Ragged, gather_spans, offsets_of, row_index
from keptset.schemas.rollout_batch import RolloutBatch

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
UNKNOWN_VERSION = -1
"""Stands for a null policy version; recorded versions are >= 0."""


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """One entry per sampled token, in the order of the batch: response after response."""

    batch: RolloutBatch
    """Where they come from."""
    row_T: Ints
    """Index of the token's response."""
    position_T: Ints
    """Index of the token within its response."""
    token_ids_T: Ints
    behavior_logprobs_T: NDArray[np.float32]
    """b in nats; NaN where it is not recorded."""
    log_kept_mass_T: NDArray[np.float32]
    """m in nats; NaN where it is not recorded."""
    trainable_T: Bools
    """The caller's loss mask; all of them where there is none."""
    policy_versions_T: Ints
    """-1 where unknown."""
    temperature_T: NDArray[np.float64]
    """NaN where unknown."""
    full_T: Bools
    """Drawn from the whole vocabulary; the kept set is then not listed."""
    absent_T: Bools
    """No kept set was recorded."""
    kept_offsets_T1: Ints
    kept_ids_N: NDArray[np.int32]
    """Token t's set is kept_ids_N[kept_offsets_T1[t] : kept_offsets_T1[t + 1]]."""
    logprob_domain_B: tuple[str, ...]
    """What b is normalised over, per response."""

    @property
    def num_tokens(self) -> int:
        return len(self.row_T)

    @property
    def rollout_ids(self) -> list[str]:
        """[B]."""
        return self.batch.rollout_ids

    @property
    def vocab_size(self) -> int | None:
        """V, where the recording engine told it."""
        return self.batch.identity.vocab_size

    @cached_property
    def kept_sizes_T(self) -> Ints:
        """|K| per token; V for `full` (0 where V is unknown), 0 where no set was recorded."""
        listed_T = np.diff(self.kept_offsets_T1)
        return np.where(self.full_T, self.vocab_size or 0, listed_T)

    def take(self, index: Ints) -> SampledTokens:
        """Some of the tokens, in this order."""
        offsets_S1, index_N = gather_spans(self.kept_offsets_T1, index)
        return replace(
            self,
            row_T=self.row_T[index],
            position_T=self.position_T[index],
            token_ids_T=self.token_ids_T[index],
            behavior_logprobs_T=self.behavior_logprobs_T[index],
            log_kept_mass_T=self.log_kept_mass_T[index],
            trainable_T=self.trainable_T[index],
            policy_versions_T=self.policy_versions_T[index],
            temperature_T=self.temperature_T[index],
            full_T=self.full_T[index],
            absent_T=self.absent_T[index],
            kept_offsets_T1=offsets_S1,
            kept_ids_N=self.kept_ids_N[index_N],
        )

    def locate(self, token: int) -> tuple[str, int | None]:
        """rollout_id and position of a token, for messages."""
        return self.rollout_ids[self.row_T[token]], int(self.position_T[token])

    def check_domain(self) -> None:
        """ScoringRefused unless every b is normalised over its kept set."""
        wrong = sorted({domain for domain in self.logprob_domain_B if domain != LogprobDomain.KEPT.value})
        if wrong:
            first = next(i for i, d in enumerate(self.logprob_domain_B) if d != LogprobDomain.KEPT.value)
            raise ScoringRefused(
                f"behaviour log-probabilities of {self.rollout_ids[first]} have domain {', '.join(wrong)}; a ratio "
                f"needs them over the kept set (`kept`): have the engine return them after filtering"
            )


def sampled_tokens(batch: RolloutBatch) -> SampledTokens:
    """Flatten a batch to its sampled tokens.

    Errors: InvalidInput for anything but a batch; ViolationError of kind `lengths` where a per-token column differs in
    length from the response, `nulls` where kept sets are missing though the support is `kept`, or given though it is
    not, or where a mask or a list of ids holds a null.
    """
    if not isinstance(batch, RolloutBatch):
        raise InvalidInput(f"batch is a {type(batch)}; RolloutBatch.from_arrow makes a batch of Arrow data")
    tokens = batch.token_ids
    _require_values(batch, "token_ids", tokens, whole_lists=True)
    if batch.prompt_token_ids is not None:
        _require_values(batch, "prompt_token_ids", batch.prompt_token_ids, whole_lists=False)
    _require_values(batch, "sampled", batch.sampled, whole_lists=True)
    if batch.trainable is not None:
        _require_values(batch, "trainable", batch.trainable, whole_lists=False)
    sampled_A = _aligned(batch, "sampled", batch.sampled, False).astype(bool)
    selected = np.flatnonzero(sampled_A)
    row_A = row_index(tokens.offsets)
    row_T = row_A[selected]
    support = batch.column("support")
    offsets_A1, kept_ids_N = _kept_sets(batch, _equals(support, Support.KEPT.value))
    kept_offsets_T1, kept_ids_N = _select_lists(offsets_A1, kept_ids_N, selected)
    trainable_A = _aligned(batch, "trainable", batch.trainable, True).astype(bool)
    temperature_B = batch.column("temperature").to_numpy(zero_copy_only=False).astype(np.float64)
    return SampledTokens(
        batch=batch,
        row_T=row_T,
        position_T=selected - np.asarray(tokens.offsets, np.int64)[row_T],
        token_ids_T=tokens.values[selected].astype(np.int64),
        behavior_logprobs_T=_floats(batch, "behavior_logprobs", batch.behavior_logprobs, selected),
        log_kept_mass_T=_floats(batch, "log_kept_mass", batch.log_kept_mass, selected),
        trainable_T=trainable_A[selected],
        policy_versions_T=_aligned(batch, "policy_versions", batch.policy_versions, UNKNOWN_VERSION)[selected].astype(
            np.int64
        ),
        temperature_T=temperature_B[row_T],
        full_T=_equals(support, Support.FULL.value)[row_T],
        absent_T=_equals(support, Support.ABSENT.value)[row_T],
        kept_offsets_T1=kept_offsets_T1,
        kept_ids_N=kept_ids_N,
        logprob_domain_B=tuple(batch.column("logprob_domain").to_pylist()),
    )


def _require_values(batch: RolloutBatch, name: str, column: Ragged, *, whole_lists: bool) -> None:
    """A null would silently read as False, and its token leave every ratio, or as an id that no vocabulary has."""
    null_B = np.zeros(len(column), bool)
    if whole_lists and column.row_valid is not None:
        null_B |= ~column.row_valid
    if column.valid is not None:
        null_B[row_index(column.offsets)[~column.valid]] = True
    _refuse(batch, FindingKind.NULLS, null_B, lambda row: f"{name} holds a null")


def _equals(column: object, value: str) -> Bools:
    equal: Bools = pc.fill_null(pc.equal(column, value), False).to_numpy(zero_copy_only=False)
    return equal


def _floats(batch: RolloutBatch, name: str, column: Ragged | None, selected: Ints) -> NDArray[np.float32]:
    return _aligned(batch, name, column, np.nan)[selected].astype(np.float32)


def _aligned(batch: RolloutBatch, name: str, column: Ragged | None, filler: float | bool) -> AnyArray:
    """Values of a per-token column for every token of the batch; `filler` where a whole list is null."""
    tokens = batch.token_ids
    if column is None:
        return np.full(batch.num_tokens, filler)
    missing_B = np.zeros(len(tokens), bool) if column.row_valid is None else ~column.row_valid
    _check_lengths(batch, name, column.lengths, missing_B)
    if not missing_B.any():
        return column.values
    values_A = np.full(batch.num_tokens, filler, column.values.dtype if filler is not np.nan else np.float32)
    values_A[np.repeat(~missing_B, tokens.lengths)] = column.values
    return values_A


def _check_lengths(batch: RolloutBatch, name: str, lengths_B: NDArray[np.integer], missing_B: Bools) -> None:
    expected_B = batch.token_ids.lengths
    wrong_B = (lengths_B != expected_B) & ~missing_B
    _refuse(
        batch,
        FindingKind.LENGTHS,
        wrong_B,
        lambda row: f"{name} has {lengths_B[row]} entries for {expected_B[row]} tokens",
    )


def _kept_sets(batch: RolloutBatch, kept_B: Bools) -> tuple[Ints, NDArray[np.int32]]:
    """Offsets for every token of the batch into the listed ids; empty for rows whose support is not `kept`."""
    nested, tokens = batch.kept_ids, batch.token_ids
    listed_B = np.zeros(len(tokens), bool) if nested is None else np.ones(len(tokens), bool)
    if nested is not None and nested.row_valid is not None:
        listed_B = nested.row_valid
    holds_tokens_B = tokens.lengths > 0
    _refuse(
        batch,
        FindingKind.NULLS,
        (listed_B != kept_B) & holds_tokens_B,
        lambda row: "kept_ids is null though support is kept" if kept_B[row] else "kept_ids though support is not kept",
    )
    if nested is None:
        return np.zeros(batch.num_tokens + 1, np.int64), np.zeros(0, np.int32)
    _check_lengths(batch, "kept_ids", np.diff(nested.row_offsets), ~listed_B)
    sizes_A = np.zeros(batch.num_tokens, np.int64)
    sizes_A[np.repeat(listed_B, tokens.lengths)] = nested.inner.lengths
    return offsets_of(sizes_A), nested.inner.values.astype(np.int32, copy=False)


def _select_lists(offsets_A1: Ints, ids_N: NDArray[np.int32], selected: Ints) -> tuple[Ints, NDArray[np.int32]]:
    """The lists of the selected tokens; the ids themselves are copied only where others lie between them."""
    sizes_T = np.diff(offsets_A1)[selected]
    if sizes_T.sum() == len(ids_N):
        return offsets_of(sizes_T), ids_N
    offsets_T1, index = gather_spans(offsets_A1, selected)
    return offsets_T1, ids_N[index]


def _refuse(batch: RolloutBatch, kind: FindingKind, wrong_B: Bools, detail: Callable[[int], str]) -> None:
    rows = np.flatnonzero(wrong_B)
    if not len(rows):
        return
    examples = tuple(
        Example(rollout_id=batch.rollout_ids[row], position=None, detail=detail(row)) for row in rows[:3].tolist()
    )
    finding = Finding(kind=kind, severity=Severity.ERROR, count=len(rows), responses=len(rows), examples=examples)
    raise ViolationError(f"batch cannot be aligned: {finding}", (finding,))
