"""SGLang: replies of `/generate`, of its offline engine (the same dictionaries), and of slime's patched server.

b comes from `output_token_sampling_logprobs` (over the kept set). `output_token_logprobs` are over the whole vocabulary
after temperature, so that m = full - b. On slime's server they are over the kept set already.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keptset.schemas.adapters.arrays import (
    FloatArray,
    IntArray,
    KeptSets,
    check_sampled,
    floats,
    ids,
    kept_sets,
    logprobs_of,
    sort_sets,
)
from keptset.schemas.adapters.base import (
    Adapter,
    Names,
    Part,
    Record,
    finish_reason,
    prompt_ids_of,
    same_version,
    support_columns,
    version_spans,
)
from keptset.schemas.adapters.collect import Adapted, adapt_live
from keptset.schemas.adapters.settings import Settings, Stated, read_settings
from keptset.schemas.adapters.tree import Node
from keptset.schemas.builder import Response
from keptset.schemas.columns import LogprobDomain
from keptset.schemas.errors import InvalidInput, SchemaError
from keptset.schemas.sampling_params import KnownParams

ROUNDING = 1e-5
"""m is the difference of two float32 numbers, of which the engine computed one over the whole vocabulary. A miss of the
bounds of m (0, and log top_p where that filter acts alone) within this and within two steps of float32 at their size
is rounding, and m is written as the bound. A larger miss stays, and is a finding."""
_FLOAT32_STEP = 2.0**-23

_MASK_LOGPROBS = ("output_token_sampling_logprobs", "output_token_sampling_mask_logprobs")
"""The engine's name, and that of a fork."""
_PATCHED = (
    ("top_p_token_ids", "top_p_token_offsets"),
    ("top_p_kept_token_ids", "top_p_kept_token_offsets"),
)
"""Where slime's patched server puts ids and offsets, base64 of int32."""


def from_sglang(
    outputs: Iterable[object],
    params: object = None,
    stated: Stated | None = None,
    *,
    prompt_token_ids: Sequence[Sequence[int]] | None = None,
    prompt_ids: Sequence[str] | None = None,
) -> Adapted:
    """What `Engine.generate(...)` returned for a batch, or parsed replies of the server.

    `params`: the sampling parameters of the call (a mapping of the known ones, or an object); None where unknown.
    `prompt_token_ids`: one list per output, where the engine was not asked to return them.
    `prompt_ids`: the caller's, one per output; by default the engine's own ids.

    Errors: SchemaError where `outputs` are something else.
    """
    return adapt_live(Sglang(), outputs, params, stated, prompt_ids, prompt_token_ids)


