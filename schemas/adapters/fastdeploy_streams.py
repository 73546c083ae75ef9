"""FastDeploy streams: pieces become whole replies, in bounded memory. One that lost a piece is told where it can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from keptset.schemas.adapters.base import Place, Tree
from keptset.schemas.adapters.tree import Node
from keptset.schemas.errors import SchemaError

MAX_HELD = 1024
"""Finished streams that wait for their usage, which comes last and tells how many tokens there should be. Beyond it the
oldest goes on without; a server that sends no usage costs memory for no more than these."""
MAX_SILENCE = 1 << 20
"""Pieces of other streams after which one under way is taken for cut off: its client went away."""
_MAX_LET_GO = 1 << 17
"""Streams remembered that went on without their last piece, some 200 bytes each."""


def streams_joined(trees: Iterable[Tree]) -> Iterator[Tree]:
    """The same trees, those that are pieces of streams joined to replies."""
    streams = Streams()
    for tree in trees:
        if tree.error is None and _is_piece(tree.value):
            yield from streams.add(tree)
            continue
        if tree.error is not None and streams.seen:
            streams.break_all(f"a piece of the stream could not be read ({tree.place.text})")
            tree = replace(tree, recognised=True)
        yield tree
    yield from streams.rest()


def with_stream_joined(tree: Tree) -> Tree:
    """The same record; if its `response` holds the pieces of a stream, then joined."""
    value = tree.value
    if tree.error is not None or not isinstance(value, Mapping) or not isinstance(value.get("response"), list):
        return tree
    joined = list(streams_joined(Tree(value=piece, place=tree.place) for piece in value["response"]))
    if len(joined) != 1:
        told = f"response holds {len(joined)} replies; expected one reply or the pieces of one stream"
        return replace(tree, error=told)
    if joined[0].error is not None:
        return replace(tree, error=joined[0].error, recognised=joined[0].recognised)
    return replace(tree, value={**value, "response": joined[0].value})


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
        added = 0 if new_ids is None else len(new_ids.rows())
        if new_ids is not None and added and self.finish_reason is not None:
            raise new_ids.refuse("no token after the finish reason")
        if new_ids is not None or self.token_ids is not None:
            for entries in (mask, content):
                if entries is not None and len(entries.rows()) != added:
                    raise entries.refuse(f"one entry for each of this piece's {added} ids")
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
    usage: int | None = None
    """Tokens of all choices, which the last piece tells. It has no choices."""
    usage_so_far: int | None = None
    """What a piece with choices told: nobody says whether of this choice or of all."""
    size: int = 0
    """Bytes that its pieces were read from."""
    last: int = 0
    """Number of its last piece among those of all streams."""

    @property
    def finished(self) -> bool:
        """Whether each choice that came is. Of others nothing is known before the usage comes."""
        return bool(self.choices) and all(choice.finish_reason is not None for choice in self.choices.values())

    @property
    def tokens(self) -> int:
        return sum(len(choice.token_ids or []) for choice in self.choices.values())

    def as_tree(self) -> Tree:
        choices = [choice.as_reply(index) for index, choice in sorted(self.choices.items())]
        expected = self.usage_so_far if self.usage is None and len(choices) == 1 else self.usage
        error = self.error
        if error is None and expected is not None and expected != self.tokens:
            error = f"the stream holds {self.tokens} tokens, its usage says {expected}: pieces are missing"
        if error is None and not self.finished:
            error = "the stream has no finish reason: it was cut off, or its last piece is missing"
        value = {"id": self.name, "choices": choices}
        return Tree(value=value, place=self.place, error=error, recognised=True, size=self.size)


class Streams:
    """The streams of one file, by id; pieces of several may alternate."""

    def __init__(self) -> None:
        self._under_way: dict[str, _Stream] = {}
        """The one that has been silent for the longest comes first."""
        self._waiting: dict[str, _Stream] = {}
        """Finished ones, for their usage."""
        self._let_go: dict[str, int] = {}
        """Tokens of those that went on without it."""
        self._pieces = 0
        self.seen = False
        """Whether there was a piece that fits."""

    def add(self, tree: Tree) -> Iterator[Tree]:
        """Take one piece; give the reply that it completes, and those that have waited too long for their next."""
        node = Node(tree.value)
        name = None
        try:
            name = node.require("id", "the stream's id").text()
            yield from self._add(name, node, tree)
        except SchemaError as error:
            stream = None if name is None else self._under_way.get(name) or self._waiting.get(name)
            if stream is not None:
                stream.error = f"a piece of the stream does not fit ({tree.place.text}): {error}"
            yield replace(tree, error=str(error), recognised=self.seen)

    def _add(self, name: str, node: Node, tree: Tree) -> Iterator[Tree]:
        pieces = node.require("choices", "a list").items()
        usage = node.get("usage")
        count = None if usage is None else usage.get("completion_tokens")
        tokens = None if count is None else count.integer()
        if name in self._let_go:
            self._check_late(name, tokens, last=not pieces)
            return
        if not pieces and tokens is None:
            return
        stream = self._under_way.pop(name, None) or self._waiting.pop(name, None) or _Stream(name, tree.place)
        self._under_way[name] = stream
        self._pieces += 1
        stream.last, stream.size = self._pieces, stream.size + tree.size
        for piece in pieces:
            index = piece.require("index", "the number of the choice").integer()
            stream.choices.setdefault(index, _Choice()).add(piece)
            self.seen = True
        if not pieces:
            stream.usage = tokens
        elif tokens is not None:
            stream.usage_so_far = tokens
        if stream.finished:
            del self._under_way[name]
            if stream.usage is not None:
                yield stream.as_tree()
            else:
                self._waiting[name] = stream
        yield from self._too_long()

    def _check_late(self, name: str, tokens: int | None, *, last: bool) -> None:
        if not last:
            raise SchemaError(
                f"stream {name} was taken for ended long before this piece; record streams closer together"
            )
        if tokens is not None and tokens != self._let_go[name]:
            raise SchemaError(
                f"stream {name} was taken with {self._let_go[name]} tokens, its usage says {tokens}: pieces are missing"
            )

    def _too_long(self) -> Iterator[Tree]:
        """Those that have waited too long: finished ones as they are, others as cut off."""
        gone = [self._waiting.pop(next(iter(self._waiting)))] if len(self._waiting) > MAX_HELD else []
        silent = next(iter(self._under_way.values()), None)
        if silent is not None and self._pieces - silent.last > MAX_SILENCE:
            gone.append(self._under_way.pop(silent.name))
        for stream in gone:
            self._let_go[stream.name] = stream.tokens
            if len(self._let_go) > _MAX_LET_GO:
                del self._let_go[next(iter(self._let_go))]
            yield stream.as_tree()

    def break_all(self, error: str) -> None:
        """A piece is lost that may belong to any stream under way, or be the usage of a finished one."""
        for stream in (*self._waiting.values(), *self._under_way.values()):
            stream.error = stream.error or error

    def rest(self) -> Iterator[Tree]:
        """What is left at the end of the file. A stream without a finish reason was cut off."""
        for stream in (*self._waiting.values(), *self._under_way.values()):
            yield stream.as_tree()
        self._waiting, self._under_way = {}, {}
