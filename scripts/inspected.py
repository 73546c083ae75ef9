"""One recorded response, found in files and read as it stands: also one whose columns do not fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keptset.schemas.errors import InvalidInput
from keptset.schemas.findings import Finding
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.validation import validate
from keptset.trainer_bridge.audit.reading.files import Part, read, scan
from keptset.trainer_bridge.audit.reading.inputs import InputFile, find_inputs
from keptset.trainer_bridge.audit.settings import setting_names

if TYPE_CHECKING:
    from keptset.rollout.tokenizer import Tokenizer

MEMBERS_SHOWN = 10
"""Members of each kept set, where not one token alone is asked for."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member of a kept set."""

    token_id: int
    text: str | None
    logprob: float | None
    """Where the kept distribution is recorded."""


@dataclass(frozen=True, kw_only=True)
class InspectedToken:
    """What is recorded about a token; None where nothing is."""

    position: int
    token_id: int | None
    text: str | None
    sampled: bool | None
    behavior_logprob: float | None
    log_kept_mass: float | None
    entropy: float | None
    version: int | None
    kept_size: int | None
    kept: tuple[Member, ...]
    """The first members of K: by probability where the distribution is recorded, else by id."""


@dataclass(frozen=True, kw_only=True)
class InspectedResponse:
    """A response with everything recorded about it."""

    file: str
    row: int
    """Over all files, in the order in which they are read."""
    others: tuple[int, ...]
    """Further rows with the same rollout_id."""
    rollout_id: str
    setting: str
    facts: dict[str, Any]
    """Every other recorded value about the whole response."""
    identity: dict[str, str]
    findings: tuple[Finding, ...]
    """What validation says of this response by itself."""
    prompt_token_ids: tuple[int | None, ...] | None
    prompt_text: str | None
    """Decoded; None without a tokenizer."""
    tokens: tuple[InspectedToken, ...]


@dataclass(frozen=True, kw_only=True)
class _Place:
    file: InputFile
    part: Part
    row: int
    """In the part."""
    number: int
    """Over all files."""


def find_response(
    paths: Sequence[str | Path],
    *,
    rollout_id: str | None = None,
    row: int | None = None,
    tokenizer: Tokenizer | None = None,
    members: int | None = MEMBERS_SHOWN,
    unguarded: bool = False,
) -> InspectedResponse:
    """The response with this rollout_id, or in this row; of several with one id, the first.

    `members` of each kept set are read out, None: all. Errors: InvalidInput where there is none; StorageError,
    DamagedFile or SchemaError for files that cannot be read.
    """
    if (rollout_id is None) == (row is None):
        raise InvalidInput("name one response: --rollout-id ID, or --row N")
    places = _places(paths, rollout_id, row, unguarded)
    found = next(places, None)
    if found is None:
        raise InvalidInput(
            f"no response has rollout_id {rollout_id!r}; ids are compared letter by letter"
            if row is None
            else f"there is no row {row}; rows count from 0 over all files"
        )
    others = () if row is not None else tuple(place.number for place in places)
    part = found.part
    (batch,) = read(found.file, part.number, part.number + 1, start=part.start, unguarded=unguarded)
    response = _response(batch.slice(found.row, 1), found, others, members)
    return response if tokenizer is None else decoded(response, tokenizer)


def decoded(response: InspectedResponse, tokenizer: Tokenizer) -> InspectedResponse:
    """The response with its text."""
    ids = {i for token in response.tokens for i in (token.token_id, *(member.token_id for member in token.kept))}
    known = sorted(i for i in ids if i is not None and i >= 0)
    texts: dict[int | None, str] = dict(zip(known, tokenizer.decode_tokens(known), strict=True))
    prompt = response.prompt_token_ids
    return replace(
        response,
        prompt_text=None if prompt is None else tokenizer.decode([i for i in prompt if i is not None and i >= 0]),
        tokens=tuple(
            replace(
                token,
                text=texts.get(token.token_id),
                kept=tuple(replace(member, text=texts.get(member.token_id)) for member in token.kept),
            )
            for token in response.tokens
        ),
    )


def _places(paths: Sequence[str | Path], rollout_id: str | None, row: int | None, unguarded: bool) -> Iterator[_Place]:
    before = 0
    for file in find_inputs(paths):
        for part in scan(file, ["rollout_id"], unguarded=unguarded):
            if row is not None:
                rows = [row - before] if before <= row < before + part.rows else []
            else:
                equal = pc.equal(part.columns.column("rollout_id"), pa.scalar(rollout_id))
                rows = np.flatnonzero(pc.fill_null(equal, False).to_numpy(zero_copy_only=False)).tolist()
            for inside in rows:
                yield _Place(file=file, part=part, row=inside, number=before + inside)
            before += part.rows


_PER_TOKEN = {
    "behavior_logprob": "behavior_logprobs",
    "log_kept_mass": "log_kept_mass",
    "entropy": "kept_entropy",
    "version": "policy_versions",
    "sampled": "sampled",
}
"""Field of a token -> its column."""
_NOT_FACTS = {"rollout_id", "prompt_token_ids", "token_ids", "kept_ids", "kept_logprobs", *_PER_TOKEN.values()}


def _response(one: RolloutBatch, place: _Place, others: tuple[int, ...], members: int | None) -> InspectedResponse:
    values: dict[str, Any] = one.arrow.to_pylist()[0]
    facts = {name: value for name, value in values.items() if name not in _NOT_FACTS}
    prompt = values["prompt_token_ids"]
    return InspectedResponse(
        file=place.file.shown,
        row=place.number,
        others=others,
        rollout_id=values["rollout_id"],
        setting=setting_names(one)[0],
        facts={name: value for name, value in facts.items() if value is not None and not isinstance(value, list)},
        identity={name: str(value) for name, value in vars(one.identity).items() if value is not None},
        findings=tuple(validate(one)),
        prompt_token_ids=None if prompt is None else tuple(prompt),
        prompt_text=None,
        tokens=tuple(_token(values, position, members) for position in range(len(values["token_ids"] or ()))),
    )


def _token(values: dict[str, Any], position: int, members: int | None) -> InspectedToken:
    kept, logprobs = (_at(values[name], position) for name in ("kept_ids", "kept_logprobs"))
    return InspectedToken(
        position=position,
        token_id=values["token_ids"][position],
        text=None,
        kept_size=None if kept is None else len(kept),
        kept=_members(kept or [], logprobs, members),
        **{field: _at(values[column], position) for field, column in _PER_TOKEN.items()},
    )


def _at(column: list[Any] | None, position: int) -> Any:
    """An entry of a column that may be missing, or shorter than the response."""
    return column[position] if column is not None and position < len(column) else None


def _members(ids: list[Any], logprobs: list[Any] | None, count: int | None) -> tuple[Member, ...]:
    if logprobs is None or len(logprobs) != len(ids):
        pairs = [(i, None) for i in ids]
    else:
        pairs = sorted(zip(ids, logprobs, strict=True), key=lambda pair: -np.inf if pair[1] is None else -pair[1])
    return tuple(Member(token_id=i, text=None, logprob=p) for i, p in pairs[:count] if i is not None)
