"""What b would have been under each named fault: the better explanations of SEMANTICS 6, for one response.

    full_vocabulary          log softmax(z' / T)_y                over the vocabulary
    raw_logits               log softmax(z)_y                     before processors and temperature
    renormalised_twice       l - m
    temperature_missing      log softmax(z')_y                    over K
    temperature_on_logprobs  the same / T
    processors_missing       log softmax(z / T)_y                 over K
    mask_shifted             log softmax(z' / T)_y                over the set recorded one position before or after
    mask_swapped             the same                             over the set recorded for another response
    wrong_version            l under other weights

z are the logits of the weights that drew the token, z' the same after the value-changing processors. A fault that has
several forms (which shift, which response, which version) is tried in each. A token that the form's set does not hold
has b = -inf under it, and so has a token outside its recorded set wherever a fault leaves the sets as they were. A form
that says nothing of a token has NaN there.

Legend: T tokens of one response, N kept ids over them, A all sampled tokens of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import gather_spans, row_index
from keptset.trainer_bridge.replay import Replayer
from keptset.trainer_bridge.sampled_tokens import Ints, SampledTokens
from keptset.trainer_bridge.scoring.from_logits import score_from_logits, score_full_vocabulary
from keptset.trainer_bridge.scoring.hand import Tensor, hand_for

Floats = NDArray[np.float64]

EXPLANATIONS = (
    FindingKind.FULL_VOCABULARY,
    FindingKind.RAW_LOGITS,
    FindingKind.RENORMALISED_TWICE,
    FindingKind.TEMPERATURE_MISSING,
    FindingKind.TEMPERATURE_ON_LOGPROBS,
    FindingKind.PROCESSORS_MISSING,
    FindingKind.MASK_SHIFTED,
    FindingKind.MASK_SWAPPED,
    FindingKind.WRONG_VERSION,
)
"""In the order in which one of equal fit is preferred."""

SHIFTS = (-1, 1)
MAX_SWAPS = 8
"""Other responses whose sets are tried in the place of one's own."""
MIN_HELD = 0.9
"""Share of a response's tokens that another response's sets must hold for the two to be tried as swapped."""


@dataclass(frozen=True, order=True)
class Form:
    """One way in which a fault can show."""

    order: int
    """Index into EXPLANATIONS."""
    hint: int
    """The shift, the response's row in the batch, the version; 0 where there is one form only."""

    @property
    def kind(self) -> FindingKind:
        return EXPLANATIONS[self.order]


def form(kind: FindingKind, hint: int = 0) -> Form:
    """The form of a kind with its hint."""
    return Form(EXPLANATIONS.index(kind), hint)


def from_scores(kept_T: Floats, m_T: Floats) -> Mapping[Form, Floats]:
    """What follows from l and the recorded m alone, without logits."""
    return {form(FindingKind.FULL_VOCABULARY): kept_T + m_T, form(FindingKind.RENORMALISED_TWICE): kept_T - m_T}


def from_logits(logits_TV: Tensor, tokens: SampledTokens, sets: BatchSets, row: int) -> dict[Form, Floats]:
    """b [T] under every form but those of other weights and other responses, for tokens of one response at T > 0.

    Row t of `logits_TV` predicts token t. `sets` are those of the whole batch, in which the response is number `row`:
    neighbours are found there.
    """
    temperature_T = tokens.temperature_T
    replayer = Replayer(tokens)
    patch = replayer.full(np.arange(tokens.num_tokens))
    untempered = replace(tokens, temperature_T=np.ones_like(temperature_T))
    kept_T = over_sets(logits_TV, tokens)
    untempered_T = over_sets(logits_TV, untempered)
    full_T = _host(score_full_vocabulary(logits_TV, tokens.token_ids_T, temperature_T, patch=patch).logprobs_T)
    raw_T = full_T
    if patch is not None or (temperature_T != 1).any():
        raw_T = _host(score_full_vocabulary(logits_TV, tokens.token_ids_T, untempered.temperature_T).logprobs_T)
    outside_T = np.isneginf(kept_T)
    m_T = tokens.log_kept_mass_T.astype(np.float64)
    m_T = np.where(np.isnan(m_T), full_T - kept_T, m_T)
    forms = {
        form(FindingKind.FULL_VOCABULARY): np.where(outside_T, -np.inf, full_T),
        form(FindingKind.RAW_LOGITS): np.where(outside_T, -np.inf, raw_T),
        form(FindingKind.RENORMALISED_TWICE): kept_T - m_T,
        form(FindingKind.TEMPERATURE_MISSING): untempered_T,
        form(FindingKind.TEMPERATURE_ON_LOGPROBS): untempered_T / temperature_T,
    }
    if patch is not None:
        forms[form(FindingKind.PROCESSORS_MISSING)] = over_sets(logits_TV, tokens, replayed=False)
    for shift in SHIFTS:
        neighbours_T = sets.at(row, tokens.position_T + shift)
        forms[form(FindingKind.MASK_SHIFTED, shift)] = _over_others(logits_TV, tokens, sets, neighbours_T)
    return forms


def over_swapped(
    logits_TV: Tensor, tokens: SampledTokens, sets: BatchSets, others: tuple[int, ...]
) -> dict[Form, Floats]:
    """b [T] over the sets of each of these responses of the batch, as `from_logits` takes the rest."""
    return {
        form(FindingKind.MASK_SWAPPED, other): _over_others(logits_TV, tokens, sets, sets.at(other, tokens.position_T))
        for other in others
    }


