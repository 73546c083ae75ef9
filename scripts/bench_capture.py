"""`keptset bench capture`: kept sets and their numbers from wide logits, against sorting the vocabulary.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

import numpy as np
import typer

from keptset.rollout.cpu_threads import configure, usable_cores
from keptset.schemas.sampling_params import SamplingParams
from keptset.scripts.timing import interleaved, print_numbers

ROWS, VOCAB = 64, 151_936
PARAMS = SamplingParams(top_k=512, top_p=0.97)


def command(
    rounds: Annotated[int, typer.Option(help="Times each way is run; the median counts.", min=1)] = 7,
    rows: Annotated[int, typer.Option(help="Rows of logits.", min=1)] = ROWS,
    vocab: Annotated[int, typer.Option(help="Vocabulary size.", min=1024)] = VOCAB,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """K, b, m, H and the draw for top_k 512, top_p 0.97, against a full sort in Paddle and, where it is, in PyTorch."""
    configure()
    import paddle

    from keptset.rollout.sampling import draw
    from keptset.rollout.truncation import truncate

    rng = np.random.default_rng(0)
    logits_BV = (3 * rng.standard_normal((rows, vocab))).astype(np.float32)
    uniforms_B = rng.random(rows)
    tensor = paddle.to_tensor(logits_BV)
    ways: dict[str, Callable[[], Any]] = {
        "keptset": lambda: draw(truncate(tensor, [PARAMS] * rows), uniforms_B),
        "paddle": lambda: sorted_in_paddle(tensor, PARAMS),
    }
    if find_spec("torch") is not None:
        import torch

        torch.set_num_threads(usable_cores())
        torch_logits = torch.from_numpy(logits_BV)
        ways["torch"] = lambda: sorted_in_torch(torch_logits, PARAMS)
    _check(tensor, rows)
    seconds = interleaved(ways, rounds)
    numbers = {
        "capture_ms": seconds["keptset"] * 1e3,
        "paddle_sort_ms": seconds["paddle"] * 1e3,
        "capture_speedup": seconds["paddle"] / seconds["keptset"],
    }
    if "torch" in seconds:
        numbers["torch_sort_ms"] = seconds["torch"] * 1e3
        numbers["capture_speedup_torch"] = seconds["torch"] / seconds["keptset"]
    elif not as_json:
        print("PyTorch is not installed: its full sort is left out")
    print(json.dumps(numbers)) if as_json else print_numbers(f"capture, [{rows}, {vocab}]", numbers)


def sorted_in_paddle(logits_BV: Any, params: SamplingParams) -> tuple[Any, Any, Any, Any]:
    """The plain way: sort, cut, renormalise, draw. Returns kept mask, log-probabilities, log kept mass, entropy [.]"""
    import paddle

    order_BV = paddle.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = paddle.take_along_axis(logits_BV, order_BV, axis=-1)[:, : params.top_k]
    p_BK = paddle.nn.functional.softmax(sorted_BV, axis=-1)
    keep_BK = paddle.cumsum(p_BK, axis=-1) - p_BK < params.top_p
    z_BK = paddle.where(keep_BK, sorted_BV, paddle.full_like(sorted_BV, -np.inf))
    log_sum_B1 = paddle.logsumexp(z_BK, axis=-1, keepdim=True)
    mass_B1 = log_sum_B1 - paddle.logsumexp(logits_BV, axis=-1, keepdim=True)
    q_BK = paddle.exp(z_BK - log_sum_B1)
    entropy_B = (log_sum_B1.squeeze(-1)) - (q_BK * sorted_BV).sum(axis=-1)
    token_B1 = paddle.take_along_axis(order_BV, paddle.multinomial(q_BK, 1), axis=-1)
    return keep_BK.numpy(), token_B1.numpy(), mass_B1.numpy(), entropy_B.numpy()


def sorted_in_torch(logits_BV: Any, params: SamplingParams) -> tuple[Any, Any, Any, Any]:
    """The same in PyTorch."""
    import torch

    sorted_BV, order_BV = torch.sort(logits_BV, dim=-1, descending=True)
    sorted_BK = sorted_BV[:, : params.top_k]
    p_BK = torch.softmax(sorted_BK, dim=-1)
    keep_BK = torch.cumsum(p_BK, dim=-1) - p_BK < params.top_p
    z_BK = sorted_BK.masked_fill(~keep_BK, -torch.inf)
    log_sum_B1 = torch.logsumexp(z_BK, dim=-1, keepdim=True)
    mass_B1 = log_sum_B1 - torch.logsumexp(logits_BV, dim=-1, keepdim=True)
    q_BK = torch.exp(z_BK - log_sum_B1)
    entropy_B = log_sum_B1.squeeze(-1) - (q_BK * sorted_BK).sum(dim=-1)
    token_B1 = torch.gather(order_BV, -1, torch.multinomial(q_BK, 1))
    return keep_BK.numpy(), token_B1.numpy(), mass_B1.numpy(), entropy_B.numpy()


def _check(logits_BV: Any, rows: int) -> None:
    """Both ways must find the same before either is timed."""
    from keptset.rollout.truncation import truncate

    kept = truncate(logits_BV, [PARAMS] * rows)
    keep_BK, _, mass_B1, entropy_B = sorted_in_paddle(logits_BV, PARAMS)
    sizes = keep_BK.sum(axis=1)
    if np.abs(sizes - kept.sizes_B).max() > 1 or not np.allclose(mass_B1[:, 0], kept.log_kept_mass_B, atol=1e-3):
        raise AssertionError("the two ways disagree on the kept sets")
    if not np.allclose(entropy_B, kept.entropy_B, atol=1e-2):
        raise AssertionError("the two ways disagree on the entropy")
