"""FastDeploy: replies of `/v1/chat/completions` with sampling masks, whole or as the pieces of a stream.

Its log-probabilities lose the log mass of the kept set when masks are on. They are over the kept set then, if they were
processed ones or nothing was there to process (temperature 1, no penalty); else they are over nothing that has a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from keptset.schemas.adapters.arrays import FloatArray, KeptSets, column, floats, ids, kept_sets
from keptset.schemas.adapters.base import (
    Adapter,
    Names,
    Part,
    Place,
    Record,
    Tree,
    finish_reason,
    prompt_ids_of,
    support_columns,
)
from keptset.schemas.adapters.collect import Adapted, adapt_live
from keptset.schemas.adapters.settings import Settings, Stated
from keptset.schemas.adapters.tree import Node
from keptset.schemas.builder import Response
from keptset.schemas.columns import LogprobDomain
from keptset.schemas.errors import SchemaError

_UNPROCESSED = {
    "temperature": 1,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
}
"""The settings, all of them known, under which raw and processed log-probabilities are the same."""
MAX_HELD = 1024
"""Finished streams that wait for their usage, which comes last and tells how many tokens there should be. Beyond it the
oldest goes on without; a server that sends no usage costs memory for no more than these."""


def from_fastdeploy(
    replies: Iterable[object],
    params: object = None,
    stated: Stated | None = None,
    *,
    prompt_ids: Sequence[str] | None = None,
) -> Adapted:
    """Replies of the server, as parsed JSON or as a client's objects, asked for with `return_token_ids`.

    Pieces of streams are joined. `params`: the sampling settings of the requests; None where unknown. `prompt_ids`: the
    caller's, one per reply; by default the engine's own ids.

    Errors: SchemaError where `replies` are something else.
    """
    return adapt_live(Fastdeploy(), replies, params, stated, prompt_ids)


class Fastdeploy(Adapter):
    engine = "fastdeploy"
    layout = (
        "a reply of /v1/chat/completions (choices[] with message.completion_token_ids, logprobs, sampling_mask), its "
        "stream, one piece a line, or either as {engine, request, response}"
    )

    def whole(self, trees: Iterable[Tree]) -> Iterator[Tree]:
        streams = _Streams()
        for tree in trees:
            if tree.error is None and _is_piece(tree.value):
                yield from streams.add(tree)
                continue
            if tree.error is not None and streams.seen:
                streams.break_all(f"a piece of the stream could not be read ({tree.place.text})")
                tree = replace(tree, recognised=True)
            yield tree
        yield from streams.rest()

    def open(self, tree: Tree, stated: Stated) -> Record:
        value = tree.value
        if isinstance(value, Mapping) and isinstance(value.get("response"), list):
            pieces = (Tree(value=piece, place=tree.place) for piece in value["response"])
            joined = list(self.whole(pieces))
            if len(joined) != 1:
                raise SchemaError(
                    f"response holds {len(joined)} replies; expected one reply or the pieces of one stream"
                )
            if joined[0].error is not None:
                raise SchemaError(joined[0].error)
            tree = Tree(value={**value, "response": joined[0].value}, place=tree.place)
        return super().open(tree, stated)

    def sampling(self, request: Node | None, flags: Mapping[str, str]) -> Node | None:
        """The settings stand among the other fields of the request."""
        return request

    def parts(self, record: Record) -> Iterator[Part]:
        choices = record.tree.get("choices")
        if choices is None:
            raise record.tree.refuse(self.layout)
        nodes = choices.items()
        messages = [node.get("message") for node in nodes if node.has_fields]
        if nodes and not any(message is not None and message.has("completion_token_ids") for message in messages):
            raise nodes[0].refuse(f"{self.layout}: ask with return_token_ids, since texts of tokens are ambiguous")
        for position, node in enumerate(nodes):
            yield Part(record=record, node=node, position=position, settings=record.settings)

    def response(self, part: Part, stated: Stated) -> Response:
        choice, tree = part.node, part.record.tree
        message = choice.require("message", "the message that holds the token ids")
        index = choice.require("index", "the number of the choice, by which n samples are told apart").integer()
        samples = len(tree.require("choices", "a list").rows())
        given = tree.get("id")
        prompt = part.record.place.name if given is None else given.text()
        names = Names.of(part.record, stated, prompt=prompt, index=index, samples=samples)
        token_ids_T = ids(message.require("completion_token_ids", "the response's ids, beside those of the others"))
        mask = choice.get("sampling_mask")
        kept = None if mask is None else kept_sets(mask, None, names.rollout_id)
        logprobs_T = _logprobs(choice)
        prompt_node = message.get("prompt_token_ids")
        return Response(
            **vars(names),
            prompt_token_ids=None if prompt_node is None else prompt_ids_of(ids(prompt_node)),
            token_ids=token_ids_T,
            behavior_logprobs=logprobs_T,
            logprob_domain=_domain(kept, part.record.flags, part.settings, stated),
            **support_columns(kept, len(token_ids_T)),  # type: ignore[arg-type]
            kv_policy=stated.kv_policy,
            finish_reason=finish_reason(choice.get("finish_reason")),
            params=part.settings.params,
            sampler_extras=part.settings.extras,
        )

    def raw_reply(self, part: Part) -> object:
        reply = part.record.tree.value
        fields = reply if isinstance(reply, Mapping) else vars(reply) if hasattr(reply, "__dict__") else {}
        return {**fields, "choices": [part.node.value]}


def _logprobs(choice: Node) -> FloatArray | None:
    """b [T]. (`top_logprobs` leave the sampled token out here, and are not looked at.)"""
    logprobs = choice.get("logprobs")
    content = None if logprobs is None else logprobs.get("content")
    return None if content is None else floats(Node(column(content, "logprob"), f"{content.path}[].logprob"))


def _domain(kept: KeptSets | None, flags: Mapping[str, str], settings: Settings, stated: Stated) -> str:
    known = vars(settings.params)
    unprocessed = all(known[name] == value for name, value in _UNPROCESSED.items())
    if kept is not None and (flags.get("logprobs_mode") == "processed_logprobs" or unprocessed):
        return LogprobDomain.KEPT.value
    return stated.logprob_domain or LogprobDomain.UNKNOWN.value


def _is_piece(value: object) -> bool:
    """Whether this is a piece of a stream."""
    node = Node(value)
    if not node.has_fields:
        return False
    kind, choices = node.get("object"), node.get("choices")
    if kind is not None and kind.value == "chat.completion.chunk":
        return True
    if choices is None or not choices.is_list or not choices.rows():
        return False
    return choices.at(0).has("delta")


@dataclass
class _Choice:
    """One response of a stream, as far as it came. A list is None until the first piece that has one."""

    token_ids: list[object] | None = None
    prompt_token_ids: object = None
    text: str = ""
    content: list[object] | None = None
    sampling_mask: list[object] | None = None
    finish_reason: object = None

    def add(self, piece: Node) -> None:
        delta = piece.require("delta", "what this piece adds")
        new_ids, prompt, text = (delta.get(name) for name in ("completion_token_ids", "prompt_token_ids", "content"))
        logprobs, mask, reason = (piece.get(name) for name in ("logprobs", "sampling_mask", "finish_reason"))
        content = None if logprobs is None else logprobs.get("content")
        if prompt is not None:
            self.prompt_token_ids = prompt.value
            self.token_ids = self.token_ids or []  # ids were asked for, though none came yet
        self.token_ids = _longer(self.token_ids, new_ids)
        self.content = _longer(self.content, content)
        self.sampling_mask = _longer(self.sampling_mask, mask)
        self.text += "" if text is None else text.text()
        if reason is not None:
            self.finish_reason = reason.text()

    def as_reply(self, index: int) -> dict[str, object]:
        return {
            "index": index,
            "message": {
                "content": self.text,
                "prompt_token_ids": self.prompt_token_ids,
                "completion_token_ids": self.token_ids,
            },
            "logprobs": None if self.content is None else {"content": self.content},
            "sampling_mask": self.sampling_mask,
            "finish_reason": self.finish_reason,
        }


def _longer(so_far: list[object] | None, more: Node | None) -> list[object] | None:
    if more is None:
        return so_far
    longer = [] if so_far is None else so_far
    longer.extend(more.rows())
    return longer


@dataclass
class _Stream:
    """One reply in the making."""

    name: str
    place: Place
    choices: dict[int, _Choice] = field(default_factory=dict)
    error: str | None = None

    @property
    def finished(self) -> bool:
        return bool(self.choices) and all(choice.finish_reason is not None for choice in self.choices.values())

    def as_tree(self, expected_tokens: int | None = None) -> Tree:
        choices = [choice.as_reply(index) for index, choice in sorted(self.choices.items())]
        tokens = sum(len(choice.token_ids or []) for choice in self.choices.values())
        error = self.error
        if error is None and expected_tokens is not None and expected_tokens != tokens:
            error = f"the stream holds {tokens} tokens, its usage says {expected_tokens}: pieces are missing"
        return Tree(value={"id": self.name, "choices": choices}, place=self.place, error=error, recognised=True)


class _Streams:
    """The streams of one file that are under way, by id; pieces of several may alternate."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self.seen = False
        """Whether there was a piece that fits."""

    def add(self, tree: Tree) -> Iterator[Tree]:
        """Take one piece; give the reply that it completes, and one that has waited too long for its usage."""
        node = Node(tree.value)
        name = None
        try:
            name = node.require("id", "the stream's id").text()
            yield from self._add(name, node, tree.place)
        except SchemaError as error:
            if name in self._streams:
                self._streams[name].error = f"a piece of the stream does not fit ({tree.place.text}): {error}"
            yield replace(tree, error=str(error), recognised=self.seen)

    def _add(self, name: str, node: Node, place: Place) -> Iterator[Tree]:
        pieces = node.require("choices", "a list").items()
        stream = self._streams.setdefault(name, _Stream(name=name, place=place))
        for piece in pieces:
            index = piece.require("index", "the number of the choice").integer()
            stream.choices.setdefault(index, _Choice()).add(piece)
            self.seen = True
        usage = node.get("usage")
        count = None if usage is None else usage.get("completion_tokens")
        if count is not None and stream.finished:
            del self._streams[name]
            yield stream.as_tree(count.integer())
        elif len(self._streams) > MAX_HELD:
            waiting = next((name for name, stream in self._streams.items() if stream.finished), None)
            if waiting is not None:
                yield self._streams.pop(waiting).as_tree()

    def break_all(self, error: str) -> None:
        """A piece is lost that may belong to any stream under way."""
        for stream in self._streams.values():
            stream.error = stream.error or error

    def rest(self) -> Iterator[Tree]:
        """What is left at the end of the file. A stream cut off keeps what came, and has no finish reason."""
        for stream in self._streams.values():
            yield stream.as_tree()
        self._streams.clear()
