"""`keptset bench decode`: tokens a second with capture on, against transformers; batching, drafting, shares."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from keptset.rollout.cpu_threads import configure, usable_cores
from keptset.schemas.sampling_params import SamplingParams
from keptset.scripts.timing import interleaved, print_numbers

REQUESTS, NEW_TOKENS = 16, 64
PARAMS = SamplingParams(top_k=512, top_p=0.97, max_new_tokens=NEW_TOKENS)
QUEUE, SLOTS, LONGEST = 128, 16, 512
"""Continuous batching: requests of lengths min(LONGEST, round(exp(N(3.5, 1)))), seed 0."""
SYNC_ACTORS, SYNC_UPDATES = 2, 3
PROSE = (
    "The harbour wakes before the town does. A man with a lantern walks along the quay and counts the boats that "
    "came home, then the ones that did not, and writes both numbers on the wall of the customs house with a piece "
    "of chalk. By the time the bakers light their ovens the tide has turned, and the gulls have found the nets "
    "that were left unmended from the day before. Children come down with baskets to gather what fell from the "
    "carts, and an old woman sells tea from a copper kettle that her mother used in the same place. Nobody "
    "hurries. The ferry will leave when the doctor arrives, and the doctor arrives when the last patient has gone "
    "to sleep. At noon the bells ring from both churches, never quite together, and the fishermen argue about "
    "which of them is right. In the evening the lamps are lit from the far end of the pier towards the square, so "
    "that from the sea it looks as if the town were slowly opening its eyes, one after the other, to see who is "
    "coming home late tonight and who will stay out there until the morning comes."
)
"""200 words, to be repeated."""


def command(
    rounds: Annotated[int, typer.Option(help="Times decoding is run each way; the median counts.", min=1)] = 3,
    quick: Annotated[bool, typer.Option(help="Fewer tokens and requests, to see that it runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Decoding SmolLM2-135M-Instruct in float32: 16 requests, 64 new tokens, top_k 512, top_p 0.97, capture on."""
    configure()
    from keptset.rollout.models import load_decoder
    from keptset.scripts.demo_model import ensure_demo_model

    folder = ensure_demo_model()
    decoder = load_decoder(folder)
    new_tokens = 8 if quick else NEW_TOKENS
    numbers = _decode(folder, decoder, rounds, new_tokens, quiet=as_json)
    numbers |= _continuous(decoder, 24 if quick else QUEUE)
    numbers |= _speculative(folder, decoder, 40 if quick else 300)
    numbers |= _weight_sync(folder)
    print(json.dumps(numbers)) if as_json else print_numbers("decode", numbers)


def _decode(folder: Path, decoder: Any, rounds: int, new_tokens: int, *, quiet: bool) -> dict[str, float]:
    """Tokens a second, and what of a step is capture and what matrix products."""
    from keptset.rollout.config import EngineConfig
    from keptset.rollout.engine import RolloutEngine

    prompts = _prompts(folder)
    parts: dict[str, float] = {}

    def ours() -> None:
        engine = RolloutEngine(decoder, EngineConfig(slots=REQUESTS))
        drawing = _Stopwatch(engine, "_draw_round")
        products = _Stopwatch(decoder, "logits")
        begin = time.perf_counter()
        engine.generate(_requests(prompts, [new_tokens] * REQUESTS))
        total = time.perf_counter() - begin
        drawing.remove()
        products.remove()
        parts["capture_share"] = drawing.seconds / total
        parts["head_share"] = products.seconds / total

    ways: dict[str, Callable[[], Any]] = {"keptset": ours}
    if find_spec("torch") is not None and find_spec("transformers") is not None:
        ways["transformers"] = _transformers(folder, prompts, new_tokens)
    elif not quiet:
        print("PyTorch or transformers is not installed: the comparison with generate is left out")
    seconds = interleaved(ways, rounds)
    tokens = REQUESTS * new_tokens
    numbers = {
        "tokens_per_second": tokens / seconds["keptset"],
        "matmul_share": _matmul_seconds(decoder, prompts, new_tokens) / seconds["keptset"],
        **parts,
    }
    if "transformers" in seconds:
        numbers["transformers_tokens_per_second"] = tokens / seconds["transformers"]
        numbers["decode_speedup"] = seconds["transformers"] / seconds["keptset"]
    return numbers


