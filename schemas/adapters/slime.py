"""slime: samples as `Sample.to_dict()` gives them, whole debug dumps, and replies of its patched SGLang server.

Top-p ids and offsets cover the response. Tokens of tools have an empty span, log-probability 0 and loss mask 0: the
policy did not draw them. Beside recorded ids log-probabilities are over them; without, nothing says what they are over.
slime's files are pickles, which can run code when they are read: convert them to JSON outside keptset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from keptset.schemas.adapters.arrays import FloatArray, IntArray, KeptSets, floats, ids
from keptset.schemas.adapters.base import (
    Adapter,
    Names,
    Part,
    Record,
    Tree,
    finish_reason,
    prompt_ids_of,
    same_version,
    support_columns,
)
from keptset.schemas.adapters.collect import Adapted, adapt_live
from keptset.schemas.adapters.settings import Stated, flag_settings
from keptset.schemas.adapters.sglang import Sglang, csr_sets
from keptset.schemas.adapters.tree import Node
from keptset.schemas.builder import Response
from keptset.schemas.columns import LogprobDomain
from keptset.schemas.errors import SchemaError
from keptset.schemas.ragged import BoolArray

_STATUS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "error", "pending": "unknown"}
_FLAGS = {"rollout_temperature": "temperature", "rollout_top_p": "top_p", "rollout_top_k": "top_k"}
_FOREIGN_MASK = "rollout_sampling_mask"
"""Where a fork keeps its sets, in a layout of its own."""


def from_slime(samples: Iterable[object], params: object = None, stated: Stated | None = None) -> Adapted:
    """`Sample` objects or their dictionaries, of one rollout: sample indices must be unique, or `Stated(id_prefix=...)`
    make them so. `params`: the sampling settings of the rollout (a mapping of the known ones); None where unknown.

    Errors: SchemaError where `samples` are something else.
    """
    return adapt_live(Slime(), samples, params, stated)


class Slime(Adapter):
    engine = "slime"
    layout = (
        "a sample (tokens, response_length, rollout_log_probs, rollout_top_p_token_ids, ..._offsets), a dump of them "
        "(rollout_id, samples), alone or as {engine, dump}; or a reply of its server (output_ids, meta_info)"
    )

    def __init__(self) -> None:
        self._server = Sglang()
        self._in_group: Counter[str] = Counter()

    def open(self, tree: Tree, stated: Stated) -> Record:
        value = tree.value
        if isinstance(value, Mapping) and isinstance(value.get("dump"), Mapping):
            opened = super().open(Tree(value={**value, "response": value["dump"]}, place=tree.place), stated)
            return Record(**{**vars(opened), "tree": Node(value["dump"], "dump"), "raw": value})
        return super().open(tree, stated)

    def sampling(self, request: Node | None, flags: Mapping[str, str]) -> Node | None:
        """A dump has no request: the trainer's launch flags tell three settings."""
        return super().sampling(request, flags) or flag_settings(flags, _FLAGS)

    def parts(self, record: Record) -> Iterator[Part]:
        tree = record.tree
        if _is_reply(tree):
            yield from self._server.parts(record)
            return
        samples = tree.get("samples")
        nodes = [tree] if samples is None and tree.has("tokens") else None if samples is None else samples.items()
        if nodes is None or (nodes and not any(node.has("tokens") for node in nodes)):
            raise tree.refuse(self.layout)
        for position, node in enumerate(nodes):
            yield Part(record=record, node=node, position=position, settings=record.settings)

    def response(self, part: Part, stated: Stated) -> Response:
        sample = part.node
        if sample.has("meta_info"):
            return self._server.response(part, stated)
        names = self._names(part, stated)
        prompt_ids_P, token_ids_T = _tokens(sample)
        kept = _kept(sample)
        b_node, loss_node = sample.get("rollout_log_probs"), sample.get("loss_mask")
        b_T = None if b_node is None else floats(b_node)
        trainable_T = None if loss_node is None else ids(loss_node) != 0
        sampled_T = _sampled(len(token_ids_T), kept, trainable_T, b_T)
        domain = LogprobDomain.UNKNOWN.value if stated.logprob_domain is None else stated.logprob_domain
        return Response(
            **vars(names),
            prompt_token_ids=prompt_ids_of(prompt_ids_P),
            token_ids=token_ids_T,
            sampled=sampled_T,
            trainable=trainable_T,
            behavior_logprobs=b_T,
            logprob_domain=domain if kept is None else LogprobDomain.KEPT.value,
            **support_columns(kept, len(token_ids_T)),  # type: ignore[arg-type]
            policy_versions=_versions(sample, len(token_ids_T), stated),
            kv_policy=stated.kv_policy,
            finish_reason=finish_reason(sample.get("status"), _STATUS),
            params=part.settings.params,
            sampler_extras=part.settings.extras,
        )

    def raw(self, part: Part) -> object:
        outer, dump = part.record.raw, part.record.tree
        if dump.path != "dump" or not isinstance(outer, Mapping):
            return super().raw(part)
        return {**outer, "dump": {**dump.value, "samples": [part.node.value]}}

    def _names(self, part: Part, stated: Stated) -> Names:
        """Samples count through a rollout, and within it through their group; a lone sample has its place's name."""
        record, sample = part.record, part.node
        rollout = record.tree.get("rollout_id") or sample.get("rollout_id")
        of = record.place.file or str(record.place.number) if rollout is None else str(rollout.integer())
        index, group = sample.get("index"), sample.get("group_index")
        name = f"{of}/{record.place.number}.{part.position}" if index is None else f"{of}/{index.integer()}"
        if group is None:
            return Names.of(record, stated, prompt=name, index=0)
        prompt = f"{of}/group {group.integer()}"
        within = self._in_group[prompt]
        self._in_group[prompt] += 1
        return Names.of(record, stated, prompt=prompt, index=within, samples=2, rollout=name)


