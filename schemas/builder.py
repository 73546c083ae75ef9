"""Responses become a RolloutBatch: arrays in, Arrow out, no Python object per token.

Legend: T tokens of one response, N kept ids of one response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keptset.schemas.columns import (
    BY_NAME,
    COLUMNS,
    EXTRA_PREFIX,
    SET_COLUMNS,
    TOKEN_COLUMNS,
    TOKEN_MASKS,
    WORDS,
    Identity,
    arrow_schema,
    words,
)
from keptset.schemas.errors import InvalidInput, ViolationError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity
from keptset.schemas.ragged import NestedRagged, Ragged, offsets_of
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import KnownParams, SamplingParams, is_whole

MAX_KEPT_IDS = 2**24
"""Batches are cut here, so that some hundred of them can still be joined under 32-bit offsets."""

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response as a producer hands it over. Arrays are of this response alone; None means unknown."""

    rollout_id: str
    prompt_id: str
    token_ids: Array
    """int [T]."""
    finish_reason: str
    group_id: str | None = None
    sample_index: int = 0
    prompt_token_ids: Array | None = None
    sampled: Array | None = None
    """bool [T]; None: every token was drawn by the policy."""
    trainable: Array | None = None
    """bool [T]; None: as sampled."""
    behavior_logprobs: Array | None = None
    """float [T]; entries of tokens that were not sampled are ignored, here and in every column below. Entries that a
    NumPy mask hides are unknown: they become null, in every per-token column of floats."""
    logprob_domain: str = "kept"
    full_logprobs: Array | None = None
    log_kept_mass: Array | None = None
    kept_entropy: Array | None = None
    kept_logprob_var: Array | None = None
    support: str = "kept"
    kept_offsets: Array | None = None
    """int [T + 1]: token t's set is kept_ids[kept_offsets[t] : kept_offsets[t + 1]]."""
    kept_ids: Array | None = None
    """int [N]."""
    kept_logprobs: Array | None = None
    """float [N]; the whole kept distribution."""
    top_offsets: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    policy_versions: Array | None = None
    """int [T]; negative where unknown."""
    kv_policy: str | None = "none"
    error: str | None = None
    params: SamplingParams | KnownParams | None = None
    """None: no setting is known."""
    seed: int | None = None
    sampler_extras: str | None = None
    """Canonical JSON; None: made from `params`."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """The caller's own columns, names beginning with x_."""


_SETTINGS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "top_k",
)


