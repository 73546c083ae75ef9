"""Drawing what a spool does not hold yet of a file of prompts, and saying how far it is."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from keptset.rollout.config import EngineConfig
from keptset.rollout.request import Request
from keptset.rollout.sampling import row_seed
from keptset.rollout.tokenizer import Tokenizer, tokenizer_digest
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, RolloutError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.spool import SpoolWriter
from keptset.scripts.prompts import PromptFile
from keptset.scripts.resume import Run, held_by, prompt_digest

if TYPE_CHECKING:
    from keptset.rollout.actor import Turn

WRITER = "rollout"
"""The spool's writer. Its lock keeps a second run off the spool; its next start publishes what a crash left."""
_SHOWN = 5
_SPEED_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be drawn, and where to."""

    file: PromptFile
    tokenizer: Tokenizer | None
    params: SamplingParams
    samples: int
    config: EngineConfig
    model: Path
    model_id: str
    version: int
    """Of the model's weights."""
    dtype: str
    out: str

    def rollout_id(self, prompt_id: str, sample: int) -> str:
        """As `Request.resolved` makes it."""
        return f"{prompt_id}/{sample}/{row_seed(self.config.base_seed, prompt_id, sample):016x}"

    def wanted(self) -> set[str]:
        """Every response that is to be in the spool in the end."""
        return {self.rollout_id(name, sample) for name in self.file.prompt_ids for sample in range(self.samples)}


