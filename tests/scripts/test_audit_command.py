"""`keptset audit`: what it reads, says, writes and ends with."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.spool import SpoolWriter
from keptset.scripts import audit as audit_command
from keptset.scripts import audit_outputs
from keptset.trainer_bridge.usable_cores import usable_cores

RunAudit = Callable[..., tuple[int, str, str]]
RESPONSES, TOKENS, MEMBERS, VOCABULARY = 60, 40, 5, 50
LOG_RATIO = 0.01
"""Of the trainer's recorded log-probabilities over the sampler's."""


def response(rng: np.random.Generator, number: int) -> Response:
    """Honest draws from known distributions over five members."""
    kept = np.sort(np.array([rng.choice(VOCABULARY, MEMBERS, replace=False) for _ in range(TOKENS)]), axis=1)
    p = rng.dirichlet(np.full(MEMBERS, 2.0), TOKENS)
    drawn = (rng.random((TOKENS, 1)) > np.cumsum(p, axis=1)).sum(axis=1).clip(max=MEMBERS - 1)
    at = np.arange(TOKENS)
    entropy = -(p * np.log(p)).sum(axis=1)
    return Response(
        rollout_id=f"r{number}",
        prompt_id=f"p{number // 4}",
        group_id=f"p{number // 4}",
        prompt_token_ids=np.array([1, 2, 3]),
        token_ids=kept[at, drawn],
        finish_reason="stop" if number % 3 else "length",
        behavior_logprobs=np.log(p[at, drawn]),
        log_kept_mass=np.full(TOKENS, math.log(0.9)),
        kept_entropy=entropy,
        kept_logprob_var=(p * np.log(p) ** 2).sum(axis=1) - entropy**2,
        kept_offsets=np.arange(TOKENS + 1) * MEMBERS,
        kept_ids=kept.ravel(),
        kept_logprobs=np.log(p).ravel(),
        policy_versions=np.full(TOKENS, number // 30),
        params=SamplingParams(top_k=MEMBERS, seed=1000 + number),
        extra={"x_l": (np.log(p[at, drawn]) + LOG_RATIO).tolist()},
    )


@pytest.fixture(scope="module")
def batches() -> list[RolloutBatch]:
    rng = np.random.default_rng(5)
    made = []
    for first in range(0, RESPONSES, 20):
        builder = BatchBuilder(Identity(vocab_size=VOCABULARY, engine="test", model_id="tiny"))
        for number in range(first, first + 20):
            builder.add(response(rng, number))
        made.append(builder.build())
    return made


def spool_of(folder: Path, batches: list[RolloutBatch]) -> Path:
    with SpoolWriter(folder) as writer:
        for batch in batches:
            writer.append(batch)
    return folder


@pytest.fixture(scope="module")
def spool(batches: list[RolloutBatch], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spool_of(tmp_path_factory.mktemp("clean"), batches)


def changed(batch: RolloutBatch, column: str, change: Callable[[list[Any]], list[Any]]) -> RolloutBatch:
    at = batch.arrow.schema.get_field_index(column)
    field = batch.arrow.schema.field(at)
    values = pa.array(change(batch.arrow.column(at).to_pylist()), field.type)
    return RolloutBatch.from_arrow(batch.arrow.set_column(at, field, values))


@pytest.fixture(scope="module")
def faulty(batches: list[RolloutBatch], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two responses with a positive log-probability, and one response that came twice."""
    bad = changed(batches[0], "behavior_logprobs", lambda rows: [[0.5, *row[1:]] for row in rows[:2]] + rows[2:])
    return spool_of(tmp_path_factory.mktemp("faulty"), [bad, *batches[1:], batches[2].slice(4, 1)])


def told(out: str) -> dict[str, Any]:
    return json.loads(out)


def test_honest_rollouts_end_with_0_and_what_was_not_tested_is_told(run_audit: RunAudit, spool: Path) -> None:
    code, out, err = run_audit(spool)
    assert (code, err) == (0, "")
    verdict, read = out.splitlines()[:2]
    assert verdict.endswith("2,400 sampled tokens; 3 checks could not be made.")  # but staleness was not asked for
    assert read == "60 responses, 2,400 tokens (2,400 sampled), 12,000 kept ids in 1 file."
    assert "explanations, unit mean, support drift: there were no scores to hold b against: give a model" in out
    assert "T 1, top_k 5" in out and "0.90000" in out
    assert re.search(r"^surprisal .* holds$", out, re.M) and re.search(r"^draws .* holds$", out, re.M)


