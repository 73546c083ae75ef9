"""`keptset import`: what it writes, says and ends with."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keptset.schemas.rollout_batch import concat_batches
from keptset.schemas.storage.spool import SpoolReader
from keptset.scripts import main

ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)`: exit code, stdout and stderr of `keptset import ARGUMENTS`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["keptset", "import", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main.main()
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out, err

    return call


def test_good_files_go_into_the_spool(run: Run, tmp_path: Path) -> None:
    files = [ENGINES / "vllm_good.json", ENGINES / "vllm_offline_good.json"]
    code, out, err = run("--from", "vllm", *files, "-o", tmp_path / "spool", "--vocab-size", 24)
    assert (code, err) == (0, "")
    assert out == f"4 responses, 18 tokens in {tmp_path / 'spool'}\n"
    batch = concat_batches(list(SpoolReader(tmp_path / "spool")))
    assert (len(batch), batch.identity.vocab_size, batch.identity.engine) == (4, 24, "vllm")
    assert not (tmp_path / "spool" / "rejected").exists()


def test_a_bad_response_goes_whole_with_its_findings_beside_the_spool_and_ends_with_1(run: Run, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    code, out, _ = run("--from", "vllm", ENGINES / "vllm_bad_not_in_mask.json", "-o", spool, "--json")
    told = json.loads(out)
    assert code == 1
    assert {name: told[name] for name in ("spool", "responses", "tokens", "rejected")} == {
        "spool": str(spool),
        "responses": 1,
        "tokens": 5,
        "rejected": 1,
    }
    assert [(f["kind"], f["severity"], f["count"]) for f in told["findings"]] == [("member", "error", 1)]
    (path,) = (spool / "rejected").iterdir()
    assert told["rejected_file"] == str(path)
    (line,) = path.read_text().splitlines()
    rejected = json.loads(line)
    recorded = json.loads((ENGINES / "vllm_bad_not_in_mask.json").read_text())
    assert rejected["record"]["request"] == recorded["request"]
    assert rejected["record"]["response"]["choices"] == recorded["response"]["choices"][:1]
    assert [f["kind"] for f in rejected["findings"]] == ["member"]
    assert concat_batches(list(SpoolReader(spool))).rollout_ids == ["demo-0001/1"]


def test_without_json_the_findings_and_where_the_rejected_are_is_said(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--from", "sglang", ENGINES / "sglang_bad_mask_short.json", "-o", tmp_path / "s")
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("error lengths: per-token columns of a response differ in length (1 in 1 responses;")
    assert lines[1].startswith(f"1 responses rejected, whole in {tmp_path / 's' / 'rejected'}")
    assert lines[2] == f"1 responses, 3 tokens in {tmp_path / 's'}"


def test_a_warning_is_told_and_ends_with_0(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--from", "sglang", ENGINES / "sglang_bad_mask_null.json", "-o", tmp_path / "s")
    assert (code, out.splitlines()[0].split(":")[0]) == (0, "warning support_absent")


def test_a_file_of_another_engine_ends_with_3_and_what_came_before_stays(run: Run, tmp_path: Path) -> None:
    files = [ENGINES / "vllm_good.json", ENGINES / "sglang_good.json"]
    code, out, err = run("--from", "vllm", *files, "-o", tmp_path / "s")
    assert code == 3
    assert "sglang_good.json: response is a list of 2; expected an object with a field choices" in err
    assert out == f"2 responses, 9 tokens in {tmp_path / 's'}\n"
    assert len(concat_batches(list(SpoolReader(tmp_path / "s")))) == 2


def test_reading_the_same_file_again_repeats_its_ids(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        run("--from", "slime", ENGINES / "slime_good.json", "-o", tmp_path / "s")
    assert set(concat_batches(list(SpoolReader(tmp_path / "s"))).rollout_ids) == {"7/0", "7/1"}


def test_what_files_do_not_tell_can_be_stated(run: Run, tmp_path: Path) -> None:
    code, _, _ = run(
        *("--from", "fastdeploy", ENGINES / "fastdeploy_stream_good.jsonl", "-o", tmp_path / "s"),
        *("--setting", "temperature=1.0", "--setting", "top_p=0.8", "--others-off", "--logprobs", "full"),
        *("--identity", "model_id=toy-24", "--identity", "engine_version=2.3"),
        *("--id-prefix", "run1/", "--no-update-in-flight"),
    )
    batch = concat_batches(list(SpoolReader(tmp_path / "s")))
    assert code == 0
    assert (batch.identity.model_id, batch.identity.engine_version) == ("toy-24", "2.3")
    assert batch.rollout_ids == ["run1/chatcmpl-demo/0"]
    told = {name: batch.column(name).to_pylist()[0] for name in ("temperature", "top_p", "top_k", "kv_policy")}
    assert told == {"temperature": 1.0, "top_p": 0.8, "top_k": 0, "kv_policy": "none"}
    # Everything known to be off and at temperature 1, raw log-probabilities less log Z are over the kept set.
    assert batch.column("logprob_domain").to_pylist() == ["kept"]


def test_of_a_folder_every_file_with_a_readable_name_is_taken_in_order(run: Run, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded" / "step_1"
    recorded.mkdir(parents=True)
    shutil.copy(ENGINES / "vllm_good.json", recorded / "b.json")
    shutil.copy(ENGINES / "vllm_offline_good.json", recorded / "a.json")
    (recorded / "notes.txt").write_text("not for reading")
    code, _, _ = run("--from", "vllm", tmp_path / "recorded", "-o", tmp_path / "s")
    assert code == 0
    ids = concat_batches(list(SpoolReader(tmp_path / "s"))).rollout_ids
    assert ids == ["step_1/a:0/0", "step_1/a:0/1", "demo-0001/0", "demo-0001/1"]


def test_prime_rl_reads_msgpack(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("msgpack", reason="prime-rl files are msgpack; install the extra [prime-rl]")
    code, out, _ = run("--from", "prime-rl", ENGINES / "prime_rl_good.msgpack", "-o", tmp_path / "s")
    assert (code, out.split(" in ")[0]) == (0, "2 responses, 9 tokens")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--from", "tgi", "x.json"], 2, "no adapter for 'tgi'"),
        (["--from", "transformers", "x.json"], 2, "use from_transformers on what generate() returned"),
        (["--from", "vllm", "gone.json"], 3, "gone.json does not exist"),
        (["--from", "vllm", "EMPTY"], 3, "holds no file that --from vllm reads"),
        (["--from", "vllm", "README"], 2, "the name says no format that is read here"),
        (["--from", "vllm", "x.json", "--setting", "top_p"], 2, "--setting 'top_p': give it as NAME=VALUE"),
        (["--from", "vllm", "x.json", "--setting", "top_p=high"], 2, "the value must be a number"),
        (["--from", "vllm", "x.json", "--setting", "heat=1"], 2, "no such setting: heat"),
        (["--from", "vllm", "x.json", "--setting", "top_p=7"], 2, "top_p is 7"),
        (["--from", "vllm", "x.json", "--identity", "modelid=x"], 2, "--identity knows no modelid; there are engine"),
        (["--from", "vllm", "x.json", "--logprobs", "some"], 2, "logprob_domain is 'some'"),
    ],
)
def test_wrong_use_says_what_would_be_right(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[Any], code: int, message: str
) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "README").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found, _, err = run(*arguments, "-o", "spool")
    assert (found, message in err) == (code, True), err


def test_the_spool_is_not_made_where_nothing_could_be_asked_of_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("--from", "vllm", "gone.json", "-o", "spool")
    assert not (tmp_path / "spool").exists()
