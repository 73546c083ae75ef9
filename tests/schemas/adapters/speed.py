"""How many tokens a second each adapter takes, from live objects and from recorded JSON or msgpack.

    python tests/schemas/adapters/speed.py [--tokens N] [--rounds N]

Made-up responses of 2,048 tokens, or N, with sets as in `keptset bench wire`; for transformers 64 tokens of 32 rows and
a vocabulary of 2,048, since its adapter reads every score. No test: a busy machine would fail it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from keptset.schemas.adapters import (
    Adapted,
    Stated,
    adapt_files,
    adapter_for,
    from_fastdeploy,
    from_prime_rl,
    from_sglang,
    from_slime,
    from_transformers,
    from_vllm,
)
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.scripts.bench_wire_rollouts import made_up_rollouts
from keptset.scripts.timing import interleaved

TOTAL, VOCAB = 2**17, 151_936
ROWS, STEPS, DENSE_VOCAB = 32, 64, 2_048
STATED = Stated(identity=Identity(vocab_size=VOCAB), others_off=True, no_update_in_flight=True)
PARAMS = {"temperature": 0.7, "top_p": 0.95, "top_k": 512}
Reply = dict[str, Any]


def rows(tokens: int) -> list[Reply]:
    batch = made_up_rollouts(TOTAL, row_tokens=tokens, vocab_size=VOCAB)
    names = ("prompt_token_ids", "token_ids", "behavior_logprobs", "log_kept_mass", "kept_ids")
    told: list[Reply] = batch.arrow.select(names).to_pylist()
    return told


def vllm_reply(number: int, row: Reply) -> Reply:
    logprobs = zip(row["token_ids"], row["behavior_logprobs"], strict=True)
    content = [{"token": f"token_id:{t}", "token_id": t, "logprob": b, "top_logprobs": []} for t, b in logprobs]
    choice = {
        "index": 0,
        "token_ids": row["token_ids"],
        "logprobs": {"content": content},
        "sampling_mask": row["kept_ids"],
        "finish_reason": "length",
    }
    return {"request_id": f"cmpl-{number}", "prompt_token_ids": row["prompt_token_ids"], "choices": [choice]}


def vllm_output(number: int, row: Reply) -> SimpleNamespace:
    pairs = zip(row["token_ids"], row["behavior_logprobs"], strict=True)
    output = SimpleNamespace(
        index=0,
        token_ids=row["token_ids"],
        logprobs=[{t: SimpleNamespace(logprob=b, rank=1, decoded_token=None)} for t, b in pairs],
        sampling_mask=SimpleNamespace(token_ids=row["kept_ids"]),
        finish_reason="length",
    )
    return SimpleNamespace(request_id=str(number), prompt_token_ids=row["prompt_token_ids"], outputs=[output])


def sglang_reply(number: int, row: Reply) -> Reply:
    full = np.add(row["behavior_logprobs"], row["log_kept_mass"]).tolist()
    meta = {
        "id": f"reply-{number}",
        "finish_reason": {"type": "length", "length": len(row["token_ids"])},
        "weight_version": "3",
        "output_token_logprobs": [[b, t, None] for b, t in zip(full, row["token_ids"], strict=True)],
        "output_token_sampling_mask": row["kept_ids"],
        "output_token_sampling_logprobs": row["behavior_logprobs"],
    }
    return {"output_ids": row["token_ids"], "prompt_token_ids": row["prompt_token_ids"], "meta_info": meta}


def fastdeploy_reply(number: int, row: Reply) -> Reply:
    content = [{"token": "a", "logprob": b, "bytes": [97], "top_logprobs": []} for b in row["behavior_logprobs"]]
    message = {"prompt_token_ids": row["prompt_token_ids"], "completion_token_ids": row["token_ids"]}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": content},
        "sampling_mask": row["kept_ids"],
        "finish_reason": "length",
    }
    return {"id": f"chatcmpl-{number}", "object": "chat.completion", "choices": [choice]}


def slime_sample(number: int, row: Reply) -> Reply:
    return {
        "group_index": number // 8,
        "index": number,
        "tokens": row["prompt_token_ids"] + row["token_ids"],
        "response_length": len(row["token_ids"]),
        "loss_mask": [1] * len(row["token_ids"]),
        "weight_versions": ["3"],
        "rollout_log_probs": row["behavior_logprobs"],
        "rollout_top_p_token_ids": [one for ids in row["kept_ids"] for one in ids],
        "rollout_top_p_token_offsets": np.cumsum([0, *map(len, row["kept_ids"])]).tolist(),
        "status": "truncated",
    }


def prime_rl_micro_batch(number: int, row: Reply) -> list[Any]:
    prompt, tokens = len(row["prompt_token_ids"]), len(row["token_ids"])
    size = prompt + tokens
    counts = np.array([0] * prompt + list(map(len, row["kept_ids"])), "<i4").tobytes()
    kept = np.array([one for ids in row["kept_ids"] for one in ids], "<i4").tobytes()
    return [
        row["prompt_token_ids"] + row["token_ids"],
        [False] * prompt + [True] * tokens,
        [0.0] * prompt + [0.5] * tokens,
        [0.0] * prompt + row["behavior_logprobs"],
        list(range(size)),
        [size],
        [0.7] * size,
        ["made up"],
        [size],
        *[None] * 7,
        [kept, counts, None],
        [f"trace-{number}"],
        [0],
    ]


def transformers_output() -> Reply:
    random = np.random.default_rng(0)
    logits = random.normal(size=(STEPS, ROWS, DENSE_VOCAB)).astype(np.float32)
    cut = np.sort(logits, axis=-1)[..., -6:-5]
    scores = np.where(logits >= cut, logits, -np.inf)
    tokens = scores.argmax(axis=-1).T
    return {"sequences": np.concatenate([np.ones((ROWS, 4), int), tokens], axis=1), "scores": tuple(scores)}


def recorded(engine: str, entries: list[Any], folder: Path) -> Callable[[], object]:
    """Reading these from a file."""
    if engine == "prime_rl":
        import msgpack

        path = folder / "recorded.msgpack"
        path.write_bytes(msgpack.packb(entries))
    else:
        path = folder / f"{engine}.jsonl"
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return lambda: [require(adapted) for adapted in adapt_files(adapter_for(engine), [path], STATED)]


def require(adapted: Adapted) -> RolloutBatch:
    return adapted.require()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a response")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    made = list(enumerate(rows(arguments.tokens)))
    live: dict[str, tuple[Callable[..., Adapted], list[Any]]] = {
        "vllm, RequestOutput": (from_vllm, [vllm_output(*one) for one in made]),
        "vllm, parsed replies": (from_vllm, [vllm_reply(*one) for one in made]),
        "sglang": (from_sglang, [sglang_reply(*one) for one in made]),
        "fastdeploy": (from_fastdeploy, [fastdeploy_reply(*one) for one in made]),
        "slime": (from_slime, [slime_sample(*one) for one in made]),
        "prime_rl": (from_prime_rl, [prime_rl_micro_batch(*one) for one in made]),
    }
    ways: dict[str, Callable[[], object]] = {}
    for name, (adapt, entries) in live.items():
        params = None if name == "prime_rl" else PARAMS
        ways[f"{name}, live"] = lambda adapt=adapt, entries=entries, params=params: require(
            adapt(entries, params, STATED)
        )
    dense = transformers_output()
    config = {"do_sample": True, "temperature": 1.0, "top_k": 5, "top_p": 1.0, "eos_token_id": 0}
    ways["transformers, live"] = lambda: require(from_transformers(dense, config, STATED))
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, entries) in live.items():
            if name != "vllm, RequestOutput":
                engine = name.split(",")[0]
                ways[f"{engine}, recorded"] = recorded(engine, entries, Path(folder))
        seconds = interleaved(ways, arguments.rounds)
    tokens = {name: ROWS * STEPS if name.startswith("transformers") else TOTAL for name in ways}
    kept = np.mean([len(ids) for _, row in made for ids in row["kept_ids"]])
    lines = [f"{TOTAL} tokens, {kept:.1f} kept ids each; million tokens a second:"]
    lines += [f"{name:28} {tokens[name] / took / 1e6:.2f}" for name, took in seconds.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
