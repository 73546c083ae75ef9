"""Models for an audit: checkpoint folders, run by keptset's own decoder, or by transformers where Paddle is not.

Legend: P positions, B responses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from keptset.schemas.errors import CheckpointError, InvalidInput, MissingDependency
from keptset.trainer_bridge.audit.scorer import Scorer
from keptset.trainer_bridge.audit.token_scores import ModelScorer
from keptset.trainer_bridge.sampled_tokens import Ints
from keptset.trainer_bridge.scoring.aligned import LogitsOf

if TYPE_CHECKING:
    from keptset.rollout.models import Decoder


_WEIGHTS = ".json", ".safetensors", ".bin"
"""How the names of a checkpoint's files end: config, index, weights."""


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """Opens the folders when it is called, once in each process that scores. All of them are held in memory."""

    folders: tuple[tuple[int | None, str], ...]
    """Version and folder; the one version None: whatever drew the tokens."""
    dtype: str = "float32"
    files: tuple[tuple[str, int, int], ...] = ()
    """Config and weights that lie there, each with size and time of change: other weights are another model."""

    def __call__(self) -> ModelScorer:
        """Errors: CheckpointError for a folder that cannot be read or a model that is not supported; InvalidInput where
        versions have vocabularies of different size; MissingDependency where nothing here can run a model."""
        return ModelScorer(scorer=self._scorer())

    def _scorer(self) -> Scorer:
        if find_spec("paddle") is not None:
            from keptset.rollout.cpu_threads import configure
            from keptset.rollout.models import load_decoder

            configure()
            return DecoderScorer({version: load_decoder(folder, self.dtype) for version, folder in self.folders})
        if find_spec("torch") is not None and find_spec("transformers") is not None:
            from keptset.scripts.transformers_scorer import TransformersScorer

            return TransformersScorer.from_folders(dict(self.folders), self.dtype)
        raise MissingDependency(
            "an audit with --model runs the model: install keptset[cpu] or keptset[gpu], or torch and transformers"
        )


def model_folders(given: Sequence[str]) -> OpenModel:
    """What `--model` was given: `FOLDER` once, or `VERSION=FOLDER` as often as there are versions.

    Errors: InvalidInput where a folder is not there, a version is given twice, or one is given without its version
    beside others.

    Folders are absolute: the same from wherever an interrupted audit is started again.

    >>> model_folders(["/"]).folders, model_folders(["3=/", "4=/"]).folders
    (((None, '/'),), ((3, '/'), (4, '/')))
    """
    folders: dict[int | None, str] = {}
    for text in given:
        version, equals, folder = text.partition("=")
        told = bool(equals) and version.isdecimal()
        key, folder = (int(version), folder) if told else (None, text)
        if key in folders:
            which = "a folder without its version" if key is None else f"version {key}"
            raise InvalidInput(f"--model gives {which} twice: write VERSION=FOLDER, each version once")
        if not Path(folder).is_dir():
            raise InvalidInput(
                f"--model {folder} is no folder; name a Hugging Face folder with config.json and weights"
            )
        folders[key] = os.path.abspath(folder)
    if None in folders and len(folders) > 1:
        raise InvalidInput(f"--model {folders[None]} has no version beside others that have: write VERSION=FOLDER")
    return OpenModel(
        folders=tuple(sorted(folders.items(), key=lambda item: item[0] or 0)),
        files=tuple(file for folder in folders.values() for file in _files(folder)),
    )


def _files(folder: str) -> list[tuple[str, int, int]]:
    """Errors: CheckpointError where the folder cannot be looked at."""
    try:
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix in _WEIGHTS and path.is_file())
        states = [(path, path.stat()) for path in paths]
    except OSError as error:
        raise CheckpointError(f"cannot look at {error.filename}: {error.strerror or error}") from error
    return [(str(path), state.st_size, state.st_mtime_ns) for path, state in states]


class DecoderScorer:
    """`Scorer` over keptset's own decoder."""

    def __init__(self, decoders: Mapping[int | None, Decoder]) -> None:
        self._decoders = dict(decoders)
        sizes = {decoder.config.vocab_size for decoder in self._decoders.values()}
        if len(sizes) > 1:
            raise InvalidInput(f"the versions have vocabularies of {sorted(sizes)} ids; they must be of one model")
        self.vocab_size: int = sizes.pop()
        self.max_positions: int | None = min(d.config.max_position_embeddings for d in self._decoders.values())
        self.versions: tuple[int | None, ...] = tuple(sorted(self._decoders, key=lambda version: version or 0))

    def logits_of(self, ids_P: Ints, lengths_B: Ints, version: int | None) -> LogitsOf:
        """See `Scorer`."""
        from keptset.scripts.rescore import hidden_in_one_pass, logits_of

        decoder = self._decoders[version]
        return logits_of(decoder, hidden_in_one_pass(decoder, ids_P, lengths_B))

    def stepwise_logits_of(
        self, ids_P: Ints, lengths_B: Ints, prompt_lengths_B: Ints, version: int | None
    ) -> LogitsOf | None:
        """See `Scorer`."""
        from keptset.scripts.rescore import hidden_through_cache, logits_of

        decoder = self._decoders[version]
        return logits_of(decoder, hidden_through_cache(decoder, ids_P, lengths_B, prompt_lengths_B))
