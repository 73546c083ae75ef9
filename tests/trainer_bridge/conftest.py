"""Responses sampled by the oracle from random logits: every number of theirs is known in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference


class Paddle:
    """How a test makes and reads tensors of one framework."""

    name = "paddle"

    def __init__(self) -> None:
        self.module = pytest.importorskip("paddle", reason="Paddle is not installed; `make test` has it")

    def tensor(self, array: Any, dtype: str = "float32", *, gradient: bool = False) -> Any:
        # Through float32, since Paddle 2.6 cuts float64 to bfloat16 instead of rounding it.
        wide = np.asarray(array, np.float64 if dtype == "float64" else np.float32)
        tensor = self.module.to_tensor(wide).astype(dtype)
        tensor.stop_gradient = not gradient
        return tensor

    def index(self, positions: Any) -> Any:
        """Of tensors."""
        return self.module.to_tensor(np.asarray(positions, np.int64))

    def gather(self, tensor: Any, positions: Any) -> Any:
        """Rows of a tensor; a row may be named more than once, or none."""
        return self.module.gather(tensor, self.index(positions))

    def host(self, tensor: Any) -> np.ndarray:
        return tensor.detach().astype("float64").numpy()

    def no_gradients(self) -> Any:
        return self.module.no_grad()

    def has_graph(self, tensor: Any) -> bool:
        return not tensor.stop_gradient

    def clear_gradient(self, leaf: Any) -> None:
        leaf.clear_gradient()

    def linear(self, weight: np.ndarray, bias: np.ndarray) -> Any:
        """A linear layer as the framework's users have it; Paddle lays its weight out as [in, out]."""
        made = self.module.nn.Linear(weight.shape[1], weight.shape[0])
        made.weight.set_value(weight.T.astype(np.float32))
        made.bias.set_value(bias.astype(np.float32))
        return made

    def mixed_precision(self) -> Any:
        if not self.module.device.is_compiled_with_cuda() or not self.module.device.cuda.device_count():
            pytest.skip("Paddle's mixed precision needs a GPU")
        return self.module.amp.auto_cast(level="O2", dtype="bfloat16")

    def allocated(self) -> int:
        """Bytes of tensors on the host, where the framework tells; else 0."""
        return int(self.module.base.core.host_memory_stat_current_value("Allocated", 0))

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """The most bytes of tensors that a call adds at any time."""
        core = self.module.base.core
        if not hasattr(core, "host_memory_stat_reset_peak_value"):
            pytest.skip("Paddle 2.6 cannot measure the peak of one call")
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = self.allocated()
        run()
        return int(core.host_memory_stat_peak_value("Allocated", 0)) - before

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).split(".")[-1]