def test_what_the_readme_shows_is_worded_as_an_audit_is_and_its_options_exist(
    run_audit: RunAudit, spool: Path, repository: Path
) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## A recording, audited\n(.*?)\n## ", readme, re.DOTALL)
    commands, shown = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    there = set(inspect.signature(audit_command.command).parameters)
    assert {option[2:].replace("-", "_") for option in re.findall(r"--[a-z-]+", commands)} <= there

    def worded(text: str) -> list[str]:
        lines = (" ".join(line.split()) for line in text.replace("p99", "p..").splitlines())
        return [re.sub(r"\d[\d,.]*", "#", line) for line in lines if line and "─" not in line]

    said = worded(run_audit(spool)[1])
    assert worded(shown)[:2] == said[:2]
    assert [line for line in worded(shown) if "#" not in line and line not in said] == []


def test_the_json_of_a_real_audit_follows_the_published_schema(
    run_audit: RunAudit, spool: Path, repository: Path
) -> None:
    code, out, _ = run_audit(spool, "--json", "--trainer-logprobs", "x_l")
    schema = json.loads((repository / "docs" / "audit.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(told(out))
    assert code == 1 and told(out)["totals"]["sampled_tokens"] == RESPONSES * TOKENS


def test_a_finding_ends_it_with_1_and_stands_once_with_examples(run_audit: RunAudit, faulty: Path) -> None:
    code, out, _ = run_audit(faulty)
    assert code == 1
    assert out.count("error     logprob") == 1 and "r0 token 0" in out and "r1 token 0" in out
    assert "to do" in out and "warning   duplicate" in out


def test_warnings_end_it_with_1_only_if_asked(run_audit: RunAudit, batches: list[RolloutBatch], tmp_path: Path) -> None:
    twice = spool_of(tmp_path / "twice", [*batches, batches[0].slice(0, 1)])
    code, out, _ = run_audit(twice)
    assert code == 0 and "warning   duplicate" in out
    assert run_audit(twice, "--fail-on", "warning")[0] == 1


def test_scores_of_a_column_give_ratios(run_audit: RunAudit, spool: Path) -> None:
    code, out, _ = run_audit(spool, "--trainer-logprobs", "x_l", "--json")
    (row,) = told(out)["settings"]
    assert code == 1 and told(out)["findings"][0]["kind"] == "unit_mean"
    assert row["kept_ratio"]["mean"] == pytest.approx(math.exp(LOG_RATIO), abs=1e-6)
    assert sum(told(out)["kept_log_ratios"]["counts"]) == RESPONSES * TOKENS


def test_a_column_that_no_file_has_is_wrong_use_and_so_is_one_of_the_schema(run_audit: RunAudit, spool: Path) -> None:
    (file,) = spool.glob("*.arrow")
    code, out, err = run_audit(spool, "--trainer-logprobs", "x_nope")
    assert (code, out) == (2, "")
    assert err == f"keptset: no file has a column x_nope; the caller's own columns of {file} are: x_l\n"
    code, out, err = run_audit(spool, "--trainer-logprobs", "behavior_logprobs")
    assert (code, out) == (2, "") and "behavior_logprobs is a column of the schema" in err


def test_a_column_that_some_files_lack_is_counted_there(
    run_audit: RunAudit, batches: list[RolloutBatch], tmp_path: Path
) -> None:
    without = RolloutBatch.from_arrow(batches[0].arrow.drop_columns(["x_l"]))
    lacking, having = spool_of(tmp_path / "lacking", [without]), spool_of(tmp_path / "having", batches[1:])
    _, out, err = run_audit(lacking, having, "--trainer-logprobs", "x_l", "--json")
    (reason,) = (entry["reason"] for entry in told(out)["not_tested"] if entry["check"] == "scores")
    assert err == "" and reason.startswith("20 of 60 responses could not be scored: no column x_l")


def test_where_nothing_could_be_scored_that_is_the_one_reason(
    run_audit: RunAudit, batches: list[RolloutBatch], tmp_path: Path
) -> None:
    nothing = spool_of(tmp_path / "nothing", [changed(batches[0], "x_l", lambda rows: [None] * len(rows))])
    _, out, _ = run_audit(nothing, "--trainer-logprobs", "x_l", "--json")
    reasons = {entry["reason"] for entry in told(out)["not_tested"] if entry["check"] != "staleness"}
    assert reasons == {"20 of 20 responses could not be scored: x_l is null (20)"}


def test_a_model_gives_ratios_over_kept_sets_and_over_the_vocabulary(
    run_audit: RunAudit, repository: Path, tmp_path: Path
) -> None:
    paddle = pytest.importorskip("paddle")
    folder = repository / "tests" / "data" / "tiny_checkpoints" / "llama_tied"
    from keptset.rollout.models import load_decoder
    from keptset.rollout.models.segments import Segment

    decoder = load_decoder(folder)
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
    with paddle.no_grad():
        logits = decoder.logits(decoder.forward(ids, [Segment(slot=0, start=0, length=len(ids))])).numpy()[2:-1]
    # Of each step the sampler kept the drawn id and the best one, at temperature 1.
    drawn, best = ids[3:].astype(np.int64), logits.argmax(axis=1)
    sets = [np.unique([a, b]) for a, b in zip(drawn, best, strict=True)]
    rows = [logits[t, kept].astype(np.float64) for t, kept in enumerate(sets)]
    b = np.array([logits[t, drawn[t]] - np.logaddexp.reduce(row) for t, row in enumerate(rows)])
    b[[len(kept) == 1 for kept in sets]] = 0.0
    whole = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    builder = BatchBuilder(Identity(vocab_size=logits.shape[1]))
    builder.add(
        Response(
            rollout_id="r0",
            prompt_id="p",
            prompt_token_ids=ids[:3],
            token_ids=ids[3:],
            finish_reason="length",
            behavior_logprobs=b,
            log_kept_mass=np.array([np.logaddexp.reduce(row) for row in rows]) - whole,
            kept_offsets=np.cumsum([0, *(len(kept) for kept in sets)]),
            kept_ids=np.concatenate(sets),
            params=SamplingParams(top_k=2),
        )
    )
    spool = spool_of(tmp_path / "spool", [builder.build()])
    _, out, _ = run_audit(spool, "--model", folder, "--json")
    (row,) = told(out)["settings"]
    assert row["kept_ratio"]["mean"] == pytest.approx(1, abs=1e-5)
    kept_mass = np.exp([np.logaddexp.reduce(values) for values in rows] - whole)
    assert row["full_ratio"]["mean"] == pytest.approx(kept_mass.mean(), rel=1e-5)
    assert sum(told(out)["full_log_ratios"]["counts"]) == len(b)


def test_what_was_chosen_by_reward_is_shown_and_not_judged(run_audit: RunAudit, spool: Path) -> None:
    _, out, _ = run_audit(spool, "--filtered", "--json")
    informational = {test["name"]: test["informational"] for test in told(out)["tests"]}
    assert informational == {"surprisal": True, "draws": True}
    assert "not judged" in run_audit(spool, "--filtered")[1]


def test_old_weights_are_a_finding_beyond_the_bound(
    run_audit: RunAudit, batches: list[RolloutBatch], tmp_path: Path
) -> None:
    old = changed(batches[2], "policy_versions", lambda rows: [[9] * TOKENS, *([0] * TOKENS for _ in rows[1:])])
    folder = spool_of(tmp_path / "old", [old])
    assert "staleness" not in [f["kind"] for f in told(run_audit(folder, "--json")[1])["findings"]]
    findings = told(run_audit(folder, "--json", "--max-version-lag", 2)[1])["findings"]
    assert "staleness" in [finding["kind"] for finding in findings]


def test_page_and_json_are_written_beside_the_text(run_audit: RunAudit, faulty: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page, file = tmp_path / "out" / "audit.html", tmp_path / "out" / "audit.json"
    code, out, err = run_audit(faulty, "--html", page, "--json-file", file)
    assert code == 1 and "Findings" in out and err == f"report: {page}\n"
    verdict = told(file.read_text(encoding="utf-8"))["verdict"]
    assert " ".join(out.split()).startswith(verdict)
    assert "<code>logprob</code>" in page.read_text(encoding="utf-8")


def test_text_comes_from_the_tokenizer_that_is_named(run_audit: RunAudit, spool: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    vocabulary = {f" w{i}": i for i in range(VOCABULARY)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": " w0"}
    rules = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], **rules, "model": model})
    )
    _, out, err = run_audit(spool, "--json", "--tokenizer", tmp_path)
    (shown, *_) = told(out)["worst"]
    assert err == "" and shown["prompt_text"].split() == ["w1", "w2", "w3"]
    assert all(token["text"] == f" w{token['token_id']}" for token in shown["tokens"])
    assert shown["tokens"][0]["kept"][0][1] == f" w{shown['tokens'][0]['kept'][0][0]}"


def test_a_damaged_file_among_others_ends_it_with_3_unless_there_are_findings(
    run_audit: RunAudit, batches: list[RolloutBatch], faulty: Path, tmp_path: Path
) -> None:
    good, bad = spool_of(tmp_path / "good", batches[:1]), spool_of(tmp_path / "bad", batches[1:])
    (file,) = bad.glob("*.arrow")
    with file.open("r+b") as stream:
        stream.seek(400)
        stream.write(b"\xee\xee\xee\xee")
    code, out, _ = run_audit(good, bad)
    assert code == 3 and "Files not read to their end (1)" in out and file.name in out
    assert run_audit(faulty, bad)[0] == 1
    code, _, err = run_audit(bad)
    assert code == 3 and "is damaged" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere"], 3, "nowhere is not there"),
        ([], 2, ""),
        (["nowhere", "--model", "/", "--trainer-logprobs", "x_l"], 2, "--model or --trainer-logprobs, not both"),
        (["nowhere", "--model", "3"], 2, "is no folder"),
        (["nowhere", "--html", "/"], 2, "--html / is a folder"),
        (["nowhere", "--json-file", "/"], 2, "--json-file / is a folder"),
        (["nowhere", "--fail-on", "info"], 2, ""),
        (["nowhere", "--sample", "0"], 2, ""),
    ],
)
def test_wrong_use_and_missing_input_are_told(run_audit: RunAudit, arguments: list[str], code: int, said: str) -> None:
    ended, _, err = run_audit(*arguments)
    assert ended == code and said in err


