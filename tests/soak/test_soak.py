"""The trial of readers and spool, at the size that every change can afford, and a trial of the trial."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from keptset.schemas.rollout_batch import RolloutBatch

HERE = Path(__file__).resolve().parent
FILES = {"spool-published", "spool-open", "spool-recovery", "archive"}
ENGINES = {"vllm", "sglang", "fastdeploy", "slime", "prime_rl", "transformers"}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(repository: Path) -> Run:
    """A script of this folder in a process of its own."""

    def start(*arguments: object) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": f"{repository}:{HERE}"}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)

    return start


@pytest.mark.slow
@pytest.mark.parametrize(("readers", "kills"), [(FILES, 20), (ENGINES, 0)], ids=["files and kills", "engines"])
def test_no_input_gets_the_better_of_a_reader_and_no_kill_of_the_spool(
    run: Run, tmp_path: Path, readers: set[str], kills: int
) -> None:
    pytest.importorskip("msgpack", reason="prime-rl files are msgpack; install the extra [prime-rl]")
    report = tmp_path / "report.json"
    chosen = [part for name in sorted(readers) for part in ("--reader", name)]
    ended = run(HERE / "soak.py", "--inputs", 2000, "--kills", kills, "--work", tmp_path, "--report", report, *chosen)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    told = json.loads(report.read_text())
    assert told["complete"]
    assert set(told["readers"]) == readers
    for name, reader in told["readers"].items():
        assert (reader["inputs"], reader["faults"]) == (2000, 0)
        assert sum(reader["outcomes"].values()) == 2000
        refused = sum(count for outcome, count in reader["outcomes"].items() if outcome.endswith(("File", "Error")))
        refused += sum(count for outcome, count in reader["outcomes"].items() if "rest set aside" in outcome)
        assert 200 < refused < 1990, f"{name} shows nothing where all inputs end the same way"
    assert (told["kills"]["kills"], told["kills"]["faults"]) == (kills, 0)
    if kills:
        assert told["kills"]["acknowledged"] > 20
        assert told["kills"]["at"]["while writing"] > 5


TRY_BROKEN = """
import json, sys
from pathlib import Path
from fuzz import Job, fuzz

