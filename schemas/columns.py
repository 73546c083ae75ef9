"""Arrow schema version 1: the columns of a rollout batch and the identity that travels in its metadata.

One row is one response. docs/schema is made from the descriptions below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

import pyarrow as pa

from keptset.schemas.errors import SchemaError

SCHEMA_VERSION = "1"

_TOKENS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())


class Support(str, Enum):
    """What the sampled tokens of a response were drawn from."""

    KEPT = "kept"
    FULL = "full"
    ABSENT = "absent"


class LogprobDomain(str, Enum):
    """What `behavior_logprobs` are normalised over."""

    KEPT = "kept"
    FULL = "full"
    RAW = "raw"
    UNKNOWN = "unknown"


class FinishReason(str, Enum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TOOL_CALLS = "tool_calls"
    UNKNOWN = "unknown"


class KvPolicy(str, Enum):
    """What became of the key-value cache when weights were updated during a response."""

    NONE = "none"
    KEPT = "kept"
    RECOMPUTED = "recomputed"


WORDS: dict[str, type[Enum]] = {
    "support": Support,
    "logprob_domain": LogprobDomain,
    "kv_policy": KvPolicy,
    "finish_reason": FinishReason,
}
"""Columns that hold one of a few words."""


def words(column: str) -> list[str]:
    """The words a column of WORDS may hold.

    >>> words("support")
    ['kept', 'full', 'absent']
    """
    return [member.value for member in WORDS[column]]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the schema."""

    name: str
    type: pa.DataType
    meaning: str
    required: bool = False


COLUMNS: tuple[Column, ...] = tuple(
    Column(name=name, type=kind, required=required, meaning=meaning)
    for name, kind, required, meaning in [
        ("rollout_id", pa.string(), True, "unique; the idempotency key"),
        ("prompt_id", pa.string(), True, "the caller's"),
        ("group_id", pa.string(), False, "rows of one prompt's group share it"),
        ("sample_index", pa.int32(), True, "index within the group"),
        ("prompt_token_ids", _TOKENS, False, "the prompt"),
        ("token_ids", _TOKENS, True, "the response"),
        ("sampled", pa.list_(pa.bool_()), True, "false: forced or injected, not drawn by the policy"),
        ("trainable", pa.list_(pa.bool_()), False, "the caller's loss mask; null: as sampled"),
        ("behavior_logprobs", _FLOATS, False, "b; item null where not sampled"),
        ("logprob_domain", pa.string(), True, "what b is over: kept, full, raw (before temperature), unknown"),
        ("full_logprobs", _FLOATS, False, "log-probability over the whole vocabulary, where an engine gives both"),
        ("log_kept_mass", _FLOATS, False, "m; item null where not sampled"),
        ("kept_entropy", _FLOATS, False, "H of the kept distribution, in nats"),
        ("kept_logprob_var", _FLOATS, False, "Var(log p) under the kept distribution"),
        ("support", pa.string(), True, "kept, full or absent, for the whole response"),
        (
            "kept_ids",
            pa.list_(_TOKENS),
            False,
            "the kept sets, ascending and unique, one per token; inner null where not sampled, "
            "outer null unless support is kept",
        ),
        (
            "kept_logprobs",
            pa.list_(_FLOATS),
            False,
            "the whole kept distribution, aligned with kept_ids; on a share of rows",
        ),
        ("top_ids", pa.list_(_TOKENS), False, "most probable ids, where asked for"),
        ("top_logprobs", pa.list_(_FLOATS), False, "their log-probabilities over the kept set; -inf outside it"),
        ("policy_versions", _TOKENS, False, "weights version per token; item null where not sampled or unknown"),
        ("kv_policy", pa.string(), False, "none (no update in flight), kept, recomputed"),
        ("finish_reason", pa.string(), True, "stop, length, abort, error, tool_calls, unknown"),
        ("error", pa.string(), False, "what went wrong, where finish_reason is error"),
        ("temperature", pa.float64(), False, "as asked; 0 is greedy"),
        ("top_p", pa.float64(), False, "as asked; 1 is off"),
        ("min_p", pa.float64(), False, "as asked; 0 is off"),
        ("repetition_penalty", pa.float64(), False, "as asked; 1 is off"),
        ("frequency_penalty", pa.float64(), False, "as asked; 0 is off"),
        ("presence_penalty", pa.float64(), False, "as asked; 0 is off"),
        ("top_k", pa.int32(), False, "as asked; 0 is off"),
        ("logit_bias", pa.map_(pa.int32(), pa.float32()), False, "as asked"),
        (
            "sampler_extras",
            pa.string(),
            False,
            "rare settings, canonical JSON: stop and banned tokens, minimum length, speculation",
        ),
        ("seed", pa.int64(), False, "row seed"),
    ]
)
BY_NAME = {column.name: column for column in COLUMNS}


