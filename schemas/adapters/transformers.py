"""transformers: what `generate(..., output_scores=True, return_dict_in_generate=True)` returns.

Scores are the processed, tempered logits with -inf outside the kept set, so the set is where they are finite. Greedy
search takes the largest score and cuts nothing: there the set is the token alone. Scores are too large to record, so
this takes live objects only.

Legend: B rows, P prompt tokens, T steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np

from keptset.schemas.adapters.arrays import IntArray, as_numpy, ids
from keptset.schemas.adapters.base import Adapter, Names, Part, Record, prompt_ids_of
from keptset.schemas.adapters.collect import Adapted, adapt_live
from keptset.schemas.adapters.dense_scores import DenseSteps, read_steps
from keptset.schemas.adapters.settings import Stated, read_settings
from keptset.schemas.adapters.tree import Node
from keptset.schemas.builder import Response
from keptset.schemas.columns import FinishReason, LogprobDomain, Support
from keptset.schemas.errors import InvalidInput, SchemaError
from keptset.schemas.sampling_params import KnownParams

_BANS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "constraints",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "sequence_bias",
    "suppress_tokens",
    "watermarking_config",
)
"""Settings that change or ban logits: with one on, raw logits do not tell what the filters cut, and m is unknown."""


def from_transformers(
    output: object,
    generation_config: object,
    stated: Stated | None = None,
    *,
    attention_mask: object = None,
    do_sample: bool | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    response_lengths: Sequence[int] | None = None,
    prompt_ids: Sequence[str] | None = None,
) -> Adapted:
    """One `generate` call. Tensors may be of any library that gives NumPy arrays; torch is not imported.

    `generation_config`: the one that was in force, or a mapping of its known settings.
    `attention_mask` [B, P]: the prompts'; without one the whole prompt is taken, padding included.
    `do_sample`, `eos_token_id`: where the configuration does not tell them; `eos_token_id=()` says that there was none.
    `response_lengths` [B]: needed with stop strings, behind which padding cannot be told from tokens.
    `prompt_ids`: the caller's, one per row; by default the row's number: give `Stated(id_prefix=...)` then.

    With `output_logits=True` as well, m is recorded where nothing but temperature and filters acted on them. Work and
    memory grow with the vocabulary, which is the price of dense scores.

    Errors: InvalidInput for beam search, missing scores, and where what is needed is not told.
    """
    config = Node(generation_config, "generation_config")
    stated = stated or Stated()
    call = _Call.of(output, config, do_sample, eos_token_id, stated)
    call = call.with_prompts(attention_mask, response_lengths)
    rows = [_Row(call, number) for number in range(len(call.sequences_BL))]
    return adapt_live(Transformers(), rows, call.settings, stated, prompt_ids)


class Transformers(Adapter):
    engine = "transformers"
    layout = "the rows of one generate() call"

    def parts(self, record: Record) -> Iterator[Part]:
        yield Part(record=record, node=record.tree, position=0, settings=record.settings)

    def response(self, part: Part, stated: Stated) -> Response:
        row = part.record.tree.value
        assert isinstance(row, _Row)
        call, steps, number = row.call, row.call.steps, row.number
        length = int(call.lengths_B[number])
        broken = np.flatnonzero(~steps.sound_TB[:length, number])
        if len(broken):
            raise SchemaError(
                f"scores[{broken[0]}] of row {number} hold NaN or +inf, or nothing finite; expected scores to draw from"
            )
        kept = steps.sets(number, length)
        m_T = None if steps.m_TB is None or not call.only_filters else steps.m_TB[:length, number]
        token_ids_T = call.tokens_BT[number, :length]
        return Response(
            **vars(Names.of(part.record, stated, prompt=str(part.record.place.number), index=0)),
            prompt_token_ids=prompt_ids_of(call.prompt(number)),
            token_ids=token_ids_T,
            behavior_logprobs=steps.b_TB[:length, number],
            logprob_domain=LogprobDomain.KEPT.value,
            log_kept_mass=None if m_T is None or np.isnan(m_T).any() else m_T,
            kept_entropy=steps.entropy_TB[:length, number],
            kept_logprob_var=steps.variance_TB[:length, number],
            support=Support.FULL.value if kept is None else Support.KEPT.value,
            kept_offsets=None if kept is None else kept[0],
            kept_ids=None if kept is None else kept[1],
            kv_policy=stated.kv_policy,
            finish_reason=call.finish_reason(token_ids_T),
            params=part.settings.params,
            sampler_extras=part.settings.extras,
        )

    def raw(self, part: Part) -> object:
        """The row's ids. (Its scores are not kept: a hundred tokens of them are tens of megabytes.)"""
        row = part.record.tree.value
        assert isinstance(row, _Row)
        return {"sequence": row.call.sequences_BL[row.number], "prompt_length": row.call.prompt_length}


