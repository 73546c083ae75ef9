"""A transformers model as the scorer of an audit, where torch is installed and Paddle is not.

Rows go through the model one after the other: no padding, whatever attention the model has.

Legend: P positions, B responses, L tokens of one row, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keptset.schemas.errors import CheckpointError, InvalidInput
from keptset.trainer_bridge.sampled_tokens import Ints
from keptset.trainer_bridge.scoring.aligned import LogitsOf

PROBE = 8
"""Tokens on which hidden states and head are held against the model's own logits."""


class TransformersScorer:
    """`Scorer` over causal language models of transformers."""

    def __init__(self, models: Mapping[int | None, Any]) -> None:
        """Errors: InvalidInput where vocabularies differ, or a model does more to its logits than apply its head."""
        self._models = dict(models)
        sizes = {int(model.get_output_embeddings().weight.shape[0]) for model in self._models.values()}
        if len(sizes) > 1:
            raise InvalidInput(f"the versions have vocabularies of {sorted(sizes)} ids; they must be of one model")
        self.vocab_size: int = sizes.pop()
        bounds = [getattr(model.config, "max_position_embeddings", None) for model in self._models.values()]
        self.max_positions: int | None = min((b for b in bounds if b is not None), default=None)
        self.versions: tuple[int | None, ...] = tuple(sorted(self._models, key=lambda version: version or 0))
        for model in self._models.values():
            _probe(model)

    @classmethod
    def from_folders(cls, folders: Mapping[int | None, str], dtype: str) -> TransformersScorer:
        """Errors: CheckpointError for a folder that cannot be read; those of the class."""
        import torch
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        models = {}
        for version, folder in folders.items():
            try:
                model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"transformers cannot read {folder}: {error}") from error
            models[version] = model.to(device=device, dtype=getattr(torch, dtype)).eval()
        return cls(models)

    def logits_of(self, ids_P: Ints, lengths_B: Ints, version: int | None) -> LogitsOf:
        """See `Scorer`."""
        import torch

        model = self._models[version]
        rows = np.split(ids_P, np.cumsum(lengths_B)[:-1])
        with torch.inference_mode():
            hidden_PH = torch.cat([_hidden(model, row) for row in rows if len(row)])

        def logits(positions: Ints) -> Any:
            with torch.inference_mode():
                index = torch.as_tensor(positions, device=hidden_PH.device)
                return model.get_output_embeddings()(hidden_PH[index]).float()

        return logits

    def stepwise_logits_of(
        self, ids_P: Ints, lengths_B: Ints, prompt_lengths_B: Ints, version: int | None
    ) -> LogitsOf | None:
        """None: caches differ from model to model here, and the path floor is left out."""
        return None


def _hidden(model: Any, ids_L: Ints) -> Any:
    """[L, H], what the head is applied to."""
    import torch

    ids = torch.as_tensor(np.asarray(ids_L, np.int64), device=model.device)[None]
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]


def _probe(model: Any) -> None:
    import torch

    with torch.inference_mode():
        ids = np.arange(PROBE) % int(model.get_output_embeddings().weight.shape[0])
        ours = model.get_output_embeddings()(_hidden(model, ids)).float()
        theirs = model(input_ids=torch.as_tensor(ids, device=model.device)[None], use_cache=False).logits[0].float()
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise InvalidInput(
            f"{type(model).__name__} does more to its logits than apply its head (a soft cap, a scale), so they cannot "
            f"be made in pieces; bring a `Scorer` of your own"
        )
