"""transformers models as the models of an audit: logits of packed rows, and what cannot be made in pieces."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from keptset.schemas.errors import CheckpointError, InvalidInput  # noqa: E402
from keptset.scripts.audit_scorers import model_folders  # noqa: E402
from keptset.scripts.transformers_scorer import TransformersScorer  # noqa: E402

FOLDER = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "qwen2_bias"


def test_logits_of_packed_rows_are_those_of_the_model_row_by_row() -> None:
    scorer = TransformersScorer.from_folders({4: str(FOLDER)}, "float32")
    assert scorer.versions == (4,) and scorer.vocab_size == 160
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 160, length) for length in (5, 9, 3)]
    logits_of = scorer.logits_of(np.concatenate(rows), np.array([5, 9, 3]), 4)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(FOLDER), local_files_only=True).float().eval()
    with torch.no_grad():
        expected = torch.cat([model(torch.as_tensor(row)[None]).logits[0] for row in rows])
    np.testing.assert_allclose(logits_of(np.array([16, 0, 6])).numpy(), expected[[16, 0, 6]].numpy(), atol=1e-4)
    assert scorer.stepwise_logits_of(rows[0], np.array([5]), np.array([2]), 4) is None


def test_a_model_that_caps_its_logits_is_refused() -> None:
    config = transformers.Gemma2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.01,
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    with pytest.raises(InvalidInput, match="does more to its logits than apply its head"):
        TransformersScorer({None: model})


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="transformers cannot read"):
        TransformersScorer.from_folders({None: str(tmp_path)}, "float32")


@pytest.mark.skipif(find_spec("paddle") is not None, reason="Paddle is installed, and comes first")
def test_without_paddle_a_folder_is_run_by_transformers() -> None:
    assert isinstance(model_folders([str(FOLDER)])().scorer, TransformersScorer)
