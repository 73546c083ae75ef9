"""What is to be computed for which token, decided on the host before any logit is touched.

Tokens with one kept id need nothing (their log-probability is exactly 0); tokens with more are gathered; tokens of
support `full` go over the vocabulary; tokens whose record breaks an invariant stop the call or are marked.

Legend: T tokens, N kept ids over them; A active tokens (a listed set of two or more), M kept ids over those;
F tokens scored over the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput, ScoringRefused
from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import gather_spans, row_index
from keptset.trainer_bridge.replay import Patch, Replay
from keptset.trainer_bridge.violations import Locate, OnViolation, Violations, check_policy, raise_violation

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_GOLDEN = 0.6180339887498949
"""Fractional parts of its multiples spread evenly over [0, 1), without the period that a stride would have."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of one scoring call. Indices count tokens of the call, not rows of the logits."""

    num_tokens: int
    active_A: Ints
    """Tokens with a listed set of two or more, ascending."""
    starts_A1: Ints
    """Active token a has ids_M[starts_A1[a] : starts_A1[a + 1]]."""
    ids_M: NDArray[np.integer]
    member_A: Ints
    """Index into ids_M of the sampled token."""
    temperature_A: NDArray[np.float64]
    replay_M: Replay | None
    """Value-changing processors at ids_M; None where there are none."""
    full_F: Ints
    """Tokens over the whole vocabulary, ascending."""
    token_ids_F: Ints
    temperature_F: NDArray[np.float64]
    patch: Patch | None
    """Value-changing processors of those, per token; None where there are none."""
    violations: Violations

    @property
    def needs_logits_T(self) -> Bools:
        """Tokens whose score depends on logits at all."""
        needs_T: Bools = np.zeros(self.num_tokens, bool)
        needs_T[self.active_A] = True
        needs_T[self.full_F] = True
        return needs_T

    def part(self, begin: int, end: int) -> Plan:
        """The same for tokens [begin, end) alone, renumbered from 0."""
        a0, a1 = np.searchsorted(self.active_A, [begin, end])
        f0, f1 = np.searchsorted(self.full_F, [begin, end])
        m0, m1 = self.starts_A1[a0], self.starts_A1[a1]
        return Plan(
            num_tokens=end - begin,
            active_A=self.active_A[a0:a1] - begin,
            starts_A1=self.starts_A1[a0 : a1 + 1] - m0,
            ids_M=self.ids_M[m0:m1],
            member_A=self.member_A[a0:a1] - m0,
            temperature_A=self.temperature_A[a0:a1],
            replay_M=None if self.replay_M is None else self.replay_M.take(slice(m0, m1)),
            full_F=self.full_F[f0:f1] - begin,
            token_ids_F=self.token_ids_F[f0:f1],
            temperature_F=self.temperature_F[f0:f1],
            patch=None if self.patch is None else self.patch.part(begin, end),
            violations=self.violations.take(np.arange(begin, end)),
        )


def plan_scores(
    token_ids_T: ArrayLike,
    kept_offsets_T1: ArrayLike,
    kept_ids_N: ArrayLike,
    temperature_T: ArrayLike,
    *,
    vocab_size: int,
    full_T: ArrayLike | None = None,
    absent_T: ArrayLike | None = None,
    replay_N: Replay | None = None,
    patch: Patch | None = None,
    on_violation: OnViolation,
    locate: Locate,
) -> Plan:
    """Check the record and sort tokens by what they need.

    Errors: InvalidInput where arrays do not fit each other or a temperature is negative or infinite; ScoringRefused
    where the kept set is absent, a temperature is unknown, or is 0 with more than one id to choose from;
    ViolationError (or a mark, by policy) where a set is empty, unsorted, out of range or without its token.
    """
    check_policy(on_violation)
    token_ids_T = _ints("token_ids_T", token_ids_T)
    offsets_T1 = _ints("kept_offsets_T1", kept_offsets_T1)
    ids_N = np.asarray(kept_ids_N)
    num_tokens = len(token_ids_T)
    full_T = _bools("full_T", full_T, num_tokens)
    absent_T = _bools("absent_T", absent_T, num_tokens)
    temperature_T = np.asarray(temperature_T, np.float64)
    _check_shapes(num_tokens, offsets_T1, ids_N, temperature_T)
    sizes_T = np.diff(offsets_T1)
    if (full_T & (sizes_T > 0)).any():
        raise InvalidInput("a token is marked full and has a listed kept set; it is one or the other")
    _refuse_absent(absent_T, locate)

    violations, member_T = _structure(
        token_ids_T, offsets_T1, ids_N, full_T, vocab_size=vocab_size, on_violation=on_violation, locate=locate
    )
    good_T = ~violations.bad_T
    _check_temperatures(temperature_T, good_T & (full_T | (sizes_T > 1)), locate)

    active = np.flatnonzero(good_T & (sizes_T > 1))
    full = np.flatnonzero(good_T & full_T)
    if sizes_T[active].sum() == len(ids_N):
        starts_A1 = np.append(offsets_T1[active], len(ids_N))
        ids_M, replay_M = ids_N, replay_N
    else:
        starts_A1, index = gather_spans(offsets_T1, active)
        ids_M, replay_M = ids_N[index], None if replay_N is None else replay_N.take(index)
    return Plan(
        num_tokens=num_tokens,
        active_A=active,
        starts_A1=starts_A1,
        ids_M=ids_M,
        member_A=starts_A1[:-1] + (member_T[active] - offsets_T1[active]),
        temperature_A=temperature_T[active],
        replay_M=replay_M,
        full_F=full,
        token_ids_F=token_ids_T[full],
        temperature_F=temperature_T[full],
        patch=patch,
        violations=violations,
    )


