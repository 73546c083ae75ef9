"""Every recorded example against the logits behind it: the good say what the oracle says, the bad what is wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.adapters import Adapted, Stated, adapt_files, adapter_for
from keptset.schemas.adapters.recorded import read_trees
from keptset.schemas.builder import Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.reference import score, truncate

ENGINES = Path(__file__).resolve().parents[2] / "data" / "engines"
MANIFEST = json.loads((ENGINES / "manifest.json").read_text())
GOOD = [entry for entry in MANIFEST if entry["verdict"] == "good"]
BAD = [entry for entry in MANIFEST if entry["verdict"] == "bad"]
STATED = Stated(identity=Identity(vocab_size=24))


def adapted(entry: dict[str, Any]) -> Adapted:
    (result,) = adapt_files(adapter_for(entry["format"]), [ENGINES / entry["file"]], STATED)
    return result


def rows_behind(entry: dict[str, Any], batch: RolloutBatch) -> list[tuple[dict[str, Any], int]]:
    """(logits entry, row of the batch) of each response, told apart by prompt and tokens."""
    logits = json.loads((ENGINES / entry["logits"]).read_text())["responses"]
    assert batch.prompt_token_ids is not None
    found = []
    for row in range(len(batch)):
        prompt, tokens = batch.prompt_token_ids[row].tolist(), batch.token_ids[row].tolist()
        fits = [one for one in logits if one["prompt"] == prompt and one["tokens"] == tokens]
        found += [(one, row) for one in fits]
    return found


def temperature_of(entry: dict[str, Any]) -> float:
    return float(json.loads((ENGINES / entry["logits"]).read_text())["temperature"])


@pytest.mark.parametrize("entry", GOOD, ids=lambda entry: entry["file"])
def test_a_good_file_has_no_finding_and_loses_no_response(entry: dict[str, Any]) -> None:
    result = adapted(entry)
    assert (result.findings, result.rejected) == ((), ())
    single = any(word in entry["file"] for word in ("stream", "engine", "greedy"))
    assert len(result.require()) == (1 if single else 2)


@pytest.mark.parametrize("entry", [e for e in GOOD if "greedy" not in e["file"]], ids=lambda entry: entry["file"])
def test_kept_sets_and_logprobs_of_a_good_file_are_those_of_the_logits_behind_it(entry: dict[str, Any]) -> None:
    batch = adapted(entry).batch
    pairs = rows_behind(entry, batch)
    assert len(pairs) == len(batch)
    temperature = temperature_of(entry)
    kept, b = batch.kept_ids, batch.behavior_logprobs
    assert kept is not None
    assert b is not None
    for logits, row in pairs:
        for t, (row_V, token) in enumerate(zip(logits["rows"], logits["tokens"], strict=True)):
            at = int(batch.token_ids.offsets[row]) + t
            if row_V is None:
                assert not batch.sampled.values[at]
                continue
            assert kept.inner[at].tolist() == sorted(logits["kept"][t])
            expected = score(row_V, kept.inner[at], token, temperature)
            np.testing.assert_array_max_ulp(b.values[at], np.float32(expected), maxulp=1)


@pytest.mark.parametrize("name", ["sglang_good.json"])
def test_the_log_kept_mass_is_that_of_the_logits_where_an_engine_gives_both_logprobs(name: str) -> None:
    (entry,) = [entry for entry in MANIFEST if entry["file"] == name]
    batch = adapted(entry).batch
    m, full = batch.log_kept_mass, batch.full_logprobs
    assert m is not None
    assert full is not None
    for logits, row in rows_behind(entry, batch):
        for t, row_V in enumerate(logits["rows"]):
            at = int(batch.token_ids.offsets[row]) + t
            kept = truncate(row_V, SamplingParams(temperature=0.8, top_k=6, top_p=0.85))
            assert m.values[at] == pytest.approx(kept.log_kept_mass, abs=2e-7)
            assert full.values[at] == pytest.approx(logits["logprob_full"][t], abs=1e-7)


def test_a_greedy_response_keeps_one_token_a_step_with_logprob_and_mass_0() -> None:
    (entry,) = [entry for entry in MANIFEST if "greedy" in entry["file"]]
    batch = adapted(entry).batch
    rows = json.loads((ENGINES / entry["logits"]).read_text())["responses"][1]["rows"]
    assert batch.kept_ids is not None
    assert batch.behavior_logprobs is not None
    assert batch.log_kept_mass is not None
    assert batch.kept_ids.inner.values.tolist() == batch.token_ids.values.tolist()
    assert batch.token_ids[0][0] == truncate(rows[0], SamplingParams(temperature=0)).kept_ids[0]
    assert not batch.behavior_logprobs.values.any()
    assert not batch.log_kept_mass.values.any()


@pytest.mark.parametrize(
    "entry", [e for e in BAD if e["findings"][0]["kind"] != "logprob_mismatch"], ids=lambda e: e["file"]
)
def test_a_bad_file_has_exactly_the_findings_planted_in_it(entry: dict[str, Any]) -> None:
    result = adapted(entry)
    positions = {response.rollout_id: index for index, response in enumerate(responses(entry))}
    found = {
        (finding.kind.value, positions[example.rollout_id], example.position)
        for finding in result.findings
        for example in finding.examples
    }
    assert found == {(planted["kind"], planted["response"], planted["token"]) for planted in entry["findings"]}
    errors = {planted["response"] for planted in entry["findings"] if planted["kind"] != "support_absent"}
    assert {positions[str(rejected.rollout_id)] for rejected in result.rejected} == errors
    assert len(result.batch) == len(positions) - len(errors)


def responses(entry: dict[str, Any]) -> list[Response]:
    """All responses of a file in the engine's order, before any check."""
    adapter = adapter_for(entry["format"])
    (tree,) = adapter.whole(read_trees(ENGINES / entry["file"]))
    return [adapter.response(part, STATED) for part in adapter.parts(adapter.open(tree, STATED))]


