"""The interface of an adapter: what one engine's file must say, and what it is given to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from keptset.schemas.adapters.arrays import IntArray, KeptSets
from keptset.schemas.adapters.settings import Settings, Stated, read_flags, read_settings
from keptset.schemas.adapters.tree import Node, shown
from keptset.schemas.builder import Response
from keptset.schemas.columns import FinishReason, Support
from keptset.schemas.errors import SchemaError


@dataclass(frozen=True, kw_only=True)
class Tree:
    """One tree out of a file, or one live object."""

    value: object
    place: Place
    error: str | None = None
    """Why it cannot be used; `value` is then what stands there."""
    recognised: bool = False
    """Whether it is the engine's all the same, such as a stream that lost a piece."""
    size: int = 0
    """Bytes that it was read from."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a record stands."""

    text: str
    """For people: file and line."""
    file: str
    """The file, in short; empty for live objects. Ids are made of it where the engine's own are not unique alone."""
    number: int
    """Which record of the file, or of the call."""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.number}" if self.file else str(self.number)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One reply of an engine, with one response or more, and what is known about its request."""

    tree: Node
    """The engine's own part."""
    place: Place
    settings: Settings
    request: Node | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    """Launch flags of the engine."""
    prompt_id: str | None = None
    """The caller's, where the caller gave one."""
    repeat: int = 0
    """How many records with this prompt_id came before."""
    prompt_token_ids: object = None
    """The caller's, where the engine was not asked to return them."""
    raw: object = None
    """All of it as it came."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One response within a record."""

    record: Record
    node: Node
    position: int
    """Which of the record's responses, in the engine's order."""
    settings: Settings


class Adapter(ABC):
    """How one engine's output becomes responses. One subclass per engine, one file per subclass."""

    engine: str
    """The name, as `--from` takes it and as it stands in a batch's identity."""
    layout: str
    """What its records look like, in one line; said where one does not."""
    msgpack = False
    """Whether its files are msgpack instead of JSON."""

    def whole(self, trees: Iterable[Tree]) -> Iterator[Tree]:
        """Trees that each hold whole responses. An engine that streams pieces joins them here, in bounded memory."""
        yield from trees

    def open(self, tree: Tree, stated: Stated) -> Record:
        """Tell the engine's own part from what was recorded around it: `{engine, request, response}`, or it alone.

        Errors: SchemaError where this is not the engine's layout.
        """
        value, request, flags = tree.value, None, {}
        inner = Node(value)
        if isinstance(value, Mapping) and isinstance(value.get("response"), (Mapping, list)):
            inner = Node(value["response"], "response")
            request = Node(value).get("request")
            engine = Node(value).get("engine")
            flags = read_flags(engine.get("flags")) if engine is not None and engine.has_fields else {}
        settings = read_settings(self.sampling(request, flags), stated)
        return Record(
            tree=inner,
            place=tree.place,
            settings=settings,
            request=request,
            flags=flags,
            raw=value,
        )

    def sampling(self, request: Node | None, flags: Mapping[str, str]) -> Node | None:
        """Where the sampling settings stand: under `request.sampling_params`, unless an engine says otherwise."""
        return request.get("sampling_params") if request is not None else None

    @abstractmethod
    def parts(self, record: Record) -> Iterator[Part]:
        """The responses of a record. Errors: SchemaError where none of them looks like one of the engine's."""

    @abstractmethod
    def response(self, part: Part, stated: Stated) -> Response:
        """One response, read and not yet checked.

        Errors, each of which sets this response alone aside: SchemaError where it is not the engine's layout,
        ViolationError where there is a kind for what is wrong, InvalidInput where its pieces contradict each other.
        """

    def raw(self, part: Part) -> object:
        """One response whole, as this adapter would read it again: what is kept of a rejected one."""
        outer = part.record.raw
        if isinstance(outer, Mapping) and part.record.tree.path == "response":
            return {**outer, "response": self.raw_reply(part)}
        return self.raw_reply(part)

    def raw_reply(self, part: Part) -> object:
        """The engine's own part of it: the reply without its other responses."""
        return part.node.value


