"""Importance ratios from trainer and behaviour log-probabilities.

    d_t = l_t - b_t        token exp(d_t)    sequence exp(sum d)    geometric exp(mean d)

Log space until the last step. Tokens enter by name: `trainable` (the caller's loss mask) or `sampled`. A log ratio that
is no finite number, or whose score was excluded, stops the call or is left out and counted; at sequence and geometric
level it takes its response with it, since a product over what is left would be another ratio.

Legend: T sampled tokens, C counted entries: tokens at token level, responses at the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge.sampled_tokens import Bools, Ints, SampledTokens
from keptset.trainer_bridge.scoring.hand import Hand, Tensor, hand_for
from keptset.trainer_bridge.scoring.run import Scores
from keptset.trainer_bridge.violations import (
    NON_FINITE,
    NUM_EXAMPLES,
    Locate,
    OnViolation,
    Violations,
    check_policy,
    locate_by_index,
    raise_violation,
)

Level = Literal["token", "sequence", "geometric"]
RatioOver = Literal["trainable", "sampled"]
_KINDS = {kind.value: kind for kind in FindingKind}


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Log ratios of one level, in the framework and on the device of the trainer's log-probabilities."""

    level: Level
    ratio_over: RatioOver
    """Which tokens entered."""
    over: str
    """What the trainer scored over: `kept`, or `full` where that was asked for by name."""
    log_ratios_C: Tensor
    """Differentiable where the log-probabilities are."""
    index_C: Ints
    """Of each entry: the token's index at token level, the response's index at the others."""
    num_tokens_C: Ints
    """Tokens behind each entry."""
    excluded_tokens: dict[str, int]
    """Tokens left out, by kind."""
    excluded_responses: dict[str, int]
    """Responses left out, by kind (one with two kinds counts under both); empty at token level."""

    @property
    def ratios_C(self) -> Tensor:
        """exp of the log ratios; inf where that overflows."""
        with np.errstate(over="ignore"):
            return hand_for(self.log_ratios_C).exp(self.log_ratios_C)


@dataclass(frozen=True, kw_only=True)
class LogRatios:
    """d_t of the tokens that count, before a level is chosen."""

    ratio_over: RatioOver
    over: str
    delta_T: Tensor
    """l - b of every token of the call, counted or not; differentiable."""
    host_delta_T: NDArray[np.float64]
    """The same numbers as NumPy."""
    row_T: Ints
    selected_T: Bools
    """Tokens that may enter, by `ratio_over`."""
    violations: Violations
    """Why selected tokens are left out; unselected ones are never marked."""
    num_responses: int | None = None
    """B; None where bare arrays do not tell."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.row_T)

    @property
    def counted_T(self) -> Bools:
        """Tokens that count at token level."""
        return self.selected_T & ~self.violations.bad_T

    @property
    def whole_T(self) -> Bools:
        """Tokens that count at sequence and geometric level: those of responses that lost none."""
        lost = self.row_T[self.violations.bad_T]
        return self.selected_T & ~np.isin(self.row_T, lost) if len(lost) else self.selected_T

    def counted_at(self, level: Level) -> Bools:
        """Tokens that count at a level. InvalidInput for a level that does not exist."""
        _check_level(level)
        return self.counted_T if level == "token" else self.whole_T

    def log_ratios_T(self, level: Level) -> NDArray[np.float64]:
        """Log ratio of the level at each token that counts there (at sequence and geometric level that of its
        response), as NumPy; NaN at the others."""
        counted_T = self.counted_at(level)
        d_T = np.where(counted_T, self.host_delta_T, np.nan)
        if level == "token" or not counted_T.any():
            return d_T
        rows = self.row_T[counted_T]
        sums_B = np.bincount(rows, self.host_delta_T[counted_T]).astype(np.float64)
        if level == "geometric":
            sums_B = sums_B / np.maximum(np.bincount(rows), 1)
        d_T[counted_T] = sums_B[rows]
        return d_T

    def excluded_responses(self) -> dict[str, int]:
        """Responses that lost a token, by kind."""
        counts = {}
        for code, kind in enumerate(self.violations.kinds):
            rows = np.unique(self.row_T[self.violations.code_T == code])
            if len(rows):
                counts[kind] = len(rows)
        return counts

    def at(self, level: Level) -> Ratios:
        """Log ratios of one level. InvalidInput for a level that does not exist."""
        counted = np.flatnonzero(self.counted_at(level))
        hand = hand_for(self.delta_T)
        delta_C = hand.take(self.delta_T, hand.ints(counted))
        if level == "token":
            index_C, num_tokens_C = counted, np.ones(len(counted), np.int64)
        else:
            index_C, starts, num_tokens_C = runs(self.row_T[counted])
            delta_C = _sum_rows(hand, delta_C, starts, num_tokens_C)
            if level == "geometric":
                delta_C = delta_C / hand.floats(num_tokens_C.astype(np.float64))
        return Ratios(
            level=level,
            ratio_over=self.ratio_over,
            over=self.over,
            log_ratios_C=delta_C,
            index_C=index_C,
            num_tokens_C=num_tokens_C,
            excluded_tokens=self.violations.counts(),
            excluded_responses={} if level == "token" else self.excluded_responses(),
        )


def runs(rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Each value of ascending rows once, where it begins, and how often it occurs.

    >>> [part.tolist() for part in runs(np.array([2, 2, 5]))]
    [[2, 5], [0, 2], [2, 1]]
    """
    starts = np.flatnonzero(np.diff(rows, prepend=rows[:1] - 1))
    return rows[starts], starts, np.diff(starts, append=len(rows))


