"""Checkpoint folders as the models of an audit, over responses that keptset's own engine sampled."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")

from keptset.rollout.config import EngineConfig  # noqa: E402
from keptset.rollout.engine import RolloutEngine  # noqa: E402
from keptset.rollout.models import Decoder, load_decoder  # noqa: E402
from keptset.rollout.request import Request  # noqa: E402
from keptset.schemas.errors import CheckpointError, InvalidInput  # noqa: E402
from keptset.schemas.findings import FindingKind, Severity  # noqa: E402
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches  # noqa: E402
from keptset.schemas.sampling_params import SamplingParams  # noqa: E402
from keptset.schemas.storage.spool import SpoolWriter  # noqa: E402
from keptset.scripts.audit_scorers import DecoderScorer, model_folders  # noqa: E402
from keptset.scripts.rescore import rescore, rescore_through_cache  # noqa: E402
from keptset.trainer_bridge.audit import AuditOptions, audit  # noqa: E402
from keptset.trainer_bridge.audit.checks.explanations import Explanations  # noqa: E402
from keptset.trainer_bridge.audit.token_scores import ModelScorer  # noqa: E402
from keptset.trainer_bridge.audit.unit_audit import audited  # noqa: E402

TINY = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
FOLDER = TINY / "qwen2_bias"
SETTINGS = [
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.7, top_p=0.95, top_k=40),
    SamplingParams(temperature=1.2, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.3),
]


def sampled(decoder: Decoder, count: int, version: int, name: str) -> RolloutBatch:
    rng = np.random.default_rng(7)
    return RolloutEngine(decoder, EngineConfig(slots=16, base_seed=version), version=version).generate(
        Request(
            prompt_id=f"{name}{i}",
            prompt_token_ids=rng.integers(0, 160, rng.integers(2, 20)).astype(np.int32),
            params=replace(SETTINGS[i % len(SETTINGS)], max_new_tokens=20),
        )
        for i in range(count)
    )


@pytest.fixture(scope="module")
def decoders() -> Mapping[int, Decoder]:
    """Two versions: the second has moved a little."""
    old, new = load_decoder(FOLDER), load_decoder(FOLDER)
    rng = np.random.default_rng(3)
    moved = {
        name: np.asarray(weight.numpy()) * (1 + 0.05 * rng.normal(size=tuple(weight.shape)).astype(np.float32))
        for name, weight in new.weights().items()
    }
    new.load_weights(moved)
    return {0: old, 1: new}


@pytest.fixture(scope="module")
def batch(decoders: Mapping[int, Decoder]) -> RolloutBatch:
    return sampled(decoders[0], 40, 0, "p")


def test_a_folder_audits_what_its_model_sampled(batch: RolloutBatch, tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "spool") as writer:
        writer.append(batch)
    scorer = model_folders([f"0={FOLDER}"])
    assert pickle.loads(pickle.dumps(scorer)) == scorer
    report = audit([tmp_path / "spool"], AuditOptions(workers=1, scorer=scorer))
    assert [found for found in report.findings if found.severity is not Severity.INFO] == []
    assert all(abs(row.kept_ratio.mean - 1) < 1e-5 for row in report.settings)
    assert set(report.budget) == {"truncation", "staleness", "path", "total"}
    assert report.floors is not None and report.floors.path_mean_abs < 1e-4


def test_scores_are_those_of_the_demo(batch: RolloutBatch, decoders: Mapping[int, Decoder]) -> None:
    scores = ModelScorer(scorer=DecoderScorer({0: decoders[0]})).score(batch)
    parts = rescore(decoders[0], batch)
    np.testing.assert_allclose(scores.kept_T, np.concatenate([part.kept_T for part in parts]), atol=1e-12)
    np.testing.assert_allclose(scores.full_T, np.concatenate([part.full_T for part in parts]), atol=1e-12)
    stepwise = rescore_through_cache(decoders[0], batch).kept_T
    assert 0 < np.abs(stepwise - scores.kept_T).max() < 1e-3


def test_responses_of_two_versions_are_each_held_against_their_own(decoders: Mapping[int, Decoder]) -> None:
    batch = concat_batches([sampled(decoders[0], 12, 0, "a"), sampled(decoders[1], 12, 1, "b")])
    scorer = ModelScorer(scorer=DecoderScorer(decoders))
    check = Explanations(AuditOptions())
    check.add(audited(batch, scorer=scorer))
    assert check.outcome().evidence == () and check.without_expectation == 0
    swapped = ModelScorer(scorer=DecoderScorer({0: decoders[1], 1: decoders[0]}))
    check = Explanations(AuditOptions())
    check.add(audited(batch, scorer=swapped))
    assert [found.kind for found in check.outcome().evidence] == [FindingKind.WRONG_VERSION]


def test_new_weights_in_the_same_folder_are_another_audit_and_another_way_to_name_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(folder: str | Path) -> str:
        return AuditOptions(scorer=model_folders([f"3={folder}"])).digest()

    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    before = digest(folder)
    monkeypatch.chdir(tmp_path)
    assert digest("model") == digest("./model/../model") == before
    (folder / "README.md").write_text("no weights")
    assert digest(folder) == before
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(0, 0))
    assert digest(folder) != before
    monkeypatch.chdir(Path(shutil.copytree(tmp_path, tmp_path.with_name("elsewhere"))))
    assert digest("model") != digest(folder)


def test_what_model_is_given_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is no folder"):
        model_folders([str(tmp_path / "nothing")])
    with pytest.raises(InvalidInput, match="version 3 twice"):
        model_folders([f"3={FOLDER}", f"3={FOLDER}"])
    with pytest.raises(InvalidInput, match="without its version twice"):
        model_folders([str(FOLDER), str(FOLDER)])
    with pytest.raises(InvalidInput, match="has no version beside others"):
        model_folders([str(FOLDER), f"3={FOLDER}"])
    with pytest.raises(CheckpointError):
        model_folders([str(tmp_path)])()
    other = load_decoder(FOLDER)
    other.config = replace(other.config, vocab_size=99)
    with pytest.raises(InvalidInput, match="vocabularies of"):
        DecoderScorer({0: load_decoder(FOLDER), 1: other})
