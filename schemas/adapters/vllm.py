"""vLLM: replies of `/inference/v1/generate` and offline `RequestOutput` objects, with their sampling masks.

A mask needs `--logprobs-mode=processed_logprobs`, so log-probabilities beside one are over the kept set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from keptset.schemas.adapters.arrays import (
    FloatArray,
    IntArray,
    KeptSets,
    check_sampled,
    column,
    floats,
    ids,
    kept_sets,
    logprobs_of,
    violation,
)
from keptset.schemas.adapters.base import (
    Adapter,
    Names,
    Part,
    Record,
    finish_reason,
    prompt_ids_of,
    support_columns,
    version_spans,
)
from keptset.schemas.adapters.collect import Adapted, adapt_live
from keptset.schemas.adapters.settings import Stated
from keptset.schemas.adapters.tree import Node
from keptset.schemas.builder import Response
from keptset.schemas.columns import LogprobDomain
from keptset.schemas.errors import SchemaError
from keptset.schemas.findings import FindingKind

_OLD_TOKEN = "token_id:"
_DOMAINS = {"raw_logprobs": LogprobDomain.RAW, "processed_logprobs": LogprobDomain.KEPT}


def from_vllm(
    outputs: Iterable[object],
    params: object = None,
    stated: Stated | None = None,
    *,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    prompt_ids: Sequence[str] | None = None,
) -> Adapted:
    """What `LLM.generate(...)` returned, or parsed replies of the server.

    `params`: the `SamplingParams` of the call (vLLM's or keptset's, or a mapping of known settings); None: unknown.
    `prompt_token_ids`: one list per output, where the server was not asked to return them.
    `prompt_ids`: the caller's, one per output; by default the engine's request ids, which an offline engine counts
    from 0 in each process: give `Stated(id_prefix=...)` then.

    Errors: SchemaError where `outputs` are something else.
    """
    return adapt_live(Vllm(), outputs, params, stated, prompt_ids, prompt_token_ids)


class Vllm(Adapter):
    engine = "vllm"
    layout = (
        "a reply of /inference/v1/generate (choices[] with index, token_ids, sampling_mask) or a RequestOutput "
        "(outputs[] of the same), alone or as {engine, request, response}"
    )

    def parts(self, record: Record) -> Iterator[Part]:
        choices = _choices(record.tree).items()
        if choices and not any(choice.has("token_ids") for choice in choices):
            raise choices[0].refuse(f"{self.layout}")
        for position, node in enumerate(choices):
            yield Part(record=record, node=node, position=position, settings=record.settings)

    def response(self, part: Part, stated: Stated) -> Response:
        choice, record = part.node, part.record
        index = choice.require("index", "the number of the choice, by which n samples are told apart").integer()
        samples = len(_choices(record.tree).rows())
        names = Names.of(record, stated, prompt=_prompt_id(record), index=index, samples=samples)
        token_ids_T = ids(choice.require("token_ids", "the response's token ids"))
        kept = _mask(choice, names.rollout_id)
        logprobs_T, domain = _logprobs(choice, token_ids_T, kept, record.flags, names.rollout_id, stated)
        return Response(
            **vars(names),
            prompt_token_ids=_prompt(record),
            token_ids=token_ids_T,
            behavior_logprobs=logprobs_T,
            logprob_domain=domain,
            **support_columns(kept, len(token_ids_T)),  # type: ignore[arg-type]
            policy_versions=version_spans(choice.get("weight_versions"), len(token_ids_T)),
            kv_policy=stated.kv_policy,
            finish_reason=finish_reason(choice.get("finish_reason")),
            params=part.settings.params,
            sampler_extras=part.settings.extras,
        )

    def raw_reply(self, part: Part) -> object:
        reply = part.record.tree.value
        fields = reply if isinstance(reply, Mapping) else vars(reply) if hasattr(reply, "__dict__") else {}
        name = "choices" if "choices" in fields else "outputs"
        return {**fields, name: [part.node.value]}


def _choices(reply: Node) -> Node:
    choices = reply.get("choices") or reply.get("outputs")
    if choices is None:
        raise reply.refuse(Vllm.layout)
    return choices


def _prompt_id(record: Record) -> str:
    asked = record.request.get("request_id") if record.request is not None and record.request.has_fields else None
    given = asked or record.tree.get("request_id")
    if given is None:
        return record.place.name
    name = given.text()
    # Offline engines count requests from 0 in each process: such a number says nothing without its file.
    return f"{record.place.file}:{name}" if name.isdigit() and record.place.file else name


def _prompt(record: Record) -> IntArray | None:
    given = record.tree.get("prompt_token_ids")
    if given is None and record.prompt_token_ids is not None:
        given = Node(record.prompt_token_ids, "prompt_token_ids")
    if given is None and record.request is not None:
        given = record.request.get("token_ids")
    return None if given is None else prompt_ids_of(ids(given))


def _mask(choice: Node, rollout_id: str) -> KeptSets | None:
    """Over HTTP a list of lists; offline an object that holds one, and in the newest version its log-probabilities."""
    mask = choice.get("sampling_mask")
    if mask is None:
        return None
    if not mask.is_list and mask.has_fields:
        return kept_sets(mask.require("token_ids", "one list of ids per token"), mask.get("logprobs"), rollout_id)
    return kept_sets(mask, choice.get("sampling_mask_logprobs"), rollout_id)


def _logprobs(
    choice: Node,
    token_ids_T: IntArray,
    kept: KeptSets | None,
    flags: Mapping[str, str],
    rollout_id: str,
    stated: Stated,
) -> tuple[FloatArray | None, str]:
    """b [T] and what it is over."""
    unknown = stated.logprob_domain or LogprobDomain.UNKNOWN.value
    mode = flags.get("logprobs_mode") or ("processed_logprobs" if kept is not None else None)
    if mode is not None and mode.endswith("_logits"):
        return None, unknown
    node = choice.get("logprobs")
    values_T = None
    if node is not None:
        read = _per_position if node.is_list or not (node.has("content") or node.has("sampled")) else _content
        values_T = read(node, token_ids_T, rollout_id)
    if values_T is not None:
        return values_T, _DOMAINS[mode].value if mode in _DOMAINS else unknown
    if kept is not None and kept.logprobs_N is not None:
        return logprobs_of(token_ids_T, kept), LogprobDomain.KEPT.value
    return None, unknown


def _content(node: Node, token_ids_T: IntArray, rollout_id: str) -> FloatArray | None:
    """Over HTTP: `content`, one object per token, or in one variant `sampled`, the bare numbers."""
    content = node.get("content")
    if content is None:
        return floats(node.require("sampled", "the sampled tokens' log-probabilities"))
    values_T = floats(Node(column(content, "logprob"), f"{content.path}[].logprob"))
    first = content.at(0) if len(values_T) else None
    if first is not None:
        newer = first.has("token_id")
        told = column(content, "token_id") if newer else _old_ids(column(content, "token"), content.path)
        check_sampled(ids(Node(told, f"{content.path}[].token_id")), token_ids_T, content.path, rollout_id)
    return values_T


def _old_ids(tokens: list[object], path: str) -> list[int]:
    """Ids from texts such as `token_id:7`, the older versions' only place for them."""
    numbers = []
    for position, token in enumerate(tokens):
        digits = token[len(_OLD_TOKEN) :] if isinstance(token, str) and token.startswith(_OLD_TOKEN) else ""
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise Node(token, f"{path}[{position}].token").refuse("a text such as 'token_id:7'")
        numbers.append(int(digits))
    return numbers


