"""From objectives of tokens or responses to one number, with a gradient that any framework can follow.

Objectives are computed in float64 NumPy with their derivative by the log ratio written out, so they are the same in
every framework, and no NaN of a token that was left out can reach them. A framework contributes one linear term,

    value + sum over t of g_t (d_t - its own number),    g_t = d value / d d_t

whose number is `value` and whose gradient is exact. (There is no second derivative.)

Legend: T sampled tokens, C entries: tokens at token level, responses at the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.corrections import Corrected
from keptset.trainer_bridge.ratios import Level, LogRatios, check_log_ratios, runs
from keptset.trainer_bridge.sampled_tokens import Bools, Ints
from keptset.trainer_bridge.scoring.hand import Tensor, hand_for

Floats = NDArray[np.float64]
Reduce = Literal["token_mean", "response_mean", "sum"]
LARGEST_GRADIENT = float(np.finfo(np.float32).max)
"""Frameworks take the gradient as float32."""


@dataclass(frozen=True, kw_only=True)
class Entries:
    """What a loss sums over: one entry per counted token, or per response with counted tokens."""

    level: Level
    counted_T: Bools
    log_ratio_C: Floats
    row_C: Ints
    """The entry's response."""
    token_C: Ints
    """The entry's token; the first of its response at response levels."""
    num_tokens_C: Ints
    weight_C: Floats
    """Importance weights, constants."""

    def scale_C(self, reduce: Reduce, denominator: float | None) -> Floats:
        """What each entry's objective is multiplied by in the reduction.

        `token_mean` divides by the number of counted tokens, `response_mean` takes the mean over a response's tokens
        first and divides by the number of responses, `sum` divides by 1; or by `denominator` in place of those numbers.
        """
        if reduce not in ("token_mean", "response_mean", "sum"):
            raise InvalidInput(f"reduce is {reduce!r}; it must be 'token_mean', 'response_mean' or 'sum'")
        if denominator is not None and not 0 < denominator < np.inf:
            raise InvalidInput(f"denominator is {denominator}; it must be finite and > 0")
        if reduce == "sum" or not len(self.row_C):
            return np.full(len(self.row_C), 1.0 / (denominator or 1.0))
        if reduce == "token_mean":
            scale_C = np.ones(len(self.row_C)) if self.level == "token" else self.num_tokens_C.astype(np.float64)
            return scale_C / (denominator or self.counted_T.sum())
        tokens_B = np.bincount(self.row_C)
        scale_C = 1.0 / tokens_B[self.row_C]
        return scale_C / (denominator or int((tokens_B > 0).sum()))

    def on_tokens(self, slope_C: Floats, row_T: Ints) -> Floats:
        """d value / d d_t of every token, from d value / d log ratio of every entry."""
        gradient_T = np.zeros(len(row_T))
        if self.level == "geometric":
            slope_C = slope_C / self.num_tokens_C
        gradient_T[self.counted_T] = np.repeat(slope_C, self.num_tokens_C)
        return gradient_T


def entries_of(ratios: LogRatios, level: Level, weights: Corrected | None) -> Entries:
    """The entries of one level, with the weights of a correction.

    Errors: InvalidInput where `weights` are of other tokens, or weigh the tokens of a response differently at a level
    that has one objective for it.
    """
    check_log_ratios(ratios)
    counted_T = ratios.counted_at(level)
    weights_T = np.ones(ratios.num_tokens)
    if weights is not None:
        _check_weights(ratios, weights)
        weights_T = weights.weights_T
        lost_T = counted_T & ~weights.counted_T
        if level != "token":
            lost_T = np.isin(ratios.row_T, ratios.row_T[lost_T])
        counted_T = counted_T & ~lost_T
    token = np.flatnonzero(counted_T)
    num_tokens = np.ones(len(token), np.int64)
    if level != "token" and len(token):
        rows, first, num_tokens = runs(ratios.row_T[token])
        low = np.minimum.reduceat(weights_T[token], first)
        high = np.maximum.reduceat(weights_T[token], first)
        if (low != high).any():
            raise InvalidInput(
                f"the tokens of response {rows[low != high][0]} have weights from {low[low != high][0]:.4g} to "
                f"{high[low != high][0]:.4g}, but at level {level!r} it has one objective: correct at level 'sequence' "
                f"or 'geometric'"
            )
        token = token[first]
    return Entries(
        level=level,
        counted_T=counted_T,
        log_ratio_C=ratios.log_ratios_T(level)[token],
        row_C=ratios.row_T[token],
        token_C=token,
        num_tokens_C=num_tokens,
        weight_C=weights_T[token],
    )


def _check_weights(ratios: LogRatios, weights: Corrected) -> None:
    if weights.weights_T.shape != (ratios.num_tokens,):
        raise InvalidInput(f"weights are of {len(weights.weights_T)} tokens; the ratios have {ratios.num_tokens}")
    if weights.report.ratio_over != ratios.ratio_over:
        raise InvalidInput(
            f"weights are over {weights.report.ratio_over} tokens, the ratios over {ratios.ratio_over} ones; "
            f"take both over the same"
        )


def per_entry(name: str, values: ArrayLike, per: str, ratios: LogRatios, entries: Entries) -> Floats:
    """A caller's numbers at each entry: one per response, or one per sampled token.

    Errors: InvalidInput where their number does not fit, one that counts is not finite, or tokens have numbers of their
    own at a level that has one objective per response.
    """
    if per not in ("response", "token"):
        raise InvalidInput(f"{name}_per is {per!r}; it must be 'response' or 'token'")
    array: Floats = np.asarray(values, np.float64)
    if per == "token":
        if entries.level != "token":
            raise InvalidInput(
                f"at level {entries.level!r} there is one objective per response; give {name} per response"
            )
        if array.shape != (ratios.num_tokens,):
            raise InvalidInput(f"{name} has shape {array.shape}; there are {ratios.num_tokens} sampled tokens")
        at_C = array[entries.token_C]
    else:
        fewest = int(ratios.row_T.max(initial=-1)) + 1
        fits = len(array) >= fewest if ratios.num_responses is None else len(array) == ratios.num_responses
        if array.ndim != 1 or not fits:
            expected = f"at least {fewest}" if ratios.num_responses is None else ratios.num_responses
            raise InvalidInput(f"{name} has shape {array.shape}; it takes one number for each of {expected} responses")
        at_C = array[entries.row_C]
    bad = np.flatnonzero(~np.isfinite(at_C))
    if len(bad):
        raise InvalidInput(f"{name} of response {entries.row_C[bad[0]]} is {at_C[bad[0]]}; it must be finite")
    return at_C


def differentiable(logs_T: Tensor, host_T: Floats, value: float, gradient_T: Floats) -> Tensor:
    """A scalar of the framework of `logs_T`, of this value and with this derivative by them.

    `logs_T` are log ratios or log-probabilities, `host_T` the same numbers. The scalar hangs on them even where no
    token counts, so that every rank of a group has a backward pass.
    """
    hand = hand_for(logs_T)
    takes_part_T = hand.floats((gradient_T != 0).astype(np.float64)) > 0.5
    with np.errstate(invalid="ignore"):
        distance_T = logs_T - hand.floats(host_T)  # 0, or NaN where the log is no finite number
    linear_T = hand.where(~takes_part_T, 0.0, distance_T) * hand.floats(gradient_T)
    return hand.concatenate([linear_T, hand.floats(np.array([value]))]).sum()
