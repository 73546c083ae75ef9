"""What an audit needs of a model: logits of recorded tokens, from one or several versions of its weights.

Legend: P positions (tokens of prompt and response, response after response), B responses, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from keptset.trainer_bridge.sampled_tokens import Ints
from keptset.trainer_bridge.scoring.aligned import LogitsOf


class Scorer(Protocol):
    """A causal language model, with one or several versions of its weights."""

    @property
    def vocab_size(self) -> int:
        """V of the logits."""

    @property
    def max_positions(self) -> int | None:
        """Longest prompt and response together; None: no bound."""

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Versions whose weights are at hand, ascending. (None,): one model, and nobody told which version it is."""

    def logits_of(self, ids_P: Ints, lengths_B: Ints, version: int | None) -> LogitsOf:
        """One pass over whole responses with the weights of `version`.

        The answer maps positions [R] into `ids_P` to their logits [R, V]: those of NumPy, Paddle or torch, unshifted,
        before temperature and processors. It may hold hidden states and apply the head when it is asked.
        """

    def stepwise_logits_of(
        self, ids_P: Ints, lengths_B: Ints, prompt_lengths_B: Ints, version: int | None
    ) -> LogitsOf | None:
        """The same, computed as a sampler does: the prompt first, then token by token through the key-value cache.

        None where the model cannot; the path floor is then not measured.
        """