class Sglang(Adapter):
    engine = "sglang"
    layout = (
        "a reply of /generate (output_ids, meta_info) or a list of them, alone or as {engine, request, response}; "
        "or chat choices that carry meta_info"
    )

    def parts(self, record: Record) -> Iterator[Part]:
        tree = record.tree
        if tree.is_list:
            nodes = tree.items()
        else:
            choices = tree.get("choices")
            nodes = [tree] if choices is None else choices.items()
        if not any(node.has("meta_info") for node in nodes):
            raise tree.refuse(self.layout)
        for position, node in enumerate(nodes):
            yield Part(record=record, node=node, position=position, settings=record.settings)

    def sampling(self, request: Node | None, flags: Mapping[str, str]) -> Node | None:
        """Where one request holds several prompts, each may have its own; those are read response by response."""
        params = super().sampling(request, flags)
        return None if params is not None and params.is_list else params

    def response(self, part: Part, stated: Stated) -> Response:
        node, meta = part.node, part.node.require("meta_info", "what the engine tells about the response")
        place = _Place.of(part)
        settings = _own_settings(part, place, stated)
        names = _names(part, meta, place, stated)
        token_ids_T = _token_ids(node, meta)
        reason = _finish(node, meta)
        numbers = _numbers(meta, token_ids_T, names.rollout_id, settings, stated)
        versions = version_spans(meta.get("weight_versions"), len(token_ids_T))
        if versions is None:
            versions = same_version(meta.get("weight_version"), len(token_ids_T), stated)
        return Response(
            **vars(names),
            prompt_token_ids=_prompt(part, meta, place),
            token_ids=token_ids_T,
            behavior_logprobs=numbers.b_T,
            logprob_domain=numbers.domain,
            full_logprobs=numbers.full_T,
            log_kept_mass=numbers.m_T,
            **support_columns(numbers.kept, len(token_ids_T)),  # type: ignore[arg-type]
            policy_versions=versions,
            kv_policy=stated.kv_policy,
            finish_reason=reason[0],
            error=reason[1],
            params=settings.params,
            sampler_extras=settings.extras,
        )

    def raw(self, part: Part) -> object:
        """A batch of this reply alone, with its own prompt and settings."""
        outer, tree, node = part.record.raw, part.record.tree, part.node
        reply = [node.value] if tree.is_list else node.value if tree.path == node.path else {"choices": [node.value]}
        if not isinstance(outer, Mapping) or tree.path != "response":
            return reply
        request, prompt = outer.get("request"), _Place.of(part).prompt
        if isinstance(request, Mapping):
            several = {
                name: value
                for name in ("input_ids", "text", "sampling_params")
                if isinstance(value := request.get(name), list) and _is_batch(Node(value)) and prompt < len(value)
            }
            request = {**request, **{name: value[prompt : prompt + 1] for name, value in several.items()}}
        return {**outer, "request": request, "response": reply}


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Which prompt of the request a response answers. Prompts come in order, the samples of one next to each other."""

    prompt: int
    sample: int
    samples: int

    @classmethod
    def of(cls, part: Part) -> _Place:
        asked = part.record.request
        tree = part.record.tree
        total = len(tree.rows()) if tree.is_list else 1
        if not tree.is_list and tree.get("choices") is not None:
            return cls(prompt=0, sample=part.position, samples=len(tree.require("choices", "a list").rows()))
        prompts = asked.get("input_ids") or asked.get("text") if asked is not None and asked.has_fields else None
        batch = len(prompts.rows()) if prompts is not None and _is_batch(prompts) else 1
        samples = total // batch if batch and total % batch == 0 else 1
        if asked is None:
            return cls(prompt=part.position, sample=0, samples=1)
        return cls(prompt=part.position // samples, sample=part.position % samples, samples=samples)


def _is_batch(prompts: Node) -> bool:
    return prompts.is_list and bool(prompts.rows()) and isinstance(prompts.rows()[0], (list, tuple, str, Mapping))


def _own_settings(part: Part, place: _Place, stated: Stated) -> Settings:
    """The settings of this prompt, where each of the request has its own."""
    request = part.record.request
    params = request.get("sampling_params") if request is not None and request.has_fields else None
    if params is None or not params.is_list:
        return part.settings
    if place.prompt >= len(params.rows()):
        raise params.refuse("sampling parameters for every prompt")
    return read_settings(params.at(place.prompt), stated)


def _names(part: Part, meta: Node, place: _Place, stated: Stated) -> Names:
    record, given = part.record, meta.get("id")
    own = f"{record.place.name}#{place.prompt}"
    rollout = None if given is None else given.text()
    prompt = own if rollout is None or place.samples > 1 else rollout
    return Names.of(record, stated, prompt=prompt, index=place.sample, samples=place.samples, rollout=rollout)


def _token_ids(node: Node, meta: Node) -> IntArray:
    for name in ("output_ids", "completion_token_ids", "response_token_ids"):
        found = node.get(name)
        if found is not None:
            return ids(found)
    entries = meta.get("output_token_logprobs")
    if entries is None:
        raise SchemaError(f"{node.path + '.' if node.path else ''}output_ids is missing; expected the response's ids")
    return ids(Node(_entries(entries)[1], f"{entries.path}[][1]"))


def _finish(node: Node, meta: Node) -> tuple[str, str | None]:
    """(finish_reason, error). Null stands in the middle of a stream only."""
    reason = meta.get("finish_reason") or node.get("finish_reason")
    if reason is None:
        raise SchemaError(
            f"{meta.path}.finish_reason is null: this is a piece of a stream; expected a whole reply "
            "(ask without streaming, or record the last piece of a cumulative stream)"
        )
    if isinstance(reason.value, str):
        return finish_reason(reason), None
    message = reason.get("message")
    return finish_reason(reason.get("type")), None if message is None else message.text()


def _prompt(part: Part, meta: Node, place: _Place) -> IntArray | None:
    given = part.node.get("prompt_token_ids") or meta.get("prompt_token_ids")
    if given is None and part.record.prompt_token_ids is not None:
        given = Node(part.record.prompt_token_ids, "prompt_token_ids")
    if given is None and part.record.request is not None and part.record.request.has_fields:
        given = part.record.request.get("input_ids")
        if given is not None and _is_batch(given):
            given = given.at(place.prompt) if place.prompt < len(given.rows()) else None
    prompt = None if given is None else prompt_ids_of(ids(given))
    count = meta.get("prompt_tokens")
    if prompt is not None and count is not None and count.integer() != len(prompt):
        raise InvalidInput(f"{count.path} is {count.value}, but its prompt has {len(prompt)}: it answers another one")
    return prompt


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """What an engine tells about the tokens of one response."""

    kept: KeptSets | None = None
    b_T: FloatArray | None = None
    domain: str = LogprobDomain.UNKNOWN.value
    full_T: FloatArray | None = None
    m_T: FloatArray | None = None


def _numbers(meta: Node, token_ids_T: IntArray, rollout_id: str, settings: Settings, stated: Stated) -> _Numbers:
    if meta.has("output_store_ref"):
        raise SchemaError(
            f"{meta.path}.output_store_ref: the lists are in a store outside the reply; "
            "expected them in place (resolve the reference before recording)"
        )
    logprobs_T = _own_logprobs(meta, token_ids_T, rollout_id)
    patched = _patched(meta)
    if patched is not None:
        return _Numbers(kept=patched, b_T=logprobs_T, domain=LogprobDomain.KEPT.value)
    mask = meta.get("output_token_sampling_mask")
    if mask is None:
        domain = stated.logprob_domain or LogprobDomain.FULL.value
        return _Numbers(b_T=logprobs_T, domain=LogprobDomain.UNKNOWN.value if logprobs_T is None else domain)
    given = next((found for name in _MASK_LOGPROBS if (found := meta.get(name)) is not None), None)
    nested = given is not None and bool(given.rows()) and isinstance(given.rows()[0], (list, tuple))
    kept = kept_sets(mask, given if nested else None, rollout_id)
    if given is None:
        return _Numbers(kept=kept, b_T=logprobs_T, domain=LogprobDomain.FULL.value)
    b_T = logprobs_of(token_ids_T, kept) if nested else floats(given)
    numbers = _Numbers(kept=kept, b_T=b_T, domain=LogprobDomain.KEPT.value)
    temperature = settings.params.temperature
    if logprobs_T is None or len(logprobs_T) != len(b_T) or temperature is None:
        return replace(numbers, full_T=logprobs_T)
    if temperature == 0:
        # The engine gives them at temperature 1 here; at 0 the whole distribution is the one token.
        return replace(numbers, m_T=np.zeros(len(b_T)))
    return replace(numbers, full_T=logprobs_T, m_T=_log_kept_mass(logprobs_T, b_T, settings.params))


def _log_kept_mass(full_T: FloatArray, b_T: FloatArray, params: KnownParams) -> FloatArray:
    alone = params.top_k == 0 and params.min_p == 0 and params.top_p is not None
    lowest = np.log(params.top_p) if alone and params.top_p is not None else -np.inf
    hidden_T = np.ma.getmask(full_T) | np.ma.getmask(b_T)  # one False where neither hides anything
    with np.errstate(invalid="ignore", over="ignore"):  # numbers that are not finite stay so, for validation to refuse
        m_T = np.ma.getdata(full_T) - np.ma.getdata(b_T)
        bounded_T = np.minimum(np.maximum(m_T, lowest), 0.0)
        rounding_T = ROUNDING + 2 * _FLOAT32_STEP * np.abs(np.ma.getdata(full_T))
        rounded_T: FloatArray = np.where(np.abs(m_T - bounded_T) <= rounding_T, bounded_T, m_T)
    return np.ma.MaskedArray(rounded_T, hidden_T) if np.any(hidden_T) else rounded_T


def _own_logprobs(meta: Node, token_ids_T: IntArray, rollout_id: str) -> FloatArray | None:
    """From `output_token_logprobs`, entries of (log-probability, id, text)."""
    node = meta.get("output_token_logprobs")
    if node is None or not (node.rows() or len(token_ids_T)):
        return None
    numbers, told = _entries(node)
    check_sampled(ids(Node(told, f"{node.path}[][1]")), token_ids_T, node.path, rollout_id)
    return floats(Node(numbers, f"{node.path}[][0]"))


def _entries(node: Node) -> tuple[list[object], list[object]]:
    return _position(node, 0), _position(node, 1)


def _position(node: Node, position: int) -> list[object]:
    try:
        return [entry[position] for entry in node.rows()]
    except (IndexError, KeyError, TypeError):
        wrong = next(e for e in node.items() if not e.is_list or len(e.rows()) <= position)
        raise wrong.refuse("[log-probability, token id, text]") from None


def _patched(meta: Node) -> KeptSets | None:
    for ids_name, offsets_name in _PATCHED:
        found = meta.get(ids_name)
        if found is not None:
            offsets = meta.require(offsets_name, "the offsets of its ids")
            return csr_sets(found, offsets)
    return None


def csr_sets(ids_node: Node, offsets_node: Node) -> KeptSets:
    """Kept sets from flat ids and offsets, each a list, a tensor, or base64 of int32.

    Errors: SchemaError where the offsets do not ascend from 0 to the number of ids.
    """
    ids_N, offsets_T1 = _int32s(ids_node), _int32s(offsets_node)
    ascending = len(offsets_T1) > 0 and offsets_T1[0] == 0 and bool((np.diff(offsets_T1) >= 0).all())
    if not ascending or offsets_T1[-1] != len(ids_N):
        raise offsets_node.refuse(f"offsets that ascend from 0 to the number of ids, {len(ids_N)}")
    return sort_sets(KeptSets(offsets_T1, ids_N))


def _int32s(node: Node) -> IntArray:
    if not isinstance(node.value, (str, bytes)):
        return ids(node)
    try:
        data = base64.b64decode(node.value, validate=True)
    except (binascii.Error, ValueError):
        raise node.refuse("base64 of int32 numbers") from None
    if len(data) % 4:
        raise node.refuse(f"base64 of int32 numbers; it holds {len(data)} bytes")
    return np.frombuffer(data, "<i4").astype(np.int64)
