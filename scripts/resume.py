"""What a spool already holds of a run: which responses need not be drawn again, and whether they were drawn alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.schemas.builder import canonical_extras
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.spool import SpoolReader

_SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
_IDENTITY = ("vocab_size", "model_digest", "tokenizer_digest", "engine", "model_id")


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a run's responses are drawn."""

    params: SamplingParams
    identity: Identity
    """What is known of model and engine before it is loaded; None where it is not."""
    version: int
    """Of the weights. What they are is not looked at: two checkpoints of one training run differ in it, or in name."""
    max_length: int
    """Longest prompt and response together."""


def held_by(spool: str, wanted: Set[str], run: Run) -> dict[str, bytes]:
    """Rollout ids of `wanted` that the spool holds, with the digest of their prompts.

    Errors: InvalidInput where they were drawn from another model or under other settings; those of the spool's reader.
    """
    held: dict[str, bytes] = {}
    with SpoolReader(spool) as reader:
        for batch in reader:
            ours = np.array([name in wanted for name in batch.rollout_ids], bool)
            if not ours.any():
                continue
            batch = batch.filter(ours)
            _check_alike(spool, batch, run)
            prompts = batch.prompt_token_ids
            for row, name in enumerate(batch.rollout_ids):
                held[name] = b"" if prompts is None else prompt_digest(prompts[row])
    return held


def prompt_digest(token_ids_T: npt.NDArray[Any]) -> bytes:
    """Eight bytes that tell prompts apart."""
    return hashlib.blake2b(np.asarray(token_ids_T, "<i4").tobytes(), digest_size=8).digest()


def _check_alike(spool: str, batch: RolloutBatch, run: Run) -> None:
    for name in _IDENTITY:
        theirs, ours = getattr(batch.identity, name), getattr(run.identity, name)
        if None not in (theirs, ours) and theirs != ours:
            raise _differs(spool, batch, name, theirs, ours)
    if batch.policy_versions is not None:
        for version in np.setdiff1d(batch.policy_versions.values, run.version).tolist():
            raise _differs(spool, batch, "weights version", version, run.version)
    asked = {name: getattr(run.params, name) for name in _SETTINGS}
    asked["logit_bias"] = _bias(run.params.logit_bias)
    asked["rare settings"] = canonical_extras(run.params)
    columns = {name: batch.column(name).to_pylist() for name in (*_SETTINGS, "logit_bias", "sampler_extras")}
    columns["logit_bias"] = [_bias(dict(pairs or ())) for pairs in columns["logit_bias"]]
    columns["rare settings"] = columns.pop("sampler_extras")
    for name, values in columns.items():
        for value in values:
            if value != asked[name]:
                raise _differs(spool, batch, name, value, asked[name])
    ended = np.array([reason == "length" for reason in batch.column("finish_reason").to_pylist()], bool)
    lengths = batch.token_ids.lengths
    prompts = np.zeros(len(batch), np.int64) if batch.prompt_token_ids is None else batch.prompt_token_ids.lengths
    most = np.minimum(run.params.max_new_tokens, run.max_length - prompts)
    wrong = np.flatnonzero(np.where(ended, lengths != most, lengths > most))
    if len(wrong):
        raise _differs(spool, batch, "max_new_tokens", int(lengths[wrong[0]]), run.params.max_new_tokens)


def _bias(bias: Mapping[int, float]) -> dict[int, np.float32]:
    return {token_id: np.float32(value) for token_id, value in bias.items()}


def _differs(spool: str, batch: RolloutBatch, name: str, there: object, asked: object) -> InvalidInput:
    return InvalidInput(
        f"{spool} holds responses of this run, such as {batch.rollout_ids[0]}, with {name} {there!r}, and {asked!r} is "
        "asked now; ask as before to go on, or name another --out"
    )