def over_sets(logits_TV: Tensor, tokens: SampledTokens, *, replayed: bool = True, rows: Ints | None = None) -> Floats:
    """l [T] over the listed sets; -inf where a set does not hold its token."""
    replayer = Replayer(tokens) if replayed else None
    scores = score_from_logits(
        logits_TV,
        tokens.token_ids_T,
        tokens.kept_offsets_T1,
        tokens.kept_ids_N,
        tokens.temperature_T,
        rows_T=rows,
        full_T=tokens.full_T,
        replay_N=None if replayer is None else replayer.kept(),
        patch=None if replayer is None else replayer.full(np.flatnonzero(tokens.full_T)),
        on_violation="exclude",
    )
    values_T = _host(scores.logprobs_T)
    values_T[scores.violations.bad_T] = -np.inf
    return values_T


def _over_others(logits_TV: Tensor, tokens: SampledTokens, sets: BatchSets, other_T: Ints) -> Floats:
    """l [T] over the sets of the batch's tokens `other_T`; NaN where that is -1 or has no listed set."""
    values_T = np.full(tokens.num_tokens, np.nan)
    at = np.flatnonzero((other_T >= 0) & ~tokens.full_T)
    if not len(at):
        return values_T
    part = tokens.take(at)
    offsets, index = gather_spans(sets.tokens.kept_offsets_T1, other_T[at])
    part = replace(part, kept_offsets_T1=offsets, kept_ids_N=sets.tokens.kept_ids_N[index])
    listed = np.flatnonzero(np.diff(offsets) > 0)
    values_T[at[listed]] = over_sets(logits_TV, part.take(listed), rows=at[listed])
    return values_T


def _host(values: Tensor) -> Floats:
    host: Floats = np.array(hand_for(values).to_host(values), np.float64)
    return host


class BatchSets:
    """The sets of a batch, found by response and position, and searched for tokens."""

    def __init__(self, tokens: SampledTokens) -> None:
        self.tokens = tokens
        self._offsets_B1 = np.asarray(tokens.batch.token_ids.offsets, np.int64)
        self._index = np.full(int(self._offsets_B1[-1]), -1, np.int64)
        self._index[self._offsets_B1[tokens.row_T] + tokens.position_T] = np.arange(tokens.num_tokens)

    def at(self, row: int, positions_T: Ints) -> Ints:
        """Index into A of the sampled token at each position of a response; -1 where there is none."""
        begin, end = self._offsets_B1[row], self._offsets_B1[row + 1]
        inside_T = (positions_T >= 0) & (begin + positions_T < end)
        found_T = np.full(len(positions_T), -1, np.int64)
        found_T[inside_T] = self._index[begin + positions_T[inside_T]]
        return found_T

    def holding(self, tokens: SampledTokens, own: int, asking: Ints) -> tuple[int, ...]:
        """Responses whose sets hold the tokens of response `own` at the same positions; first of all those of which
        chance would do it least.

        The other half of a swap holds them as far as it reaches, which must be half of the tokens `asking` at least;
        many others may where sets are large.
        """
        length = int(self._offsets_B1[own + 1] - self._offsets_B1[own])
        wanted, asks = np.full(length, -1, np.int64), np.zeros(length, bool)
        wanted[tokens.position_T] = tokens.token_ids_T
        asks[tokens.position_T[asking]] = True
        everyone = self.tokens
        near = np.flatnonzero((everyone.position_T < length) & ~everyone.full_T)
        wanted_A, asks_A = np.full(everyone.num_tokens, -1, np.int64), np.zeros(everyone.num_tokens, bool)
        wanted_A[near] = wanted[everyone.position_T[near]]
        asks_A[near] = asks[everyone.position_T[near]]
        num_rows = everyone.batch.num_responses
        held = self._token_N[everyone.kept_ids_N == wanted_A[self._token_N]]
        there_B, asked_B, held_B = (
            np.bincount(everyone.row_T[at], minlength=num_rows) for at in (wanted_A >= 0, asks_A, held)
        )
        share_B = np.where(2 * asked_B >= len(asking), held_B / np.maximum(there_B, 1), 0.0)
        share_B[own] = 0.0
        surprise_B = np.bincount(everyone.row_T[held], weights=self._surprise_A[held], minlength=num_rows)
        candidates = np.flatnonzero(share_B >= MIN_HELD)
        order = np.lexsort((candidates, -surprise_B[candidates]))[:MAX_SWAPS]
        return tuple(candidates[order].tolist())

    @cached_property
    def _token_N(self) -> Ints:
        return row_index(self.tokens.kept_offsets_T1)

    @cached_property
    def _surprise_A(self) -> Floats:
        """-log of the chance that a set of this size holds a given id."""
        ids_N = self.tokens.kept_ids_N
        surprise_A: Floats = np.log((ids_N.max(initial=0) + 1.0) / np.maximum(self.tokens.kept_sizes_T, 1))
        return surprise_A


def token_chunks(tokens: Ints, vocab_size: int, max_elements: int) -> Iterator[Ints]:
    """Consecutive tokens whose logits number at most this many, but always one."""
    step = max(1, max_elements // vocab_size)
    return (tokens[begin : begin + step] for begin in range(0, len(tokens), step))
