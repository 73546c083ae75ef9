"""Prompt files: JSONL lines or Parquet rows with a conversation, a text, or token ids, encoded for one model.

A file is looked through once before anything starts, so that what is wrong with it is said at once, and then read again
as its prompts are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from keptset.rollout.tokenizer import Tokenizer
from keptset.schemas.columns import EXTRA_PREFIX
from keptset.schemas.errors import InvalidInput, StorageError

KINDS = ("messages", "text", "token_ids")
"""Where a prompt stands, by what it is."""
_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for the model."""

    prompt_id: str
    """The file's, or the line number where it gives none."""
    token_ids: npt.NDArray[np.int32]
    extra: Mapping[str, object] = field(default_factory=dict)
    """The file's own columns, names beginning with x_."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One prompt as it stands in the file."""

    where: str
    """For people: file and line."""
    prompt_id: str
    kind: str
    """One of KINDS."""
    value: Any
    extra: Mapping[str, object]

    def encode(self, tokenizer: Tokenizer | None) -> Prompt:
        """The prompt for this model. Errors: InvalidInput naming file and line where it cannot be encoded."""
        try:
            token_ids = _encode(self.kind, self.value, tokenizer)
        except (InvalidInput, ValueError, OverflowError, TypeError) as error:
            raise InvalidInput(f"{self.where}: {error}") from error
        if not len(token_ids):
            raise InvalidInput(f"{self.where}: the prompt is empty; a response needs at least one token before it")
        return Prompt(prompt_id=self.prompt_id, token_ids=token_ids, extra=self.extra)


class PromptFile:
    """A file that was looked through: `prompt_ids` in order, and the Arrow types of the file's own columns."""

    def __init__(self, path: Path, *, prompt_column: str | None = None, id_column: str = "prompt_id") -> None:
        """`prompt_column` holds the prompts, whichever of the kinds they are; None: columns named as the kinds.

        Errors: StorageError for a file that cannot be read; InvalidInput naming the line of what cannot be used and of
        an id that occurs twice, or where there is no prompt.
        """
        self.path, self._prompt_column, self._id_column = path, prompt_column, id_column
        seen: dict[str, None] = {}
        types: dict[str, pa.DataType] = {}
        for entry in self.entries():
            if entry.prompt_id in seen:
                raise InvalidInput(
                    f"{entry.where}: {id_column} {entry.prompt_id!r} occurs twice; ids must be unique within a file"
                )
            seen[entry.prompt_id] = None
            for name, value in entry.extra.items():
                types[name] = _common(entry.where, name, types.get(name), value)
        if not seen:
            raise InvalidInput(f"{path} holds no prompt")
        self.prompt_ids = list(seen)
        self.extra_types = types

    def entries(self) -> Iterator[Entry]:
        """The prompts in order, not yet encoded. Errors: as the constructor's."""
        rows = _parquet_rows(self.path) if self.path.suffix == ".parquet" else _json_rows(self.path)
        for where, number, row in rows:
            yield self._entry(where, number, row)

    def _entry(self, where: str, number: int, row: dict[str, Any]) -> Entry:
        if self._prompt_column is not None:
            value = row.get(self._prompt_column)
            kind = _kind_of(value)
            if kind is None:
                raise InvalidInput(
                    f"{where}: {self._prompt_column} holds neither messages nor text nor token ids; the columns are "
                    f"{', '.join(row)}"
                )
        else:
            given = [name for name in KINDS if row.get(name) is not None]
            if len(given) != 1:
                raise InvalidInput(
                    f"{where}: needs exactly one of messages, text, token_ids; it has {', '.join(given) or 'none'}"
                )
            kind, value = given[0], row[given[0]]
        prompt_id = row.get(self._id_column)
        return Entry(
            where=where,
            prompt_id=str(number if prompt_id is None else prompt_id),
            kind=kind,
            value=value,
            extra={name: value for name, value in row.items() if name.startswith(EXTRA_PREFIX)},
        )


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """All prompts of a file, encoded.

    Conversations go through the model's chat template; a model without one gets the contents as plain text.
    Errors: as `PromptFile` and `Entry.encode`.
    """
    return [entry.encode(tokenizer) for entry in PromptFile(path).entries()]


def _json_rows(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise StorageError(f"{where} is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise InvalidInput(f"{where} must hold an object with messages, text or token_ids")
                yield where, number, row
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"prompt file {path} cannot be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", number, row
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"prompt file {path} cannot be read as Parquet: {error}") from error


def _kind_of(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and value:
        return "messages" if isinstance(value[0], dict) else "token_ids"
    return None


def _common(where: str, name: str, known: pa.DataType | None, value: object) -> pa.DataType:
    """The type that holds this value and those before it."""
    try:
        found = pa.array([value]).type
        if known is None or known == found:
            return found
        schemas = [pa.schema([(name, kind)]) for kind in (known, found)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise InvalidInput(f"{where}: {name} does not fit the lines before it: {error}") from error


def _encode(kind: str, value: Any, tokenizer: Tokenizer | None) -> npt.NDArray[np.int32]:
    if kind == "token_ids":
        ids = np.asarray(value)
        if isinstance(value, list) and any(isinstance(token_id, bool) for token_id in value):
            raise InvalidInput("token_ids hold true or false; they must be whole numbers")
        if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            raise InvalidInput(
                f"token_ids must be one row of whole numbers, not {ids.dtype} of shape {list(ids.shape)}"
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
            raise InvalidInput(f"token_ids reach from {ids.min()} to {ids.max()}; no vocabulary does")
        return ids.reshape(-1).astype(np.int32)
    if tokenizer is None:
        raise InvalidInput("the model's folder has no tokenizer.json, so prompts must be token_ids")
    if kind == "text":
        return tokenizer.encode(value)
    if tokenizer.template is not None:
        return tokenizer.encode_chat(value)
    return tokenizer.encode("\n\n".join(str(message.get("content", "")) for message in value))
