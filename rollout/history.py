"""History: which ids a request has seen, kept up to date token by token.

Penalties need the distinct ids of prompt and response at every step; counting them anew would make a step cost as much
as the response is long.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class History:
    """Distinct ids of prompt and response, and how often the response holds each.

    >>> history = History([5, 3, 5])
    >>> history.append(3), history.append(7), history.append(7)
    (None, None, None)
    >>> sorted(history.seen.tolist()), dict(zip(history.drawn.tolist(), history.counts.tolist())), history.length
    ([3, 5, 7], {3: 1, 7: 2}, 3)
    """

    def __init__(self, prompt_ids: npt.ArrayLike) -> None:
        prompt = np.unique(np.asarray(prompt_ids, np.int64))
        self._in_prompt = set(prompt.tolist())
        self._seen = prompt
        self._seen_used = len(prompt)
        self._slot: dict[int, int] = {}
        self._drawn = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._recent = np.asarray(prompt_ids, np.int64).tolist()
        self.length = 0
        """Tokens of the response so far."""

    @property
    def seen(self) -> Ids:
        """Distinct ids of prompt and response, in no particular order. A view, valid until the next `append`."""
        return self._seen[: self._seen_used]

    @property
    def drawn(self) -> Ids:
        """Distinct ids of the response, in order of first occurrence. A view, valid until the next `append`."""
        return self._drawn[: len(self._slot)]

    @property
    def counts(self) -> Ids:
        """How often the response holds each id of `drawn`. A view, valid until the next `append`."""
        return self._counts[: len(self._slot)]

    def ends_with(self, ids: tuple[int, ...]) -> bool:
        """Whether prompt + response end with these ids, in order."""
        return not ids or tuple(self._recent[-len(ids) :]) == ids

    def append(self, token_id: int) -> None:
        """One more token of the response."""
        self.length += 1
        self._recent.append(token_id)
        slot = self._slot.get(token_id)
        if slot is not None:
            self._counts[slot] += 1
            return
        slot = self._slot[token_id] = len(self._slot)
        self._drawn, self._counts = _with_room(self._drawn, slot), _with_room(self._counts, slot)
        self._drawn[slot], self._counts[slot] = token_id, 1
        if token_id not in self._in_prompt:
            self._seen = _with_room(self._seen, self._seen_used)
            self._seen[self._seen_used] = token_id
            self._seen_used += 1


def _with_room(array: Ids, used: int) -> Ids:
    """The array, or a copy twice as long where all of it is used."""
    return array if used < len(array) else np.concatenate([array, np.zeros(max(16, len(array)), np.int64)])
