"""What changes logits before temperature and filters: penalties, bias, then bans.

    z <- z / r if z > 0 else z * r     for ids in prompt or response    (repetition penalty r)
    z <- z - f * count                 for ids in the response          (frequency penalty f)
    z <- z - q                         for ids in the response          (presence penalty q)
    z <- z + bias                      for ids of the logit bias
    z <- -inf                          for ids not allowed, ids that complete a banned word,
                                       and stop tokens before min_new_tokens

Each stage touches single logits, listed for all rows at once as flat (row, id) pairs; no [B, V] mask is made. Values
are computed in float64 and stored in the logits' dtype after each stage.

Legend: B rows, V vocabulary, P (row, id) pairs of one stage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.rollout.history import History
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

PROCESSOR_ORDER = (
    "repetition_penalty,frequency_penalty,presence_penalty,logit_bias,allowed_token_ids,banned_words,min_new_tokens"
)
"""Order in which the processors act, as recorded with every batch."""

Ids = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


def process(logits_BV: Any, histories: Sequence[History], params: Sequence[SamplingParams]) -> Any:
    """Logits after every processor of each row, of the kind, dtype and device of `logits_BV` [B, V].

    `logits_BV` is a NumPy array or a Paddle tensor; it is not changed, and is itself the result where no row asks for
    anything. No gradient flows through.
    Errors: InvalidInput where the numbers of rows differ or an id lies outside [0, V).
    """
    if not logits_BV.shape[0] == len(histories) == len(params):
        raise InvalidInput(f"{logits_BV.shape[0]} rows of logits, {len(histories)} histories, {len(params)} settings")
    repetition, frequency, presence, bias, banned = _Pairs(), _Pairs(), _Pairs(), _Pairs(), _Pairs()
    for row, (history, settings) in enumerate(zip(histories, params, strict=True)):
        if settings.repetition_penalty != 1:
            repetition.add(row, history.seen, settings.repetition_penalty)
        if settings.frequency_penalty != 0:
            frequency.add(row, history.drawn, settings.frequency_penalty * history.counts.astype(np.float64))
        if settings.presence_penalty != 0:
            presence.add(row, history.drawn, settings.presence_penalty)
        if settings.logit_bias:
            bias.add(row, list(settings.logit_bias), np.array(list(settings.logit_bias.values()), np.float64))
        for ids in _bans(history, settings, int(logits_BV.shape[1])):
            banned.add(row, ids, -np.inf)
    if not any((repetition, frequency, presence, bias, banned)):
        return logits_BV
    logits = _HostLogits(logits_BV) if isinstance(logits_BV, np.ndarray) else _PaddleLogits(logits_BV)
    logits.update(repetition, logits.penalised)
    logits.update(frequency, operator.sub)
    logits.update(presence, operator.sub)
    logits.update(bias, operator.add)
    logits.update(banned, lambda _, minus_inf_P: minus_inf_P)
    return logits.result()


def _bans(history: History, settings: SamplingParams, vocab_size: int) -> Iterator[npt.ArrayLike]:
    """Ids that may not be drawn now."""
    if settings.allowed_token_ids is not None:
        yield _complement(settings.allowed_token_ids, vocab_size)
    for word in settings.banned_words:
        if history.ends_with(word[:-1]):
            yield word[-1:]
    if history.length < settings.min_new_tokens:
        yield tuple(set(settings.stop_token_ids))


@lru_cache(maxsize=64)
def _complement(allowed: tuple[int, ...], vocab_size: int) -> Ids:
    """Every id but these; kept, since a request asks for the same at each step."""
    return np.setdiff1d(np.arange(vocab_size), np.array(allowed, np.int64))


class LogitProcessors:
    """`process` for an engine whose requests come and go: keeps the history of each slot.

    >>> processors = LogitProcessors(vocab_size=3)
    >>> processors.open(7, SamplingParams(frequency_penalty=0.5), prompt_ids=[0])
    >>> processors.commit([7, 7], [1, 1])
    >>> processors.apply([7], np.zeros((1, 3))).tolist()
    [[0.0, -1.0, 0.0]]
    >>> processors.close(7)
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._requests: dict[int, tuple[History, SamplingParams]] = {}

    def open(self, slot: int, params: SamplingParams, prompt_ids: npt.ArrayLike) -> None:
        """A request begins in this slot.

        Errors: InvalidInput where its settings or its prompt hold an id outside the vocabulary.
        """
        assert slot not in self._requests, f"slot {slot} is taken"
        check_ids(params, self.vocab_size)
        _check_range("the prompt", np.asarray(prompt_ids, np.int64), self.vocab_size)
        self._requests[slot] = History(prompt_ids), params

    def apply(self, slots_B: Sequence[int], logits_BV: Any) -> Any:
        """Processed logits, row i being those of the request in slot i of `slots_B`."""
        requests = [self._requests[slot] for slot in slots_B]
        return process(logits_BV, [history for history, _ in requests], [params for _, params in requests])

    def commit(self, slots_M: npt.ArrayLike, token_ids_M: npt.ArrayLike) -> None:
        """Tokens that joined the responses; those of one slot in order."""
        slots, token_ids = np.asarray(slots_M).tolist(), np.asarray(token_ids_M).tolist()
        for slot, token_id in zip(slots, token_ids, strict=True):
            self._requests[slot][0].append(token_id)

    def close(self, slot: int) -> None:
        """The request is over; the slot is free again."""
        del self._requests[slot]


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Errors: InvalidInput where a setting names an id outside [0, vocab_size)."""
    named = {
        "logit_bias": list(params.logit_bias),
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_words": [token_id for word in params.banned_words for token_id in word],
    }
    for name, ids in named.items():
        _check_range(name, np.array(ids, np.int64), vocab_size)


def _check_range(name: str, ids: Ids, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise InvalidInput(f"{name}: id {outside[0]} is outside the vocabulary [0, {vocab_size})")


class _Pairs:
    """The (row, id) pairs one stage changes, each once, and its number for each pair. False where there are none."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[Ids] = []
        self._values: list[Float64] = []

    def add(self, row: int, ids: npt.ArrayLike, values: Float64 | float) -> None:
        ids = np.asarray(ids, np.int64)
        if len(ids):
            self._rows.append(row)
            self._ids.append(ids)
            self._values.append(np.broadcast_to(np.asarray(values, np.float64), ids.shape))

    def __bool__(self) -> bool:
        return bool(self._rows)

    def flat(self, vocab_size: int) -> tuple[Ids, Float64]:
        """Index row * V + id [P] and number [P] of every pair."""
        ids_P = np.concatenate(self._ids)
        rows_P = np.repeat(self._rows, [len(ids) for ids in self._ids])
        outside = np.flatnonzero((ids_P < 0) | (ids_P >= vocab_size))
        if len(outside):
            at = outside[0]
            raise InvalidInput(f"row {rows_P[at]}: id {ids_P[at]} is outside the vocabulary [0, {vocab_size})")
        return rows_P * vocab_size + ids_P, np.concatenate(self._values)


