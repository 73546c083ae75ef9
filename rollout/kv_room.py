"""Key-value memory shared out to slots: who has a row of the cache, and who has to wait for one.

Memory is rows times positions per row. Under a bound of `kv_tokens` a long request therefore costs rows: where it needs
longer ones, the cache is laid out anew with fewer, as soon as few enough are taken. Requests are admitted in order, so
that a long one is waited for, not overtaken forever.
"""

from __future__ import annotations

from collections.abc import Sequence

from keptset.rollout.models import Decoder, KVCache
from keptset.rollout.models.kv_cache import whole_blocks
from keptset.schemas.errors import InvalidInput


class KvRoom:
    """Rows of one cache for up to `slots` sequences of at most `max_length` tokens."""

    def __init__(self, decoder: Decoder, *, slots: int, max_length: int, kv_tokens: int | None) -> None:
        """`kv_tokens`: positions that all rows together may have; None: no bound, and rows grow as sequences do."""
        self._decoder, self._slots, self._max_length, self._kv_tokens = decoder, slots, max_length, kv_tokens
        self._length: dict[int, int] = {}
        """Positions reserved for each slot that has a row."""
        self._row: dict[int, int] = {}
        self.cache: KVCache = decoder.new_cache(*self._shape(1))

    @property
    def reserved_tokens(self) -> int:
        """Positions promised to the slots that have a row."""
        return sum(self._length.values())

    def row(self, slot: int) -> int:
        """The slot's row of the cache."""
        return self._row[slot]

    def check(self, name: str, length: int) -> None:
        """Errors: InvalidInput where a sequence of `length` tokens could never have a row."""
        if self._kv_tokens is not None and whole_blocks(length) > self._kv_tokens:
            raise InvalidInput(
                f"prompt {name}: prompt and response may take {length} tokens, more than kv_tokens = "
                f"{self._kv_tokens}; lower max_new_tokens or raise kv_tokens"
            )

    def admit(self, slot: int, length: int) -> bool:
        """Give `slot` a row for `length` tokens; False where it has to wait until others leave."""
        rows, capacity = self._shape(max(length, *self._length.values(), 1))
        if len(self._row) >= rows:
            return False
        if rows < self.cache.slots or capacity > self.cache.capacity or len(self._row) == self.cache.slots:
            self._lay_out(rows, capacity)
        self._row[slot] = min(set(range(self.cache.slots)) - set(self._row.values()))
        self._length[slot] = length
        return True

    def release(self, slot: int, *, clear: bool) -> None:
        """The slot's sequence is over. `clear`: no draw has shown what it leaves behind to be finite."""
        if clear:
            self.clear([slot])
        del self._row[slot], self._length[slot]

    def clear(self, slots: Sequence[int]) -> None:
        """What these slots hold is worth nothing any more."""
        if slots:
            self.cache.clear([self._row[slot] for slot in slots])

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Give slots `targets` what slot `source` holds."""
        self.cache.copy_slot(self._row[source], [self._row[target] for target in targets])

    def _shape(self, longest: int) -> tuple[int, int]:
        """Rows, and positions a row may grow to, where the longest sequence has `longest` tokens."""
        if self._kv_tokens is None:
            return self._slots, self._max_length
        capacity = min(whole_blocks(longest), self._kv_tokens)
        return max(1, min(self._slots, self._kv_tokens // capacity)), capacity

    def _lay_out(self, rows: int, capacity: int) -> None:
        """A cache of another shape, holding what the present rows hold."""
        slots = sorted(self._row)
        fresh = self._decoder.new_cache(rows, capacity)
        fresh.take_over(self.cache, [self._row[slot] for slot in slots])
        self.cache, self._row = fresh, {slot: row for row, slot in enumerate(slots)}