class Torch:
    """See `Paddle`."""

    name = "torch"

    def __init__(self) -> None:
        self.module = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` has it")

    def tensor(self, array: Any, dtype: str = "float32", *, gradient: bool = False) -> Any:
        return self.module.tensor(np.asarray(array), dtype=getattr(self.module, dtype)).requires_grad_(gradient)

    def index(self, positions: Any) -> Any:
        return self.module.tensor(np.asarray(positions, np.int64))

    def gather(self, tensor: Any, positions: Any) -> Any:
        return tensor[self.index(positions)]

    def host(self, tensor: Any) -> np.ndarray:
        return tensor.detach().double().numpy()

    def no_gradients(self) -> Any:
        return self.module.no_grad()

    def has_graph(self, tensor: Any) -> bool:
        return tensor.requires_grad

    def clear_gradient(self, leaf: Any) -> None:
        leaf.grad = None

    def linear(self, weight: np.ndarray, bias: np.ndarray) -> Any:
        made = self.module.nn.Linear(weight.shape[1], weight.shape[0])
        made.load_state_dict({"weight": self.tensor(weight), "bias": self.tensor(bias)})
        return made

    def mixed_precision(self) -> Any:
        return self.module.autocast("cpu", dtype=self.module.bfloat16)

    def allocated(self) -> int:
        return 0

    def largest_tensor(self, run: Callable[[], None], besides: tuple[tuple[int, ...], ...]) -> int:
        """Bytes of the largest tensor that any operation of a call makes, beside those of the given shapes."""
        torch, sizes = self.module, [0]

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                for value in out if isinstance(out, tuple | list) else [out]:
                    if isinstance(value, torch.Tensor) and tuple(value.shape) not in besides:
                        sizes.append(value.nbytes)
                return out

        with Watch():
            run()
        return max(sizes)

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).split(".")[-1]


class NumPy:
    """See `Paddle`; without gradients, and always wide."""

    name = "numpy"

    def tensor(self, array: Any, dtype: str = "float64", *, gradient: bool = False) -> Any:
        return np.asarray(array, np.float64 if dtype == "bfloat16" else dtype)

    def gather(self, tensor: Any, positions: Any) -> Any:
        return tensor[positions]

    def host(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor, np.float64)


FRAMEWORKS = {one.name: one for one in (NumPy, Paddle, Torch)}


@pytest.fixture(params=list(FRAMEWORKS))
def anywhere(request: pytest.FixtureRequest) -> Any:
    """Each framework, NumPy among them."""
    return FRAMEWORKS[request.param]()


@pytest.fixture(params=["paddle", "torch"])
def trainer(request: pytest.FixtureRequest) -> Any:
    """Each framework that has gradients."""
    return FRAMEWORKS[request.param]()


PROCESSOR_ORDER = "repetition_penalty,frequency_penalty,presence_penalty,logit_bias"


@dataclass(frozen=True)
class World:
    """A batch, and the logits [prompt + response, V] of each of its rows: position i predicts token i + 1."""

    batch: RolloutBatch
    logits: list[np.ndarray]
    prompts: list[np.ndarray]
    params: list[SamplingParams]

    @property
    def vocab_size(self) -> int:
        return self.logits[0].shape[1]

    def padded_logits(self, side: str, length: int) -> np.ndarray:
        """[B, L, V] as a model would give them, and nan where nothing may be read."""
        grid = np.full((len(self.logits), length, self.vocab_size), np.nan)
        for row, logits in enumerate(self.logits):
            start = length - len(logits) if side == "left" else 0
            grid[row, start : start + len(logits)] = logits
        return grid

    def packed_logits(self) -> np.ndarray:
        return np.concatenate(self.logits)

    def oracle(self, score: Callable[[int, int, np.ndarray], float]) -> np.ndarray:
        """score(row, position, processed logits) of each sampled token."""
        scores = []
        for row, (logits, prompt, params) in enumerate(zip(self.logits, self.prompts, self.params, strict=True)):
            response = self.batch.token_ids[row]
            for position in np.flatnonzero(self.batch.sampled[row]).tolist():
                raw = logits[len(prompt) + position - 1]
                scores.append(
                    score(row, position, reference.process(raw, prompt, response[:position], without_bans(params)))
                )
        return np.array(scores)

    def oracle_scores(self) -> np.ndarray:
        """Over the recorded sets."""

        def score(row: int, position: int, z: np.ndarray) -> float:
            kept = None if self.batch.column("support")[row].as_py() == "full" else self.kept_set(row, position)
            return reference.score(z, kept, int(self.batch.token_ids[row][position]), self.params[row].temperature)

        return self.oracle(score)

    def oracle_full_scores(self) -> np.ndarray:
        """Over the vocabulary."""
        return self.oracle(
            lambda row, position, z: reference.score(
                z, None, int(self.batch.token_ids[row][position]), self.params[row].temperature
            )
        )

    def kept_set(self, row: int, position: int) -> list[int]:
        return self.batch.column("kept_ids")[row].as_py()[position]


def without_bans(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
    )


def _simulate(
    rng: np.random.Generator,
    settings: Sequence[SamplingParams],
    *,
    vocab_size: int = 40,
    forced_share: float = 0.2,
    max_prompt: int = 6,
    max_response: int = 9,
    processor_order: str | None = PROCESSOR_ORDER,
) -> World:
    builder = BatchBuilder(Identity(vocab_size=vocab_size, processor_order=processor_order))
    logits, prompts = [], []
    for row, params in enumerate(settings):
        prompt = rng.integers(0, vocab_size, rng.integers(1, max_prompt + 1))
        length = int(rng.integers(1, max_response + 1))
        row_logits = rng.normal(0, 2.5, (len(prompt) + length, vocab_size))
        tokens, sampled, b, m, sets = [], [], [], [], []
        for position in range(length):
            z = reference.process(row_logits[len(prompt) + position - 1], prompt, tokens, params)
            kept = reference.truncate(z, params)
            if rng.random() < forced_share:
                tokens.append(int(rng.integers(0, vocab_size)))
                sampled.append(False)
                b.append(0.0)
                m.append(0.0)
                sets.append([])
                continue
            token = reference.draw(kept, rng.random())
            tokens.append(token)
            sampled.append(True)
            b.append(kept.logprobs[kept.kept_ids.tolist().index(token)])
            m.append(kept.log_kept_mass)
            sets.append(kept.kept_ids.tolist())
        is_full = all(len(s) == vocab_size for s, drawn in zip(sets, sampled, strict=True) if drawn)
        builder.add(
            Response(
                rollout_id=f"rollout-{row}",
                prompt_id=f"prompt-{row}",
                prompt_token_ids=prompt,
                token_ids=np.array(tokens),
                sampled=np.array(sampled),
                trainable=rng.random(length) < 0.7,
                behavior_logprobs=np.array(b),
                log_kept_mass=np.array(m),
                support="full" if is_full else "kept",
                kept_offsets=None if is_full else np.cumsum([0, *map(len, sets)]),
                kept_ids=None if is_full else np.array([i for s in sets for i in s], np.int64),
                policy_versions=np.full(length, row),
                finish_reason="length",
                params=params,
            )
        )
        logits.append(row_logits)
        prompts.append(prompt)
    batch = builder.build()
    return World(batch=batch, logits=logits, prompts=prompts, params=list(settings))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


@pytest.fixture(scope="session")
def simulate() -> Callable[..., World]:
    """simulate(rng, settings, ...) -> World: one response per setting, drawn by the oracle."""
    return _simulate


VARIED = (
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.6, temperature=0.7),
    SamplingParams(temperature=0),
    SamplingParams(min_p=0.05, temperature=1.4),
    SamplingParams(top_k=1),
)


@pytest.fixture
def world(rng: np.random.Generator) -> World:
    """Twelve responses under varied settings, with forced tokens among the sampled ones."""
    return _simulate(rng, VARIED * 2)


class Framework:
    """Arrays of one framework, with their gradients."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._module = None if name == "numpy" else pytest.importorskip(name, reason=f"{name} is not installed")

    def tensor(self, values: npt.ArrayLike, dtype: str = "float64") -> Any:
        """A leaf that takes a gradient, where the framework has any."""
        array = np.asarray(values, dtype)
        if self.name == "paddle":
            return self._module.to_tensor(array, stop_gradient=False)
        return array if self._module is None else self._module.tensor(array, requires_grad=True)

    def host(self, values: Any) -> np.ndarray:
        return np.asarray(values) if self._module is None else values.detach().numpy()

    def gradient(self, value: Any, leaf: Any) -> np.ndarray:
        """d value / d leaf; skips where the framework has no gradients."""
        if self._module is None:
            pytest.skip("NumPy has no gradients")
        value.backward()
        return np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()


@pytest.fixture(params=["numpy", "paddle", "torch"])
def framework(request: pytest.FixtureRequest) -> Framework:
    """Each framework that is installed."""
    return Framework(request.param)
