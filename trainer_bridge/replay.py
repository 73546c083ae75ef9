"""Replay of the processors that change finite logits, at the ids that scoring looks at and nowhere else.

    z' = (z > 0 ? z / r : z * r)  where the id is in prompt or response so far
         - f * count in the response so far - q * [count > 0] + bias

Per (token, id) that is a divisor and a shift, both from the recorded history. Bans need no replay: the kept set carries
them. What was not recorded is refused by name.

Legend: B responses, T sampled tokens, N kept ids over them, Q queries (token, id).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput, ScoringRefused
from keptset.schemas.ragged import Ragged, offsets_of, row_index
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import FOREIGN_PROCESSORS
from keptset.trainer_bridge.sampled_tokens import Bools, Ints, SampledTokens

Floats = NDArray[np.float64]
MAX_KEY = 2**63 - 1
"""Largest key (response, id, position) that an int64 holds."""
REPLAYED_ORDER = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
"""The one order that is replayed; `processor_order` of the identity must name these in it."""
BANS = ("allowed_token_ids", "bad_words", "banned_words", "grammar", "min_new_tokens")
"""What else `processor_order` may name: these only take ids away, and the kept sets carry that."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the processors do to one logit each: z > 0 ? z / divisor : z * divisor, then + shift."""

    divisor_N: Floats
    """1 where the repetition penalty does not reach."""
    shift_N: Floats
    """Frequency and presence penalty (negative where they lower) and bias."""

    def take(self, index: Ints | slice) -> Replay:
        return Replay(divisor_N=self.divisor_N[index], shift_N=self.shift_N[index])


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The changed logits of tokens that are scored over the whole vocabulary."""

    offsets_T1: Ints
    """Token t has ids_N[offsets_T1[t] : offsets_T1[t + 1]]; empty where nothing changes."""
    ids_N: Ints
    replay_N: Replay

    def part(self, begin: int, end: int) -> Patch:
        """The same for tokens [begin, end) alone."""
        low, high = self.offsets_T1[begin], self.offsets_T1[end]
        return Patch(
            offsets_T1=self.offsets_T1[begin : end + 1] - low,
            ids_N=self.ids_N[low:high],
            replay_N=self.replay_N.take(slice(low, high)),
        )


class Replayer:
    """What has to be replayed for the sampled tokens of a batch.

    Errors: ScoringRefused naming the setting that is not recorded, or the order that is not known. Greedy responses
    need neither: whatever the processors did, one id was left.
    """

    def __init__(self, tokens: SampledTokens) -> None:
        self._tokens = tokens
        batch = tokens.batch
        settings = _Settings(batch)
        needed_B = np.zeros(batch.num_responses, bool)
        needed_B[tokens.row_T[tokens.temperature_T != 0]] = True
        settings.require(needed_B)
        if needed_B.any():
            _refuse_foreign(batch, needed_B)
        self._changes_B: Bools = settings.changes_B & needed_B
        self._history: _History | None = None
        if self._changes_B.any():
            _require_order(batch)
            self._history = _History(batch, settings, self._changes_B)

    def kept(self) -> Replay | None:
        """At every one of kept_ids_N; None where no processor was on."""
        if self._history is None:
            return None
        tokens = self._tokens
        token_N = row_index(tokens.kept_offsets_T1)
        changed_N = np.flatnonzero(self._changes_B[tokens.row_T][token_N])
        token_Q = token_N[changed_N]
        divisor_N, shift_N = np.ones(len(token_N)), np.zeros(len(token_N))
        divisor_N[changed_N], shift_N[changed_N] = self._history.effect(
            tokens.row_T[token_Q], tokens.position_T[token_Q], tokens.kept_ids_N[changed_N]
        )
        return Replay(divisor_N=divisor_N, shift_N=shift_N)

    def full(self, which: Ints) -> Patch | None:
        """At every id of the vocabulary that changed, for the tokens `which`; None where none changed.

        Ids that neither history nor bias names cannot have changed, so none of the others is looked at.
        """
        tokens = self._tokens
        which = which[self._changes_B[tokens.row_T[which]]]
        if self._history is None or not len(which):
            return None
        rows, counts = np.unique(tokens.row_T[which], return_counts=True)
        candidates = [self._history.candidates(row) for row in rows.tolist()]
        per_row = np.split(which, np.cumsum(counts)[:-1])
        pairs = list(zip(per_row, candidates, strict=True))
        token_Q = np.concatenate([np.repeat(of_row, len(ids)) for of_row, ids in pairs])
        ids_Q = np.concatenate([np.tile(ids, len(of_row)) for of_row, ids in pairs])
        divisor_Q, shift_Q = self._history.effect(tokens.row_T[token_Q], tokens.position_T[token_Q], ids_Q)
        changed = np.flatnonzero((divisor_Q != 1) | (shift_Q != 0))
        return Patch(
            offsets_T1=offsets_of(np.bincount(token_Q[changed], minlength=tokens.num_tokens)),
            ids_N=ids_Q[changed],
            replay_N=Replay(divisor_N=divisor_Q[changed], shift_N=shift_Q[changed]),
        )


class _Settings:
    """The value-changing settings of each response; NaN and `bias_known_B` say what was not recorded."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.rollout_ids = batch.rollout_ids
        self.penalties_B: dict[str, Floats] = {
            name: batch.column(name).to_numpy(zero_copy_only=False).astype(np.float64) for name in REPLAYED_ORDER[:3]
        }
        column = batch.column("logit_bias")
        self.bias_known_B: Bools = column.is_valid().to_numpy(zero_copy_only=False)
        pairs = [pairs or [] for pairs in column.to_pylist()]
        self.bias = Ragged(offsets_of([len(p) for p in pairs]), np.array([i for p in pairs for i, _ in p], np.int64))
        self.bias_values = np.array([b for p in pairs for _, b in p], np.float64)

    def require(self, needed_B: Bools) -> None:
        """ScoringRefused for a setting that is null in a response that needs it."""
        for name in REPLAYED_ORDER:
            known_B = self.bias_known_B if name == "logit_bias" else ~np.isnan(self.penalties_B[name])
            unknown = np.flatnonzero(needed_B & ~known_B)
            if len(unknown):
                raise ScoringRefused(
                    f"{name} of {self.rollout_ids[unknown[0]]} is unknown (null in {len(unknown)} responses): the "
                    f"trainer cannot replay what it does to the logits; have the engine record it, with "
                    f"{'an empty map' if name == 'logit_bias' else 'its neutral value'} where it was off"
                )

    @property
    def changes_B(self) -> Bools:
        """Whether any processor changes finite logits."""
        r_B, f_B, q_B = (self.penalties_B[name] for name in REPLAYED_ORDER[:3])
        changes_B: Bools = (r_B != 1) | (f_B != 0) | (q_B != 0) | (self.bias.lengths > 0)
        return changes_B