folder = Path(sys.argv[1])
tried = fuzz([Job("broken", 0, 25), Job("broken", 25, 40)], seed=3, children=1, faults=folder, hang_seconds=1.0)
print(json.dumps(vars(tried["broken"])))
"""


def test_aborts_hangs_foreign_exceptions_and_violations_are_seen_and_their_inputs_saved(
    run: Run, tmp_path: Path
) -> None:
    ended = run("-c", TRY_BROKEN, tmp_path)
    assert ended.returncode == 0, ended.stderr
    tried = json.loads(ended.stdout)
    saved = {path: Path(f"{path}.txt").read_text() for path in tmp_path.glob("broken-3-*.bin")}
    told = {
        b"abort": "the process ended with -6",
        b"hang": "no end after 1.0 s",
        b"foreign": "KeyError: 'foreign'",
        b"let through": "a violation was let through",
    }
    assert {path.read_bytes() for path in saved} == set(told)
    for path, reason in saved.items():
        assert told[path.read_bytes()] in reason.strip().splitlines()[-1]
    assert len(tried["faults"]) == len(saved)
    assert set(tried["outcomes"]) == {"taken", "SchemaError"}
    assert all(str(tmp_path) in fault for fault in tried["faults"])


def test_a_run_goes_on_where_it_was_ended_and_starts_over_for_another_seed(run: Run, tmp_path: Path) -> None:
    def soak(inputs: int, seed: int = 0) -> dict[str, Any]:
        command = [HERE / "soak.py", "--inputs", inputs, "--kills", 0, "--seed", seed, "--reader", "archive"]
        ended = run(*command, "--work", tmp_path, "--report", tmp_path / "report.json", "--children", 1)
        assert ended.returncode == 0, ended.stderr
        said.append(ended.stdout)
        return json.loads((tmp_path / "progress.json").read_text())

    said: list[str] = []
    first = soak(1000)
    assert first["jobs"] == {"archive": [0, 500]}
    second = soak(1500)
    assert second["jobs"] == {"archive": [0, 500, 1000]}
    assert second["readers"]["archive"]["inputs"] == 1500
    assert soak(1500)["readers"] == second["readers"]
    assert soak(500, seed=1)["readers"]["archive"]["inputs"] == 500
    assert ["starting over" in text for text in said] == [False, False, False, True]


def test_a_reader_whose_code_is_another_by_now_starts_over_and_the_others_go_on(run: Run, tmp_path: Path) -> None:
    progress, report = tmp_path / "progress.json", tmp_path / "report.json"
    command = [HERE / "soak.py", "--inputs", 500, "--kills", 0, "--work", tmp_path, "--report", report]
    command += ["--reader", "transformers", "--reader", "archive"]
    assert run(*command).returncode == 0
    stored = json.loads(progress.read_text())
    stored["code"]["transformers"] = "0" * 16
    for reader in stored["readers"].values():
        reader["outcomes"] = {"before": 500}
    progress.write_text(json.dumps(stored))
    ended = run(*command)
    assert ended.stdout.splitlines()[0] == (
        "code is another than that of the run before: starting over with transformers"
    )
    readers = json.loads(progress.read_text())["readers"]
    assert readers["archive"]["outcomes"] == {"before": 500}
    assert readers["transformers"]["inputs"] == 500 and "before" not in readers["transformers"]["outcomes"]


def test_code_belongs_to_the_readers_that_run_it(run: Run) -> None:
    told = run(
        "-c",
        "from pathlib import Path; import soak, json\n"
        "real, changed = Path.read_bytes, {}\n"
        "for name in ('adapters/vllm.py', 'adapters/sglang.py', 'adapters/collect.py', 'storage/spool/reader.py'):\n"
        "    Path.read_bytes = lambda path: real(path) + b'?' * str(path).endswith(name)\n"
        "    after = {reader: soak.code_digest(reader) for reader in soak.READERS}\n"
        "    Path.read_bytes = real\n"
        "    changed[name] = [reader for reader in soak.READERS if after[reader] != soak.code_digest(reader)]\n"
        "print(json.dumps(changed))",
    )
    assert told.returncode == 0, told.stderr
    changed = {name: set(readers) for name, readers in json.loads(told.stdout).items()}
    assert changed == {
        "adapters/vllm.py": {"vllm"},
        "adapters/sglang.py": {"sglang", "slime"},
        "adapters/collect.py": ENGINES,
        "storage/spool/reader.py": FILES | ENGINES,
    }


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("keptset_soak_contract", HERE / "contract.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def golden(repository: Path) -> RolloutBatch:
    """Sound responses, with sets, distributions and tokens that were not sampled."""
    with pa.ipc.open_file(str(repository / "tests/data/schema_v1/spool/golden-00000000.arrow")) as file:
        return RolloutBatch.from_arrow(file.get_batch(0))


def test_the_contract_finds_sound_responses_sound(contract: ModuleType, golden: RolloutBatch) -> None:
    assert list(contract.violations(golden)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda row: row.update(rollout_id=None), "null in"),
        (lambda row: row["token_ids"].append(1), "tokens, but"),
        (lambda row: row["sampled"].__setitem__(0, None), "null among"),
        (lambda row: row.update(prompt_token_ids=[]), "no prompt"),
        (lambda row: row["token_ids"].__setitem__(0, 1000), "outside the vocabulary"),
        (lambda row: row["prompt_token_ids"].__setitem__(0, -1), "outside the vocabulary"),
        (lambda row: row.update(kept_ids=None, kept_logprobs=None), "there are no sets"),
        (lambda row: row.update(support="full"), "sets although"),
        (lambda row: row["policy_versions"].__setitem__(0, 2**30), "versions fall"),
        (lambda row: row["sampled"].__setitem__(0, False), "not sampled, but has"),
        (lambda row: row["behavior_logprobs"].__setitem__(0, 0.5), "b is 0.5"),
        (lambda row: row["behavior_logprobs"].__setitem__(0, None), "b is None"),
        (lambda row: row["log_kept_mass"].__setitem__(0, 0.5), "m is 0.5"),
        (
            lambda row: row["log_kept_mass"].__setitem__(0, -5.0) or row.update(top_p=0.9, top_k=0, min_p=0.0),
            "kept mass",
        ),
        (lambda row: row["kept_ids"].__setitem__(0, []), "its set is []"),
        (lambda row: row["kept_ids"][0].__setitem__(0, -1), "in its set"),
        (lambda row: row["kept_ids"][0].reverse(), "does not ascend"),
        (lambda row: row["kept_ids"].__setitem__(0, [row["token_ids"][0] + 1]), "is not in its set"),
        (lambda row: row["kept_ids"].__setitem__(0, [row["token_ids"][0]]), "a set of one"),
        (lambda row: row["kept_logprobs"][0].__setitem__(0, -0.01), "sums to"),
        (lambda row: row["kept_logprobs"][0].pop(), "log-probabilities"),
        (lambda row: row["behavior_logprobs"].__setitem__(0, -3.0), "its distribution says"),
    ],
)
def test_the_contract_sees_each_violation(
    contract: ModuleType, golden: RolloutBatch, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    rows = golden.arrow.to_pylist()
    row = next(row for row in rows if row["kept_logprobs"] is not None and len(row["kept_ids"][0]) > 1)
    change(row)
    arrow = pa.RecordBatch.from_pylist(rows, schema=golden.arrow.schema)
    found = list(contract.violations(RolloutBatch.from_arrow(arrow)))
    assert any(told in violation for violation in found), found


def test_the_contract_sees_two_responses_under_one_id(contract: ModuleType, golden: RolloutBatch) -> None:
    rows = golden.arrow.to_pylist()
    rows[1]["rollout_id"] = rows[0]["rollout_id"]
    arrow = pa.RecordBatch.from_pylist(rows, schema=golden.arrow.schema)
    assert any("share it and differ" in told for told in contract.violations(RolloutBatch.from_arrow(arrow)))


def test_the_readme_quotes_what_the_last_soak_said(repository: Path) -> None:
    told = json.loads((repository / "docs" / "soak.json").read_text(encoding="utf-8"))
    readme = " ".join((repository / "README.md").read_text(encoding="utf-8").split())
    date = datetime.date.fromisoformat(told["date"])
    inputs, kills = {reader["inputs"] for reader in told["readers"].values()}, told["kills"]
    faults = sum(reader["faults"] for reader in told["readers"].values())
    assert told["complete"] and told["command"] == "make soak"
    assert (faults, kills["faults"]) == (0, 0)
    assert (inputs, len(told["readers"])) == ({told["asked"]["inputs_per_reader"]}, len(FILES | ENGINES))
    run = f"`make soak`, {date.day} {date:%B %Y}, {told['minutes']:.0f} minutes"
    tried = f"{min(inputs):,} spoilt inputs for each of {len(told['readers'])} readers"
    assert f"{run}: {tried} and {kills['kills']} killed writers" in readme
    assert f"{kills['acknowledged']:,} batches acknowledged" in readme
