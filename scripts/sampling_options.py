"""Sampling settings as they come from a command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keptset.rollout.tokenizer import Tokenizer
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams


def sampling_params(
    *,
    tokenizer: Tokenizer | None,
    stop_token_ids: Sequence[int],
    logit_bias: Iterable[str],
    ban: Sequence[str],
    allow_token_id: Sequence[int],
    **plain: Any,
) -> SamplingParams:
    """Settings that need no reading (`plain`) and those that do: biases as ID=NUMBER, banned words as text.

    Errors: InvalidInput naming the option.
    """
    return SamplingParams(
        stop_token_ids=tuple(stop_token_ids),
        logit_bias=dict(_bias(text) for text in logit_bias),
        banned_words=banned_words(ban, tokenizer),
        allowed_token_ids=tuple(allow_token_id) or None,
        **plain,
    )


def banned_words(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the beginning of a text and behind a space.

    Errors: InvalidInput where the model has no tokenizer.
    """
    if words and tokenizer is None:
        raise InvalidInput("--ban needs the model's tokenizer.json, to spell words as tokens")
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            assert tokenizer is not None
            ids = tuple(tokenizer.encode(text, add_special_tokens=False).tolist())
            if not ids:
                raise InvalidInput(f"--ban {word!r}: the tokenizer makes no token of it")
            spelled[ids] = None
    return tuple(spelled)


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, number = text.partition("=")
    try:
        if not equals:
            raise ValueError("there is no =")
        return int(token_id), float(number)
    except ValueError as error:
        raise InvalidInput(f"--logit-bias {text!r}: give it as ID=NUMBER ({error})") from error