def test_a_page_that_could_not_be_drawn_is_told_before_the_audit(
    run_audit: RunAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_outputs, "find_spec", lambda name: None)
    code, _, err = run_audit("nowhere", "--html", "a.html")
    assert code == 2 and "keptset[report]" in err


def test_two_recordings_that_part_end_it_with_1(
    run_audit: RunAudit, spool: Path, batches: list[RolloutBatch], tmp_path: Path
) -> None:
    assert run_audit(spool, "--against", spool)[:2] == (
        0,
        "The recordings are the same.\n  60 responses in both recordings; 0 only here, 0 only there\n"
        "  the same in both: tokens, what was sampled, support, kept sets, b, m, versions\n",
    )
    later = changed(batches[2], "behavior_logprobs", lambda rows: [[b - 0.5 for b in row] for row in rows])
    other = spool_of(tmp_path / "other", [*batches[:2], later])
    code, out, _ = run_audit(spool, "--against", other)
    assert code == 1 and out.startswith("The recordings part.") and "b part in 20 responses" in out
    assert "since r40 (row 40, position 0, version 1)" in " ".join(out.split())
    code, out, _ = run_audit(spool, "--against", other, "--json")
    assert code == 1 and told(out)["matched"] == RESPONSES
    assert run_audit(spool, "--against", other, "--trainer-logprobs", "x_l")[0] == 2
    assert run_audit(spool, "--against", tmp_path / "nowhere")[0] == 3