def plan_full_vocabulary(
    token_ids_T: ArrayLike, temperature_T: ArrayLike, *, vocab_size: int, patch: Patch | None = None, locate: Locate
) -> Plan:
    """Every token over the whole vocabulary, whatever was recorded.

    Errors: ViolationError (kind `range`) where an id lies outside [0, V); ScoringRefused where a temperature is unknown
    or 0.
    """
    token_ids_T = _ints("token_ids_T", token_ids_T)
    return plan_scores(
        token_ids_T,
        np.zeros(len(token_ids_T) + 1, np.int64),
        np.zeros(0, np.int32),
        temperature_T,
        vocab_size=vocab_size,
        full_T=np.ones(len(token_ids_T), bool),
        patch=patch,
        on_violation="raise",
        locate=locate,
    )


def plan_share(
    plan: Plan, token_ids_T: ArrayLike, temperature_T: ArrayLike, *, share: float, patch: Patch | None = None
) -> Plan | None:
    """The plan that measures a share of the tokens over the whole vocabulary; None where the share is 0.

    Tokens are taken in a fixed, evenly spread pattern; greedy and excluded ones are never measured.

    Errors: InvalidInput where the share lies outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise InvalidInput(f"full_share is {share}; it must lie in [0, 1]")
    if share == 0:
        return None
    temperature_T = np.asarray(temperature_T, np.float64)
    chosen_T = (np.arange(plan.num_tokens) * _GOLDEN) % 1 < share
    chosen = np.flatnonzero(chosen_T & (temperature_T > 0) & ~plan.violations.bad_T)
    none = np.zeros(0, np.int64)
    return Plan(
        num_tokens=plan.num_tokens,
        active_A=none,
        starts_A1=np.zeros(1, np.int64),
        ids_M=none,
        member_A=none,
        temperature_A=np.zeros(0),
        replay_M=None,
        full_F=chosen,
        token_ids_F=np.asarray(token_ids_T, np.int64)[chosen],
        temperature_F=temperature_T[chosen],
        patch=patch,
        violations=plan.violations,
    )


def _structure(
    token_ids_T: Ints,
    offsets_T1: Ints,
    ids_N: NDArray[np.integer],
    full_T: Bools,
    *,
    vocab_size: int,
    on_violation: OnViolation,
    locate: Locate,
) -> tuple[Violations, Ints]:
    """What is wrong with each token's set, and where in ids_N the token itself stands."""
    num_tokens = len(token_ids_T)
    token_N = row_index(offsets_T1)
    sizes_T = np.diff(offsets_T1)
    member_N = np.flatnonzero(ids_N == token_ids_T[token_N])
    member_T = np.full(num_tokens, -1, np.int64)
    member_T[token_N[member_N]] = member_N

    out_of_range_T = (token_ids_T < 0) | (token_ids_T >= vocab_size)
    out_of_range_T[token_N[(ids_N < 0) | (ids_N >= vocab_size)]] = True
    descends_N = np.zeros(len(ids_N), bool)
    descends_N[1:] = (ids_N[1:] <= ids_N[:-1]) & (token_N[1:] == token_N[:-1])
    unsorted_T = np.zeros(num_tokens, bool)
    unsorted_T[token_N[descends_N]] = True

    def shown(token: int) -> str:
        ids = ids_N[offsets_T1[token] : offsets_T1[token + 1]]
        return f"token {token_ids_T[token]}, {len(ids)} kept ids {ids[:8].tolist()}, vocabulary {vocab_size}"

    violations = Violations.none(num_tokens)
    for kind, bad_T in (
        (FindingKind.EMPTY_SET, (sizes_T == 0) & ~full_T),
        (FindingKind.RANGE, out_of_range_T),
        (FindingKind.SORTED, unsorted_T),
        (FindingKind.MEMBER, (member_T < 0) & ~full_T),
    ):
        if on_violation == "raise":
            raise_violation(kind, bad_T, shown, locate, "cannot be scored over its kept set")
        violations = violations.mark(bad_T, kind.value)
    return violations, member_T


