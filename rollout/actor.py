"""One engine in one process: a plain class, and the Ray actor made of it.

The pool drives a worker by turns: hand in requests, let the engine run for a while, take what ended. Requests that
have not ended stay in flight between turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from keptset.rollout import cpu_threads
from keptset.rollout.config import EngineConfig
from keptset.rollout.request import Request
from keptset.rollout.tokenizer import Tokenizer, tokenizer_digest
from keptset.schemas.errors import InvalidInput
from keptset.schemas.rollout_batch import RolloutBatch

if TYPE_CHECKING:
    from keptset.rollout.engine import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn of a worker brought, without the responses themselves."""

    finished: tuple[str, ...]
    """Rollout ids of the responses in the turn's batch."""
    refused: dict[str, str]
    """Rollout ids of requests that could not be accepted, with the reason."""
    unfinished: int
    """Requests still in flight."""
    tokens_drawn: int
    """Tokens drawn in this turn."""
    seconds: float
    """Wall time of this turn."""


class RolloutWorker:
    """An engine over a checkpoint folder, loaded when it is first needed."""

    def __init__(
        self,
        folder: str | Path,
        config: EngineConfig,
        *,
        threads: int | None = None,
        model_id: str | None = None,
        version: int = 0,
    ) -> None:
        cpu_threads.configure(threads)
        self._folder, self._config, self._model_id, self._version = Path(folder), config, model_id, version

    @cached_property
    def engine(self) -> RolloutEngine:
        """The engine. Errors: CheckpointError where the folder cannot be used."""
        # Paddle reads its thread settings when it is imported, so not before __init__ has made them.
        from keptset.rollout.engine import RolloutEngine
        from keptset.rollout.models import load_decoder

        return RolloutEngine(
            load_decoder(self._folder),
            self._config,
            model_id=self._model_id or self._folder.name,
            tokenizer=self._tokenizer(),
            tokenizer_digest=tokenizer_digest(self._folder),
            version=self._version,
        )

    def _tokenizer(self) -> Tokenizer | None:
        """For stop strings; a folder or an installation without one serves token ids all the same."""
        readable = (self._folder / "tokenizer.json").is_file() and find_spec("tokenizers") is not None
        return Tokenizer.from_folder(self._folder) if readable else None

    def load(self) -> int:
        """Load the checkpoint now; returns the process's id, for logs and for tests that kill it."""
        assert self.engine is not None
        return os.getpid()

    def turn(self, requests: Sequence[Request], seconds: float) -> tuple[Turn, RolloutBatch | None]:
        """Accept requests and run until `seconds` have passed or nothing is left.

        A request that cannot be accepted is named in the turn; the others go on.
        """
        begin, drawn_before = time.monotonic(), self.engine.tokens_drawn
        refused: dict[str, str] = {}
        for request in requests:
            try:
                self.engine.submit(request)
            except InvalidInput as error:
                refused[request.rollout_id or request.prompt_id] = str(error)
        batch = self.engine.advance(seconds)
        turn = Turn(
            finished=() if batch is None else tuple(batch.rollout_ids),
            refused=refused,
            unfinished=self.engine.unfinished,
            tokens_drawn=self.engine.tokens_drawn - drawn_before,
            seconds=time.monotonic() - begin,
        )
        return turn, batch
