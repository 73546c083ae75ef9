"""Decoded steps become responses: what was drawn, from which kept set, with which log-probability and mass.

A step commits one row per token. Numbers per token sit in [slots, positions] tables; kept sets of all slots share one
growing store, each token knowing its span, so that a step costs a few array writes and a response one gather.

Legend: S slots, P positions, M tokens committed in one step, N kept ids.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.rollout.kept_sets import KeptSets
from keptset.rollout.request import Request
from keptset.rollout.top_logprobs import TopLogprobs
from keptset.schemas.builder import Response
from keptset.schemas.ragged import offsets_of, span_index
from keptset.schemas.sampling_params import SamplingParams

_COLUMNS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "behavior_logprobs": np.float32,
    "log_kept_mass": np.float32,
    "kept_entropy": np.float32,
    "kept_logprob_var": np.float32,
    "policy_versions": np.int32,
    "is_full": np.bool_,
    "start": np.int64,
    "size": np.int64,
    "top_start": np.int64,
    "top_size": np.int64,
}
_FIRST_POSITIONS = 64
_COMPACT_ABOVE = 1 << 20
"""Kept ids held before the store is checked for room that closed responses left behind."""


class _Store:
    """Listed ids and their log-probabilities of many tokens, back to back."""

    def __init__(self) -> None:
        self.used = 0
        self.ids = np.zeros(1024, np.int32)
        self.logprobs = np.zeros(1024, np.float32)

    def append(self, ids_N: npt.NDArray[np.int32], logprobs_N: npt.NDArray[np.float64]) -> int:
        """Add a step's lists; returns where they begin."""
        begin, count = self.used, len(ids_N)
        if begin + count > len(self.ids):
            more = max(len(self.ids), begin + count - len(self.ids))
            self.ids, self.logprobs = np.pad(self.ids, (0, more)), np.pad(self.logprobs, (0, more))
        self.ids[begin : begin + count] = ids_N
        self.logprobs[begin : begin + count] = logprobs_N
        self.used = begin + count
        return begin

    def keep_only(self, index_N: npt.NDArray[np.int64]) -> None:
        self.ids, self.logprobs, self.used = self.ids[index_N], self.logprobs[index_N], len(index_N)


