"""`keptset inspect`: one response, found and shown, sound or not."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.archive import write_archive
from keptset.schemas.storage.spool import SpoolWriter
from keptset.scripts import main

Run = Callable[..., tuple[int, str, str]]
WORDS = ["<s>", "a", " b", "\n", "\x1b[2J", "x", "y", "z"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)`: exit code, stdout and stderr of `keptset inspect ARGUMENTS`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["keptset", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main.main()
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out, err

    return call


def response(rollout_id: str, *, first: int = 1) -> Response:
    """Three tokens: one drawn from two, one forced, one drawn from a set of one member."""
    b = math.log(0.25)
    return Response(
        rollout_id=rollout_id,
        prompt_id="p",
        prompt_token_ids=np.array([0, 1]),
        token_ids=np.array([first, 3, 4]),
        sampled=np.array([True, False, True]),
        finish_reason="stop",
        behavior_logprobs=np.array([b, np.nan, 0.0]),
        log_kept_mass=np.array([math.log(0.5), np.nan, -0.1]),
        kept_entropy=np.array([0.5623, np.nan, 0.0]),
        kept_offsets=np.array([0, 2, 2, 3]),
        kept_ids=np.array([1, 2, 4]),
        kept_logprobs=np.array([b, math.log(0.75), 0.0]),
        policy_versions=np.array([3, -1, 3]),
        params=SamplingParams(top_k=2),
    )


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    builder = BatchBuilder(Identity(vocab_size=8, engine="test", model_id="tiny"))
    for rollout_id in ("r0", "r1", "r2"):
        builder.add(response(rollout_id))
    return builder.build()


@pytest.fixture(scope="module")
def spool(batch: RolloutBatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows 0 to 2, then r1 again as row 3."""
    folder = tmp_path_factory.mktemp("spool")
    with SpoolWriter(folder) as writer:
        writer.append(batch)
        writer.append(batch.slice(1, 1))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<s>"}
    rules = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps({**rules, "decoder": None, "model": model}))
    return folder


def test_a_response_is_shown_with_its_numbers(run: Run, spool: Path) -> None:
    code, out, err = run(spool, "--rollout-id", "r0")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "r0" and lines[1].startswith("row 0, ")
    assert "  T 1, top_k 2" in lines and "no finding by itself" in out and "model_id tiny, engine test" in out
    (first,) = (line.split() for line in lines if line.startswith((" 0 ", "0 ")))
    assert first == ["0", "1", "-1.39", "25.0%", "0.5000", "0.562", "2", "3", "2", "75.0%", "1", "25.0%"]
    assert re.search(r"^ *1 +3 .*not sampled", out, re.M)


def test_with_a_tokenizer_there_is_text_and_nothing_in_it_is_obeyed(run: Run, spool: Path, tokenizer: Path) -> None:
    pytest.importorskip("tokenizers")
    _, out, _ = run(spool, "--row", 0, "--tokenizer", tokenizer)
    assert '" b" 75.0%' in out and '"a" 25.0%' in out and '"\\n"' in out
    assert "\x1b" not in out and "\\x1b[2J" in out
    assert "Prompt, 2 tokens" in out


def test_a_row_counts_over_all_files_and_a_repeated_id_is_told(run: Run, spool: Path) -> None:
    _, out, _ = run(spool, "--row", 2)
    assert out.startswith("r2\nrow 2, ")
    _, out, _ = run(spool, "--rollout-id", "r1")
    assert "row 1, " in out and "the same rollout_id also stands in row 3" in out
    _, out, _ = run(spool, spool, "--row", 3)
    assert out.startswith("r1\nrow 3, ")


def test_one_token_is_shown_with_its_whole_set(run: Run, spool: Path) -> None:
    code, out, _ = run(spool, "--row", 0, "--position", 0)
    assert code == 0
    assert "b        -1.39, probability 25.0%" in out
    assert "b + m    -2.08, probability before the filters 12.5%" in out
    assert [line.split() for line in out[out.index("Kept set") :].splitlines()[1:]] == [
        ["2", "75.0%"],
        ["1", "25.0%", "drawn"],
    ]


def test_json_holds_everything_also_of_one_token(run: Run, spool: Path) -> None:
    code, out, _ = run(spool, "--rollout-id", "r0", "--json")
    told = json.loads(out)
    assert code == 0 and (told["rollout_id"], told["row"], told["others"]) == ("r0", 0, [])
    assert told["prompt_token_ids"] == [0, 1] and told["facts"]["top_k"] == 2
    first, forced, _ = told["tokens"]
    assert first["kept"][0] == {"token_id": 2, "text": None, "logprob": pytest.approx(math.log(0.75))}
    assert (forced["sampled"], forced["behavior_logprob"], forced["kept"]) == (False, None, [])
    _, out, _ = run(spool, "--rollout-id", "r0", "--position", 2, "--json")
    (token,) = json.loads(out)["tokens"]
    assert (token["position"], token["kept_size"]) == (2, 1)


def spoilt(batch: RolloutBatch, column: str, values: list[object]) -> RolloutBatch:
    arrow = batch.arrow
    at = arrow.schema.get_field_index(column)
    return RolloutBatch.from_arrow(
        arrow.set_column(at, arrow.schema.field(at), pa.array(values, arrow.schema.field(at).type))
    )


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("behavior_logprobs", [-1.0], "lengths"),
        ("kept_ids", [[1, 2]], "lengths"),
        ("kept_ids", None, "nulls"),
        ("sampled", [True, True], "lengths"),
        ("kept_ids", [[2, 5], None, [4]], "member"),
        ("policy_versions", [9, None, 1], "version_order"),
    ],
)
def test_a_response_that_is_wrong_is_shown_as_it_stands(
    run: Run, batch: RolloutBatch, tmp_path: Path, column: str, value: object, kind: str
) -> None:
    with SpoolWriter(tmp_path / "bad") as writer:
        writer.append(spoilt(batch.slice(0, 1), column, [value]))
    code, out, err = run(tmp_path / "bad", "--row", 0)
    assert (code, err) == (1, "") and f"error {kind}: " in out
    assert "Response, 3 tokens" in out
    assert run(tmp_path / "bad", "--row", 0, "--json")[0] == 1


def test_an_archive_is_read_too_and_its_rows_follow_those_before(
    run: Run, spool: Path, batch: RolloutBatch, tmp_path: Path
) -> None:
    write_archive([batch], tmp_path / "a.parquet")
    assert run(tmp_path / "a.parquet", "--rollout-id", "r2")[1].startswith("r2\nrow 2, ")
    assert run(spool, tmp_path / "a.parquet", "--row", 6)[1].startswith("r2\nrow 6, ")
    assert "also stands in row 6" in run(spool, tmp_path / "a.parquet", "--rollout-id", "r2")[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name one response: --rollout-id ID, or --row N"),
        (["--row", "0", "--rollout-id", "r0"], "name one response"),
        (["--row", "4"], "there is no row 4"),
        (["--rollout-id", "R0"], "no response has rollout_id 'R0'"),
        (["--row", "0", "--position", "3"], "the response has 3 tokens, counted from 0"),
    ],
)
def test_wrong_use_is_told(run: Run, spool: Path, arguments: list[str], told: str) -> None:
    code, _, err = run(spool, *arguments)
    assert code == 2 and told in err


def test_what_cannot_be_read_ends_with_3(run: Run, spool: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "nowhere", "--row", 0)[0] == 3
    (tmp_path / "empty").mkdir()
    assert run(spool, "--row", 0, "--tokenizer", tmp_path / "empty")[0] in (2, 3)