class _Stopwatch:
    """Seconds spent in one method of one object."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self._owner, self._name = 0.0, owner, name
        method = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(owner, name, timed)

    def remove(self) -> None:
        delattr(self._owner, self._name)


def _matmul_seconds(decoder: Any, prompts: list[Any], new_tokens: int) -> float:
    """The run's projections, feed-forward and head products alone, at the same numbers of rows."""
    import paddle

    c = decoder.config
    shapes = [
        (c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
        (c.num_heads * c.head_dim, c.hidden_size),
    ]
    shapes += [(c.hidden_size, 2 * c.intermediate_size), (c.intermediate_size, c.hidden_size)]
    weights = [[paddle.randn(list(shape)) for shape in shapes] for _ in range(c.num_layers)]
    head = paddle.randn([c.hidden_size, c.vocab_size])

    def step(rows: int) -> None:
        inputs = {width: paddle.randn([rows, width]) for width, _ in shapes}
        for layer in weights:
            for weight, (width, _) in zip(layer, shapes, strict=True):
                paddle.matmul(inputs[width], weight)
        paddle.matmul(inputs[c.hidden_size][:REQUESTS], head)

    prefill = sum(len(prompt) for prompt in prompts)
    seconds = {rows: statistics.median(_timed(partial(step, rows)) for _ in range(5)) for rows in (REQUESTS, prefill)}
    return seconds[prefill] + (new_tokens - 1) * seconds[REQUESTS]


def _timed(way: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def _transformers(folder: Path, prompts: list[Any], new_tokens: int) -> Callable[[], Any]:
    """The same requests through `generate`, padded on the left as it wants them."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(usable_cores())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(np.asarray(prompt, np.int64))
        mask[row, width - len(prompt) :] = 1
    settings = GenerationConfig(
        do_sample=True,
        top_k=PARAMS.top_k,
        top_p=PARAMS.top_p,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=2,
        eos_token_id=2,
    )

    def generate() -> Any:
        torch.manual_seed(0)
        return model.generate(ids, attention_mask=mask, generation_config=settings)

    return generate


def _prompts(folder: Path) -> list[Any]:
    from keptset.rollout.tokenizer import Tokenizer
    from keptset.scripts.demo_model import PROMPTS
    from keptset.scripts.prompts import read_prompts

    return [prompt.token_ids for prompt in read_prompts(PROMPTS, Tokenizer.from_folder(folder))[:REQUESTS]]


def _requests(prompts: list[Any], lengths: list[int], **changes: Any) -> list[Any]:
    from dataclasses import replace

    from keptset.rollout.request import Request

    return [
        Request(
            prompt_id=f"r{i}",
            prompt_token_ids=prompts[i % len(prompts)],
            params=replace(PARAMS, max_new_tokens=length, **changes),
        )
        for i, length in enumerate(lengths)
    ]


def _continuous(decoder: Any, queue: int) -> dict[str, float]:
    """All requests at once, refilling slots, against groups of as many as there are slots, each run to its end."""
    from keptset.rollout.config import EngineConfig
    from keptset.rollout.engine import RolloutEngine

    rng = np.random.default_rng(0)
    lengths = [int(n) for n in np.clip(np.round(np.exp(rng.normal(3.5, 1, queue))), 1, LONGEST)]
    prompts = [rng.integers(0, decoder.config.vocab_size, 16).astype(np.int32) for _ in range(queue)]
    requests = _requests(prompts, lengths)

    def continuous() -> None:
        RolloutEngine(decoder, EngineConfig(slots=SLOTS)).generate(requests)

    def static() -> None:
        engine = RolloutEngine(decoder, EngineConfig(slots=SLOTS))
        for begin in range(0, len(requests), SLOTS):
            engine.generate(requests[begin : begin + SLOTS])

    seconds = {name: _timed(way) for name, way in {"continuous": continuous, "static": static}.items()}
    return {
        "continuous_tokens_per_second": sum(lengths) / seconds["continuous"],
        "static_tokens_per_second": sum(lengths) / seconds["static"],
        "continuous_speedup": seconds["static"] / seconds["continuous"],
    }


def _speculative(folder: Path, decoder: Any, new_tokens: int) -> dict[str, float]:
    """Committed tokens a pass on a prompt that asks for its text again; at T 0.3, since at T 1 the model strays."""
    from keptset.rollout.engine import RolloutEngine
    from keptset.rollout.tokenizer import Tokenizer

    message = {"role": "user", "content": f"Repeat the following 200 words:\n\n{PROSE}"}
    prompt = Tokenizer.from_folder(folder).encode_chat([message])
    engine = RolloutEngine(decoder)
    engine.generate(_requests([prompt], [new_tokens], draft_tokens=8, temperature=0.3, stop_token_ids=(2,)))
    return {"speculative_tokens_per_pass": engine.tokens_drawn / engine.passes}


def _weight_sync(folder: Path) -> dict[str, float]:
    """Seconds from a trainer's weights to actors that draw with them, through the object store; the median update."""
    from safetensors.numpy import load_file

    from keptset.rollout.pool import RolloutPool

    weights = load_file(folder / "model.safetensors")
    with RolloutPool(folder, actors=SYNC_ACTORS, threads_per_actor=1, name="bench") as pool:
        syncs = [pool.update_weights(version, weights) for version in range(1, 2 + SYNC_UPDATES)][1:]
    return {
        "weight_sync_s": statistics.median(sync.seconds for sync in syncs),
        "weight_sync_store_s": statistics.median(sync.store_seconds for sync in syncs),
        "weight_sync_mb": sum(weight.nbytes for weight in weights.values()) / 1e6,
    }
