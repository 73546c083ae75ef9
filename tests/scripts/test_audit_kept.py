"""`keptset audit`: where its answer goes, where its work is kept meanwhile, and what a comparison cannot use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keptset.schemas.storage.spool import SpoolWriter
from keptset.scripts import audit as audit_command
from keptset.scripts.bench_wire_rollouts import made_up_rollouts
from keptset.trainer_bridge.audit import checkpoint
from keptset.trainer_bridge.audit.options import Progress

RunAudit = Callable[..., tuple[int, str, str]]
FILES, ROWS, TOKENS = 3, 4, 25
FOUND = 1
"""Made up rollouts are no draws."""


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files, each a unit of work."""
    folder = tmp_path_factory.mktemp("files") / "spool"
    batch = made_up_rollouts(FILES * ROWS * TOKENS, row_tokens=TOKENS)
    with SpoolWriter(folder, fsync="never") as writer:
        for number in range(FILES):
            writer.append(batch.slice(number * ROWS, ROWS).compact())
            writer.rotate()
    return folder


def told(out: str) -> dict[str, Any]:
    return json.loads(out)


def test_an_interrupted_audit_goes_on_where_it_was(
    run_audit: RunAudit, spool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, whole, _ = run_audit(spool, "--json", "--no-resume")
    seen: list[int] = []

    @contextmanager
    def progress(*, stop_at: int) -> Iterator[Callable[[Progress], None]]:
        def tell(now: Progress) -> None:
            seen.append(now.units_done)
            if now.units_done == stop_at:
                raise KeyboardInterrupt

        yield tell

    monkeypatch.setattr(audit_command, "_progress", lambda: progress(stop_at=2))
    code, out, err = run_audit(spool, "--json")
    assert (code, out) == (130, "") and "the same command goes on from there" in err and seen == [0, 1, 2]
    seen.clear()
    monkeypatch.setattr(audit_command, "_progress", lambda: progress(stop_at=-1))
    code, out, _ = run_audit(spool, "--json")
    assert code == FOUND and seen == [2, 3] and told(out) == told(whole)
    assert not list((tmp_path / "cache" / "keptset" / "audits").iterdir())


def test_two_audits_of_the_same_files_do_not_stand_in_each_others_way(
    run_audit: RunAudit, spool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While one works, another with other options and one that is the same begin and end."""
    monkeypatch.setattr(checkpoint, "SAVE_SECONDS", 0)
    asked: list[list[str]] = [["--filtered"], []]
    alone = [told(run_audit(spool, "--json", "--no-resume", *more)[1]) for more in asked]
    meanwhile: list[tuple[int, Any, str]] = []

    @contextmanager
    def progress() -> Iterator[Callable[[Progress], None]]:
        def tell(now: Progress) -> None:
            while now.units_done == 1 and asked:
                code, out, err = run_audit(spool, "--json", *asked.pop(0))
                meanwhile.append((code, told(out), err))

        yield tell

    monkeypatch.setattr(audit_command, "_progress", progress)
    code, out, err = run_audit(spool, "--json")
    assert (code, told(out), err) == (FOUND, alone[1], "")
    assert sorted(meanwhile, key=lambda one: one[1] == alone[1]) == [(0, alone[0], ""), (FOUND, alone[1], "")]
    assert list((tmp_path / "cache" / "keptset" / "audits").iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_the_resuming_alone(
    run_audit: RunAudit, spool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, out, err = run_audit(spool)
    assert code == FOUND and f"{FILES * ROWS} responses" in out
    assert err.count("\n") == 1 and "cannot write" in err and "if it is interrupted it starts over" in err
    assert run_audit(spool, "--no-resume")[2] == ""

    def interrupt(now: Progress) -> None:
        if now.units_done == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(audit_command, "_progress", lambda: contextlib.nullcontext(interrupt))
    code, _, err = run_audit(spool)
    assert code == 130 and err == "keptset: interrupted; nothing of it was kept\n"


def test_a_place_that_cannot_be_written_is_told_before_the_audit(
    run_audit: RunAudit, spool: Path, tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    (tmp_path / "file").write_text("no folder")
    for option in ("--html", "--json-file"):
        code, out, err = run_audit(spool, option, tmp_path / "file" / "x")
        assert (code, out) == (3, "") and f"{option} {tmp_path}/file/x cannot be written" in err
    code, out, _ = run_audit(spool, "--against", spool, "--json-file", tmp_path / "file" / "x")
    assert (code, out) == (3, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_an_answer_that_could_not_be_put_out_is_there_for_the_next_time(
    run_audit: RunAudit, spool: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "out" / "audit.json"

    def takes_its_place(now: Progress) -> None:
        place.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def progress() -> Iterator[Callable[[Progress], None]]:
        yield takes_its_place

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(audit_command, "_progress", progress)
        code, _, err = run_audit(spool, "--json-file", place)
    assert code == 3 and "cannot write" in err
    place.rmdir()
    code, _, err = run_audit(spool, "--json-file", place)
    assert code == FOUND and "3 of 3 units of work are done already" in err and place.is_file()
    assert list((tmp_path / "cache" / "keptset" / "audits").iterdir()) == []


@pytest.mark.parametrize(
    "more",
    [
        ["--sample", "5"],
        ["--filtered"],
        ["--max-version-lag", "2"],
        ["--fail-on", "warning"],
        ["--workers", "2"],
        ["--tokenizer", "nowhere"],
        ["--html", "a.html"],
        ["--model", "/"],
        ["--ray"],
    ],
)
def test_what_a_comparison_cannot_use_is_refused_by_name(run_audit: RunAudit, spool: Path, more: list[str]) -> None:
    code, out, err = run_audit(spool, "--against", spool, *more)
    assert (code, out) == (2, "") and f"leave {more[0]} out" in err