@dataclass(frozen=True)
class _Row:
    call: _Call
    number: int


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call of generate()."""

    sequences_BL: IntArray
    scores: Sequence[object]
    raw_logits: Sequence[object] | None
    greedy: bool
    eos: frozenset[int]
    settings: Mapping[str, object]
    params: KnownParams
    only_filters: bool
    """Nothing but temperature and filters is known to have acted on the logits."""
    limit: int | None
    """The number of tokens after which generation stops."""
    has_stop_strings: bool
    prompt_mask_BP: IntArray | None = None
    lengths_B: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, output: object, config: Node, do_sample: bool | None, eos: object, stated: Stated) -> _Call:
        out = Node(output)
        if not out.has_fields or not out.has("scores") or not out.has("sequences"):
            raise InvalidInput(
                "no sequences with scores here; call generate with output_scores=True and return_dict_in_generate=True"
            )
        beams = config.get("num_beams")
        if out.has("beam_indices") or out.has("sequences_scores") or (beams is not None and beams.integer() > 1):
            raise InvalidInput("beam search draws no token from a distribution, so there is nothing to record; sample")
        sequences = as_numpy(out.require("sequences", "ids").value)
        if sequences is None or sequences.ndim != 2 or sequences.dtype.kind not in "iu":
            raise InvalidInput("sequences must be a tensor of ids [rows, length]")
        scores, logits = out.require("scores", "a tuple").value, out.get("logits")
        if not isinstance(scores, (list, tuple)) or len(scores) > sequences.shape[1]:
            raise InvalidInput(f"scores must be one tensor per step, of the {sequences.shape[1]} ids or fewer")
        sampling = _told(config.get("do_sample"), do_sample)
        settings = {name: node.value for name in _SETTINGS if (node := config.get(name)) is not None}
        if not sampling:
            settings = {name: value for name, value in settings.items() if name not in _FILTERS} | {"temperature": 0.0}
        limit = config.get("max_new_tokens")
        return cls(
            sequences_BL=sequences.astype(np.int64),
            scores=scores,
            raw_logits=None if logits is None or not logits.is_list or not logits.rows() else logits.rows(),
            greedy=not sampling,
            eos=_ends(config.get("eos_token_id"), eos),
            settings=settings,
            params=read_settings(Node(settings), stated).params,
            only_filters=not any(_acts(config.get(name)) for name in _BANS)
            and settings.get("repetition_penalty", 1.0) == 1.0,
            limit=None if limit is None else limit.integer(),
            has_stop_strings=config.has("stop_strings"),
        )

    def with_prompts(self, attention_mask: object, response_lengths: Sequence[int] | None) -> _Call:
        """With the padding told apart, before the prompts and behind the responses."""
        rows = len(self.sequences_BL)
        mask = None
        if attention_mask is not None:
            mask = as_numpy(attention_mask)
            mask = np.asarray(attention_mask) if mask is None else mask
            if mask.shape != (rows, self.prompt_length):
                raise InvalidInput(f"attention_mask is {mask.shape}; the prompts are {(rows, self.prompt_length)}")
        if response_lengths is None and self.has_stop_strings:
            raise InvalidInput("stop strings end a response anywhere; give response_lengths, the tokens of each row")
        lengths = self._ends_found() if response_lengths is None else ids(Node(list(response_lengths), "lengths"))
        if len(lengths) != rows or np.any((lengths < 0) | (lengths > len(self.scores))):
            raise InvalidInput(f"response_lengths must be {rows} numbers from 0 to {len(self.scores)}")
        return replace(self, prompt_mask_BP=mask, lengths_B=lengths)

    def _ends_found(self) -> IntArray:
        """Tokens of each row up to its first end of sequence, which is one of them."""
        ended_BT = np.isin(self.tokens_BT, sorted(self.eos))
        first_B = ended_BT.argmax(axis=1) if len(self.scores) else np.zeros(len(self.sequences_BL), np.int64)
        lengths: IntArray = np.where(ended_BT.any(axis=1), first_B + 1, len(self.scores))
        return lengths

    @property
    def prompt_length(self) -> int:
        return int(self.sequences_BL.shape[1] - len(self.scores))

    @property
    def tokens_BT(self) -> IntArray:
        return self.sequences_BL[:, self.prompt_length :]

    def prompt(self, row: int) -> IntArray:
        prompt_P = self.sequences_BL[row, : self.prompt_length]
        return prompt_P if self.prompt_mask_BP is None else prompt_P[np.asarray(self.prompt_mask_BP[row]) != 0]

    @cached_property
    def steps(self) -> DenseSteps:
        return read_steps(
            self.scores, self.raw_logits, self.tokens_BT, self.lengths_B, self.params.temperature, self.greedy
        )

    def finish_reason(self, token_ids_T: IntArray) -> str:
        if len(token_ids_T) and int(token_ids_T[-1]) in self.eos:
            return FinishReason.STOP.value
        if self.limit is not None and len(token_ids_T) == self.limit:
            return FinishReason.LENGTH.value
        return FinishReason.UNKNOWN.value


_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_SETTINGS = (*_FILTERS, "repetition_penalty", "min_new_tokens")


def _told(node: Node | None, do_sample: bool | None) -> bool:
    value = do_sample if do_sample is not None else None if node is None else node.value
    if not isinstance(value, bool):
        raise InvalidInput("the configuration does not say whether tokens were drawn; give do_sample=True or False")
    return value


def _ends(node: Node | None, eos: object) -> frozenset[int]:
    value = eos if eos is not None else None if node is None else node.value
    if value is None:
        raise InvalidInput(
            "the configuration does not say which ids end a response; give eos_token_id, () if none does"
        )
    dense = as_numpy(value)
    if isinstance(value, int) or (dense is not None and dense.ndim == 0):
        return frozenset({int(cast(int, value))})
    return frozenset(ids(Node(value, "eos_token_id")).tolist())


def _acts(node: Node | None) -> bool:
    """Whether a setting is on: neither null nor empty nor the number that leaves logits alone."""
    if node is None:
        return False
    if node.is_list:
        return bool(node.rows())
    neutral: tuple[object, ...] = (0, 1.0) if isinstance(node.value, (int, float)) else ({},)
    return node.value not in neutral
