"""One decoder block: attention and a gated MLP, each on the normalised residual stream.

Dims: T tokens, H hidden, Z heads of a token's projections, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.incubate.nn.functional import fused_rms_norm

from keptset.rollout.models.attention import AttentionPlan, HeadShape
from keptset.rollout.models.rope import Rotation


class Block:
    """Weights of one block, named as `parameters.layer_specs` names them, and the pass over them."""

    def __init__(self, parameters: Mapping[str, paddle.Tensor], heads: HeadShape, eps: float) -> None:
        self.parameters = dict(parameters)
        self._heads = heads
        self._eps = eps

    def forward(self, hidden_TH: paddle.Tensor, rotation: Rotation, plan: AttentionPlan, layer: int) -> paddle.Tensor:
        """The residual stream after this block, [T, H]."""
        normed_TH = rms_norm(hidden_TH, self.parameters["input_norm"], self._eps)
        qkv_TZD = self._project("qkv", normed_TH).reshape([-1, self._heads.per_token, self._heads.head_dim])
        if "q_norm" in self.parameters:
            qkv_TZD = self._normed_heads(qkv_TZD)
        mixed = plan.attend(rotation.rotate(qkv_TZD), layer)
        hidden_TH = hidden_TH + self._project("output", mixed)
        normed_TH = rms_norm(hidden_TH, self.parameters["mlp_norm"], self._eps)
        gated = F.silu(self._project("gate", normed_TH)) * self._project("up", normed_TH)
        return hidden_TH + self._project("down", gated)

    def _project(self, key: str, rows: paddle.Tensor) -> paddle.Tensor:
        """Product with a weight [in, out], and its bias where there is one."""
        product = paddle.matmul(rows, self.parameters[key])
        bias = self.parameters.get(f"{key}_bias")
        return product if bias is None else product + bias

    def _normed_heads(self, qkv_TZD: paddle.Tensor) -> paddle.Tensor:
        """Queries and keys normalised head by head; values as they are."""
        kv_heads = self._heads.num_kv_heads
        queries, keys, values = qkv_TZD.split([self._heads.num_heads, kv_heads, kv_heads], axis=1)
        queries = rms_norm(queries, self.parameters["q_norm"], self._eps)
        keys = rms_norm(keys, self.parameters["k_norm"], self._eps)
        return paddle.concat([queries, keys, values], axis=1)


def rms_norm(rows: paddle.Tensor, weight: paddle.Tensor, eps: float) -> paddle.Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last dimension, the root in float32 (Zhang and Sennrich 2019)."""
    in_float32 = rows.dtype == weight.dtype == paddle.float32
    if in_float32 and not paddle.is_grad_enabled() and _has_fused_norm(rows):
        return fused_rms_norm(rows, weight, None, eps, rows.ndim - 1)[0]
    wide = rows if rows.dtype == paddle.float32 else rows.astype("float32")
    inverse = paddle.rsqrt((wide * wide).mean(axis=-1, keepdim=True) + eps)
    normed = wide * inverse
    return (normed if normed.dtype == rows.dtype else normed.astype(rows.dtype)) * weight


def _has_fused_norm(rows: paddle.Tensor) -> bool:
    """Whether this Paddle has one kernel for the norm on a host: a quarter of the time, without gradient; 2.6 has none.

    A device is not asked: what is gained there is unmeasured.
    """
    if not rows.place.is_cpu_place():
        return False
    if not _FUSED:
        _FUSED.append(_fused_norm_works(rows.place))
    return _FUSED[0]


_FUSED: list[bool] = []
"""The answer, once it was asked for."""


def _fused_norm_works(place: Any) -> bool:
    rows = paddle.to_tensor([[3.0, 4.0], [0.0, 2.0]], place=place)
    try:
        found = fused_rms_norm(rows, rows[0], None, 0.0, 1)[0].numpy()
    except RuntimeError:
        return False
    expected = [[9 / 12.5**0.5, 16 / 12.5**0.5], [0.0, 8 / 2**0.5]]
    return found.shape == (2, 2) and bool(np.allclose(found, expected, rtol=1e-5))
