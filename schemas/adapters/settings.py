"""What an engine was asked to do, as far as the record or the caller tells. What neither tells stays unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from keptset.schemas.adapters.tree import Node
from keptset.schemas.columns import Identity, KvPolicy, LogprobDomain
from keptset.schemas.errors import InvalidInput, SchemaError
from keptset.schemas.sampling_params import FOREIGN_PROCESSORS, KnownParams

OFF: Mapping[str, object] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": {},
}
"""Every setting that can be switched off, switched off."""

_RARE = (
    *("seed", "stop", "min_tokens", "min_new_tokens", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *FOREIGN_PROCESSORS,
)
_RARE_NAMES = {"min_tokens": "min_new_tokens", "seed": "engine_seed"}
"""An engine's seed is one number for a whole request: it is not the row seed that the column `seed` holds."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What the caller states where an engine's output does not tell. Nothing here overrides what a record does tell."""

    identity: Identity = field(default_factory=Identity)
    """Which model and engine. Without a vocabulary size ids are checked for sign only."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Sampling settings by their names in `KnownParams`."""
    others_off: bool = False
    """Settings that neither the record nor `settings` names were off. (Temperature cannot be.)"""
    logprob_domain: str | None = None
    """What the log-probabilities are over, where the engine gives them without saying: kept, full or raw."""
    no_update_in_flight: bool = False
    """The weights never changed during a response: a version given once holds for all of its tokens."""
    id_prefix: str = ""
    """Put before every rollout_id; it must make ids unique where the engine counts from 0 in each process."""

    def __post_init__(self) -> None:
        strange = sorted(set(self.settings) - set(KnownParams.__dataclass_fields__))
        if strange:
            known = ", ".join(KnownParams.__dataclass_fields__)
            raise InvalidInput(f"no such setting: {', '.join(strange)}; there are {known}")
        domains = [domain.value for domain in LogprobDomain]
        if self.logprob_domain is not None and self.logprob_domain not in domains:
            raise InvalidInput(f"logprob_domain is {self.logprob_domain!r}; it must be one of {', '.join(domains)}")
        try:
            self.read()
        except SchemaError as error:
            raise InvalidInput(str(error)) from error

    def read(self) -> KnownParams:
        """The stated settings alone. Errors: SchemaError where one is not of its type or outside its range."""
        return _read(Node(dict(self.settings)), OFF if self.others_off else {})

    @property
    def kv_policy(self) -> str | None:
        return KvPolicy.NONE.value if self.no_update_in_flight else None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is known about one request."""

    params: KnownParams
    extras: str | None = None
    """Rare settings as canonical JSON; None where none is told."""


def read_settings(request: Node | None, stated: Stated) -> Settings:
    """The settings that a request, an engine's own object or a keptset one tells, filled up from what is stated.

    Errors: SchemaError where a setting is not of its type or outside its range.
    """
    if request is None:
        return Settings(params=stated.read())
    if not request.has_fields:
        raise request.refuse("an object of sampling settings")
    filled = {**(OFF if stated.others_off else {}), **stated.settings}
    return Settings(params=_read(request, filled), extras=_extras(request))


def _read(request: Node, filled: Mapping[str, object]) -> KnownParams:
    known: dict[str, object] = {}
    for name in KnownParams.__dataclass_fields__:
        node = request.get(name)
        if node is None and name == "logit_bias" and _names(request, name):
            known[name] = {}  # said to be none
        elif node is None and name in filled:
            node = Node(filled[name], name)
        if node is not None:
            known[name] = _READERS.get(name, Node.number)(node)
    try:
        return KnownParams(**known)  # type: ignore[arg-type]
    except InvalidInput as error:
        raise SchemaError(f"{request.path or 'settings'}: {error}") from error


def _names(request: Node, name: str) -> bool:
    """Whether a setting is there though null."""
    return name in request.value if isinstance(request.value, Mapping) else hasattr(request.value, name)


def _top_k(node: Node) -> int:
    value = node.integer()
    if value >= 1 << 30:  # an engine's own way to say "no limit"
        return 0
    if value < -1:
        raise node.refuse("a whole number >= -1")
    return max(value, 0)


def _logit_bias(node: Node) -> dict[int, float]:
    value = node.value
    if not isinstance(value, Mapping):
        raise node.refuse("an object from token id to a number")
    biases = {}
    for name, bias in value.items():
        text = str(name)
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 31):
            raise SchemaError(f"{node.path} has a field {text[:40]!r}; expected token ids")
        biases[int(text)] = Node(bias, f"{node.path}.{text}").number()
    return biases


_READERS = {"top_k": _top_k, "logit_bias": _logit_bias}


def _extras(request: Node) -> str | None:
    """Rare settings of the request, under keptset's names where it has one.

    >>> _extras(Node({"stop_token_ids": [7], "min_tokens": 0, "seed": 5, "stop": None}))
    '{"engine_seed":5,"stop_token_ids":[7]}'
    """
    rare = {}
    for name in _RARE:
        node = request.get(name)
        if node is not None and (name == "seed" or node.value not in ([], (), 0, "", FOREIGN_PROCESSORS.get(name))):
            rare[_RARE_NAMES.get(name, name)] = node.value
    try:
        return json.dumps(rare, sort_keys=True, separators=(",", ":"), default=_as_list) if rare else None
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"{request.path or 'settings'} cannot be kept as JSON: {error}") from error


def _as_list(value: object) -> list[object]:
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def read_flags(node: Node | None) -> dict[str, str]:
    """Launch flags, given as a list of words or as an object.

    >>> read_flags(Node(["--logprobs-mode=processed_logprobs", "--rollout-top-p", "0.9", "--verbose"]))
    {'logprobs_mode': 'processed_logprobs', 'rollout_top_p': '0.9', 'verbose': ''}
    """
    if node is None:
        return {}
    if isinstance(node.value, Mapping):
        return {_flag_name(str(name)): str(value) for name, value in node.value.items()}
    flags: dict[str, str] = {}
    last = None
    for entry in node.items():
        word = entry.text()
        if word.startswith("-") or "=" in word:
            name, _, value = word.partition("=")
            last = _flag_name(name)
            flags[last] = value
        elif last is not None and not flags[last]:
            flags[last] = word
    return flags


def _flag_name(word: str) -> str:
    return word.lstrip("-").replace("-", "_")


def flag_settings(flags: Mapping[str, str], names: Mapping[str, str]) -> Node | None:
    """The settings that launch flags tell, as if they were a request; `names` says which flag is which setting."""
    told = {name: _number_of(flags[flag], flag) for flag, name in names.items() if flag in flags}
    return Node(told, "engine.flags") if told else None


def _number_of(text: str, flag: str) -> float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise SchemaError(f"engine.flags: {flag} is {text[:40]!r}; expected a number") from None
