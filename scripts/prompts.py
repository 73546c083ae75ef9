"""Prompt files: JSONL lines with a conversation, a text, or token ids, encoded for one model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.rollout.tokenizer import Tokenizer
from keptset.schemas.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for the model."""

    prompt_id: str
    """The file's, or the line number where it gives none."""
    token_ids: npt.NDArray[np.int32]


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """All prompts of a JSONL file: objects with `messages`, `text` or `token_ids`, and `prompt_id` if they like.

    Conversations go through the model's chat template; a model without one gets the contents as plain text.
    Errors: InvalidInput naming file and line for what cannot be used, and for a prompt_id that occurs twice.
    """
    prompts: dict[str, Prompt] = {}
    for where, entry in _entries(path):
        prompt_id = str(entry.get("prompt_id", where.rpartition(" ")[2]))
        if prompt_id in prompts:
            raise InvalidInput(f"{where}: prompt_id {prompt_id!r} occurs twice; ids must be unique within a file")
        try:
            prompts[prompt_id] = Prompt(prompt_id=prompt_id, token_ids=_encode(entry, tokenizer))
        except (InvalidInput, ValueError, OverflowError) as error:
            raise InvalidInput(f"{where}: {error}") from error
    if not prompts:
        raise InvalidInput(f"{path} holds no prompt")
    return list(prompts.values())


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"prompt file {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInput(f"{where} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise InvalidInput(f"{where} must hold an object with messages, text or token_ids")
        yield where, entry


def _encode(entry: dict[str, Any], tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    given = [name for name in ("messages", "text", "token_ids") if name in entry]
    if len(given) != 1:
        raise InvalidInput(f"needs exactly one of messages, text, token_ids; it has {', '.join(given) or 'none'}")
    if given == ["token_ids"]:
        # NumPy 1 only warns where a number does not fit.
        wide = np.array(entry["token_ids"], np.int64)
        if (wide != wide.astype(np.int32)).any():
            raise InvalidInput(f"token_ids holds {wide[wide != wide.astype(np.int32)][0]}, which is no token id")
        return wide.astype(np.int32)
    if given == ["text"]:
        return tokenizer.encode(entry["text"])
    if tokenizer.template is not None:
        return tokenizer.encode_chat(entry["messages"])
    return tokenizer.encode("\n\n".join(str(message.get("content", "")) for message in entry["messages"]))