def _lists_of(is_item: Callable[[pa.DataType], bool]) -> tuple[str, ...]:
    lists = (column for column in COLUMNS if pa.types.is_list(column.type) and is_item(column.type.value_type))
    return tuple(column.name for column in lists if column.name not in ("prompt_token_ids", "token_ids"))


SET_COLUMNS = _lists_of(pa.types.is_list)
"""Columns with one set for each of `token_ids`."""
TOKEN_COLUMNS = _lists_of(lambda item: not pa.types.is_list(item))
"""Columns with one value for each of `token_ids`."""
TOKEN_MASKS = _lists_of(pa.types.is_boolean)
"""Those of them that say yes or no, of every token; the others are null where a token was not sampled."""
EXTRA_PREFIX = "x_"
"""Columns of the caller's own begin so and are carried through untouched."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which model, tokenizer and engine made a batch. Batches are joined only where all of it is equal.

    >>> Identity(vocab_size=10, engine="keptset").to_metadata()[b"keptset.vocab_size"]
    b'10'
    """

    vocab_size: int | None = None
    """V; None where an engine does not tell: ids are then checked for sign only."""
    model_id: str | None = None
    """A name for people."""
    model_digest: str | None = None
    """sha256 of the canonical config.json, never of weights: those are known by their version."""
    tokenizer_digest: str | None = None
    """sha256 of tokenizer.json."""
    engine: str | None = None
    engine_version: str | None = None
    filter_order: str | None = None
    """Order in which the engine applies its filters, such as `temperature,min_p,top_k,top_p`."""
    processor_order: str | None = None
    """Order in which the engine applies value-changing processors."""
    logits_dtype: str | None = None

    def to_metadata(self) -> dict[bytes, bytes]:
        """Schema metadata; unknown entries are left out."""
        metadata = {b"keptset.schema_version": SCHEMA_VERSION.encode()}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                metadata[f"keptset.{field.name}".encode()] = str(value).encode()
        return metadata

    @classmethod
    def from_metadata(cls, metadata: dict[bytes, bytes] | None) -> Identity:
        """Read it back.

        Errors: SchemaError where the version is missing or not ours, or the vocabulary size is no number.
        """
        metadata = metadata or {}
        version = metadata.get(b"keptset.schema_version")
        if version is None:
            raise SchemaError(
                "schema metadata has no keptset.schema_version: this is not a keptset batch, or its metadata was lost "
                "on the way; use `keptset import` for an engine's own output"
            )
        if version != SCHEMA_VERSION.encode():
            raise SchemaError(
                f"batch has schema version {version.decode(errors='replace')}, "
                f"this keptset reads version {SCHEMA_VERSION}; use the keptset release that wrote it, or a newer one"
            )
        texts: dict[str, str] = {}
        for field in fields(cls):
            raw = metadata.get(f"keptset.{field.name}".encode())
            if raw is not None:
                try:
                    texts[field.name] = raw.decode()
                except UnicodeDecodeError as error:
                    raise SchemaError(f"schema metadata keptset.{field.name} is not UTF-8: {raw!r}") from error
        size = texts.pop("vocab_size", None)
        if size is not None and not (size.isascii() and size.isdigit() and len(size) < 20 and int(size) > 0):
            raise SchemaError(
                f"schema metadata keptset.vocab_size is {size!r}; it must be a positive whole number, or left out"
            )
        return cls(vocab_size=None if size is None else int(size), **texts)


def arrow_schema(identity: Identity, extra: list[pa.Field] | None = None) -> pa.Schema:
    """The Arrow schema of a batch with this identity and the caller's own columns behind the standard ones."""
    standard = [pa.field(column.name, column.type) for column in COLUMNS]
    return pa.schema(standard + (extra or []), identity.to_metadata())
