"""A checkpoint's tokenizer: text and conversations to token ids, and ids back to text.

It reads what a Hugging Face folder holds: tokenizer.json (the rules), tokenizer_config.json (special
tokens, chat template) and the stop tokens of generation_config.json or config.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keptset.rollout import chat_template
from keptset.schemas.errors import CheckpointError, InvalidInput, MissingDependency

if TYPE_CHECKING:
    import tokenizers

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Made by `from_folder`."""

    digest: str
    """sha256 of tokenizer.json, in hexadecimal: the schema's tokenizer_digest."""
    vocab_size: int
    """Tokens the tokenizer knows; a model's logits may be wider."""
    stop_token_ids: tuple[int, ...]
    """Ids that end a response, ascending: the generation settings' and the tokenizer's own end token."""
    special_tokens: Mapping[str, str]
    """The text of bos_token, eos_token, unk_token and pad_token, as far as they are set."""
    template: str | None
    """The chat template, a Jinja program; None for a model without one."""
    backend: tokenizers.Tokenizer
    """The rules of tokenizer.json."""
    byte_level: bool
    """Whether tokens spell bytes in the byte-level alphabet (Llama 3, Qwen) or words with a visible space (Llama 2)."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads a checkpoint folder.

        Raises CheckpointError for a missing or unreadable file, MissingDependency without `tokenizers`.
        """
        try:
            import tokenizers
        except ImportError as missing:
            raise MissingDependency(
                "reading tokenizer.json needs the package 'tokenizers': pip install 'keptset[rollout]'"
            ) from missing
        folder = Path(folder)
        path = folder / "tokenizer.json"
        rules = _read_json(path)
        if rules is None:
            raise CheckpointError(
                f"{folder} has no tokenizer.json; a folder with another kind of tokenizer file can be saved anew "
                "with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        content = path.read_bytes()
        try:
            backend = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as broken:  # the library raises nothing narrower
            raise CheckpointError(f"{path} does not describe a tokenizer: {broken}") from broken
        # Some folders carry the lengths of a training run.
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json") or {}
        special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name))) is not None}
        return cls(
            digest=hashlib.sha256(content).hexdigest(),
            vocab_size=backend.get_vocab_size(),
            stop_token_ids=stop_token_ids(folder, backend.token_to_id(special.get("eos_token", ""))),
            special_tokens=special,
            template=chat_template.find(folder, config),
            backend=backend,
            byte_level=_mentions_byte_level(rules.get("decoder")),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids of plain text, int32 [T].

        With `add_special_tokens` the tokenizer adds what its own rules add around a text (Llama 3: the begin token).
        A special token spelled out in the text becomes that token. Raises InvalidInput for anything but valid text.
        """
        if not isinstance(text, str):
            raise InvalidInput(f"a text prompt must be str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as broken:
            raise InvalidInput(
                f"the text is not valid Unicode at character {broken.start}: {broken.reason}"
            ) from broken
        return np.asarray(self.backend.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_settings: Any
    ) -> str:
        """The text that the chat template makes of `messages`, each a mapping with `role` and `content`.

        With `add_generation_prompt` it ends where the assistant's answer begins. `template_settings` are passed to
        the template (for example enable_thinking=False). Raises CheckpointError for a model without a template,
        InvalidInput for messages that it does not take.
        """
        if self.template is None:
            raise CheckpointError(
                "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "give prompts as text or token ids"
            )
        if isinstance(messages, (str, Mapping)) or not messages:
            raise InvalidInput("a chat prompt must be a list of at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidInput(f"message {index} must be a mapping with 'role' and 'content', not {message!r}")
        variables = {"tools": None, "documents": None, **self.special_tokens, **template_settings}
        return chat_template.render(
            self.template, messages, {**variables, "add_generation_prompt": add_generation_prompt}
        )

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_settings: Any
    ) -> np.ndarray:
        """Token ids of a conversation, int32 [T]; as `render_chat`, whose text already holds every special token."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **template_settings)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are no valid text become U+FFFD, ids beyond `vocab_size` nothing."""
        return self.backend.decode(_id_list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_tokens(self, token_ids: Sequence[int] | np.ndarray) -> list[str]:
        r"""The text of each token by itself, its spaces kept.

        A token with part of a character shows its bytes as ``\xf0``, an id the tokenizer does not know as ``<id 7>``.
        """
        added = self.backend.get_added_tokens_decoder()
        return [
            added[token_id].content if token_id in added else self._one(self.backend.id_to_token(token_id), token_id)
            for token_id in _id_list(token_ids)
        ]

    def _one(self, token: str | None, token_id: int) -> str:
        if token is None:
            return f"<id {token_id}>"
        if self.byte_level and all(character in _BYTE_OF for character in token):
            spelled = bytes(_BYTE_OF[character] for character in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            spelled = bytes.fromhex(token[3:5])
        else:
            return token.replace("\u2581", " ")
        return spelled.decode(errors="backslashreplace")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling: printable Latin-1 as it is, the other bytes in order as the characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _mentions_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_mentions_byte_level, decoder.get("decoders", ())))


def tokenizer_digest(folder: str | Path) -> str | None:
    """sha256 of the folder's tokenizer.json, in hexadecimal; None where there is none. Needs no `tokenizers`."""
    path = Path(folder) / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _id_list(token_ids: Sequence[int] | np.ndarray) -> list[int]:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidInput(f"token ids must be integers in one dimension, not {ids.dtype} of shape {ids.shape}")
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**32:
        raise InvalidInput(f"token ids must lie in [0, 2**32); these reach from {ids.min()} to {ids.max()}")
    return [int(token_id) for token_id in ids]


def _token_text(entry: Any) -> str | None:
    """A special token is its text, or a mapping that holds it as `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def stop_token_ids(folder: Path, tokenizer_eos: int | None = None) -> tuple[int, ...]:
    """Ids that end a response, ascending: those of generation_config.json or else config.json, and `tokenizer_eos`.

    Raises CheckpointError where a file cannot be read, or says something else than ids.
    """
    for name in ("generation_config.json", "config.json"):
        entry = (_read_json(folder / name) or {}).get("eos_token_id")
        if entry is not None:
            break
    ids = [] if entry is None else entry if isinstance(entry, list) else [entry]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise CheckpointError(f"{folder / name}: eos_token_id must be a token id or a list of them, not {entry!r}")
    return tuple(sorted({*ids, *([] if tokenizer_eos is None else [tokenizer_eos])}))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as broken:
        raise CheckpointError(f"{path} cannot be read as JSON: {broken}") from broken
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
