"""Rotary position embedding.

Equation (Su et al. 2021, half-split convention): with x = [a, b], a and b halves of one head,
``rotated = x * cos(p * f) + [-b, a] * sin(p * f)``, position p, frequencies ``f_i = theta^(-2 i / D)``.
Llama 3 scaling divides the frequencies of long wavelengths by a factor and blends those between.

Dims: T tokens, Z heads of a token's projections (queries, keys, values), D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle

from keptset.rollout.models.attention import HeadShape
from keptset.rollout.models.rope_settings import RopeSettings


def inverse_frequencies(settings: RopeSettings, head_dim: int) -> np.ndarray:
    """Radians per position, float32 [F]: the precision these models were trained with."""
    exponents_F = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    freqs_F = (1.0 / np.float32(settings.theta) ** exponents_F).astype(np.float32)
    scaling = settings.scaling
    if scaling is None:
        return freqs_F
    original = scaling.original_max_position_embeddings
    wavelengths_F = 2 * math.pi / freqs_F
    blend_F = (original / wavelengths_F - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend_F = np.clip(blend_F, 0.0, 1.0)
    return ((1 - blend_F) * freqs_F / scaling.factor + blend_F * freqs_F).astype(np.float32)


def rotation_rows(positions_T: np.ndarray, freqs_F: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and signed sine, float32 [T, D] each.

    The sine's first half is negated, so that ``x * cos + (x with its halves swapped) * sin`` is the rotation.
    """
    angles_TF = positions_T.astype(np.float32)[:, None] * freqs_F
    cos_TF, sin_TF = np.cos(angles_TF), np.sin(angles_TF)
    return np.concatenate([cos_TF, cos_TF], axis=1), np.concatenate([-sin_TF, sin_TF], axis=1)


class Rotation:
    """The rotation of a call's tokens, the same in every layer, for queries, keys and values in one.

    Values go along unrotated (cosine 1, sine 0), and queries come out scaled by D^-1/2, so that a layer makes two
    products and a sum over contiguous memory, and nothing is split or joined.
    """

    def __init__(self, positions_T: np.ndarray, freqs_F: np.ndarray, heads: HeadShape, dtype: str, place: Any) -> None:
        tokens, self._half = len(positions_T), heads.head_dim // 2
        swapped = np.arange(2 * tokens * heads.per_token).reshape(-1, 2)[:, ::-1]
        self._swapped = paddle.to_tensor(swapped.reshape(-1), place=place)
        cos_TD, sin_TD = rotation_rows(positions_T, freqs_F)
        scale = np.float32(heads.head_dim**-0.5)
        still_1D = np.zeros((1, heads.head_dim), np.float32)
        kinds_Z = np.repeat([0, 1, 2], [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads])
        row_TZ = np.minimum(np.add.outer(np.arange(tokens), kinds_Z * tokens), 2 * tokens)
        rows = paddle.to_tensor(row_TZ.reshape(-1), place=place)

        def spread(table: np.ndarray) -> paddle.Tensor:
            taken = paddle.gather(paddle.to_tensor(table, place=place).astype(dtype), rows)
            return taken.reshape([tokens, heads.per_token, heads.head_dim])

        self._cos_TZD = spread(np.concatenate([cos_TD * scale, cos_TD, still_1D + 1]))
        self._sin_TZD = spread(np.concatenate([sin_TD * scale, sin_TD, still_1D]))

    def rotate(self, qkv_TZD: paddle.Tensor) -> paddle.Tensor:
        """Rotated and scaled queries, rotated keys, values as they are, [T, Z, D]."""
        # A gather of halves takes half the time of a roll.
        swapped_TZD = paddle.gather(qkv_TZD.reshape([-1, self._half]), self._swapped).reshape(qkv_TZD.shape)
        return qkv_TZD * self._cos_TZD + swapped_TZD * self._sin_TZD
