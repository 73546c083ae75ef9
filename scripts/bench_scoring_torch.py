"""The dense ways of scoring in PyTorch, as fast as they were found to go, for `keptset bench scoring`.

Legend: T tokens, B tokens of a block, C candidates a token is padded to, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

NAME = "torch"
VERSION = torch.__version__


def tensor(array: np.ndarray, *, gradient: bool = False) -> Any:
    return torch.tensor(array, requires_grad=gradient)


def normal(shape: list[int], scale: float) -> Any:
    """Reproducible normal numbers, made where they are used."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale


def clear_gradients(*leaves: Any) -> None:
    for leaf in leaves:
        leaf.grad = None


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def zeros(shape: list[int]) -> Any:
    return torch.zeros(shape)


def logsumexp_by_parts(logits_BV: Any) -> Any:
    """In place on the logits: what is left in them is exp(z - max)."""
    top_B1 = logits_BV.amax(dim=1, keepdim=True)
    logits_BV.sub_(top_B1).exp_()
    return top_B1 + logits_BV.sum(dim=1, keepdim=True).log()


def logsumexp_by_operator(logits_BV: Any) -> Any:
    return logits_BV.logsumexp(dim=1, keepdim=True)


@torch.no_grad()
def forward_block(hidden_BH: Any, weight_VH: Any, token_B: Any, logsumexp: Any) -> Any:
    """Scores of a block over the whole vocabulary."""
    logits_BV = torch.nn.functional.linear(hidden_BH, weight_VH)
    own_B1 = logits_BV.gather(1, token_B[:, None])
    return own_B1 - logsumexp(logits_BV)


@torch.no_grad()
def gradient_block(hidden_BH: Any, weight_VH: Any, token_B: Any, head_gradient_VH: Any | None) -> Any:
    """Forward and the gradient of the summed scores: to hidden states (returned), and added to that of the head."""
    d_BV = torch.nn.functional.linear(hidden_BH, weight_VH)
    d_BV.sub_(d_BV.amax(dim=1, keepdim=True)).exp_()
    d_BV.mul_(-1.0 / d_BV.sum(dim=1, keepdim=True))
    d_BV.scatter_add_(1, token_B[:, None], torch.ones_like(token_B[:, None], dtype=d_BV.dtype))
    if head_gradient_VH is not None:
        head_gradient_VH.addmm_(d_BV.T, hidden_BH)
    return d_BV @ weight_VH


@torch.no_grad()
def padded_block(hidden_BH: Any, weight_VH: Any, candidates_BC: Any, bias_BC: Any) -> Any:
    """Scores over candidates padded to one width, the sampled one first: gather, batched product, logsumexp."""
    rows_BCH = torch.nn.functional.embedding(candidates_BC, weight_VH)
    logits_BC = torch.bmm(rows_BCH, hidden_BH[:, :, None])[:, :, 0] + bias_BC
    return logits_BC[:, :1] - logits_BC.logsumexp(dim=1, keepdim=True)
