"""The whole way through the product by its own command, on a tiny checkpoint."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")
pytest.importorskip("ray", reason="needs the package ray")
tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")

import typer  # noqa: E402

from keptset.schemas.errors import InvalidInput, StorageError  # noqa: E402
from keptset.schemas.rollout_batch import concat_batches  # noqa: E402
from keptset.schemas.storage.spool import SpoolReader  # noqa: E402
from keptset.schemas.validation import validate  # noqa: E402
from keptset.scripts import demo  # noqa: E402
from keptset.scripts.prompts import read_prompts  # noqa: E402

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "qwen3_qknorm"
ROOT = Path(__file__).parents[2]
MARK = "KEPTSET_TEST_RUN"
PROMPTS = [
    {"prompt_id": "chat", "messages": [{"role": "user", "content": "w1 w2 w3"}]},
    {"prompt_id": "text", "text": "w5 w6 w7 w8 w9"},
    {"token_ids": [10, 11, 12]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(CHECKPOINT, folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0")
    rules = tokenizers.Tokenizer(words)
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS) + "\n")
    return path


def run(*arguments, cwd):
    code = "import sys; from keptset.scripts.main import main; sys.argv[0] = 'keptset'; main()"
    command = [sys.executable, "-c", code, "demo", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: str(cwd)}
    environment["PYTHONWARNINGS"] = "ignore:You are using GPU version Paddle:UserWarning"
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def finished(model, prompts, tmp_path_factory):
    cwd = tmp_path_factory.mktemp("run")
    options = ["--model", model, "--prompts", prompts, "--max-new-tokens", 6, "--actors", 2, "--seed", 4]
    return cwd, run(*options, "--json", cwd=cwd)


def test_the_command_passes_its_own_bounds_and_prints_nothing_but_json(finished):
    _, process = finished
    assert process.returncode == 0, process.stderr
    printed = json.loads(process.stdout)
    assert printed["passes"] is True
    assert [row["name"] for row in printed["settings"]] == list(demo.SETTINGS)
    assert all(row["tokens"] == 18 for row in printed["settings"])
    assert "WARNING" not in process.stderr and "Warning" not in process.stderr, process.stderr


def test_the_spool_holds_every_prompt_under_every_setting(finished):
    cwd, _ = finished
    (spool,) = cwd.glob("keptset-demo/*/spool")
    batch = concat_batches(list(SpoolReader(spool)))
    assert validate(batch) == []
    wanted = {f"{name}/{prompt}" for name in demo.SETTINGS for prompt in ("chat", "text", "3")}
    assert set(batch.rollout_ids) == wanted
    assert len(set(batch.column("seed").to_pylist())) == len(wanted)
    asked = {row["x_setting"]: row for row in batch.arrow.to_pylist()}
    for name, params in demo.SETTINGS.items():
        recorded = {key: asked[name][key] for key in ("temperature", "top_k", "top_p", "min_p")}
        assert recorded == {key: getattr(params, key) for key in recorded}


def test_the_report_and_the_results_lie_beside_the_spool(finished):
    cwd, process = finished
    (report,) = cwd.glob("keptset-demo/*/report.html")
    assert f"report: {report}" in process.stderr
    assert report.read_text().count("<svg") >= 2 * len(demo.SETTINGS)
    saved = json.loads(report.with_name("results.json").read_text())
    assert saved == json.loads(process.stdout)


def processes_of(cwd):
    """Command lines of running processes that inherited this run's mark."""
    mark = f"{MARK}={cwd}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return [command for command in found if command]


def test_ray_ends_with_the_command(finished):
    cwd, _ = finished
    deadline = time.monotonic() + 20
    while processes_of(cwd) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(cwd) == []


def test_the_command_ends_with_1_where_a_bound_is_broken(model, prompts, tmp_path, monkeypatch, capsys):
    """The real run, its kept-set scores shifted by what a wrong temperature or position would do to them."""
    honest = demo._score

    def shifted(plan, spool, bars):
        batch, results = honest(plan, spool, bars)
        return batch, [
            replace(result, kept_set_ratio=replace(result.kept_set_ratio, choice_abs_log_mean=3e-5))
            for result in results
        ]

    monkeypatch.setattr(demo, "_score", shifted)
    with pytest.raises(typer.Exit) as ended:
        demo.command(
            model=model,
            prompts=prompts,
            out=tmp_path,
            actors=1,
            gpus_per_actor=0.0,
            address=None,
            seed=0,
            max_new_tokens=3,
            as_json=False,
        )
    assert ended.value.exit_code == 1
    assert "5 of 5 settings break a bound" in capsys.readouterr().out


def test_a_model_that_is_no_folder_is_wrong_use(prompts, tmp_path):
    process = run("--model", tmp_path / "nowhere", "--prompts", prompts, cwd=tmp_path)
    assert process.returncode == 2
    assert "nowhere is no folder" in process.stderr and "Traceback" not in process.stderr


def test_a_prompt_beyond_the_context_and_actors_beyond_the_machine_are_told_before_anything_is_sampled(
    model, prompts, tmp_path
):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt_id": "endless", "token_ids": [1] * 300}))
    process = run("--model", model, "--prompts", long, cwd=tmp_path)
    assert process.returncode == 2 and "prompt endless has 300 tokens" in process.stderr
    process = run("--model", model, "--prompts", prompts, "--actors", 500, cwd=tmp_path)
    assert process.returncode == 2 and "500 actors of 1 CPU need 500" in process.stderr
    assert "Traceback" not in process.stderr


class _Words:
    """A tokenizer that knows nothing but lengths."""

    template = None

    def encode(self, text):
        return np.zeros(len(text.split()), np.int32)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no prompt"),
        ("{\n", "line 1 is not JSON"),
        ("[]\n", "line 1 must hold an object"),
        ('{"prompt_id": "a"}\n', "line 1: needs exactly one of messages, text, token_ids; it has none"),
        ('{"text": "a", "token_ids": [1]}\n', "line 1.*it has text, token_ids"),
        ('{"prompt_id": "a", "text": "x"}\n\n{"prompt_id": "a", "text": "y"}\n', "line 3: prompt_id 'a' occurs twice"),
        ('{"token_ids": ["x"]}\n', "line 1: "),
        ('{"token_ids": [99999999999]}\n', "line 1: "),
        ('{"token_ids": [1.5, 2]}\n', "line 1: token_ids must be one row of whole numbers"),
        ('{"token_ids": ["1", "2"]}\n', "line 1: token_ids must be one row of whole numbers"),
        ('{"token_ids": [true, 2]}\n', "line 1: token_ids hold true or false"),
        ('{"token_ids": 7}\n', "line 1: token_ids must be one row"),
        ('{"token_ids": []}\n', "line 1: the prompt is empty"),
        ('{"text": ""}\n', "line 1: the prompt is empty"),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_refused_by_line(tmp_path, content, told):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(StorageError if told == "line 1 is not JSON" else InvalidInput, match=told):
        read_prompts(path, _Words())


def test_a_missing_prompt_file_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"nothing\.jsonl cannot be read"):
        read_prompts(tmp_path / "nothing.jsonl", _Words())