def _check_level(level: str) -> None:
    if level not in ("token", "sequence", "geometric"):
        raise InvalidInput(f"level is {level!r}; it must be 'token', 'sequence' or 'geometric'")


def check_log_ratios(ratios: object) -> None:
    """InvalidInput where scores, or ratios of one level, were given for log ratios."""
    if not isinstance(ratios, LogRatios):
        raise InvalidInput(
            f"ratios is a {type(ratios).__name__}; give what log_ratios_of(scores, tokens) returns, before a level is "
            f"chosen"
        )


def _sum_rows(hand: Hand, values: Tensor, starts: Ints, counts: Ints) -> Tensor:
    if not len(starts):
        return values
    segment = hand.ints(np.repeat(np.arange(len(starts)), counts))
    return hand.segment_sum(values, np.append(starts, counts.sum()), segment)


def log_ratios(
    logprobs_T: Tensor,
    behavior_logprobs_T: ArrayLike,
    row_T: ArrayLike,
    *,
    trainable_T: ArrayLike | None = None,
    ratio_over: RatioOver = "trainable",
    on_violation: OnViolation = "raise",
    violations: Violations | None = None,
    over: str = "kept",
    num_responses: int | None = None,
    locate: Locate = locate_by_index,
) -> LogRatios:
    """d_t = l_t - b_t for sampled tokens given as bare arrays.

    `row_T` is the response of each token, ascending; `trainable_T` the loss mask (None: all); `violations` those that
    scoring excluded. A token outside `ratio_over` can neither enter nor be a violation.

    Errors: InvalidInput where arrays do not fit or a name is unknown; ViolationError where a selected token was
    excluded by scoring, or its log ratio is no finite number, and `on_violation` is `raise`.

    >>> log_ratios(np.array([-1.0, -2.0]), [-1.0, -2.5], [0, 0]).at("sequence").log_ratios_C.tolist()
    [0.5]
    """
    check_policy(on_violation)
    if ratio_over not in ("trainable", "sampled"):
        raise InvalidInput(f"ratio_over is {ratio_over!r}; it must be 'trainable' or 'sampled'")
    hand = hand_for(logprobs_T)
    num_tokens = int(logprobs_T.shape[0])
    behavior_T: NDArray[np.float64] = np.asarray(behavior_logprobs_T, np.float64)
    rows: Ints = np.asarray(row_T, np.int64)
    _check_length("behavior_logprobs_T", behavior_T, num_tokens)
    _check_length("row_T", rows, num_tokens)
    if (np.diff(rows) < 0).any():
        raise InvalidInput("row_T must ascend: the tokens of a response lie side by side")
    selected_T: Bools = np.ones(num_tokens, bool)
    if ratio_over == "trainable" and trainable_T is not None:
        selected_T = np.asarray(trainable_T, bool)
        _check_length("trainable_T", selected_T, num_tokens)

    with np.errstate(invalid="ignore"):
        delta_T = logprobs_T - hand.floats(behavior_T)
    host_T = hand.to_host(delta_T)
    found = Violations.none(num_tokens) if violations is None else violations
    found = Violations(kinds=found.kinds, code_T=np.where(selected_T, found.code_T, -1).astype(np.int8))
    non_finite_T = selected_T & ~np.isfinite(host_T)
    if on_violation == "raise":
        _raise(found, non_finite_T, hand.to_host(logprobs_T), behavior_T, locate)
    return LogRatios(
        ratio_over=ratio_over,
        over=over,
        delta_T=delta_T,
        host_delta_T=host_T,
        row_T=rows,
        selected_T=selected_T,
        violations=found.mark(non_finite_T, NON_FINITE),
        num_responses=num_responses,
    )


