"""The page on training runs: its GRPO loop in each framework, and its other examples.

Two of the loops are the same but for the support that the trainer scores over, and their rewards are noise: what the
policy learns from them is bias.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.advantages import group_advantages
from keptset.trainer_bridge.alignment import PackedBatch, to_packed, to_padded
from keptset.trainer_bridge.diagnostics import Diagnostics
from keptset.trainer_bridge.losses import grpo_loss
from keptset.trainer_bridge.ratios import log_ratios_of
from keptset.trainer_bridge.scoring import score_aligned, score_aligned_full_vocabulary

FOLDER = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "llama_tied"
PAGE = Path(__file__).parents[2] / "docs" / "training.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
STEPS, PROMPTS, GROUP, NEW_TOKENS, VOCABULARY = 20, 4, 8, 8, 160
PARAMS = SamplingParams(top_p=0.7, max_new_tokens=NEW_TOKENS)
PROMPT_IDS = np.random.default_rng(1).integers(0, VOCABULARY, (PROMPTS, 4)).astype(np.int32)
LEARNING_RATE = 4e-3


class PaddleStack:
    """keptset's own decoder trains; keptset's own engine samples from it."""

    def __init__(self) -> None:
        self._paddle = pytest.importorskip("paddle", reason="paddle is not installed")
        from keptset.rollout.models import load_decoder

        self._decoder = load_decoder(FOLDER, trainable=True)
        self._optimizer = self._paddle.optimizer.Adam(LEARNING_RATE, parameters=self._decoder.parameters())

    def sample(self, step: int) -> RolloutBatch:
        from keptset.rollout.config import EngineConfig
        from keptset.rollout.engine import RolloutEngine
        from keptset.rollout.request import Request

        engine = RolloutEngine(self._decoder, EngineConfig(slots=32, base_seed=step), version=step)
        return engine.generate(
            Request(prompt_id=f"p{p}", group_id=f"p{p}", sample_index=i, prompt_token_ids=PROMPT_IDS[p], params=PARAMS)
            for p in range(PROMPTS)
            for i in range(GROUP)
        )

    def logits_of(self, packed: PackedBatch) -> Any:
        from keptset.rollout.models import Segment

        lengths = np.diff(packed.cu_seqlens_B1).tolist()
        segments = [Segment(slot=i, start=0, length=length) for i, length in enumerate(lengths)]
        return self._decoder.logits(self._decoder.forward(packed.input_ids_P, segments))

    def update(self, loss: Any) -> None:
        loss.backward()
        self._optimizer.step()
        self._optimizer.clear_grad()

    def host(self, values: Any) -> np.ndarray:
        return values.numpy()


class TorchStack:
    """The same decoder written in PyTorch, for rows of one length; a loop over the oracle samples from it."""

    QUERY_HEADS, KEY_HEADS, WIDTH, LAYERS = 6, 2, 8, 2

    def __init__(self) -> None:
        self._torch = torch = pytest.importorskip("torch", reason="torch is not installed")
        torch.set_num_threads(1)
        self._weights = {name: torch.tensor(w, requires_grad=True) for name, w in checkpoint(FOLDER).items()}
        self._optimizer = torch.optim.Adam(self._weights.values(), lr=LEARNING_RATE)

    def logits_of(self, packed: PackedBatch) -> Any:
        return self._logits(packed.input_ids_P.reshape(-1, packed.max_seqlen)).reshape(packed.num_positions, -1)

    def _logits(self, ids_BL: np.ndarray) -> Any:
        torch, (rows, length) = self._torch, ids_BL.shape
        powers = 10000.0 ** (-np.arange(0, self.WIDTH, 2) / self.WIDTH)
        angles = torch.tensor((np.arange(length)[:, None] * powers).astype(np.float32))

        def rotated(heads: Any) -> Any:
            left, right = heads.chunk(2, -1)
            return torch.cat(
                [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1
            )

        x = self._weights["model.embed_tokens.weight"][torch.tensor(ids_BL.astype(np.int64))]
        for layer in range(self.LAYERS):
            w = {n.split(".", 3)[3]: w for n, w in self._weights.items() if n.startswith(f"model.layers.{layer}.")}
            normed = self._norm(x, w["input_layernorm.weight"])
            q, k, v = (
                (normed @ w[f"self_attn.{name}_proj.weight"].T).view(rows, length, -1, self.WIDTH).transpose(1, 2)
                for name in "qkv"
            )
            k, v = (heads.repeat_interleave(self.QUERY_HEADS // self.KEY_HEADS, 1) for heads in (rotated(k), v))
            mixed = torch.nn.functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(rows, length, -1) @ w["self_attn.o_proj.weight"].T
            normed = self._norm(x, w["post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(normed @ w["mlp.gate_proj.weight"].T)
            x = x + (gate * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return self._norm(x, self._weights["model.norm.weight"]) @ self._weights["model.embed_tokens.weight"].T

    def _norm(self, x: Any, weight: Any) -> Any:
        return weight * x * self._torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def sample(self, step: int) -> RolloutBatch:
        rng = np.random.default_rng(step)
        prompts = np.repeat(PROMPT_IDS, GROUP, 0)
        ids_BL = prompts
        kept: list[list[reference.ReferenceKept]] = [[] for _ in prompts]
        for _ in range(NEW_TOKENS):
            with self._torch.no_grad():
                logits_BV = self._logits(ids_BL)[:, -1].double().numpy()
            for sets, z_V in zip(kept, logits_BV, strict=True):
                sets.append(reference.truncate(z_V, PARAMS))
            drawn = np.array([reference.draw(sets[-1], rng.random()) for sets in kept])
            ids_BL = np.concatenate([ids_BL, drawn[:, None]], axis=1)
        builder = BatchBuilder(Identity(vocab_size=VOCABULARY))
        for row, (sets, tokens) in enumerate(zip(kept, ids_BL[:, prompts.shape[1] :], strict=True)):
            builder.add(
                Response(
                    rollout_id=f"{step}/{row}",
                    prompt_id=f"p{row // GROUP}",
                    group_id=f"p{row // GROUP}",
                    sample_index=row % GROUP,
                    prompt_token_ids=prompts[row],
                    token_ids=tokens,
                    behavior_logprobs=np.array(
                        [s.logprobs[np.searchsorted(s.kept_ids, y)] for s, y in zip(sets, tokens, strict=True)]
                    ),
                    log_kept_mass=np.array([s.log_kept_mass for s in sets]),
                    kept_offsets=np.cumsum([0, *(len(s.kept_ids) for s in sets)]),
                    kept_ids=np.concatenate([s.kept_ids for s in sets]),
                    policy_versions=np.full(NEW_TOKENS, step),
                    finish_reason="length",
                    params=PARAMS,
                )
            )
        return builder.build()

    def update(self, loss: Any) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def host(self, values: Any) -> np.ndarray:
        return values.detach().numpy()


def checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """The float32 tensors of a safetensors file."""
    raw = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = {name: entry for name, entry in json.loads(raw[8:begin]).items() if name != "__metadata__"}
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {
        name: np.frombuffer(raw[begin + low : begin + high], "<f4").reshape(header[name]["shape"])
        for name, (low, high) in spans.items()
    }


STACKS = {"paddle": PaddleStack, "torch": TorchStack}


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> type:
    """A class that makes a fresh model; skips where its framework is not installed."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return STACKS[request.param]


