"""Rollouts to plant faults in, and honest ones of many seeds: sampled once, kept in the cache.

Each is a spool in a folder that appears when it is whole, so an interrupted run goes on at the last one.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keptset.schemas.errors import StorageError
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter

# The number is the recipe's: raising it makes every machine sample anew.
CACHE_NAME = "audit-power-v1"

MAX_NEW_TOKENS = 24
SETTINGS = (
    SamplingParams(temperature=0.7, top_p=0.95, top_k=512),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=1.2, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.5),
    SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.15, frequency_penalty=0.3),
    SamplingParams(temperature=0.6, top_p=0.95, top_k=100, repetition_penalty=1.05),
)
"""Each has a temperature and cuts, so that every fault can show; all but the first have processors."""

Ids = npt.NDArray[np.int32]
Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What rollouts are sampled from."""

    model: Path
    prompts: tuple[tuple[str, Ids], ...]
    """prompt_id and ids."""
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def demo(cls, model: Path) -> Source:
        """The demo's prompts, for a model with a tokenizer."""
        from keptset.rollout.tokenizer import Tokenizer
        from keptset.scripts.demo_model import PROMPTS
        from keptset.scripts.prompts import read_prompts

        tokenizer = Tokenizer.from_folder(model)
        prompts = tuple((prompt.prompt_id, prompt.token_ids) for prompt in read_prompts(PROMPTS, tokenizer))
        return cls(model=model, prompts=prompts, stop_token_ids=tuple(tokenizer.stop_token_ids))


def varied(folder: Path, source: Source, count: int, progress: Progress) -> RolloutBatch:
    """At least `count` responses, over all of `SETTINGS` in turn, each token with its whole kept distribution."""
    batches: list[RolloutBatch] = []
    for number in range(-(-count // (len(source.prompts) * len(SETTINGS)))):
        batches += _spool(folder / f"varied-{number}", source, SETTINGS, number, 0, progress)
    return concat_batches(batches)


def of_seed(folder: Path, source: Source, settings: Sequence[SamplingParams], seed: int, progress: Progress) -> Path:
    """The spool of every prompt under every setting, all drawn under one base seed."""
    path = folder / f"seed-{seed}"
    _spool(path, source, settings, 0, seed, progress)
    return path


def _spool(
    path: Path, source: Source, settings: Sequence[SamplingParams], number: int, seed: int, progress: Progress
) -> list[RolloutBatch]:
    """What is in the spool, which is sampled first where it is not there. `number` tells samples of a prompt apart."""
    try:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.with_name("lock"), "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.is_dir():  # else another process made it meanwhile
                    partial = path.with_name(f"{path.name}.partial")
                    shutil.rmtree(partial, ignore_errors=True)
                    _sample(partial, source, settings, number, seed, progress)
                    partial.rename(path)
    except OSError as error:
        raise StorageError(f"cannot keep rollouts in {path}: {error.strerror or error}") from error
    return list(SpoolReader(path))


def _sample(
    path: Path, source: Source, settings: Sequence[SamplingParams], number: int, seed: int, progress: Progress
) -> None:
    from keptset.rollout.config import EngineConfig
    from keptset.rollout.cpu_threads import configure
    from keptset.rollout.engine import RolloutEngine
    from keptset.rollout.models import load_decoder
    from keptset.rollout.request import Request

    configure()
    config = EngineConfig(slots=64, base_seed=seed, distribution_share=1.0)
    engine = RolloutEngine(load_decoder(source.model), config, model_id=source.model.name)
    for prompt_id, ids in source.prompts:
        for setting, params in enumerate(settings):
            sample = number * len(settings) + setting
            engine.submit(
                Request(
                    prompt_id=prompt_id,
                    group_id=f"{prompt_id}/{sample}",
                    prompt_token_ids=ids,
                    sample_index=sample,
                    params=replace(params, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=source.stop_token_ids),
                )
            )
    asked, done = engine.unfinished, 0
    with SpoolWriter(path, "bench", fsync="never") as writer:
        while engine.unfinished:
            batch = engine.advance(1.0)
            if batch is not None:
                writer.append(batch)
                done += len(batch)
            progress(f"sampling {path.name.removesuffix('.partial')}", done / asked)
