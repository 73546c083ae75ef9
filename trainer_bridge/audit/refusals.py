"""Responses that a model cannot score, and why: told by name and number, never raised, never repaired.

Legend: B responses, T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import KeptsetError
from keptset.schemas.ragged import Ragged, row_index
from keptset.trainer_bridge.replay import Replayer
from keptset.trainer_bridge.sampled_tokens import Bools, SampledTokens

MAX_REASONS = 8
"""Reasons that are kept apart; what a file says must not make a report grow."""
OTHER = "other reasons"


def refusals(tokens: SampledTokens, vocab_size: int, max_positions: int | None) -> tuple[Bools, Mapping[str, int]]:
    """Which responses can be scored [B], and how many cannot by reason. Absent sets are no reason: see `absent_T`."""
    batch = tokens.batch
    num_rows = batch.num_responses
    told: dict[str, int] = {}
    good_B = np.ones(num_rows, bool)

    def refuse(reason: str, bad_B: NDArray[np.bool_]) -> None:
        new = int((bad_B & good_B).sum())
        if new:
            told[reason] = told.get(reason, 0) + new
            good_B[bad_B] = False

    def rows_of(bad_T: NDArray[np.bool_]) -> Bools:
        rows: Bools = np.bincount(tokens.row_T[bad_T], minlength=num_rows) > 0
        return rows

    prompt = batch.prompt_token_ids
    prompt_B = np.zeros(num_rows, np.int64) if prompt is None else prompt.lengths.astype(np.int64)
    refuse("no prompt was recorded", rows_of((tokens.position_T == 0) & (prompt_B[tokens.row_T] == 0)))
    if max_positions is not None:
        long_B = prompt_B + batch.token_ids.lengths > max_positions
        refuse(f"longer than the model's {max_positions} positions", long_B)
    foreign_B = _holds_foreign(batch.token_ids, vocab_size)
    if prompt is not None:
        foreign_B |= _holds_foreign(prompt, vocab_size)
    foreign_B |= rows_of(_sets_hold_foreign(tokens, vocab_size))
    refuse(f"ids outside the model's vocabulary of {vocab_size}: it is another model", foreign_B)
    if tokens.vocab_size not in (None, vocab_size):
        reason = f"drawn from a whole vocabulary of {tokens.vocab_size}, but the model's has {vocab_size}"
        refuse(reason, rows_of(tokens.full_T))
    refuse("the temperature is unknown", rows_of(np.isnan(tokens.temperature_T)))
    refuse("temperature 0 with more than one kept id", rows_of((tokens.temperature_T == 0) & (tokens.kept_sizes_T > 1)))
    for row, reason in _not_replayed(tokens, good_B).items():
        refuse(reason, np.arange(num_rows) == row)
    return good_B, told


def add_reasons(into: dict[str, int], more: Mapping[str, int]) -> None:
    """Count reasons, at most `MAX_REASONS` of them apart."""
    for reason, number in more.items():
        key = reason if reason in into or len(into) < MAX_REASONS else OTHER
        into[key] = into.get(key, 0) + number


def _not_replayed(tokens: SampledTokens, good_B: Bools) -> dict[int, str]:
    """Rows whose processors cannot be replayed, with the reason; one by one only where the batch as a whole fails."""
    chosen = np.flatnonzero(good_B[tokens.row_T])
    try:
        Replayer(tokens.take(chosen))
        return {}
    except KeptsetError:
        pass
    found = {}
    for row in np.flatnonzero(good_B).tolist():
        try:
            Replayer(tokens.take(chosen[tokens.row_T[chosen] == row]))
        except KeptsetError as error:
            found[row] = str(error).replace(tokens.rollout_ids[row], "a response").split(";")[0]
    return found


def _holds_foreign(ids: Ragged, vocab_size: int) -> Bools:
    foreign = np.flatnonzero((ids.values < 0) | (ids.values >= vocab_size))
    rows: Bools = np.bincount(row_index(ids.offsets)[foreign], minlength=len(ids)) > 0
    return rows


def _sets_hold_foreign(tokens: SampledTokens, vocab_size: int) -> Bools:
    foreign = np.flatnonzero((tokens.kept_ids_N < 0) | (tokens.kept_ids_N >= vocab_size))
    holds_T = np.zeros(tokens.num_tokens, bool)
    holds_T[np.searchsorted(tokens.kept_offsets_T1, foreign, side="right") - 1] = True
    return holds_T
