import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")

from keptset.schemas.sampling_params import SamplingParams
from keptset.scripts import bench_capture
from keptset.trainer_bridge import reference

ROOT = Path(__file__).parents[2]


def test_the_baseline_finds_what_the_oracle_finds():
    import paddle

    logits = np.random.default_rng(0).normal(0, 3, (5, 3000)).astype(np.float32)
    params = SamplingParams(top_k=50, top_p=0.9)
    keep, token, mass, entropy = bench_capture.sorted_in_paddle(paddle.to_tensor(logits), params)
    for row, z in enumerate(logits):
        kept = reference.truncate(z, params)
        assert keep[row].sum() == len(kept.kept_ids) and token[row, 0] in kept.kept_ids
        np.testing.assert_allclose([mass[row, 0], entropy[row]], [kept.log_kept_mass, kept.entropy], atol=1e-3)


def test_the_command_prints_the_documented_keys():
    code = "import sys; from keptset.scripts.main import main; sys.argv[0] = 'keptset'; main()"
    options = ["bench", "capture", "--rows", "4", "--vocab", "4096", "--rounds", "1", "--json"]
    ran = subprocess.run([sys.executable, "-c", code, *options], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    numbers = json.loads(ran.stdout)
    assert {"capture_ms", "paddle_sort_ms", "capture_speedup"} <= set(numbers)
    assert all(value > 0 for value in numbers.values())
