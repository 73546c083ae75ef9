"""RolloutBatch: a typed view of one Arrow record batch of responses. It reads; it never repairs.

Legend: B responses, T tokens over all responses, N kept ids over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keptset.schemas.columns import BY_NAME, Identity
from keptset.schemas.conform import conform, one_chunk
from keptset.schemas.errors import SchemaError
from keptset.schemas.ragged import NestedRagged, Ragged

MAX_ITEMS = 2**31 - 1
"""Arrow list offsets are int32: a batch cannot hold more tokens or kept ids than this."""

COMPACT_ENOUGH = 1.1
"""Memory held per byte of the rows up to which `compact` has nothing to do."""
COMPACT_SLACK = 4096
"""Bytes beside that for padding, of which a hundred small buffers have a few each."""


class RolloutBatch:
    """Responses with everything recorded about them, as one Arrow record batch.

    Columns of numbers per token read as `Ragged` (B lists, T items), columns of sets as `NestedRagged`; both are None
    where every row is null. Lifetime: the NumPy views borrow the Arrow buffers and keep them alive; buffers that come
    from an object store or a mapped file are read-only.
    """

    def __init__(self, arrow: pa.RecordBatch, identity: Identity) -> None:
        """Internal: use `from_arrow`, which checks and casts."""
        self.arrow = arrow
        self.identity = identity

    @classmethod
    def from_arrow(cls, data: pa.RecordBatch | pa.Table) -> RolloutBatch:
        """View of Arrow data. Errors: SchemaError where it is not schema version 1 and cannot be cast to it.

        Types are checked, values are not: `keptset.validate` does that.
        """
        arrow = conform(data)
        return cls(arrow, Identity.from_metadata(arrow.schema.metadata))

    @property
    def num_responses(self) -> int:
        return int(self.arrow.num_rows)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens over all responses, T."""
        ragged = self.token_ids
        return int(ragged.offsets[-1])

    @cached_property
    def num_kept_ids(self) -> int:
        """Kept ids over all tokens, N."""
        return 0 if self.kept_ids is None else int(self.kept_ids.inner.offsets[-1])

    def column(self, name: str) -> pa.Array:
        """One column as Arrow. Errors: SchemaError for a name that is not there."""
        index = self.arrow.schema.get_field_index(name)
        if index < 0:
            raise SchemaError(f"no column {name!r}; there are {', '.join(self.arrow.schema.names)}")
        return self.arrow.column(index)

    @property
    def extra_columns(self) -> list[str]:
        """Names of the columns beyond the schema, the caller's own."""
        return [name for name in self.arrow.schema.names if name not in BY_NAME]

    def _ragged(self, name: str) -> Ragged | None:
        array = self.column(name)
        return None if array.null_count == len(array) and len(array) else Ragged.from_arrow(array)

    def _nested(self, name: str) -> NestedRagged | None:
        array = self.column(name)
        return None if array.null_count == len(array) and len(array) else NestedRagged.from_arrow(array)

    @cached_property
    def rollout_ids(self) -> list[str]:
        ids: list[str] = self.column("rollout_id").to_pylist()
        return ids

    @cached_property
    def token_ids(self) -> Ragged:
        """The response tokens, int32."""
        return Ragged.from_arrow(self.column("token_ids"))

    @cached_property
    def sampled(self) -> Ragged:
        """Which of them the policy drew."""
        return Ragged.from_arrow(self.column("sampled"))

    @cached_property
    def prompt_token_ids(self) -> Ragged | None:
        return self._ragged("prompt_token_ids")

    @cached_property
    def trainable(self) -> Ragged | None:
        """The caller's loss mask; None or a null row: as `sampled`."""
        return self._ragged("trainable")

    @cached_property
    def behavior_logprobs(self) -> Ragged | None:
        """b, float32, nats."""
        return self._ragged("behavior_logprobs")

    @cached_property
    def full_logprobs(self) -> Ragged | None:
        return self._ragged("full_logprobs")

    @cached_property
    def log_kept_mass(self) -> Ragged | None:
        """m, float32, nats."""
        return self._ragged("log_kept_mass")

    @cached_property
    def kept_entropy(self) -> Ragged | None:
        return self._ragged("kept_entropy")

    @cached_property
    def kept_logprob_var(self) -> Ragged | None:
        return self._ragged("kept_logprob_var")

    @cached_property
    def policy_versions(self) -> Ragged | None:
        return self._ragged("policy_versions")

    @cached_property
    def kept_ids(self) -> NestedRagged | None:
        """The kept sets; a row is null unless its support is `kept`."""
        return self._nested("kept_ids")

    @cached_property
    def kept_logprobs(self) -> NestedRagged | None:
        return self._nested("kept_logprobs")

    @cached_property
    def top_ids(self) -> NestedRagged | None:
        return self._nested("top_ids")

    @cached_property
    def top_logprobs(self) -> NestedRagged | None:
        return self._nested("top_logprobs")

    def _with(self, arrow: pa.RecordBatch) -> RolloutBatch:
        return RolloutBatch(arrow, self.identity)

    def slice(self, offset: int, length: int | None = None) -> RolloutBatch:
        """Rows [offset, offset + length), without a copy."""
        return self._with(self.arrow.slice(offset, length))

    def take(self, indices: npt.ArrayLike) -> RolloutBatch:
        """Rows by index, copied."""
        return self._with(self.arrow.take(pa.array(np.asarray(indices, np.int64))))

    def filter(self, mask: npt.ArrayLike) -> RolloutBatch:
        """Rows where `mask` [B] is True, copied."""
        return self._with(self.arrow.filter(pa.array(np.asarray(mask, bool))))

    def compact(self) -> RolloutBatch:
        """The same rows in memory of their own size: a slice otherwise drags its parent's buffers along.

        Without a copy where there is next to nothing to drop.
        """
        if self.arrow.get_total_buffer_size() <= COMPACT_ENOUGH * self.arrow.nbytes + COMPACT_SLACK:
            return self
        if not self.num_responses:  # Arrow would write the parent's tokens along
            return self.take(np.zeros(0, np.int64))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.arrow.schema) as writer:
            writer.write_batch(self.arrow)
        with pa.ipc.open_stream(sink.getvalue()) as reader:
            return self._with(reader.read_next_batch())

    def __len__(self) -> int:
        return self.num_responses

    def __reduce__(self) -> tuple[type[RolloutBatch], tuple[pa.RecordBatch, Identity]]:
        # Neither a slice's parent nor the views already made shall travel along.
        return RolloutBatch, (self.compact().arrow, self.identity)

    def __repr__(self) -> str:
        return f"RolloutBatch({self.num_responses} responses, {self.num_tokens} tokens, {self.num_kept_ids} kept ids)"


