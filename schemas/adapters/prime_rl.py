"""prime-rl: micro-batches as its trainer reads them from disk, msgpack arrays of fields by position.

A micro-batch packs several sequences into one row and pads it. Everything stands at its token's own position: an id,
its log-probability, and how many kept ids it has (0: none recorded).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keptset.schemas.adapters.arrays import FloatArray, IntArray, KeptSets, as_numpy, floats, ids, sort_sets
from keptset.schemas.adapters.base import Adapter, Names, Part, Record, Tree, prompt_ids_of, support_columns
from keptset.schemas.adapters.collect import Adapted, adapt_live
from keptset.schemas.adapters.settings import Stated, read_settings
from keptset.schemas.adapters.tree import Node
from keptset.schemas.builder import Response
from keptset.schemas.columns import FinishReason, LogprobDomain
from keptset.schemas.ragged import BoolArray, offsets_of
from keptset.schemas.sampling_params import KnownParams

_LENGTHS = (16, 17, 19)
"""Fields of a micro-batch: without masks, with them, and with trace ids as well."""
_INPUT_IDS, _LOSS_MASK, _LOGPROBS, _SEQUENCE_LENGTHS, _TEMPERATURES = 0, 1, 3, 5, 6
_ENV_NAMES, _SEQ_LENS, _MASK, _TRACE_IDS, _BRANCHES = 7, 8, 16, 17, 18


def from_prime_rl(micro_batches: Iterable[object], params: object = None, stated: Stated | None = None) -> Adapted:
    """`MicroBatch` structs, or the lists of fields that msgpack makes of them.

    `params`: what is known of the sampling settings. The temperature is taken from the micro-batch where it gives one.

    Errors: SchemaError where `micro_batches` are something else.
    """
    return adapt_live(PrimeRl(), micro_batches, params, stated)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One sequence of a packed row: prompt, response, and what lies between its turns."""

    span: tuple[int, int]
    """Its place in the row."""
    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    temperatures: FloatArray | None
    counts: IntArray | None
    """Kept ids per token; None where the micro-batch has no masks."""
    kept_ids: IntArray | None
    kept_logprobs: FloatArray | None
    name: str | None
    """Trace and branch."""


class PrimeRl(Adapter):
    engine = "prime_rl"
    layout = "a micro-batch: an array of 16, 17 or 19 fields, the first input_ids, the 17th the sampling mask or nil"
    msgpack = True

    def open(self, tree: Tree, stated: Stated) -> Record:
        return Record(tree=Node(tree.value), place=tree.place, settings=read_settings(None, stated), raw=tree.value)

    def parts(self, record: Record) -> Iterator[Part]:
        fields = _fields(record.tree)
        for position, sequence in enumerate(_unpack(fields)):
            node = Node(sequence, f"sequence[{position}]")
            yield Part(record=record, node=node, position=position, settings=record.settings)

    def response(self, part: Part, stated: Stated) -> Response:
        sequence = part.node.value
        assert isinstance(sequence, Packed)
        counts_S = np.zeros(len(sequence.token_ids), np.int64) if sequence.counts is None else sequence.counts
        drawn_S = sequence.loss_mask | (counts_S > 0) | (np.ma.getdata(sequence.logprobs) != 0)
        start = int(np.argmax(drawn_S)) if drawn_S.any() else len(drawn_S)
        sampled_T, trainable_T = drawn_S[start:], sequence.loss_mask[start:]
        kept = None
        if counts_S.any() and sequence.kept_ids is not None:
            kept = sort_sets(KeptSets(offsets_of(counts_S[start:]), sequence.kept_ids, sequence.kept_logprobs))
        name = sequence.name or f"{part.record.place.name}.{part.position}"
        names = Names.of(part.record, stated, prompt=name, index=0, rollout=sequence.name)
        unknown = stated.logprob_domain or LogprobDomain.UNKNOWN.value
        return Response(
            **vars(names),
            prompt_token_ids=prompt_ids_of(sequence.token_ids[:start]),
            token_ids=sequence.token_ids[start:],
            sampled=sampled_T,
            trainable=trainable_T,
            behavior_logprobs=sequence.logprobs[start:],
            logprob_domain=unknown if kept is None else LogprobDomain.KEPT.value,
            **support_columns(kept, int(sampled_T.sum())),  # type: ignore[arg-type]
            kv_policy=stated.kv_policy,
            finish_reason=FinishReason.UNKNOWN.value,
            params=_with_temperature(part, sequence, drawn_S, stated),
        )

    def raw(self, part: Part) -> object:
        """A micro-batch of this sequence alone: each field is cut where it has an entry per token or per sequence."""
        sequence = part.node.value
        assert isinstance(sequence, Packed)
        fields = [node.value for node in _fields(part.record.tree)]
        if len(fields) > _MASK and fields[_MASK] is not None:
            fields[_MASK] = [sequence.kept_ids, sequence.counts, sequence.kept_logprobs]
        (start, stop), size = sequence.span, len(fields[_INPUT_IDS])
        for number in range(_MASK):
            if _is_per_token(fields[number], size):
                fields[number] = fields[number][start:stop]
        for number in (_SEQUENCE_LENGTHS, _ENV_NAMES, _SEQ_LENS, _TRACE_IDS, _BRANCHES):
            if number < len(fields) and isinstance(fields[number], (list, tuple)):
                fields[number] = fields[number][part.position : part.position + 1]
        return fields