def test_processes_with_a_model_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # the user's own
    names = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
    with audit_command.sharing_cores(2):
        asked = subprocess.run(
            [sys.executable, "-c", "import os, sys; print(*map(os.environ.get, sys.argv[1:]))", *names],
            capture_output=True,
            check=True,
            text=True,
        )
    assert asked.stdout.split() == [str(max(1, usable_cores() // 2)), "7"]
    assert [os.environ.get(name) for name in names] == [None, "7"]
    with audit_command.sharing_cores(1):
        assert "MKL_NUM_THREADS" not in os.environ


def test_the_severity_that_was_asked_for_decides(audit_report: Any) -> None:
    from keptset.schemas.findings import Severity

    sound = replace(audit_report, totals=replace(audit_report.totals, damaged_files=()))
    codes = {
        (found, asked): audit_command.exit_code(replace(sound, severity=found), asked)
        for found in (*Severity, None)
        for asked in (Severity.WARNING, Severity.ERROR)
    }
    assert {pair for pair, code in codes.items() if code} == {
        (Severity.ERROR, Severity.ERROR),
        (Severity.ERROR, Severity.WARNING),
        (Severity.WARNING, Severity.WARNING),
    }
    nothing = replace(sound, severity=None, totals=replace(sound.totals, responses=0))
    assert audit_command.exit_code(nothing, Severity.ERROR) == 3