@dataclass(frozen=True, kw_only=True)
class Names:
    """Ids of one response."""

    rollout_id: str
    prompt_id: str
    sample_index: int
    group_id: str | None

    @classmethod
    def of(
        cls, record: Record, stated: Stated, *, prompt: str, index: int, samples: int = 1, rollout: str | None = None
    ) -> Names:
        """`prompt` and `rollout` are the engine's ids, the latter `prompt/index` where it has none of its own.

        A prompt_id of the caller's goes before both: the records that share it are one group, and number on.

        Errors: SchemaError where `index` is beyond its column's 32 bits.
        """
        if record.prompt_id is not None:
            index += record.repeat * samples
            prompt, rollout = record.prompt_id, None
        if not -(1 << 31) <= index < 1 << 31:
            raise SchemaError(f"the sample's index is {shown(index)}; expected one within 32 bits")
        group = prompt if samples > 1 or record.prompt_id is not None else None
        return cls(
            rollout_id=stated.id_prefix + (rollout or f"{prompt}/{index}"),
            prompt_id=stated.id_prefix + prompt,
            sample_index=index,
            group_id=None if group is None else stated.id_prefix + group,
        )


def support_columns(kept: KeptSets | None, num_tokens: int) -> dict[str, object]:
    """The columns of `Response` that say what tokens were drawn from.

    No recorded sets: support is `absent`. A response without a token has no set to record, and `kept` is true of it.
    A log-probability that the engine left out of a kept distribution stays NaN: its token does not sum to 1, which is
    a finding.
    """
    if kept is None and num_tokens:
        return {"support": Support.ABSENT.value}
    if kept is None:
        kept = KeptSets(np.zeros(1, np.int64), np.zeros(0, np.int64))
    return {
        "support": Support.KEPT.value,
        "kept_offsets": kept.offsets_T1,
        "kept_ids": kept.ids_N,
        "kept_logprobs": kept.logprobs_N,
    }


def version_spans(spans: Node | None, num_tokens: int) -> IntArray | None:
    """Versions per token [T] from spans `{version, start, end}`; -1 where none covers a token or it is no number."""
    if spans is None:
        return None
    versions_T = np.full(num_tokens, -1, np.int64)
    for span in spans.items():
        start = span.require("start", "the first token of the span").integer()
        end = span.require("end", "the token after the span").integer()
        if not 0 <= start <= end <= num_tokens:
            raise span.refuse(f"a span within the {num_tokens} tokens, not {start} to {end}")
        versions_T[start:end] = version_number(span.require("version", "a version"))
    return versions_T


def version_number(node: Node) -> int:
    """A version as the column holds it; -1 (unknown) for a name, or a number that is too large for it.

    >>> version_number(Node("41")), version_number(Node("step-41"))
    (41, -1)
    """
    text = node.text() if isinstance(node.value, str) else str(node.integer())
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 31 else -1


def same_version(node: Node | None, num_tokens: int, stated: Stated) -> IntArray | None:
    """A version that is known for the whole response alone; it holds for each token if no update was in flight."""
    if node is None or not stated.no_update_in_flight:
        return None
    return np.full(num_tokens, version_number(node), np.int64)


FINISH_REASONS = frozenset(reason.value for reason in FinishReason)


def finish_reason(node: Node | None, names: Mapping[str, str] | None = None) -> str:
    """The schema's word for an engine's; `unknown` where there is none."""
    if node is None:
        return FinishReason.UNKNOWN.value
    word = node.text()
    word = (names or {}).get(word, word)
    return word if word in FINISH_REASONS else FinishReason.UNKNOWN.value


def prompt_ids_of(values: IntArray | None) -> IntArray | None:
    """A prompt, where it has a token: an empty list is what engines write for one that they do not return."""
    return values if values is not None and len(values) else None
