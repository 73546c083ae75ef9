"""The dense ways of scoring in Paddle, as fast as they were found to go, for `keptset bench scoring`.

Legend: T tokens, B tokens of a block, C candidates a token is padded to, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.base import core

NAME = "paddle"
VERSION = paddle.__version__


def tensor(array: np.ndarray, *, gradient: bool = False) -> Any:
    made = paddle.to_tensor(array)
    made.stop_gradient = not gradient
    return made


def normal(shape: list[int], scale: float) -> Any:
    """Reproducible normal numbers, made where they are used."""
    paddle.seed(0)
    return paddle.randn(shape) * scale


def clear_gradients(*leaves: Any) -> None:
    for leaf in leaves:
        leaf.clear_gradient(set_to_zero=False)


def set_threads(threads: int) -> None:
    core.set_num_threads(threads)


def zeros(shape: list[int]) -> Any:
    return paddle.zeros(shape)


def logsumexp_by_parts(logits_BV: Any) -> Any:
    """In place on the logits: what is left in them is exp(z - max)."""
    top_B1 = logits_BV.max(axis=1, keepdim=True)
    logits_BV.subtract_(top_B1).exp_()
    return top_B1 + paddle.log(logits_BV.sum(axis=1, keepdim=True))


def logsumexp_by_operator(logits_BV: Any) -> Any:
    return paddle.logsumexp(logits_BV, axis=1, keepdim=True)


@paddle.no_grad()
def forward_block(hidden_BH: Any, weight_VH: Any, token_B: Any, logsumexp: Any) -> Any:
    """Scores of a block over the whole vocabulary."""
    logits_BV = paddle.matmul(hidden_BH, weight_VH, transpose_y=True)
    own_B1 = paddle.take_along_axis(logits_BV, token_B.reshape([-1, 1]), axis=1)
    return own_B1 - logsumexp(logits_BV)


@paddle.no_grad()
def gradient_block(hidden_BH: Any, weight_VH: Any, token_B: Any, head_gradient_VH: Any | None) -> Any:
    """Forward and the gradient of the summed scores: to hidden states (returned), and added to that of the head."""
    logits_BV = paddle.matmul(hidden_BH, weight_VH, transpose_y=True)
    logits_BV.subtract_(logits_BV.max(axis=1, keepdim=True)).exp_()
    logits_BV.multiply_(-1.0 / logits_BV.sum(axis=1, keepdim=True))
    rows = paddle.arange(token_B.shape[0]) * logits_BV.shape[1] + token_B
    flat = logits_BV.reshape([-1])
    paddle.scatter_(flat, rows, paddle.gather(flat, rows) + 1.0, overwrite=True)
    d_BV = flat.reshape(logits_BV.shape)
    if head_gradient_VH is not None:
        head_gradient_VH.add_(paddle.matmul(d_BV, hidden_BH, transpose_x=True))
    return paddle.matmul(d_BV, weight_VH)


@paddle.no_grad()
def padded_block(hidden_BH: Any, weight_VH: Any, candidates_BC: Any, bias_BC: Any) -> Any:
    """Scores over candidates padded to one width, the sampled one first: gather, batched product, logsumexp."""
    rows_BCH = paddle.nn.functional.embedding(candidates_BC, weight_VH)
    logits_BC = paddle.matmul(rows_BCH, hidden_BH.unsqueeze(2)).squeeze(2) + bias_BC
    return logits_BC[:, :1] - paddle.logsumexp(logits_BC, axis=1, keepdim=True)
