"""One rank of a vocabulary-parallel head, in a process of its own. Arguments: FRAMEWORK RANK FOLDER.

Reads FOLDER/case.npz, writes FOLDER/rank<RANK>.npz.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from keptset.rollout import cpu_threads

cpu_threads.configure(threads=1)

from keptset.schemas.errors import InvalidInput  # noqa: E402
from keptset.trainer_bridge.replay import Patch, Replay  # noqa: E402
from keptset.trainer_bridge.scoring import (  # noqa: E402
    DenseHeadGradient,
    Head,
    RowSparseHeadGradient,
    Shard,
    score_from_hidden,
)


def framework(name: str, rank: int, size: int, folder: Path) -> types.SimpleNamespace:
    """Tensors, and a process group over gloo."""
    if name == "torch":
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size
        )
        return types.SimpleNamespace(
            leaf=lambda array: torch.tensor(array, requires_grad=True),
            tensor=torch.tensor,
            host=lambda tensor: tensor.detach().numpy(),
            module=torch,
        )
    import paddle

    def leaf(array: np.ndarray) -> Any:
        made = paddle.to_tensor(array)
        made.stop_gradient = False
        return made

    paddle.distributed.init_parallel_env()
    return types.SimpleNamespace(
        leaf=leaf, tensor=paddle.to_tensor, host=lambda tensor: tensor.detach().numpy(), module=paddle
    )


def main() -> None:
    name, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    given = dict(np.load(folder / "case.npz"))
    bounds = given["bounds"]
    of = framework(name, rank, len(bounds) - 1, folder)
    first, end, vocab = int(bounds[rank]), int(bounds[rank + 1]), int(bounds[-1])
    case = {key: given[key] for key in ("token_ids_T", "kept_offsets_T1", "kept_ids_N", "temperature_T", "full_T")}
    case["replay_N"] = Replay(divisor_N=given["divisor_N"], shift_N=given["shift_N"])
    case["patch"] = Patch(
        offsets_T1=given["patch_offsets_T1"],
        ids_N=given["patch_ids_N"],
        replay_N=Replay(divisor_N=given["patch_divisor_N"], shift_N=given["patch_shift_N"]),
    )

    calls: list[str] = []
    original = of.module.distributed.all_reduce

    def counted(values: Any, op: Any = None, group: Any = None) -> Any:
        calls.append("max" if op == of.module.distributed.ReduceOp.MAX else "sum")
        return original(values, op=op, group=group)

    of.module.distributed.all_reduce = counted

    def head(*, whole_hidden: bool = True, wrong: int = 0) -> Head:
        return Head(
            weight_VH=of.leaf(given["weight"][first:end]),
            bias_V=of.leaf(given["bias"][first:end]),
            shard=Shard(first=first, vocab_size=vocab + wrong, sum_hidden_gradient=whole_hidden),
        )

    out: dict[str, Any] = {}
    hidden, one = of.leaf(given["hidden"]), head()
    scores = score_from_hidden(hidden, one, **case, entropy=True, full_share=0.5, scratch_bytes=1 << 16)
    out["forward_calls"] = calls.copy()
    calls.clear()
    (scores.logprobs_T * of.tensor(given["upstream_T"])).sum().backward()
    out["backward_calls"] = calls.copy()
    out |= {
        "logprobs": of.host(scores.logprobs_T),
        "entropy": of.host(scores.entropy_T),
        "full_logprobs": of.host(scores.full_logprobs_T),
        "hidden_gradient": of.host(hidden.grad),
        "weight_gradient": of.host(one.weight_VH.grad),
        "bias_gradient": of.host(one.bias_V.grad),
    }

    hidden, one = of.leaf(given["hidden"]), head(whole_hidden=False)
    rows = RowSparseHeadGradient()
    scores = score_from_hidden(hidden, one, **case, distribution=True, head_gradient=rows)
    (scores.kept_logprobs_N * of.tensor(given["upstream_N"])).sum().backward()
    merged = rows.merged()
    buffer = DenseHeadGradient(of.tensor(np.zeros((end - first, 8))), of.tensor(np.zeros(end - first)))
    again = score_from_hidden(of.leaf(given["hidden"]), one, **case, distribution=True, head_gradient=buffer)
    (again.kept_logprobs_N * of.tensor(given["upstream_N"])).sum().backward()
    out |= {
        "distribution": of.host(scores.kept_logprobs_N),
        "hidden_part": of.host(hidden.grad),
        "row_ids": np.zeros(0, int) if merged is None else merged.ids_U,
        "rows": np.zeros((0, 8)) if merged is None else of.host(merged.weight_UH),
        "buffer": of.host(buffer.weight_VH),
    }

    try:
        score_from_hidden(of.tensor(given["hidden"]), head(wrong=3), **case)
    except InvalidInput as error:
        out["error"] = str(error)
    np.savez(folder / f"rank{rank}.npz", **out)


if __name__ == "__main__":
    main()
