"""The same engine on an accelerator: weights in bfloat16, kept sets found where the logits are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")

from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.engine import RolloutEngine  # noqa: E402
from keptset.rollout.models import load_decoder  # noqa: E402
from keptset.rollout.request import Request  # noqa: E402
from keptset.schemas.sampling_params import SamplingParams  # noqa: E402
from keptset.schemas.validation import validate  # noqa: E402

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "qwen3_qknorm"
PARAMS = [SamplingParams(), SamplingParams(top_k=20, top_logprobs=4), SamplingParams(top_p=0.8, presence_penalty=0.1)]


def requests():
    rng = np.random.default_rng(0)
    return [
        Request(
            prompt_id=f"p{i}",
            prompt_token_ids=rng.integers(0, 160, 12).astype(np.int32),
            params=replace(PARAMS[i % 3], max_new_tokens=16, draft_tokens=3 * (i % 2)),
        )
        for i in range(9)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollouts_made_on_the_device_are_whole(dtype):
    decoder = load_decoder(FOLDER, dtype)
    assert decoder.place.is_gpu_place()
    batch = RolloutEngine(decoder, EngineConfig(slots=4)).generate(requests())
    assert validate(batch) == []
    assert batch.num_tokens == 9 * 16
    assert batch.column("support").to_pylist() == ["full", "kept", "kept"] * 3


def test_a_step_copies_to_the_host_a_fixed_number_of_times(monkeypatch):
    """As many rows as there are, the copies of one step stay the same."""
    decoder = load_decoder(FOLDER)
    copies = []
    honest = paddle.Tensor.numpy
    monkeypatch.setattr(paddle.Tensor, "numpy", lambda tensor: copies.append(tensor.shape) or honest(tensor))
    counts = {}
    for slots in (2, 8):
        engine = RolloutEngine(decoder, EngineConfig(slots=slots))
        for request in requests()[:slots]:
            engine.submit(replace(request, params=replace(PARAMS[1], max_new_tokens=8)))
        engine.step()
        copies.clear()
        engine.step()
        counts[slots] = len(copies)
    assert counts[2] == counts[8]
