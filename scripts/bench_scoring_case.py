"""What `keptset bench scoring` measures on: kept sets of a heavy-tailed size, over a vocabulary as models have it.

Legend: T tokens, N kept ids over them, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LARGEST_SET = 512
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one measurement."""

    tokens: int = 2048
    hidden: int = 896
    vocab: int = 151_936

    @property
    def logits_bytes(self) -> int:
        """Of the [T, V] logits in float32 that a dense way would make."""
        return 4 * self.tokens * self.vocab

    @property
    def product_flops(self) -> float:
        """Of one product of all hidden states with the whole head."""
        return 2.0 * self.tokens * self.hidden * self.vocab


QUICK = Shape(tokens=256, hidden=256, vocab=16_384)


@dataclass(frozen=True, kw_only=True)
class KeptCase:
    """The record that is scored."""

    token_ids_T: np.ndarray
    kept_offsets_T1: np.ndarray
    kept_ids_N: np.ndarray
    temperature_T: np.ndarray

    @property
    def num_kept(self) -> int:
        return len(self.kept_ids_N)


def kept_case(shape: Shape, tokens: int | None = None, *, seed: int = SEED) -> KeptCase:
    """Set sizes min(512, ceil(exp(.19 + 1.9 N))) with N standard normal; ids uniform over the vocabulary."""
    rng = np.random.default_rng(seed)
    num = shape.tokens if tokens is None else tokens
    sizes = np.minimum(LARGEST_SET, np.ceil(np.exp(0.19 + 1.9 * rng.standard_normal(num)))).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    # One id from each of as many equal parts of the vocabulary as the set has members: uniform, ascending, distinct.
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    part = np.repeat(shape.vocab // sizes, sizes)
    ids = within * part + rng.integers(0, part)
    return KeptCase(
        token_ids_T=ids[offsets[:-1] + rng.integers(0, sizes)],
        kept_offsets_T1=offsets,
        kept_ids_N=ids.astype(np.int32),
        temperature_T=np.ones(num),
    )
