"""Request: one response asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from keptset.rollout.logit_processors import check_ids
from keptset.rollout.sampling import row_seed
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams, is_whole


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response asked for. The same request gives the same rollout_id and row seed wherever it runs."""

    prompt_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    params: SamplingParams = field(default_factory=SamplingParams)
    sample_index: int = 0
    group_id: str | None = None
    rollout_id: str | None = None
    """None: made from prompt_id, sample_index and row seed."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """The caller's own columns, names beginning with x_."""

    def resolved(self, base_seed: int) -> Request:
        """The same request with its row seed and rollout id settled."""
        seed = self.params.seed
        if seed is None:
            seed = row_seed(base_seed, self.prompt_id, self.sample_index)
        name = self.rollout_id or f"{self.prompt_id}/{self.sample_index}/{seed:016x}"
        return dataclasses.replace(self, params=dataclasses.replace(self.params, seed=seed), rollout_id=name)

    def check(self, vocab_size: int, max_length: int) -> None:
        """Errors: InvalidInput naming the prompt where it is empty, too long, or holds ids outside the vocabulary."""
        if not (is_whole(self.sample_index) and 0 <= self.sample_index < 2**31):
            raise InvalidInput(
                f"prompt {self.prompt_id}: sample_index is {self.sample_index!r}; "
                "it must be a whole number in [0, 2**31)"
            )
        ids = np.asarray(self.prompt_token_ids)
        if ids.ndim != 1 or len(ids) == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InvalidInput(
                f"prompt {self.prompt_id}: prompt_token_ids must be a non-empty row of whole numbers, "
                f"got shape {ids.shape}, dtype {ids.dtype}"
            )
        if len(ids) >= max_length:
            raise InvalidInput(
                f"prompt {self.prompt_id} has {len(ids)} tokens; with a context of {max_length} at most "
                f"{max_length - 1} leave room for a response: shorten it, or raise max_length if the model allows"
            )
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(outside):
            at = int(outside[0])
            raise InvalidInput(
                f"prompt {self.prompt_id}: id {ids[at]} at position {at} is outside the vocabulary [0, {vocab_size}); "
                "was it encoded with another model's tokenizer?"
            )
        try:
            check_ids(self.params, vocab_size)
        except InvalidInput as error:
            raise InvalidInput(f"prompt {self.prompt_id}: {error}") from error
