"""Responses to measure storage on: real ones of the demo's model, sampled once and kept in the cache, and made-up ones.

Legend: T tokens, N kept ids, V vocabulary.
"""

from __future__ import annotations

import fcntl
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from keptset.rollout.cpu_threads import configure, usable_cores
from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import StorageError
from keptset.schemas.ragged import offsets_of, row_index
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter
from keptset.scripts.demo_model import PROMPTS, default_cache, ensure_demo_model

REAL_TOKENS = 100_000
"""At least so many are sampled."""
SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, top_k=512, max_new_tokens=512)
SAMPLES_PER_ROUND = 4
"""Responses to each prompt that are asked for together; rounds follow until there are tokens enough."""

# The number is the recipe's: raising it makes every machine sample anew.
_NAME = "wire-rollouts-v1"

Progress = Callable[[int], None]
"""Called with the number of tokens that are there by now."""


def real_rollouts(cache: Path | None = None, progress: Progress = lambda tokens: None) -> list[RolloutBatch]:
    """Responses of SmolLM2-135M-Instruct to the demo's prompts, as a rollout pool recorded them, batch by batch.

    Sampled on first use, which takes minutes, into spools in the cache (`keptset` in XDG_CACHE_HOME or ~/.cache), round
    by round; an interrupted run goes on at the last whole round. Every row has its whole kept distribution too. Errors:
    CheckpointError where the model cannot be had, StorageError where the cache cannot be written.
    """
    folder = (default_cache() if cache is None else cache) / _NAME
    batches: list[RolloutBatch] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for number in itertools.count():
                before = sum(batch.num_tokens for batch in batches)
                if before >= REAL_TOKENS:
                    return batches
                batches += _round(folder, number, _further(progress, before))
    except OSError as error:
        raise StorageError(f"cannot keep rollouts in {folder}: {error.strerror or error}") from error
    raise AssertionError("rounds do not end")


def _further(progress: Progress, before: int) -> Progress:
    return lambda tokens: progress(before + tokens)


def _round(folder: Path, number: int, progress: Progress) -> list[RolloutBatch]:
    """The batches of one round, whose folder appears when it is whole."""
    spool, partial = folder / f"round-{number}", folder / f"round-{number}.partial"
    if not spool.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        _sample_round(partial, number, progress)
        partial.rename(spool)
    return list(SpoolReader(spool))


def _sample_round(spool: Path, number: int, progress: Progress) -> None:
    configure()
    from keptset.rollout.config import EngineConfig
    from keptset.rollout.pool import RolloutPool
    from keptset.rollout.request import Request
    from keptset.rollout.tokenizer import Tokenizer
    from keptset.scripts.prompts import read_prompts

    model = ensure_demo_model()
    tokenizer = Tokenizer.from_folder(model)
    params = replace(SAMPLING, stop_token_ids=tokenizer.stop_token_ids)
    requests = [
        Request(
            prompt_id=prompt.prompt_id,
            group_id=prompt.prompt_id,
            prompt_token_ids=prompt.token_ids,
            sample_index=number * SAMPLES_PER_ROUND + sample,
            params=params,
        )
        for prompt in read_prompts(PROMPTS, tokenizer)
        for sample in range(SAMPLES_PER_ROUND)
    ]
    config = EngineConfig(slots=32, distribution_share=1.0)
    tokens = 0
    with RolloutPool(model, config, actors=usable_cores()) as pool, SpoolWriter(spool, "pool") as writer:
        for batch in pool.run(requests):
            writer.append(batch)
            tokens += batch.num_tokens
            progress(tokens)


def made_up_rollouts(
    tokens: int, *, even: bool = False, vocab_size: int = 151_936, row_tokens: int = 2_048, seed: int = 0
) -> RolloutBatch:
    """Responses with kept sizes as in `keptset bench scoring`, min(512, ceil(exp(0.19 + 1.9 N))), N standard normal.

    Ids follow Zipf's law, as tokens of text do, low ids being frequent, as in vocabularies that were merged pair by
    pair; or they are spread evenly, as no model's are: the worst case. Sets do not repeat, which real ones do. Each
    distribution is a softmax of normal numbers; m of a set of one is 0.
    """
    random = np.random.default_rng(seed)
    sizes_T = np.minimum(512, np.ceil(np.exp(0.19 + 1.9 * random.standard_normal(tokens)))).astype(np.int64)
    offsets_T1 = offsets_of(sizes_T)
    token_N = row_index(offsets_T1)
    rank_N = np.arange(len(token_N)) - offsets_T1[token_N]
    # Sorted numbers below V - |K|, each raised by its rank, are ascending and unique.
    below_N = vocab_size - sizes_T[token_N]
    share_N = random.random(len(token_N))
    spread_N = (share_N * below_N if even else np.exp(share_N * np.log(below_N)) - 1).astype(np.int64)
    ids_N = spread_N[np.lexsort((spread_N, token_N))] + rank_N
    logits_N = 2 * random.standard_normal(len(ids_N))
    logp_N = logits_N - np.log(np.add.reduceat(np.exp(logits_N), offsets_T1[:-1]))[token_N]
    logp_N[sizes_T[token_N] == 1] = 0.0  # which the difference only nearly is
    p_N = np.exp(logp_N)
    entropy_T = -np.add.reduceat(p_N * logp_N, offsets_T1[:-1])
    variance_T = np.add.reduceat(p_N * (logp_N + entropy_T[token_N]) ** 2, offsets_T1[:-1])
    pick_T = offsets_T1[:-1] + random.integers(0, sizes_T)
    mass_T = np.where(sizes_T == 1, 0.0, np.log(random.uniform(0.95, 1.0, tokens)))
    builder = BatchBuilder(Identity(vocab_size=vocab_size, model_id="made up"))
    for number, start in enumerate(range(0, tokens, row_tokens)):
        at = slice(start, min(start + row_tokens, tokens))
        kept = slice(offsets_T1[at.start], offsets_T1[at.stop])
        builder.add(
            Response(
                rollout_id=f"made-up-{number:08d}",
                prompt_id=f"prompt-{number // 8}",
                sample_index=number % 8,
                prompt_token_ids=random.integers(0, vocab_size, 128),
                token_ids=ids_N[pick_T[at]],
                behavior_logprobs=logp_N[pick_T[at]],
                log_kept_mass=mass_T[at],
                kept_entropy=entropy_T[at],
                kept_logprob_var=variance_T[at],
                kept_offsets=offsets_T1[at.start : at.stop + 1] - offsets_T1[at.start],
                kept_ids=ids_N[kept],
                kept_logprobs=logp_N[kept],
                policy_versions=np.zeros(at.stop - at.start, np.int64),
                finish_reason="length",
                params=SAMPLING,
                seed=number,
            )
        )
    return builder.build()


def without_distributions(batch: RolloutBatch) -> RolloutBatch:
    """The batch as it is recorded by default: without the whole kept distributions."""
    place = batch.arrow.schema.get_field_index("kept_logprobs")
    field = batch.arrow.schema.field(place)
    return RolloutBatch.from_arrow(batch.arrow.set_column(place, field, pa.nulls(len(batch), field.type)))
