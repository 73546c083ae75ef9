"""What the sampler was asked to do. Filters act in the order min_p, top_k, top_p on tempered logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from keptset.schemas.errors import InvalidInput

FOREIGN_PROCESSORS: Mapping[str, object] = {
    "custom_logit_processor": None,
    "dry_multiplier": 0.0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "logits_processors": None,
    "logits_processors_args": None,
    "sequence_bias": None,
    "watermarking_config": None,
}
"""Settings of other engines that change finite logits, each with the value that switches it off. keptset neither
applies nor replays them: a record whose `sampler_extras` name one cannot be scored."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request.

    Errors: InvalidInput names the setting, its value and what is allowed.

    >>> SamplingParams(temperature=0.7, top_p=0.95, top_k=512).truncates
    True
    >>> SamplingParams(top_p=0.0)
    Traceback (most recent call last):
        ...
    keptset.schemas.errors.InvalidInput: top_p is 0.0; it must lie in (0, 1], where 1 switches the filter off
    """

    temperature: float = 1.0
    """Divides the logits before every filter; 0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens, ties by lower id; 0 switches the filter off."""
    top_p: float = 1.0
    """Keep tokens while the mass before them is below this share; 1 switches the filter off."""
    min_p: float = 0.0
    """Keep tokens at least this share as probable as the most probable one; 0 switches the filter off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids seen in prompt or response; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit once per occurrence of its id in the response; 0 is off."""
    presence_penalty: float = 0.0
    """Subtracted from a logit where its id occurs in the response; 0 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a finite number added to its logit."""
    max_new_tokens: int = 128
    """The response ends with reason `length` after this many tokens."""
    min_new_tokens: int = 0
    """Stop tokens are banned, and stop strings end nothing, before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Drawing one of these ends the response with reason `stop`; it is part of the response."""
    stop_strings: tuple[str, ...] = ()
    """Text of the response that ends it with reason `stop`; the token that completes it is the last."""
    allowed_token_ids: tuple[int, ...] | None = None
    """All other ids are banned; None: no such list."""
    banned_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids whose last id is banned wherever the ones before it have just been read."""
    top_logprobs: int = 0
    """Record this many of the most probable ids with their log-probabilities over the kept set."""
    draft_tokens: int = 0
    """Tokens drafted for each pass by looking up the request's own text; 0: no speculation."""
    seed: int | None = None
    """Row seed in [0, 2**63), or None: derived from base seed, prompt_id and sample_index."""

    def __post_init__(self) -> None:
        for name in ("top_k", "max_new_tokens", "min_new_tokens", "top_logprobs", "draft_tokens"):
            _check(is_whole(getattr(self, name)), name, getattr(self, name), "be a whole number")
        _check(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "be finite and >= 0, where 0 is greedy",
        )
        _check(0 <= self.top_k < 2**31, "top_k", self.top_k, "be in [0, 2^31), where 0 switches the filter off")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "lie in (0, 1], where 1 switches the filter off")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "lie in [0, 1], where 0 switches the filter off")
        _check(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "be finite and > 0, where 1 is off",
        )
        _check(
            math.isfinite(self.frequency_penalty),
            "frequency_penalty",
            self.frequency_penalty,
            "be finite, where 0 is off",
        )
        _check(
            math.isfinite(self.presence_penalty), "presence_penalty", self.presence_penalty, "be finite, where 0 is off"
        )
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "be >= 1")
        _check(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"lie in [0, max_new_tokens = {self.max_new_tokens}]",
        )
        for token_id, bias in self.logit_bias.items():
            _check(
                _is_id(token_id) and math.isfinite(bias),
                f"logit_bias[{token_id}]",
                bias,
                "be finite, of an id >= 0; to ban a token use a ban",
            )
        _check(all(map(_is_id, self.stop_token_ids)), "stop_token_ids", self.stop_token_ids, "hold ids >= 0")
        stops: Any = self.stop_strings
        listed = isinstance(stops, (tuple, list)) and all(isinstance(text, str) and text for text in stops)
        _check(listed, "stop_strings", stops, "be a list of texts, none of them empty")
        allowed = self.allowed_token_ids
        _check(
            allowed is None or (len(allowed) > 0 and all(map(_is_id, allowed))),
            "allowed_token_ids",
            allowed,
            "hold at least one id, all >= 0; None allows every id",
        )
        _check(
            all(word and all(map(_is_id, word)) for word in self.banned_words),
            "banned_words",
            self.banned_words,
            "hold non-empty sequences of ids >= 0",
        )
        _check(self.top_logprobs >= 0, "top_logprobs", self.top_logprobs, "be >= 0, where 0 records none")
        _check(self.draft_tokens >= 0, "draft_tokens", self.draft_tokens, "be >= 0, where 0 is no speculation")
        seed = self.seed
        _check(seed is None or (is_whole(seed) and 0 <= seed < 2**63), "seed", seed, "be a whole number in [0, 2**63)")

    @property
    def truncates(self) -> bool:
        """Whether any setting can make the kept set smaller than the finite logits."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def changes_values(self) -> bool:
        """Whether any processor changes finite logits, so that a trainer must replay it."""
        return bool(self.logit_bias) or (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (
            1,
            0,
            0,
        )


@dataclass(frozen=True, kw_only=True)
class KnownParams:
    """What a foreign engine's record tells of its settings, named and meant as in `SamplingParams`; None: unknown."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        SamplingParams(**{name: value for name, value in vars(self).items() if value is not None})


def is_whole(value: object) -> bool:
    """Whether this is an integer of Python or NumPy; 2.0 and True are not.

    >>> is_whole(2), is_whole(2.0), is_whole(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return is_whole(value) and bool(value >= 0)


def _check(holds: bool, name: str, value: object, must: str) -> None:
    if not holds:
        raise InvalidInput(f"{name} is {value!r}; it must {must}")