def loop() -> Any:
    """`grpo` as the page has it."""
    namespace: dict[str, Any] = {}
    exec(compile(CODE[0], str(PAGE), "exec"), namespace)
    return namespace["grpo"]


def train(stack: Any, reward: Any, **settings: Any) -> list[dict[str, float]]:
    """What the loop logged, and with each step the mean reward and the policy's entropy over the vocabulary."""
    model = stack()
    seen: list[dict[str, float]] = [{} for _ in range(STEPS)]
    entropies: list[float] = []
    rewards: list[float] = []

    def logits_of(packed: PackedBatch) -> Any:
        logits = model.logits_of(packed)
        z = model.host(logits).astype(np.float64)
        logp = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)) - z.max(1, keepdims=True)
        entropies.append(float(-np.sum(np.exp(logp) * logp, axis=1).mean()))
        return logits

    def rewarded(batch: RolloutBatch) -> np.ndarray:
        given = reward(len(rewards), batch)
        rewards.append(float(np.mean(given)))
        return given

    loop()(model.sample, rewarded, logits_of, model.update, seen.__setitem__, steps=STEPS, **settings)
    return [{**numbers, "reward": r, "entropy": h} for numbers, r, h in zip(seen, rewards, entropies, strict=True)]


def noise(step: int, batch: RolloutBatch) -> np.ndarray:
    return np.random.default_rng(1000 + step).normal(size=batch.num_responses)


def low_ids(step: int, batch: RolloutBatch) -> np.ndarray:
    return np.array([np.mean(batch.token_ids[row] < 40) for row in range(batch.num_responses)])


def test_the_core_of_the_loop_is_at_most_thirty_lines() -> None:
    assert len(CODE[0].splitlines()) <= 30