def log_ratios_of(
    scores: Scores,
    tokens: SampledTokens,
    *,
    ratio_over: RatioOver = "trainable",
    on_violation: OnViolation = "raise",
) -> LogRatios:
    """d_t = l_t - b_t of a scored batch.

    Errors: those of `log_ratios`; ScoringRefused where behaviour log-probabilities are not over the kept sets.
    """
    tokens.check_domain()
    return log_ratios(
        scores.logprobs_T,
        tokens.behavior_logprobs_T,
        tokens.row_T,
        trainable_T=tokens.trainable_T,
        ratio_over=ratio_over,
        on_violation=on_violation,
        violations=scores.violations,
        over=scores.over,
        num_responses=tokens.batch.num_responses,
        locate=tokens.locate,
    )


def importance_ratios(
    scores: Scores,
    tokens: SampledTokens,
    *,
    level: Level,
    ratio_over: RatioOver = "trainable",
    on_violation: OnViolation = "raise",
) -> Ratios:
    """Log ratios of a scored batch at one level. Errors: as `log_ratios_of`; InvalidInput for an unknown level."""
    return log_ratios_of(scores, tokens, ratio_over=ratio_over, on_violation=on_violation).at(level)


def _raise(
    found: Violations,
    non_finite_T: Bools,
    logprobs_T: NDArray[np.float64],
    behavior_T: NDArray[np.float64],
    locate: Locate,
) -> None:
    def shown(token: int) -> str:
        return f"trainer {logprobs_T[token]}, behaviour {behavior_T[token]}"

    for code, kind in enumerate(found.kinds):
        raise_violation(_KINDS[kind], found.code_T == code, shown, locate, "no ratio for an excluded token")
    raise_violation(
        FindingKind.LOGPROB, non_finite_T & ~np.isfinite(behavior_T), shown, locate, "log ratio is no finite number"
    )
    bad = np.flatnonzero(non_finite_T)
    if len(bad):
        places = "; ".join(f"{locate(t)[0]} token {locate(t)[1]}: {shown(t)}" for t in bad[:NUM_EXAMPLES].tolist())
        raise ViolationError(
            f"log ratio is no finite number for {len(bad)} tokens ({places}): the trainer's logits are not finite "
            f"there, or give the token no probability"
        )


def _check_length(name: str, values: NDArray[np.generic], num_tokens: int) -> None:
    if values.shape != (num_tokens,):
        raise InvalidInput(f"{name} has shape {values.shape}; it takes one entry for each of the {num_tokens} tokens")
