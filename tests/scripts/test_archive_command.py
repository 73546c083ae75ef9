"""`keptset archive`: a spool into Parquet and back, what it says and ends with."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.archive import read_archive
from keptset.schemas.storage.spool import SpoolReader
from keptset.scripts import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)`: exit code, stdout and stderr of `keptset archive ARGUMENTS`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["keptset", "archive", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main.main()
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out, err

    return call


@pytest.fixture
def spool(repository: Path, tmp_path: Path) -> Path:
    """Six responses, of which two are there twice; the last in an open file."""
    return Path(shutil.copytree(repository / "tests" / "data" / "schema_v1" / "spool", tmp_path / "spool"))


def whole(batches: object) -> RolloutBatch:
    return concat_batches(list(batches))  # type: ignore[call-overload]


def test_a_spool_becomes_a_parquet_file_and_a_spool_again(run: Run, spool: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    code, out, err = run(spool, "-o", file)
    assert (code, err) == (0, "")
    assert f"4 responses, 6 tokens, {file.stat().st_size / 6:.1f} bytes a token, in {file}\n" in out
    expected = whole(SpoolReader(spool))
    assert whole(read_archive(file)).arrow.equals(expected.arrow)
    code, out, err = run(file, "--restore", "-o", tmp_path / "again")
    assert (code, out, err) == (0, f"4 responses, 6 tokens in {tmp_path / 'again'}\n", "")
    assert whole(SpoolReader(tmp_path / "again")).arrow.equals(expected.arrow)


def test_responses_that_are_there_twice_are_told_and_kept_if_asked(run: Run, spool: Path, tmp_path: Path) -> None:
    code, out, _ = run(spool, "-o", tmp_path / "a.parquet", "--json")
    told = json.loads(out)
    assert (code, told["responses"], told["set_aside"]) == (0, 4, [])
    assert told["bytes"] == (tmp_path / "a.parquet").stat().st_size
    assert len(told["findings"]) == 1 and "duplicate" in told["findings"][0]
    code, out, _ = run(spool, "-o", tmp_path / "b.parquet", "--keep-duplicates", "--json")
    told = json.loads(out)
    assert (code, told["responses"], told["findings"]) == (0, 6, [])


def test_a_damaged_file_ends_it_unless_it_may_be_left_out(run: Run, spool: Path, tmp_path: Path) -> None:
    published = next(spool.glob("*.arrow"))
    with published.open("r+b") as file:
        file.seek(400)
        file.write(b"\xee\xee\xee\xee")
    code, _, err = run(spool, "-o", tmp_path / "a.parquet")
    assert code == 3 and "is damaged" in err
    assert not (tmp_path / "a.parquet").exists()
    code, out, _ = run(spool, "-o", tmp_path / "a.parquet", "--skip-damaged")
    assert code == 1
    assert f"set aside: {published} is damaged" in out
    assert len(whole(read_archive(tmp_path / "a.parquet"))) == 2


def test_an_archive_that_exists_is_replaced_only_if_asked(run: Run, spool: Path, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("mine")
    code, _, err = run(spool, "-o", tmp_path / "a.parquet")
    assert code == 3 and "a.parquet exists" in err
    assert (tmp_path / "a.parquet").read_text() == "mine"
    assert run(spool, "-o", tmp_path / "a.parquet", "--overwrite", "--level", 3)[0] == 0


def test_what_is_no_spool_is_told(run: Run, spool: Path, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "nowhere", "-o", tmp_path / "a.parquet")
    assert code == 3 and "nowhere" in err
    (tmp_path / "empty").mkdir()
    code, _, err = run(tmp_path / "empty", "-o", tmp_path / "a.parquet")
    assert code == 2 and "holds no batch to archive" in err
    run(spool, "-o", tmp_path / "a.parquet")
    code, _, err = run(tmp_path / "a.parquet", "-o", tmp_path / "b.parquet")
    assert code == 3 and "add --restore" in err
    code, _, err = run(spool, "--restore", "-o", tmp_path / "again")
    assert code == 3 and "cannot read" in err