def _ordered_names(recorded: str | None) -> list[str]:
    return [name.strip() for name in (recorded or "").split(",") if name.strip()]


def _refuse_foreign(batch: RolloutBatch, needed_B: Bools) -> None:
    """ScoringRefused for a processor that is named in the record, and that nothing here knows."""
    for name in _ordered_names(batch.identity.processor_order):
        if name not in (*REPLAYED_ORDER, *BANS):
            raise ScoringRefused(
                f"processor_order names {name!r}, and what it does to the logits is not known: only "
                f"{', '.join(REPLAYED_ORDER)} are replayed, and {', '.join(BANS)} need it not; sample without it"
            )
    extras = batch.column("sampler_extras").to_pylist()
    named = {text: _foreign_settings(text) for text in set(extras)}
    for row in np.flatnonzero(needed_B).tolist():
        if named[extras[row]]:
            raise ScoringRefused(
                f"{batch.rollout_ids[row]} was sampled with {named[extras[row]]}, whose effect on the logits cannot "
                f"be replayed; sample without it"
            )


def _foreign_settings(extras: str | None) -> str:
    settings = json.loads(extras or "{}")
    on = [f"{name} = {settings[name]!r}" for name, off in FOREIGN_PROCESSORS.items() if settings.get(name, off) != off]
    return ", ".join(on)