class _HostLogits:
    """A copy of host logits that single elements are changed in."""

    def __init__(self, logits_BV: npt.NDArray[np.floating]) -> None:
        self._logits_BV = np.array(logits_BV, order="C")

    def update(self, pairs: _Pairs, change: Callable[[Float64, Float64], Float64]) -> None:
        """z <- change(z, number) at every pair."""
        if pairs:
            index_P, number_P = pairs.flat(self._logits_BV.shape[1])
            flat = self._logits_BV.reshape(-1)
            flat[index_P] = change(flat[index_P].astype(np.float64), number_P)

    @staticmethod
    def penalised(z_P: Float64, penalty_P: Float64) -> Float64:
        return np.where(z_P > 0, z_P / penalty_P, z_P * penalty_P)

    def result(self) -> npt.NDArray[np.floating]:
        return self._logits_BV


class _PaddleLogits:
    """The same for a tensor, on its own device."""

    def __init__(self, logits_BV: Any) -> None:
        self._shape = logits_BV.shape
        self._flat = logits_BV.detach().clone().flatten()

    def update(self, pairs: _Pairs, change: Callable[[Any, Any], Any]) -> None:
        """z <- change(z, number) at every pair."""
        if pairs:
            import paddle

            index_P, number_P = (
                paddle.to_tensor(array, place=self._flat.place) for array in pairs.flat(self._shape[1])
            )
            changed_P = change(paddle.gather(self._flat, index_P).astype("float64"), number_P)
            paddle.scatter_(self._flat, index_P, changed_P.astype(self._flat.dtype))

    @staticmethod
    def penalised(z_P: Any, penalty_P: Any) -> Any:
        import paddle

        return paddle.where(z_P > 0, z_P / penalty_P, z_P * penalty_P)

    def result(self) -> Any:
        return self._flat.reshape(self._shape)
