"""FastDeploy: replies of `/v1/chat/completions` with sampling masks, whole or as the pieces of a stream.

Its log-probabilities lose the log mass of the kept set when masks are on. They are over the kept set then, if they were
processed ones or nothing was there to process (temperature 1, no penalty); else they are over nothing that has a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from keptset.schemas.adapters.arrays import FloatArray, KeptSets, column, floats, ids, kept_sets
from keptset.schemas.adapters.base import (
    Adapter,
    Names,
    Part,
    Record,
    Tree,
    finish_reason,
    prompt_ids_of,
    support_columns,
)
from keptset.schemas.adapters.collect import Adapted, adapt_live
from keptset.schemas.adapters.fastdeploy_streams import streams_joined, with_stream_joined
from keptset.schemas.adapters.settings import Settings, Stated
from keptset.schemas.adapters.tree import Node
from keptset.schemas.builder import Response
from keptset.schemas.columns import LogprobDomain

_UNPROCESSED = {
    "temperature": 1,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
}
"""The settings, all of them known, under which raw and processed log-probabilities are the same."""


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
        yield from map(with_stream_joined, streams_joined(trees))

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