def _is_per_token(value: object, size: int) -> bool:
    """Whether it is a list or tensor of so many entries. What else an engine put there stays whole."""
    dense = as_numpy(value)
    if dense is not None:
        return dense.ndim > 0 and len(dense) == size
    return isinstance(value, Sequence) and len(value) == size


def _fields(tree: Node) -> list[Node]:
    names = getattr(tree.value, "__struct_fields__", None)
    if names is not None:
        tree = Node([getattr(tree.value, name) for name in names], tree.path)
    if not tree.is_list or len(tree.rows()) not in _LENGTHS:
        raise tree.refuse(f"{PrimeRl.layout} (newer layouts keep masks in files of their own and are not known here)")
    return tree.items()


def _unpack(fields: list[Node]) -> Iterator[Packed]:
    """The sequences of a packed row; what follows the last is padding, without loss, set and log-probability."""
    token_ids, logprobs = ids(fields[_INPUT_IDS]), floats(fields[_LOGPROBS])
    loss_mask = _flags(fields[_LOSS_MASK])
    temperatures = None if fields[_TEMPERATURES].value is None else floats(fields[_TEMPERATURES])
    counts, kept_ids, kept_logprobs = _masks(fields)
    for node, values in (
        (fields[_LOGPROBS], logprobs),
        (fields[_LOSS_MASK], loss_mask),
        (fields[_TEMPERATURES], temperatures),
    ):
        if values is not None and len(values) != len(token_ids):
            raise node.refuse(f"one entry for each of the {len(token_ids)} tokens")
    if counts is not None and len(counts) != len(token_ids):
        raise fields[_MASK].refuse(f"one count for each of the {len(token_ids)} tokens, not {len(counts)}")
    lengths = ids(fields[_SEQUENCE_LENGTHS])
    if len(lengths) and (lengths.min() < 0 or lengths.max() > len(token_ids) or lengths.sum() > len(token_ids)):
        raise fields[_SEQUENCE_LENGTHS].refuse(f"lengths that fit into the {len(token_ids)} tokens")
    edges = offsets_of(lengths)
    for name, told in (("loss", loss_mask), ("log-probability", logprobs), ("count of kept ids", counts)):
        behind = np.flatnonzero([] if told is None else np.ma.getdata(told)[edges[-1] :])
        if len(behind):
            raise fields[_SEQUENCE_LENGTHS].refuse(
                f"lengths that reach to the last drawn token: they add up to {edges[-1]}, and token "
                f"{edges[-1] + behind[0]} has a {name}, which padding has not"
            )
    kept_edges = np.zeros(len(token_ids) + 1, np.int64) if counts is None else offsets_of(counts)
    for position, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        here, kept_here = slice(start, stop), slice(kept_edges[start], kept_edges[stop])
        yield Packed(
            span=(start, stop),
            token_ids=token_ids[here],
            loss_mask=loss_mask[here],
            logprobs=logprobs[here],
            temperatures=None if temperatures is None else temperatures[here],
            counts=None if counts is None else counts[here],
            kept_ids=None if kept_ids is None else kept_ids[kept_here],
            kept_logprobs=None if kept_logprobs is None else kept_logprobs[kept_here],
            name=_trace(fields, position, len(lengths)),
        )