class BatchBuilder:
    """Collects responses of one identity.

    >>> builder = BatchBuilder(Identity(vocab_size=8, engine="example"))
    >>> builder.add(Response(rollout_id="r", prompt_id="p", token_ids=np.array([3]), finish_reason="stop",
    ...     behavior_logprobs=np.array([-0.5]), kept_offsets=np.array([0, 2]), kept_ids=np.array([1, 3])))
    >>> builder.build()
    RolloutBatch(1 responses, 1 tokens, 2 kept ids)
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._responses: list[Response] = []

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, response: Response) -> None:
        """Take one response.

        Errors: ViolationError (kind `lengths`) where per-token columns differ in length; InvalidInput where a column
        of the caller's own is not named x_..., or a word is none of those its column may hold. Values that do not fit
        their column are found when the batch is built.
        """
        _check_lengths(response)
        for name in WORDS:
            word = getattr(response, name)
            if word not in words(name) and not (word is None and not BY_NAME[name].required):
                allowed = ", ".join(words(name))
                raise InvalidInput(f"{response.rollout_id}: {name} is {word!r}; it must be one of {allowed}")
        strange = [name for name in response.extra if not name.startswith(EXTRA_PREFIX)]
        if strange:
            raise InvalidInput(
                f"{response.rollout_id}: own columns must begin with {EXTRA_PREFIX}: {', '.join(strange)}"
            )
        self._responses.append(response)

    def build_batches(self) -> list[RolloutBatch]:
        """Everything added, in order, cut at MAX_KEPT_IDS (one larger response stays whole). Empties the builder.

        Errors: InvalidInput where a value does not fit its column.
        """
        parts: list[list[Response]] = [[]]
        held = 0
        for response in self._responses:
            size = 0 if response.kept_ids is None else len(response.kept_ids)
            if parts[-1] and held + size > MAX_KEPT_IDS:
                parts.append([])
                held = 0
            parts[-1].append(response)
            held += size
        batches = [self._build(part) for part in parts if part]
        self._responses = []
        return batches

    def build(self) -> RolloutBatch:
        """Everything added as one batch. Empties the builder.

        Errors: InvalidInput where it must be cut, or where a value does not fit its column.
        """
        total = sum(0 if r.kept_ids is None else len(r.kept_ids) for r in self._responses)
        if total > MAX_KEPT_IDS and len(self._responses) > 1:
            raise InvalidInput(f"{total} kept ids are too many for one batch ({MAX_KEPT_IDS}); use build_batches")
        batch = self._build(self._responses)
        self._responses = []
        return batch

    def _build(self, responses: list[Response]) -> RolloutBatch:
        makers = dict(_COLUMN_MAKERS)
        makers |= {name: _extra for response in responses for name in response.extra}
        arrays = {name: _make(maker, responses, name) for name, maker in makers.items()}
        extra = [pa.field(name, array.type) for name, array in arrays.items() if name not in BY_NAME]
        schema = arrow_schema(self.identity, extra)
        return RolloutBatch(pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema), self.identity)


Maker = Callable[[list[Response], str], pa.Array]
_MISFITS = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError)


def _make(maker: Maker, responses: list[Response], name: str) -> pa.Array:
    """One column. Errors: InvalidInput naming the column, and the response whose value does not fit."""
    try:
        return maker(responses, name)
    except _MISFITS as error:
        for response in responses:
            try:
                maker([response], name)
            except _MISFITS as alone:
                raise InvalidInput(f"{response.rollout_id}: a value does not fit column {name}: {alone}") from alone
        raise InvalidInput(f"values of column {name} do not fit together: {error}") from error


def _check_lengths(response: Response) -> None:
    expected = len(response.token_ids)
    lengths = {name: len(value) for name in TOKEN_COLUMNS if (value := getattr(response, name)) is not None}
    for name, items in (("kept", ("kept_ids", "kept_logprobs")), ("top", ("top_ids", "top_logprobs"))):
        offsets = getattr(response, f"{name}_offsets")
        present = {item: len(value) for item in items if (value := getattr(response, item)) is not None}
        if offsets is None:
            if present:
                raise InvalidInput(f"{response.rollout_id}: {', '.join(present)} given without {name}_offsets")
            continue
        lengths[f"{name}_offsets (less one)"] = len(offsets) - 1
        off = {item: length for item, length in present.items() if length != offsets[-1]}
        if off or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
            raise InvalidInput(
                f"{response.rollout_id}: {name}_offsets must ascend from 0 to the number of ids; they run from "
                f"{offsets[0]} to {offsets[-1]} over {present}"
            )
    wrong = {name: length for name, length in lengths.items() if length != expected}
    if wrong:
        told = ", ".join(f"{name} has {length}" for name, length in wrong.items())
        example = Example(rollout_id=response.rollout_id, position=None, detail=f"{expected} tokens, but {told}")
        finding = Finding(kind=FindingKind.LENGTHS, severity=Severity.ERROR, count=1, responses=1, examples=(example,))
        raise ViolationError(
            f"{response.rollout_id}: {example.detail}; every column needs one entry per token", (finding,)
        )


def _sampled(response: Response) -> npt.NDArray[np.bool_]:
    if response.sampled is None:
        return np.ones(len(response.token_ids), bool)
    return np.asarray(response.sampled, bool)


def _concatenate(arrays: list[Array]) -> Array:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def _per_token(responses: list[Response], name: str) -> pa.Array:
    item = BY_NAME[name].type.value_type
    given = [getattr(response, name) for response in responses]
    if name == "sampled":
        given = [_sampled(response) for response in responses]
    row_valid = np.array([value is not None for value in given], bool)
    present = [np.asarray(value) for value in given if value is not None]
    offsets = offsets_of([0 if value is None else len(value) for value in given])
    valid = None
    if name in TOKEN_COLUMNS and name not in TOKEN_MASKS and present:
        valid = np.concatenate(
            [_sampled(response) for response, value in zip(responses, given, strict=True) if value is not None]
        )
        if name == "policy_versions":
            valid &= np.concatenate(present) >= 0
        elif any(isinstance(value, np.ma.MaskedArray) for value in given):
            valid &= ~np.concatenate([np.ma.getmaskarray(value) for value in given if value is not None])
    return Ragged(offsets, _concatenate(present), valid, row_valid).to_arrow(item)


def _per_kept(responses: list[Response], name: str) -> pa.Array:
    item = BY_NAME[name].type.value_type.value_type
    prefix = name.split("_")[0]
    given = [getattr(response, name) for response in responses]
    if prefix == "kept":
        given = [
            value if response.support == "kept" else None for response, value in zip(responses, given, strict=True)
        ]
    rows = [(response, value) for response, value in zip(responses, given, strict=True) if value is not None]
    row_offsets = offsets_of(
        [0 if value is None else len(r.token_ids) for r, value in zip(responses, given, strict=True)]
    )
    token_lengths = [np.diff(getattr(response, f"{prefix}_offsets")) for response, _ in rows]
    token_valid = np.concatenate([_sampled(response) for response, _ in rows]) if rows else np.zeros(0, bool)
    inner = Ragged(
        offsets_of(_concatenate(token_lengths)), _concatenate([np.asarray(v) for _, v in rows]), None, token_valid
    )
    row_valid = np.array([value is not None for value in given], bool)
    return NestedRagged(row_offsets, inner, row_valid).to_arrow(item)


def _scalar(responses: list[Response], name: str) -> pa.Array:
    return _one_each(responses, name, [getattr(response, name) for response in responses])


def _setting(responses: list[Response], name: str) -> pa.Array:
    return _one_each(
        responses, name, [None if response.params is None else getattr(response.params, name) for response in responses]
    )


def _one_each(responses: list[Response], name: str, values: list[object]) -> pa.Array:
    """A column with one value a response. Arrow would cut 2.5 down to 2; here that is an error."""
    kind = BY_NAME[name].type
    if pa.types.is_integer(kind):
        for response, value in zip(responses, values, strict=True):
            if value is not None and not is_whole(value):
                raise InvalidInput(f"{response.rollout_id}: {name} is {value!r}; it must be a whole number")
    return pa.array(values, kind)


def _logit_bias(responses: list[Response], name: str) -> pa.Array:
    known = [None if r.params is None else r.params.logit_bias for r in responses]
    values = [None if bias is None else sorted(bias.items()) for bias in known]
    return pa.array(values, BY_NAME[name].type)


def _extras(responses: list[Response], name: str) -> pa.Array:
    values = [
        canonical_extras(r.params)
        if r.sampler_extras is None and isinstance(r.params, SamplingParams)
        else r.sampler_extras
        for r in responses
    ]
    return pa.array(values, pa.string())


def canonical_extras(params: SamplingParams) -> str | None:
    """The rare settings as canonical JSON; None where all are at their defaults.

    >>> canonical_extras(SamplingParams(stop_token_ids=(2,), min_new_tokens=1))
    '{"min_new_tokens":1,"stop_token_ids":[2]}'
    """
    rare: dict[str, object] = {}
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(params, name)
        if ids:
            rare[name] = sorted(ids)
    if params.banned_words:
        rare["banned_words"] = sorted(map(list, params.banned_words))
    if params.stop_strings:
        rare["stop_strings"] = sorted(params.stop_strings)
    for name in ("min_new_tokens", "draft_tokens"):
        if getattr(params, name):
            rare[name] = getattr(params, name)
    return json.dumps(rare, sort_keys=True, separators=(",", ":")) if rare else None


def _prompts(responses: list[Response], name: str) -> pa.Array:
    given = [response.prompt_token_ids for response in responses]
    offsets = offsets_of([0 if value is None else len(value) for value in given])
    values = _concatenate([np.asarray(value) for value in given if value is not None])
    return Ragged(offsets, values, None, np.array([value is not None for value in given], bool)).to_arrow(pa.int32())


def _extra(responses: list[Response], name: str) -> pa.Array:
    return pa.array([response.extra.get(name) for response in responses])


_MAKERS: dict[str, Maker] = {
    **dict.fromkeys(("token_ids", *TOKEN_COLUMNS), _per_token),
    **dict.fromkeys(SET_COLUMNS, _per_kept),
    **dict.fromkeys(_SETTINGS, _setting),
    "prompt_token_ids": _prompts,
    "logit_bias": _logit_bias,
    "sampler_extras": _extras,
}
_COLUMN_MAKERS = {column.name: _MAKERS.get(column.name, _scalar) for column in COLUMNS}