def _is_reply(tree: Node) -> bool:
    entries = tree.rows() if tree.is_list else [tree.value]
    return bool(entries) and Node(entries[0]).has("meta_info")


def _tokens(sample: Node) -> tuple[IntArray, IntArray]:
    """Prompt and response."""
    all_ids = ids(sample.require("tokens", "prompt and response"))
    length = sample.require("response_length", "how many of the tokens are the response")
    if not 0 <= length.integer() <= len(all_ids):
        raise length.refuse(f"a length within the {len(all_ids)} tokens")
    cut = len(all_ids) - length.integer()
    return all_ids[:cut], all_ids[cut:]


def _kept(sample: Node) -> KeptSets | None:
    ids_node, offsets_node = sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets")
    if ids_node is None and offsets_node is None:
        if sample.has(_FOREIGN_MASK):
            raise SchemaError(
                f"{sample.path + '.' if sample.path else ''}{_FOREIGN_MASK} is a fork's layout; "
                "expected rollout_top_p_token_ids and rollout_top_p_token_offsets"
            )
        return None
    return csr_sets(
        sample.require("rollout_top_p_token_ids", "the kept ids beside their offsets"),
        sample.require("rollout_top_p_token_offsets", "the offsets of the kept ids"),
    )


def _sampled(
    num_tokens: int, kept: KeptSets | None, trainable_T: BoolArray | None, b_T: FloatArray | None
) -> BoolArray | None:
    """Which tokens the policy drew [T]: all but those with no loss, b exactly 0, and (if sets were recorded) no set."""
    given = [values for values in (None if kept is None else kept.sizes_T, trainable_T, b_T) if values is not None]
    if trainable_T is None or any(len(values) != num_tokens for values in given):
        return None  # lengths that differ are reported as such
    injected_T = ~trainable_T
    if b_T is not None:
        injected_T &= np.ma.getdata(b_T) == 0
    if kept is not None:
        injected_T &= kept.sizes_T == 0
    return ~injected_T


def _versions(sample: Node, num_tokens: int, stated: Stated) -> IntArray | None:
    """One version per call of the engine: it holds for each token where all calls had the same."""
    versions = sample.get("weight_versions")
    if versions is None or not versions.rows() or len({str(version) for version in versions.rows()}) > 1:
        return None
    return same_version(versions.at(0), num_tokens, stated)