def _check_temperatures(temperature_T: NDArray[np.float64], chooses_T: Bools, locate: Locate) -> None:
    """`chooses_T`: tokens with more than one id to choose from. An unknown temperature is refused everywhere."""
    unknown = np.flatnonzero(np.isnan(temperature_T))
    if len(unknown):
        raise ScoringRefused(
            f"the temperature of {locate(int(unknown[0]))[0]} is unknown ({len(unknown)} tokens): have the engine "
            f"record it, or pass temperature_T"
        )
    wrong = np.flatnonzero((temperature_T < 0) | np.isinf(temperature_T))
    if len(wrong):
        raise InvalidInput(
            f"the temperature of {locate(int(wrong[0]))[0]} is {temperature_T[wrong[0]]}; it must be finite and >= 0"
        )
    greedy = np.flatnonzero(chooses_T & (temperature_T == 0))
    if len(greedy):
        raise ScoringRefused(
            f"{locate(int(greedy[0]))[0]} has temperature 0, which keeps exactly one token, but was recorded with more "
            f"to choose from ({len(greedy)} tokens): its temperature or its kept sets are wrong"
        )


def _refuse_absent(absent_T: Bools, locate: Locate) -> None:
    absent = np.flatnonzero(absent_T)
    if len(absent):
        raise ScoringRefused(
            f"no kept set was recorded for {locate(int(absent[0]))[0]} ({len(absent)} tokens): record it, leave the "
            f"response out, or ask for score_full_vocabulary by name (its ratios carry the kept mass as a bias)"
        )


def _check_shapes(
    num_tokens: int, offsets_T1: Ints, ids_N: NDArray[np.generic], temperature_T: NDArray[np.float64]
) -> None:
    if ids_N.size and not np.issubdtype(ids_N.dtype, np.integer):
        raise InvalidInput(f"kept_ids_N has dtype {ids_N.dtype}; it must hold integers")
    if len(offsets_T1) != num_tokens + 1:
        raise InvalidInput(f"kept_offsets_T1 has {len(offsets_T1)} entries; {num_tokens} tokens need {num_tokens + 1}")
    if offsets_T1[0] != 0 or offsets_T1[-1] != len(ids_N) or (np.diff(offsets_T1) < 0).any():
        raise InvalidInput(
            f"kept_offsets_T1 must ascend from 0 to the {len(ids_N)} kept ids; it runs from {offsets_T1[0]} to "
            f"{offsets_T1[-1]}"
        )
    if temperature_T.shape != (num_tokens,):
        raise InvalidInput(
            f"temperature_T has shape {temperature_T.shape}; it takes one temperature for each of the {num_tokens} "
            f"tokens (expand a response's setting to its tokens)"
        )


def _ints(name: str, values: ArrayLike) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidInput(f"{name} has shape {array.shape} and dtype {array.dtype}; it must be one axis of integers")
    return array.astype(np.int64, copy=False)


def _bools(name: str, values: ArrayLike | None, num_tokens: int) -> Bools:
    array = np.zeros(num_tokens, bool) if values is None else np.asarray(values, bool)
    if array.shape != (num_tokens,):
        raise InvalidInput(f"{name} has shape {array.shape}; it takes one entry for each of the {num_tokens} tokens")
    return array
