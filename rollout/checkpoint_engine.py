"""The factory of keptset's own engine over a checkpoint folder, loaded where and when it is called."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from keptset.rollout.config import EngineConfig
from keptset.rollout.tokenizer import Tokenizer, tokenizer_digest

if TYPE_CHECKING:
    from keptset.rollout.engine import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class CheckpointEngine:
    """Call it to get a RolloutEngine. Errors of the call: CheckpointError where the folder cannot be used."""

    folder: str | Path
    """A Hugging Face folder of a Llama, Qwen2 or Qwen3 model, readable where the engine is to run."""
    config: EngineConfig = field(default_factory=EngineConfig)
    model_id: str | None = None
    """The model's name for people; None: the folder's."""
    version: int = 0
    """Version of the folder's weights."""
    dtype: str = "float32"
    """What weights and cache are kept in; logits are float32 in any case."""

    def __call__(self) -> RolloutEngine:
        # Paddle reads its thread settings when it is imported, so not before the caller has made them.
        from keptset.rollout.engine import RolloutEngine
        from keptset.rollout.models import load_decoder

        folder = Path(self.folder)
        return RolloutEngine(
            load_decoder(folder, self.dtype),
            self.config,
            model_id=self.model_id or folder.resolve().name,
            tokenizer=_tokenizer(folder),
            tokenizer_digest=tokenizer_digest(folder),
            version=self.version,
        )


def _tokenizer(folder: Path) -> Tokenizer | None:
    """For stop strings; a folder or an installation without one serves token ids all the same."""
    readable = (folder / "tokenizer.json").is_file() and find_spec("tokenizers") is not None
    return Tokenizer.from_folder(folder) if readable else None