def _flags(node: Node) -> BoolArray:
    """A loss mask, of booleans or of 0 and 1."""
    if node.is_list and set(map(type, node.rows())) <= {bool}:
        return np.array(node.rows(), bool)
    dense = as_numpy(node.value)
    return ids(node) != 0 if dense is None or dense.dtype.kind != "b" else dense


def _masks(fields: list[Node]) -> tuple[IntArray | None, IntArray | None, FloatArray | None]:
    """Counts per token, ids, and log-probabilities if there are any."""
    if len(fields) <= _MASK or fields[_MASK].value is None:
        return None, None, None
    node = fields[_MASK]
    names = getattr(node.value, "__struct_fields__", None)
    if names is not None:
        node = Node([getattr(node.value, name) for name in names], node.path)
    if not node.is_list or len(node.rows()) not in (2, 3):
        raise node.refuse("[ids, counts] or [ids, counts, logprobs]")
    kept_ids, counts = _packed(node.at(0), "<i4").astype(np.int64), _packed(node.at(1), "<i4").astype(np.int64)
    if (len(counts) and counts.min() < 0) or counts.sum() != len(kept_ids):
        raise node.at(1).refuse(f"counts that add up to the {len(kept_ids)} ids; they add up to {counts.sum()}")
    logprobs = None
    if len(node.rows()) == 3 and node.at(2).value is not None:
        logprobs = _packed(node.at(2), "<f4").astype(np.float64)
        if len(logprobs) != len(kept_ids):
            raise node.at(2).refuse(f"one number for each of the {len(kept_ids)} ids, not {len(logprobs)}")
    return counts, kept_ids, logprobs


def _packed(node: Node, kind: str) -> IntArray | FloatArray:
    if not isinstance(node.value, (bytes, bytearray)):
        return ids(node) if kind == "<i4" else np.ma.getdata(floats(node))
    if len(node.value) % 4:
        raise node.refuse(f"bytes of 4 each, not {len(node.value)}")
    return np.frombuffer(node.value, kind)


def _trace(fields: list[Node], position: int, num_sequences: int) -> str | None:
    if len(fields) <= _BRANCHES or fields[_TRACE_IDS].value is None:
        return None
    for node in (fields[_TRACE_IDS], fields[_BRANCHES]):
        if len(node.rows()) != num_sequences:
            raise node.refuse(f"one for each of the {num_sequences} sequences")
    return f"{fields[_TRACE_IDS].at(position).text()}/{fields[_BRANCHES].at(position).integer()}"


def _with_temperature(part: Part, sequence: Packed, drawn_S: BoolArray, stated: Stated) -> KnownParams:
    """The known settings with the temperature of the drawn tokens, if all of them had the same."""
    if sequence.temperatures is None:
        return part.settings.params
    drawn = np.unique(np.ma.getdata(sequence.temperatures)[drawn_S])
    if len(drawn) != 1:
        return part.settings.params
    known = {name: value for name, value in vars(part.settings.params).items() if value is not None}
    return read_settings(Node({**known, "temperature": float(drawn[0])}, "temperatures"), stated).params