def _per_position(node: Node, token_ids_T: IntArray, rollout_id: str) -> FloatArray:
    """Offline: one mapping from id to log-probability per token, or the flat container of newer versions."""
    if not node.is_list:
        flat = _flat(node, token_ids_T, rollout_id)
        if flat is not None:
            return flat
        if not isinstance(node.value, Sequence):
            raise node.refuse("logprobs.content, or one mapping of token ids per token")
        node = Node(list(node.value), node.path)
    rows, tokens = node.rows(), token_ids_T.tolist()
    if len(rows) != len(tokens):
        raise violation(
            FindingKind.LENGTHS, rollout_id, f"{len(tokens)} tokens, but {node.path} has {len(rows)} entries"
        )
    return floats(Node(_pick(rows, tokens, node), node.path))


def _pick(rows: Sequence[Any], tokens: list[int], node: Node) -> list[object]:
    try:
        return [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
    except (AttributeError, KeyError, TypeError, IndexError):
        pass
    # JSON makes texts of the integer keys.
    return [_entry(row, token).value for row, token in zip(node.items(), tokens, strict=True)]


def _entry(row: Node, token: int) -> Node:
    if not isinstance(row.value, Mapping):
        raise row.refuse("an object from token id to log-probability")
    for key in (token, str(token)):
        if key in row.value:
            return Node(row.value[key], f"{row.path}.{token}").require("logprob", "a number")
    raise SchemaError(f"{row.path} does not hold the sampled token {token}; expected its log-probability among them")


def _flat(node: Node, token_ids_T: IntArray, rollout_id: str) -> FloatArray | None:
    """From the flat container: the sampled token is the first entry of each position."""
    if not all(hasattr(node.value, name) for name in ("start_indices", "token_ids", "logprobs")):
        return None
    starts_T = ids(node.require("start_indices", "a list"))
    flat_ids, flat_logprobs = ids(node.require("token_ids", "a list")), floats(node.require("logprobs", "a list"))
    if len(starts_T) and not (starts_T.min() >= 0 and starts_T.max() < min(len(flat_ids), len(flat_logprobs))):
        raise node.refuse("start indices within the entries")
    check_sampled(flat_ids[starts_T], token_ids_T, node.path, rollout_id)
    picked: FloatArray = flat_logprobs[starts_T]
    return picked