def _require_order(batch: RolloutBatch) -> None:
    recorded = batch.identity.processor_order
    names = _ordered_names(recorded)
    if [name for name in names if name in REPLAYED_ORDER] != list(REPLAYED_ORDER):
        raise ScoringRefused(
            f"processor_order is {recorded!r}: penalties or biases were on, and they are replayed only in the order "
            f"{','.join(REPLAYED_ORDER)}; record the engine's order, or sample without them"
        )


class _History:
    """Where each id occurs in each response and its prompt, as sorted keys: every question is a binary search."""

    def __init__(self, batch: RolloutBatch, settings: _Settings, changes_B: Bools) -> None:
        self._settings = settings
        self._response = batch.token_ids
        self._prompt = batch.prompt_token_ids
        prompt_ids = np.zeros(0, np.int64) if self._prompt is None else self._prompt.values
        largest = [values.max(initial=0) for values in (prompt_ids, self._response.values, settings.bias.values)]
        self._ids = int(max(largest)) + 1
        self._positions = int(self._response.lengths.max(initial=0)) + 1
        if batch.num_responses * self._ids * self._positions > MAX_KEY:
            raise InvalidInput("the batch is too large to replay penalties at once; score it in slices")
        row_A = row_index(self._response.offsets)
        position_A = np.arange(len(row_A)) - np.asarray(self._response.offsets, np.int64)[row_A]
        self._occurrences = np.sort(self._key(row_A, self._response.values) * self._positions + position_A)
        prompt_rows = np.zeros(0, np.int64) if self._prompt is None else row_index(self._prompt.offsets)
        needs_prompt = changes_B[prompt_rows]
        self._in_prompt = np.unique(self._key(prompt_rows[needs_prompt], prompt_ids[needs_prompt]))
        bias_keys = self._key(row_index(settings.bias.offsets), settings.bias.values)
        order = np.argsort(bias_keys, kind="stable")
        self._bias_keys, self._bias_values = bias_keys[order], settings.bias_values[order]

    def _key(self, rows: Ints, ids: NDArray[np.generic]) -> Ints:
        return rows * self._ids + ids.astype(np.int64)

    def candidates(self, row: int) -> Ints:
        """Ids of one response, its prompt and its biases: no other logit can change."""
        parts = [self._response[row], self._settings.bias[row]]
        if self._prompt is not None:
            parts.append(self._prompt[row])
        ids: Ints = np.unique(np.concatenate([part.astype(np.int64) for part in parts]))
        return ids

    def effect(self, rows_Q: Ints, positions_Q: Ints, ids_Q: NDArray[np.integer]) -> tuple[Floats, Floats]:
        """Divisor and shift of each id before the token at `positions_Q` of its response."""
        known_Q = (ids_Q >= 0) & (ids_Q < self._ids)
        key_Q = self._key(rows_Q, np.where(known_Q, ids_Q, 0))
        begin_Q = np.searchsorted(self._occurrences, key_Q * self._positions)
        count_Q = np.searchsorted(self._occurrences, key_Q * self._positions + positions_Q) - begin_Q
        count_Q = np.where(known_Q, count_Q, 0)
        seen_Q = (count_Q > 0) | (known_Q & (_find(self._in_prompt, key_Q) >= 0))
        r_Q, f_Q, q_Q = (self._settings.penalties_B[name][rows_Q] for name in REPLAYED_ORDER[:3])
        bias_at_Q = np.where(known_Q, _find(self._bias_keys, key_Q), -1)
        bias_Q = np.zeros(len(rows_Q))
        bias_Q[bias_at_Q >= 0] = self._bias_values[bias_at_Q[bias_at_Q >= 0]]
        return np.where(seen_Q, r_Q, 1.0), bias_Q - f_Q * count_Q - q_Q * (count_Q > 0)


def _find(sorted_keys: Ints, key_Q: Ints) -> Ints:
    """Index of each key, -1 where it is not there."""
    if not len(sorted_keys):
        return np.full(len(key_Q), -1, np.int64)
    at_Q = np.minimum(np.searchsorted(sorted_keys, key_Q), len(sorted_keys) - 1)
    return np.where(sorted_keys[at_Q] == key_Q, at_Q, -1)