def test_rewards_that_say_nothing_teach_nothing_over_kept_sets_and_collapse_the_control(stack: Any) -> None:
    kept = train(stack, noise)
    control = train(stack, noise, score=score_aligned_full_vocabulary)

    ratios = [step["token/mean_ratio"] for step in kept]
    np.testing.assert_allclose(ratios, 1.0, atol=1e-4)
    assert all(step["grpo_token/clipped_below_share"] == step["grpo_token/clipped_above_share"] == 0 for step in kept)
    # Over eight runs with other noise this fell by .05 to .34 nats, the control's by 2.1 to 3.6.
    assert abs(kept[-1]["entropy"] - kept[0]["entropy"]) < 0.7

    # The control: same model, same prompts, same first batch. Its ratio is the kept mass ...
    assert control[0]["token/mean_ratio"] == pytest.approx(control[0]["kept_mass_mean"], abs=1e-3)
    assert control[0]["token/mean_ratio"] < 0.75
    # ... tokens of negative advantage lie below the clip range though nothing was learned yet ...
    assert control[0]["grpo_token/clipped_below_share"] > 0.3
    # ... and the policy drifts out of rewards that are noise.
    assert control[0]["entropy"] - control[-1]["entropy"] > 1.4


def test_a_reward_is_learned_with_ratio_one_before_every_update(stack: Any) -> None:
    steps = train(stack, low_ids)
    assert steps[0]["reward"] < 0.35
    assert steps[-1]["reward"] > 0.7
    np.testing.assert_allclose([step["token/mean_ratio"] for step in steps], 1.0, atol=1e-4)
    assert steps[-1]["version_lag_max"] == 0


def test_the_other_examples_of_the_page_run(world: Any) -> None:
    logits = world.packed_logits()
    later = logits + 0.1 * np.random.default_rng(0).normal(size=logits.shape)
    packed, padded = to_packed(world.batch), to_padded(world.batch, pad_token_id=0, side="right", length=16)
    grid = np.nan_to_num(world.padded_logits("right", 16))
    advantages = np.linspace(-1, 1, 12)
    namespace: dict[str, Any] = {
        "packed": packed,
        "padded": padded,
        "advantages": advantages,
        "grpo_loss": grpo_loss,
        "logits_before": logits,
        "logits_now": later,
        "score_aligned": score_aligned,
    }
    decoupled, _, context = CODE[1:]
    exec(decoupled, namespace)
    assert float(namespace["loss"].value) != 0

    whole = grpo_loss(log_ratios_of(score_aligned(padded, grid), padded.tokens), advantages)
    ranks: list[dict[str, Any]] = []
    flat = grid.reshape(-1, grid.shape[-1])
    for rank in range(2):
        namespace |= {"rank": rank, "num_ranks": 2, "tensor": np.asarray}
        namespace["local_logits"] = lambda part: flat[part.position_index]
        namespace["all_gather"] = lambda logprobs: _every_rank(padded, flat)
        exec(context, namespace)
        ranks.append({name: namespace[name] for name in ("whole", "part", "local")})
    for one in ranks:
        np.testing.assert_allclose(one["whole"].gradient_T, whole.gradient_T)
    scores = score_aligned(padded, grid).logprobs_T
    assert sum(float(one["local"]) for one in ranks) == pytest.approx(float(np.sum(whole.gradient_T * scores)))


def test_micro_batches_of_the_page_add_up_to_the_batch(world: Any, framework: Any) -> None:
    rewards, host = np.arange(12.0) % 5, world.packed_logits() * 1.2
    whole, packed = framework.tensor(host), to_packed(world.batch)
    ratios = log_ratios_of(score_aligned(packed, whole), packed.tokens)
    advantages = group_advantages(rewards, ["one"] * 12)
    expected = framework.gradient(grpo_loss(ratios, advantages, denominator=12).value, whole)
    gradients: list[np.ndarray] = []
    leaves: list[Any] = []

    def logits_of(part: PackedBatch) -> Any:
        begin = sum(len(gradient) for gradient in gradients)
        leaves.append(framework.tensor(host[begin : begin + part.num_positions]))
        return leaves[-1]

    namespace: dict[str, Any] = {
        "batch": world.batch, "rewards": rewards, "step": 12, "Diagnostics": Diagnostics, "logits_of": logits_of,
        "to_packed": to_packed, "score_aligned": score_aligned, "log_ratios_of": log_ratios_of, "grpo_loss": grpo_loss,
        "group_advantages": lambda rewards, groups: advantages,
        "backward": lambda value: gradients.append(framework.gradient(value, leaves[-1])),
    }  # fmt: skip
    exec(CODE[2].replace("positions=2048", "positions=30"), namespace)
    assert len(gradients) > 2, "several micro-batches"
    np.testing.assert_allclose(np.concatenate(gradients), expected, rtol=0, atol=1e-12)
    assert namespace["diagnostics"].report().token.count == packed.tokens.trainable_T.sum()


def _every_rank(padded: Any, flat: np.ndarray) -> list[np.ndarray]:
    from keptset.trainer_bridge.context_split import context_slice

    parts = [context_slice(padded, rank, 2) for rank in range(2)]
    return [score_aligned(part, flat[part.position_index]).logprobs_T for part in parts]
