"""`keptset bench step`: what scoring, loss and diagnostics take of a training step of a decoder in Paddle.

Legend: B responses, T sampled tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated, Any

import numpy as np
import typer

from keptset.rollout.cpu_threads import configure
from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.scripts.bench_scoring_case import Shape, kept_case
from keptset.scripts.timing import print_numbers

NEW_TOKENS, PROMPT_TOKENS, VOCAB, LAYERS = 64, 16, 49_152, 30
PARTS = ("model", "scoring", "loss", "diagnostics", "backward", "optimizer")


def command(
    rounds: Annotated[int, typer.Option(help="Steps that are timed; medians count.", min=1)] = 3,
    tokens: Annotated[int, typer.Option(help="Sampled tokens of a step.", min=NEW_TOKENS)] = 2048,
    layers: Annotated[int, typer.Option(help="Layers of the decoder.", min=1)] = LAYERS,
    vocab: Annotated[int, typer.Option(help="Vocabulary size.", min=1024)] = VOCAB,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """A GRPO step as docs/training.md has it: forward, scores over kept sets, ratios and loss, diagnostics, backward,
    Adam; a decoder of the width of SmolLM2-135M with random weights, float32."""
    configure()
    trainer = _Trainer(layers, vocab, recorded(tokens // NEW_TOKENS, vocab))
    trainer.step()
    steps = [trainer.step() for _ in range(rounds)]
    seconds = {part: statistics.median(step[part] for step in steps) for part in PARTS}
    whole = statistics.median(sum(step.values()) for step in steps)
    numbers = {"step_seconds": whole, "diagnostics_ms": 1e3 * seconds["diagnostics"]}
    numbers |= {f"{part}_share": seconds[part] / whole for part in PARTS}
    print(json.dumps(numbers)) if as_json else print_numbers(f"step, {tokens} tokens, {layers} layers", numbers)


def recorded(responses: int, vocab: int) -> RolloutBatch:
    """Responses whose kept sets have the sizes of `keptset bench scoring`."""
    case = kept_case(Shape(tokens=responses * NEW_TOKENS, vocab=vocab))
    builder = BatchBuilder(Identity(vocab_size=vocab, engine="bench"))
    rng = np.random.default_rng(0)
    for row in range(responses):
        own = slice(row * NEW_TOKENS, (row + 1) * NEW_TOKENS)
        offsets = case.kept_offsets_T1[own.start : own.stop + 1]
        builder.add(
            Response(
                rollout_id=f"r{row}",
                prompt_id=f"p{row // 8}",
                prompt_token_ids=rng.integers(0, vocab, PROMPT_TOKENS),
                token_ids=case.token_ids_T[own],
                behavior_logprobs=-np.log(np.diff(offsets)),
                log_kept_mass=np.full(NEW_TOKENS, -0.1),
                kept_offsets=offsets - offsets[0],
                kept_ids=case.kept_ids_N[offsets[0] : offsets[-1]],
                policy_versions=np.zeros(NEW_TOKENS, np.int64),
                finish_reason="length",
                params=SamplingParams(top_k=512),
            )
        )
    return builder.build()


class _Trainer:
    """A decoder, its optimizer and one batch."""

    def __init__(self, layers: int, vocab: int, batch: RolloutBatch) -> None:
        import paddle

        from keptset.rollout.models.config import DecoderConfig
        from keptset.rollout.models.decoder import Decoder
        from keptset.rollout.models.parameters import weight_shapes

        config = DecoderConfig.from_dict(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_act": "silu",
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "num_hidden_layers": layers,
                "vocab_size": vocab,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
            }
        )
        shapes, rng = weight_shapes(config), np.random.default_rng(0)
        self._decoder = Decoder(
            config, lambda name: 0.02 * rng.standard_normal(shapes[name], dtype=np.float32), trainable=True
        )
        self._optimizer = paddle.optimizer.Adam(1e-6, parameters=self._decoder.parameters())
        self._batch = batch
        self._advantages_B = rng.standard_normal(len(batch))

    def step(self) -> dict[str, float]:
        """Seconds of each part."""
        from keptset.rollout.models import Segment
        from keptset.trainer_bridge.alignment import to_packed
        from keptset.trainer_bridge.diagnostics import Diagnostics
        from keptset.trainer_bridge.losses import grpo_loss
        from keptset.trainer_bridge.ratios import log_ratios_of
        from keptset.trainer_bridge.scoring import Head, score_aligned_from_hidden

        clock = _Clock()
        packed = to_packed(self._batch)
        lengths = np.diff(packed.cu_seqlens_B1).tolist()
        segments = [Segment(slot=row, start=0, length=length) for row, length in enumerate(lengths)]
        hidden = self._decoder.forward(packed.input_ids_P, segments)
        clock.stop("model", hidden)
        scores = score_aligned_from_hidden(packed, hidden, Head(weight_VH=self._decoder.head_weight))
        clock.stop("scoring", scores.logprobs_T)
        ratios = log_ratios_of(scores, packed.tokens)
        loss = grpo_loss(ratios, self._advantages_B)
        clock.stop("loss", loss.value)
        diagnostics = Diagnostics()
        diagnostics.add_scored(ratios, packed.tokens, scores, current_version=1)
        diagnostics.report().flat()
        clock.stop("diagnostics")
        loss.value.backward()
        clock.stop("backward", self._decoder.head_weight.grad)
        self._optimizer.step()
        self._optimizer.clear_grad()
        clock.stop("optimizer", self._decoder.head_weight)
        return clock.seconds


class _Clock:
    """Time between stops, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    def stop(self, name: str, result: Any = None) -> None:
        """A part ends when a number of its `result` can be read, on a device too."""
        if result is not None:
            float(result.reshape([-1])[0])
        now = time.perf_counter()
        self.seconds[name] = now - self._begin
        self._begin = now