class Recorder:
    """Collects what an engine commits, slot by slot.

    >>> Recorder(slots=2, vocab_size=8, distribution_share=0.0).open_slots
    []
    """

    def __init__(self, *, slots: int, vocab_size: int, distribution_share: float) -> None:
        self._vocab_size = vocab_size
        self._share = distribution_share
        self._requests: dict[int, Request] = {}
        self._lists_all: set[int] = set()
        """Slots whose whole distribution is recorded, and may have to be where the whole vocabulary was kept."""
        self._kv_policy: dict[int, str] = {}
        self._length_S = np.zeros(slots, np.int64)
        self._table = {name: np.zeros((slots, _FIRST_POSITIONS), dtype) for name, dtype in _COLUMNS.items()}
        self._kept, self._top = _Store(), _Store()

    @property
    def open_slots(self) -> list[int]:
        """Slots with a response under way."""
        return sorted(self._requests)

    def open(self, slot: int, request: Request) -> None:
        """A response begins in this slot."""
        assert slot not in self._requests, f"slot {slot} is taken"
        self._requests[slot] = request
        self._kv_policy[slot] = "none"
        self._length_S[slot] = 0
        # Where nothing can be cut, support is full at every token, and neither ids nor log-probabilities are listed.
        if _can_cut(request.params) and self._wants_distribution(request):
            self._lists_all.add(slot)
        else:
            self._lists_all.discard(slot)

    def commit(
        self,
        slots_M: npt.NDArray[np.int64],
        token_ids_M: npt.NDArray[np.int32],
        logprobs_M: npt.NDArray[np.float64],
        kept: KeptSets,
        version: int,
        top: TopLogprobs | None = None,
    ) -> None:
        """Record M drawn tokens, row i of `kept` being the set token i was drawn from.

        A slot may occur several times; its tokens are then taken in order. `top` lists the most probable ids of the
        same rows.
        """
        at_M = self._length_S[slots_M] + _rank_among_equals(slots_M)
        self._reserve(int(at_M.max(initial=-1)) + 1)
        offsets_M1, ids_N, logprobs_N = self._listed(slots_M, kept)
        values = {
            "token_ids": token_ids_M,
            "behavior_logprobs": logprobs_M,
            "log_kept_mass": kept.log_kept_mass_B,
            "kept_entropy": kept.entropy_B,
            "kept_logprob_var": kept.logprob_var_B,
            "policy_versions": version,
            "is_full": kept.is_full_B,
            "start": self._kept.append(ids_N, logprobs_N) + offsets_M1[:-1],
            "size": np.diff(offsets_M1),
        }
        if top is not None:
            values["top_start"] = self._top.append(top.ids_N, top.logprobs_N) + top.offsets_B1[:-1]
        values["top_size"] = 0 if top is None else np.diff(top.offsets_B1)
        for name, value in values.items():
            self._table[name][slots_M, at_M] = value
        np.add.at(self._length_S, slots_M, 1)

    def length(self, slot: int) -> int:
        """Tokens committed so far in this slot."""
        return int(self._length_S[slot])

    def token_ids(self, slot: int) -> npt.NDArray[np.int32]:
        """Tokens committed so far in this slot, a view."""
        tokens: npt.NDArray[np.int32] = self._table["token_ids"][slot, : self._length_S[slot]]
        return tokens

    def note_kv_policy(self, slot: int, policy: str) -> None:
        """Weights changed while this response was under way; what became of its cache.

        "kept" stays, whatever comes later: tokens were drawn since with a cache of several versions.
        """
        if self._kv_policy[slot] != "kept":
            self._kv_policy[slot] = policy

    def kv_policy(self, slot: int) -> str:
        """What is noted of this response's cache."""
        return self._kv_policy[slot]

    def discard(self, slot: int) -> None:
        """Forget this slot's response; the slot is free again."""
        del self._requests[slot], self._kv_policy[slot]
        self._forget()

    def close(self, slot: int, finish_reason: str, error: str | None = None) -> Response:
        """The response of this slot as far as it got; the slot is free again."""
        request = self._requests.pop(slot)
        length = int(self._length_S[slot])
        row: dict[str, Any] = {name: column[slot, :length].copy() for name, column in self._table.items()}
        starts, sizes, is_full = row.pop("start"), row.pop("size"), row.pop("is_full")
        top = self._top_columns(row.pop("top_start"), row.pop("top_size"), request)
        if length and is_full.all():
            support, sets = "full", {}
        else:
            support, sets = "kept", self._kept_columns(starts, sizes, is_full, self._wants_distribution(request))
        self._forget()
        return Response(
            rollout_id=request.rollout_id or "",
            prompt_id=request.prompt_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            prompt_token_ids=np.asarray(request.prompt_token_ids, np.int32),
            support=support,
            kv_policy=self._kv_policy.pop(slot),
            finish_reason=finish_reason,
            error=error,
            params=request.params,
            seed=request.params.seed,
            extra=request.extra,
            **row,
            **sets,
            **top,
        )

    def _kept_columns(
        self,
        starts: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        is_full: npt.NDArray[np.bool_],
        with_distribution: bool,
    ) -> dict[str, Any]:
        """Kept sets of one response; a token that kept the whole vocabulary among others that did not gets every id."""
        index = span_index(starts, sizes)
        ids, logprobs = self._kept.ids[index], self._kept.logprobs[index]
        offsets = offsets_of(sizes)
        if (is_full & (sizes == 0)).any():
            everything = np.arange(self._vocab_size, dtype=np.int32)
            spans = np.split(ids, offsets[1:-1])
            ids = np.concatenate([everything if full else span for full, span in zip(is_full, spans, strict=True)])
            offsets = offsets_of(np.where(is_full, self._vocab_size, sizes))
            with_distribution = False  # only where the model itself rules ids out for some tokens
        columns: dict[str, npt.NDArray[np.generic]] = {"kept_offsets": offsets, "kept_ids": ids}
        if with_distribution:
            columns["kept_logprobs"] = logprobs
        return columns

    def _top_columns(
        self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], request: Request
    ) -> dict[str, Any]:
        """The listed ids of a response that asked for them; nothing otherwise."""
        if not request.params.top_logprobs:
            return {}
        index = span_index(starts, sizes)
        ids, logprobs = self._top.ids[index], self._top.logprobs[index]
        return {"top_offsets": offsets_of(sizes), "top_ids": ids, "top_logprobs": logprobs}

    def _listed(
        self, slots_M: npt.NDArray[np.int64], kept: KeptSets
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Offsets, ids and log-probabilities of a step's sets, whole vocabularies listed where they may be needed."""
        if not (self._lists_all and kept.is_full_B.any()):
            return kept.offsets_B1, kept.ids_N, kept.logprobs_N
        members = [
            kept.members(row) if slot in self._lists_all or not full else (kept.ids_N[:0], kept.logprobs_N[:0])
            for row, (slot, full) in enumerate(zip(slots_M.tolist(), kept.is_full_B.tolist(), strict=True))
        ]
        ids, logprobs = zip(*members, strict=True)
        return offsets_of([len(row) for row in ids]), np.concatenate(ids), np.concatenate(logprobs)

    def _wants_distribution(self, request: Request) -> bool:
        digest = hashlib.blake2b((request.rollout_id or "").encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._share * 2**64

    def _reserve(self, positions: int) -> None:
        held = self._table["token_ids"].shape[1]
        if positions > held:
            more = max(held, positions - held)
            self._table = {name: np.pad(column, ((0, 0), (0, more))) for name, column in self._table.items()}

    def _forget(self) -> None:
        """Drop the lists of closed responses once they are most of a store."""
        for store, start, size in ((self._kept, "start", "size"), (self._top, "top_start", "top_size")):
            if store.used >= _COMPACT_ABOVE:
                self._compact(store, start, size)

    def _compact(self, store: _Store, start: str, size: str) -> None:
        slots = np.array(self.open_slots, np.int64)
        live_SP = np.arange(self._table[size].shape[1]) < self._length_S[slots, None]
        starts, sizes = self._table[start][slots][live_SP], self._table[size][slots][live_SP]
        if 2 * sizes.sum() > store.used:
            return
        store.keep_only(span_index(starts, sizes))
        moved = self._table[start][slots]
        moved[live_SP] = offsets_of(sizes)[:-1]
        self._table[start][slots] = moved


def _can_cut(params: SamplingParams) -> bool:
    """Whether some token's kept set can be smaller than the vocabulary."""
    bans = params.allowed_token_ids is not None or params.banned_words or params.min_new_tokens
    return params.truncates or bool(bans)


def _rank_among_equals(values_M: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many equal values stand before each.

    >>> _rank_among_equals(np.array([4, 7, 4, 4])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values_M, kind="stable")
    ordered = values_M[order]
    first = np.searchsorted(ordered, ordered)
    ranks = np.empty(len(values_M), np.int64)
    ranks[order] = np.arange(len(values_M)) - first
    return ranks