def concat_batches(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Join batches of equal identity and equal columns.

    Errors: SchemaError naming what differs (Arrow itself would silently keep the first batch's metadata), or where
    the joined lists or texts would overflow Arrow's 32-bit offsets.
    """
    if not batches:
        raise SchemaError("nothing to join: concat_batches needs at least one batch")
    first = batches[0]
    for number, batch in enumerate(batches[1:], start=1):
        if batch.identity != first.identity:
            ours, theirs = first.identity.to_metadata(), batch.identity.to_metadata()
            differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            told = ", ".join(
                f"{key.decode()}: {_shown(ours.get(key))} and {_shown(theirs.get(key))}" for key in differing
            )
            raise SchemaError(f"batches 0 and {number} have different identities ({told}); keep them apart")
        if not batch.arrow.schema.equals(first.arrow.schema):
            raise SchemaError(
                f"batches 0 and {number} have different columns of the caller's own: "
                f"{first.extra_columns} and {batch.extra_columns}, or other types of them"
            )
    tokens, kept = (sum(getattr(batch, name) for batch in batches) for name in ("num_tokens", "num_kept_ids"))
    if max(tokens, kept) > MAX_ITEMS:
        raise SchemaError(
            f"joined batch would hold {tokens} tokens and {kept} kept ids, more than {MAX_ITEMS}; join fewer"
        )
    arrow = [batch.arrow for batch in batches]
    columns = [
        one_chunk(name, pa.chunked_array([batch.column(number) for batch in arrow]))
        for number, name in enumerate(first.arrow.schema.names)
    ]
    return RolloutBatch(pa.RecordBatch.from_arrays(columns, schema=first.arrow.schema), first.identity)


def _shown(value: bytes | None) -> str:
    return "unknown" if value is None else value.decode()