@dataclass(kw_only=True)
class Summary:
    """What was done."""

    spool: str
    asked: int
    """Responses asked for."""
    there: int
    """Of these, those that the spool held before."""
    responses: int = 0
    tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Rollout id of what was refused or given up, with the reason."""
    seconds: float = 0.0
    """Of sampling, without the start."""
    tokens_per_second: float = 0.0
    restarts: int = 0
    interrupted: bool = False

    @property
    def not_begun(self) -> int:
        return self.asked - self.there - self.responses - len(self.failed)

    def text(self) -> str:
        lines = [f"failed: {name}: {reason}" for name, reason in list(self.failed.items())[:_SHOWN]]
        if len(self.failed) > _SHOWN:
            lines.append(f"failed: {len(self.failed) - _SHOWN} more; --json names all")
        if self.not_begun:
            lines.append(f"{self.not_begun} responses are missing; the same command goes on with them")
        there = f", {self.there} were there before" if self.there else ""
        speed = f", {self.tokens_per_second:.0f} tokens/s" if self.responses else ""
        return "\n".join([*lines, f"{self.responses} responses, {self.tokens} tokens in {self.spool}{there}{speed}"])


def run(job: Job, ray_options: Mapping[str, Any]) -> Summary:
    """Draw what the spool does not hold. Errors: those of prompts, spool, checkpoint and pool."""
    from keptset.rollout.models.config import DecoderConfig

    decoder = DecoderConfig.from_folder(job.model)
    identity = Identity(
        vocab_size=decoder.vocab_size,
        model_id=job.model_id,
        model_digest=decoder.digest,
        tokenizer_digest=tokenizer_digest(job.model),
        engine="keptset",
    )
    max_length = job.config.max_length or decoder.max_position_embeddings
    wanted = job.wanted()
    with SpoolWriter(job.out, WRITER) as writer:
        alike = Run(params=job.params, identity=identity, version=job.version, max_length=max_length)
        held = held_by(job.out, wanted, alike)
        summary = Summary(spool=job.out, asked=len(wanted), there=len(held))
        if summary.not_begun:
            _draw(job, ray_options, held, writer, summary)
        else:
            assert not list(_requests(job, held, summary)), "all are there; what differs from the file is told"
    return summary


def _draw(
    job: Job, ray_options: Mapping[str, Any], held: Mapping[str, bytes], writer: SpoolWriter, summary: Summary
) -> None:
    from keptset.rollout.checkpoint_engine import CheckpointEngine
    from keptset.rollout.pool import RolloutPool

    engine = CheckpointEngine(
        folder=job.model, config=job.config, model_id=job.model_id, version=job.version, dtype=job.dtype
    )
    reasons: Counter[str] = Counter()
    with progress_bar(summary) as advance, RolloutPool(engine, job.config, **ray_options) as pool:
        begin = time.monotonic()
        try:
            for batch in pool.run(_requests(job, held, summary), progress=lambda turn: advance(0, turn)):
                writer.append(with_types(batch, job.file.extra_types))
                summary.responses += len(batch)
                summary.tokens += batch.num_tokens
                reasons.update(batch.column("finish_reason").to_pylist())
                advance(len(batch), None)
        except RolloutError:
            if not pool.failures:
                raise
        except KeyboardInterrupt:
            summary.interrupted = True
        summary.seconds = time.monotonic() - begin
        summary.failed |= pool.failures
        summary.restarts = pool.restarts
    summary.tokens_per_second = summary.tokens / summary.seconds if summary.seconds else 0.0
    summary.finish_reasons = dict(reasons)


def _requests(job: Job, held: Mapping[str, bytes], summary: Summary) -> Iterator[Request]:
    """What is missing. What cannot be asked is told as failed."""
    for entry in job.file.entries():
        names = {sample: job.rollout_id(entry.prompt_id, sample) for sample in range(job.samples)}
        try:
            prompt = entry.encode(job.tokenizer)
        except InvalidInput as error:
            summary.failed |= {name: str(error) for name in names.values() if name not in held}
            continue
        digest = prompt_digest(prompt.token_ids)
        for sample, name in names.items():
            if name in held:
                if held[name] != digest:
                    summary.failed[name] = f"{entry.where}: the spool holds another prompt under this id"
                    summary.there -= 1
                continue
            yield Request(
                prompt_id=prompt.prompt_id,
                prompt_token_ids=prompt.token_ids,
                params=replace(job.params, seed=row_seed(job.config.base_seed, prompt.prompt_id, sample)),
                sample_index=sample,
                group_id=prompt.prompt_id,
                rollout_id=name,
                extra=prompt.extra,
            )


def with_types(batch: RolloutBatch, types: Mapping[str, pa.DataType]) -> RolloutBatch:
    """The same rows with these columns of the caller's own, in these types: one schema for the whole spool."""
    arrow = batch.arrow
    for name in sorted(types):
        at = arrow.schema.get_field_index(name)
        column = pa.nulls(len(batch), types[name]) if at < 0 else arrow.column(at).cast(types[name])
        own = pa.field(name, types[name])
        arrow = arrow.append_column(own, column) if at < 0 else arrow.set_column(at, own, column)
    return RolloutBatch(arrow, batch.identity)


@contextmanager
def progress_bar(summary: Summary) -> Iterator[Any]:
    """Responses done, tokens per second and time left, on a terminal; nothing in a pipe.

    Yields a function to call with responses that came, or a turn that ended.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("sampling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    speed = Speed()
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=120) as bars:
        task = bars.add_task("", total=summary.asked, completed=summary.there, speed="starting actors")

        def advance(responses: int, turn: Turn | None) -> None:
            if turn is not None:
                bars.update(task, speed=f"{speed.after(turn.tokens_drawn, time.monotonic()):.0f} tokens/s")
            else:
                bars.advance(task, responses)

        yield advance


class Speed:
    """Tokens per second over the last while.

    >>> speed = Speed()
    >>> [speed.after(tokens, at) for tokens, at in ((0, 10.0), (50, 11.0), (70, 12.0))]
    [0.0, 50.0, 60.0]
    """

    def __init__(self) -> None:
        self._drawn: deque[tuple[float, int]] = deque()

    def after(self, tokens: int, now: float) -> float:
        """So many more tokens have been drawn by now."""
        self._drawn.append((now, tokens))
        while now - self._drawn[0][0] > _SPEED_SECONDS and len(self._drawn) > 2:
            self._drawn.popleft()
        seconds = now - self._drawn[0][0]
        return sum(count for at, count in list(self._drawn)[1:]) / seconds if seconds else 0.0