def test_logprobs_over_the_whole_vocabulary_are_what_scoring_over_the_kept_set_finds() -> None:
    (entry,) = [e for e in BAD if e["findings"][0]["kind"] == "logprob_mismatch"]
    logits = json.loads((ENGINES / entry["logits"]).read_text())["responses"]
    found = {}
    for position, response in enumerate(responses(entry)):
        assert response.kept_offsets is not None
        assert response.kept_ids is not None
        assert response.behavior_logprobs is not None
        for t, token in enumerate(response.token_ids.tolist()):
            kept_N = response.kept_ids[response.kept_offsets[t] : response.kept_offsets[t + 1]]
            expected = score(logits[position]["rows"][t], kept_N, token, 1.0)
            stored = float(response.behavior_logprobs[t])
            if abs(expected - stored) > 1e-6:
                found[position, t] = (expected, stored)
    planted = {(one["response"], one["token"]): (one["expected"], one["stored"]) for one in entry["findings"]}
    assert found.keys() == planted.keys()
    for place, numbers in found.items():
        assert numbers == pytest.approx(planted[place], abs=1e-7)


def test_structure_alone_shows_such_a_logprob_where_the_set_has_one_member() -> None:
    (entry,) = [e for e in BAD if e["findings"][0]["kind"] == "logprob_mismatch"]
    (finding,) = adapted(entry).findings
    assert (finding.kind.value, [(e.rollout_id, e.position) for e in finding.examples]) == (
        "logprob",
        [("chatcmpl-demo/1", 2)],
    )


def test_the_manifest_names_every_recorded_file() -> None:
    recorded = {path.name for path in ENGINES.iterdir()} - {"manifest.json"}
    named = {entry["file"] for entry in MANIFEST} | {entry["logits"] for entry in MANIFEST}
    assert recorded == named
    assert {entry["format"] for entry in MANIFEST} == {"vllm", "sglang", "fastdeploy", "slime", "prime_rl"}


def test_a_part_knows_its_place_in_the_record() -> None:
    adapter = adapter_for("vllm")
    (tree,) = read_trees(ENGINES / "vllm_good.json")
    parts = list(adapter.parts(adapter.open(tree, STATED)))
    assert [part.node.path for part in parts] == ["response.choices[0]", "response.choices[1]"]
