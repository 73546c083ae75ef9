"""What must hold of every response that a reader lets through, by the words of docs/semantics.md, one token at a time.

Written a second time on purpose: keptset's own validation is among what is tried here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from keptset.schemas.rollout_batch import RolloutBatch

REQUIRED = (
    "rollout_id",
    "prompt_id",
    "sample_index",
    "token_ids",
    "sampled",
    "logprob_domain",
    "support",
    "finish_reason",
)
PER_TOKEN = (
    "sampled",
    "trainable",
    "behavior_logprobs",
    "full_logprobs",
    "log_kept_mass",
    "kept_entropy",
    "kept_logprob_var",
    "kept_ids",
    "kept_logprobs",
    "top_ids",
    "top_logprobs",
    "policy_versions",
)
NULL_WHERE_NOT_SAMPLED = (*PER_TOKEN[2:9], "policy_versions")


def violations(batch: RolloutBatch) -> Iterator[str]:
    """Errors in a batch; warnings (no support, sets larger than top_k, shared seeds) are none."""
    rows = batch.arrow.to_pylist()
    for row in rows:
        yield from (f"{row['rollout_id']}: {told}" for told in _of_row(row, batch.identity.vocab_size or 2**31))
    ids = [row["rollout_id"] for row in rows]
    for one, other in itertools.combinations(range(len(rows)), 2):
        if ids[one] == ids[other] and repr(rows[one]) != repr(rows[other]):
            yield f"{ids[one]}: rows {one} and {other} share it and differ"


def _of_row(row: dict[str, Any], vocab_size: int) -> Iterator[str]:
    missing = [name for name in REQUIRED if row[name] is None]
    if missing:
        yield f"null in {missing}"
        return
    tokens, sampled = row["token_ids"], row["sampled"]
    lengths = {name: len(row[name]) for name in PER_TOKEN if row[name] is not None}
    if set(lengths.values()) - {len(tokens)}:
        yield f"{len(tokens)} tokens, but {lengths}"
        return
    if None in tokens or None in sampled or None in (row["trainable"] or []):
        yield "null among tokens, sampled or trainable"
        return
    if sampled and sampled[0] and not row["prompt_token_ids"]:
        yield "token 0 was sampled and there is no prompt"
    ids = [*tokens, *(row["prompt_token_ids"] or []), *(token for token, _ in row["logit_bias"] or [])]
    if any(token is None or not 0 <= token < vocab_size for token in ids):
        yield "an id outside the vocabulary, or none, among tokens, prompt or bias"
    if row["support"] == "kept" and any(sampled) and row["kept_ids"] is None:
        yield "support is kept and there are no sets"
    if row["support"] != "kept" and (row["kept_ids"] is not None or row["kept_logprobs"] is not None):
        yield f"sets although support is {row['support']}"
    versions = [version for version in row["policy_versions"] or [] if version is not None]
    if sorted(versions) != versions:
        yield f"versions fall: {versions}"
    for position, token in enumerate(tokens):
        item = {name: row[name][position] for name in PER_TOKEN if row[name] is not None}
        for told in _of_token(row, token, item, vocab_size):
            yield f"token {position}: {told}"


def _of_token(row: dict[str, Any], token: int, item: dict[str, Any], vocab_size: int) -> Iterator[str]:
    if not item["sampled"]:
        told = [name for name in NULL_WHERE_NOT_SAMPLED if item.get(name) is not None]
        if told:
            yield f"not sampled, but has {told}"
        return
    if (item.get("top_ids") is None) != (item.get("top_logprobs") is None):
        yield "one of top_ids and top_logprobs without the other"
    b, m, kept = item.get("behavior_logprobs"), item.get("log_kept_mass"), item.get("kept_ids")
    if "behavior_logprobs" in item and (b is None or not -1000 < b <= 1e-6):
        yield f"b is {b}"
    if m is not None and not m <= 1e-6:
        yield f"m is {m}"
    bound = row["top_p"] if row["top_k"] == 0 and row["min_p"] == 0 else None
    if m is not None and bound is not None and math.exp(min(m, 1.0)) < bound - 1e-5:
        yield f"kept mass {math.exp(m)} is below top_p {bound}"
    if "kept_ids" not in item:
        return
    if not kept:
        yield f"sampled, and its set is {kept}"
        return
    if any(one is None or not 0 <= one < vocab_size for one in kept):
        yield "an id outside the vocabulary, or none, in its set"
        return
    if any(later <= sooner for sooner, later in itertools.pairwise(kept)):
        yield f"its set does not ascend: {kept[:8]}"
    if token not in kept:
        yield f"{token} is not in its set"
    if len(kept) == 1 and b is not None and row["logprob_domain"] == "kept" and abs(b) > 1e-12:
        yield f"a set of one, and b is {b}"
    if item.get("kept_logprobs") is not None:
        yield from _of_distribution(row, token, b, kept, item["kept_logprobs"])


def _of_distribution(
    row: dict[str, Any], token: int, b: float | None, kept: list[int], logprobs: list[float]
) -> Iterator[str]:
    if len(logprobs) != len(kept) or None in logprobs:
        yield f"{len(kept)} ids and {len(logprobs)} log-probabilities"
        return
    total = math.fsum(math.exp(min(logprob, 50.0)) for logprob in logprobs)
    if not abs(total - 1) <= 2e-4:
        yield f"its distribution sums to {total}"
    elif b is not None and token in kept and row["logprob_domain"] == "kept":
        own = logprobs[kept.index(token)]
        if not abs(b - own) <= 2e-4 * max(1.0, abs(own)):
            yield f"b is {b}, its distribution says {own}"
