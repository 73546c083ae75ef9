"""`keptset rollout`: what it draws, how it goes on, what it says and ends with."""

import dataclasses
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")
ray = pytest.importorskip("ray", reason="needs the package ray")
tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")

from keptset.schemas.errors import InvalidInput  # noqa: E402
from keptset.schemas.rollout_batch import concat_batches  # noqa: E402
from keptset.schemas.sampling_params import SamplingParams  # noqa: E402
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, writer  # noqa: E402
from keptset.schemas.validation import validate  # noqa: E402
from keptset.scripts import main, rollout  # noqa: E402
from keptset.scripts.sampling_options import banned_words, sampling_params  # noqa: E402

CHECKPOINTS = Path(__file__).parents[1] / "data" / "tiny_checkpoints"
ROOT = Path(__file__).parents[2]
OPTIONS = ("--actors", 1, "--top-p", 0.9, "--max-new-tokens", 6, "--slots", 2, "--turn-seconds", 0.001)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny checkpoint whose tokens are words w0 to w159."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(CHECKPOINTS / "qwen3_qknorm", folder)
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt_id": f"p{i}", "text": f"w{i + 1} w2 w3", "x_level": i} for i in range(8)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(monkeypatch, capsys) -> Run:
    """`run(*arguments)`: exit code, stdout and stderr of `keptset rollout ARGUMENTS`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["keptset", "rollout", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main.main()
        out, err = capsys.readouterr()
        # Some Paddle builds print an empty line when they are loaded.
        return int(exited.value.code or 0), out, err.strip("\n")

    return call


def held(spool):
    batch = concat_batches(list(SpoolReader(spool)))
    assert validate(batch) == []
    assert len(set(batch.rollout_ids)) == len(batch)
    return batch


def tokens(batch):
    return {name: batch.token_ids[row].tolist() for row, name in enumerate(batch.rollout_ids)}


def test_every_sample_of_every_prompt_goes_into_the_spool_and_the_summary_counts_them(run, prompts, model, tmp_path):
    spool = tmp_path / "spool"
    code, out, err = run(prompts, "-o", spool, "--model", model, *OPTIONS, "--n", 2, "--json")
    assert (code, err) == (0, "")
    batch, summary = held(spool), json.loads(out)
    assert summary | {"seconds": 0, "tokens_per_second": 0, "finish_reasons": {}} == {
        "spool": str(spool),
        "asked": 16,
        "there": 0,
        "responses": 16,
        "tokens": batch.num_tokens,
        "finish_reasons": {},
        "failed": {},
        "seconds": 0,
        "tokens_per_second": 0,
        "restarts": 0,
        "interrupted": False,
    }
    assert sorted(batch.column("x_level").to_pylist()) == sorted([*range(8)] * 2)
    assert set(batch.column("group_id").to_pylist()) == {f"p{i}" for i in range(8)}
    assert sorted(batch.column("sample_index").to_pylist()) == [0] * 8 + [1] * 8
    assert set(batch.column("top_p").to_pylist()) == {0.9}

    code, out, err = run(prompts, "-o", spool, "--model", model, *OPTIONS, "--n", 2)
    assert (code, out, err) == (0, f"0 responses, 0 tokens in {spool}, 16 were there before\n", "")

    code, out, err = run(prompts, "-o", spool, "--model", model, *OPTIONS, "--n", 3, "--json")
    assert code == 0 and json.loads(out)["responses"] == 8 and json.loads(out)["there"] == 16
    assert len(held(spool)) == 24, "the third samples alone"


def test_a_run_ended_by_ctrl_c_says_so_and_goes_on_where_it_was(run, prompts, model, tmp_path, monkeypatch):
    append = SpoolWriter.append
    calls = []

    def interrupted_at_the_second(self, batch):
        if calls:
            raise KeyboardInterrupt
        calls.append(len(batch))
        append(self, batch)

    monkeypatch.setattr(SpoolWriter, "append", interrupted_at_the_second)
    arguments = (prompts, "-o", tmp_path / "spool", "--model", model, *OPTIONS)
    code, out, _ = run(*arguments)
    assert code == 130
    assert f"{8 - calls[0]} responses are missing; the same command goes on with them\n" in out
    monkeypatch.setattr(SpoolWriter, "append", append)
    code, out, _ = run(*arguments)
    assert code == 0 and f"{calls[0]} were there before" in out
    assert run(prompts, "-o", tmp_path / "whole", "--model", model, *OPTIONS)[0] == 0
    assert tokens(held(tmp_path / "spool")) == tokens(held(tmp_path / "whole"))


def test_what_a_killed_run_had_acknowledged_is_not_done_again(run, prompts, model, tmp_path):
    rows = [{"prompt_id": f"p{i}", "text": f"w{i % 100 + 1} w2 w3"} for i in range(150)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spool = tmp_path / "spool"
    arguments = [prompts, "-o", spool, "--model", model, "--actors", 1, "--max-new-tokens", 40, "--turn-seconds", 0.05]
    code = "import sys; from keptset.scripts.main import main; sys.argv[0] = 'keptset'; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "rollout", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (spool.is_dir() and sum(map(len, SpoolReader(spool)))) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    there = sum(map(len, SpoolReader(spool)))
    assert 0 < there < 150
    code, out, _ = run(*arguments, "--json")
    assert code == 0 and json.loads(out)["there"] == there
    assert len(held(spool)) == 150


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("--top-p", 0.8), "with top_p 0.9, and 0.8 is asked now"),
        (("--max-new-tokens", 5), "with max_new_tokens 6, and 5 is asked now"),
        (("--stop-token-id", 7), "with rare settings"),
        (("--logit-bias", "3=0.5"), "with logit_bias {}, and {3: "),
        (("--model", CHECKPOINTS / "llama_tied"), "with model_digest"),
        (("--weights-version", 1), "with weights version 0, and 1 is asked now"),
        (("--model-id", "step-200"), "with model_id 'model', and 'step-200' is asked now"),
    ],
)
def test_a_spool_drawn_otherwise_is_not_gone_on_with(run, prompts, model, tmp_path, change, told, drawn):
    spool = tmp_path / "spool"
    shutil.copytree(drawn, spool)
    code, out, err = run(prompts, "-o", spool, "--model", model, *OPTIONS, *change)
    assert (code, out) == (2, "")
    assert told in err and "name another --out" in err


@pytest.fixture(scope="module")
def drawn(model, tmp_path_factory):
    """A spool that holds what the prompts ask for."""
    folder = tmp_path_factory.mktemp("drawn")
    rows = [{"prompt_id": f"p{i}", "text": f"w{i + 1} w2 w3", "x_level": i} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from keptset.rollout.config import EngineConfig
    from keptset.rollout.tokenizer import Tokenizer
    from keptset.scripts.prompts import PromptFile
    from keptset.scripts.rollout_job import Job
    from keptset.scripts.rollout_job import run as draw

    tokenizer = Tokenizer.from_folder(model)
    params = sampling_params(
        tokenizer=tokenizer,
        stop_token_ids=tokenizer.stop_token_ids,
        logit_bias=(),
        ban=(),
        allow_token_id=(),
        top_p=0.9,
        max_new_tokens=6,
    )
    job = Job(
        file=PromptFile(folder / "prompts.jsonl"),
        tokenizer=tokenizer,
        params=params,
        samples=1,
        config=EngineConfig(slots=4),
        model=model,
        model_id=model.name,
        version=0,
        dtype="float32",
        out=str(folder / "spool"),
    )
    assert draw(job, {"actors": 1}).responses == 8
    return folder / "spool"


def test_prompts_that_changed_under_their_ids_are_named(run, prompts, model, tmp_path, drawn):
    spool = tmp_path / "spool"
    shutil.copytree(drawn, spool)
    prompts.write_text(prompts.read_text().replace("w5 w2 w3", "w5 w2 w4"))
    code, out, _ = run(prompts, "-o", spool, "--model", model, *OPTIONS)
    assert code == 1
    assert "failed: p4/0/" in out and "line 5: the spool holds another prompt under this id" in out
    assert "7 were there before" in out


def test_prompts_that_cannot_be_served_are_named_and_the_others_drawn(run, model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"token_ids": [1, 2]}, {"token_ids": [999]}, {"token_ids": [3] * 400}, {"token_ids": ["x"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = run(path, "-o", tmp_path / "spool", "--model", model, *OPTIONS, "--json")
    assert (code, err) == (1, "")
    summary = json.loads(out)
    assert summary["responses"] == 1 and len(summary["failed"]) == 3
    reasons = " ".join(summary["failed"].values())
    assert "id 999" in reasons and "has 400 tokens" in reasons and "line 4: token_ids must be one row" in reasons
    code, out, _ = run(path, "-o", tmp_path / "spool", "--model", model, *OPTIONS)
    assert code == 1 and "0 responses, 0 tokens" in out and "1 were there before" in out


def test_all_settings_reach_the_record(run, prompts, model, tmp_path):
    options = [
        *("--temperature", 0.7, "--top-k", 20, "--top-p", 0.95, "--min-p", 0.01, "--repetition-penalty", 1.1),
        *("--frequency-penalty", 0.2, "--presence-penalty", 0.1, "--logit-bias", "3=0.5", "--logit-bias", "4=-1"),
        *("--max-new-tokens", 5, "--min-new-tokens", 2, "--stop", "w150 w151", "--stop-token-id", 9, "--ignore-eos"),
        *("--ban", "w7 w8", "--top-logprobs", 2, "--draft-tokens", 2, "--seed", 5, "--distribution-share", 1),
        *("--actors", 1, "--slots", 4, "--prefill-tokens", 64, "--max-length", 64, "--kv-tokens", 512),
        *("--model-id", "step-7", "--weights-version", 7),
    ]
    log = tmp_path / "log.jsonl"
    code, _, err = run(prompts, "-o", tmp_path / "spool", "--model", model, *options, "--log", log)
    assert code == 0, err
    batch = held(tmp_path / "spool")
    (row,) = {
        tuple(batch.column(name)[row].as_py() for name in ("temperature", "top_k", "top_p", "min_p"))
        for row in range(len(batch))
    }
    assert row == (0.7, 20, 0.95, 0.01)
    assert json.loads(batch.column("sampler_extras")[0].as_py()) == {
        "banned_words": [[7, 8]],
        "draft_tokens": 2,
        "min_new_tokens": 2,
        "stop_strings": ["w150 w151"],
        "stop_token_ids": [9],
    }
    assert dict(batch.column("logit_bias")[0].as_py()) == {3: 0.5, 4: -1.0}
    assert batch.column("repetition_penalty")[0].as_py() == 1.1
    assert batch.top_ids is not None and batch.kept_logprobs is not None
    assert batch.identity.model_id == "step-7" and set(batch.policy_versions.values.tolist()) == {7}
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == ["actors_started"]


def test_a_terminal_shows_how_far_and_how_fast_it_goes(run, prompts, model, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    code, _, err = run(prompts, "-o", tmp_path / "spool", "--model", model, *OPTIONS)
    assert code == 0
    assert "sampling" in err and "8/8" in err and "tokens/s" in err and "0:00:0" in err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("nothing.jsonl", "--model", CHECKPOINTS / "llama_tied"), 3, "nothing.jsonl cannot be read"),
        (("nothing.jsonl", "--model", "nowhere"), 2, "--model nowhere is no folder"),
        (("nothing.jsonl", "--model", CHECKPOINTS / "llama_tied", "--top-p", 0), 2, "top_p is 0.0"),
        (
            ("nothing.jsonl", "--model", CHECKPOINTS / "llama_tied", "--ban", "w1"),
            2,
            "--ban needs the model's tokenizer",
        ),
        (("nothing.jsonl", "--model", CHECKPOINTS / "llama_tied", "--logit-bias", "3"), 2, "--logit-bias '3'"),
        (("nothing.jsonl", "--model", CHECKPOINTS), 3, "config.json"),
    ],
)
def test_what_cannot_be_ends_with_its_code(run, tmp_path, monkeypatch, arguments, code, told):
    monkeypatch.chdir(tmp_path)
    if arguments[-1] == CHECKPOINTS:
        (tmp_path / "nothing.jsonl").write_text('{"token_ids": [1]}\n')
    found, out, err = run(*arguments, "-o", tmp_path / "spool", "--actors", 1)
    assert (found, out) == (code, "")
    assert told in err and err.startswith("keptset: ")


def test_a_spool_that_another_run_writes_to_is_left_alone(run, prompts, model, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.1)
    with SpoolWriter(tmp_path / "spool", "rollout"):
        code, _, err = run(prompts, "-o", tmp_path / "spool", "--model", model, *OPTIONS)
    assert code == 3 and "rollout" in err


def test_a_log_that_cannot_be_written_is_wrong_use(run, prompts, model, tmp_path):
    log = tmp_path / "no" / "log"
    code, _, err = run(prompts, "-o", tmp_path / "spool", "--model", model, *OPTIONS, "--log", log)
    assert code == 2 and "log cannot be written" in err


def test_every_sampling_setting_has_an_option():
    other_names = {
        "stop_strings": "stop",
        "stop_token_ids": "stop_token_id",
        "allowed_token_ids": "allow_token_id",
        "banned_words": "ban",
    }
    settings = {other_names.get(field.name, field.name) for field in dataclasses.fields(SamplingParams)}
    assert settings - set(inspect.signature(rollout.command).parameters) == set()


def test_a_banned_word_is_banned_as_it_is_spelled_with_and_without_a_space():
    class Spaced:
        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return np.array([ord(letter) for letter in text if letter != "?"])

    assert banned_words(["ab"], Spaced()) == ((97, 98), (32, 97, 98))
    with pytest.raises(InvalidInput, match="makes no token of it"):
        banned_words(["?"], Spaced())
