"""The `keptset` command: help, version, lazy subcommands, exit codes."""

import importlib
import sys
import types
from typing import Annotated

import pytest
import typer

import keptset
from keptset.schemas import errors
from keptset.scripts import main

EXIT_CODES = [
    (errors.InvalidInput("top_p is 1.5"), 2),
    (errors.MissingDependency("Paddle is needed"), 2),
    (errors.CheckpointError("no config.json"), 3),
    (errors.SchemaError("no column token_ids"), 3),
    (errors.DamagedFile("cut short"), 3),
    (errors.ScoringRefused("no kept sets"), 1),
    (errors.ViolationError("one row is bad"), 1),
    (errors.RolloutError("3 prompts failed"), 1),
    (errors.KeptsetError("a process ended before its work did"), 3),
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `keptset ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["keptset", *arguments])
    with pytest.raises(SystemExit) as exited:
        main.main()
    return exited.value.code or 0


@pytest.fixture
def subcommand(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A subcommand `try`, registered as any other; `raises` is what it will raise, `seen` what it was called with."""
    state = types.SimpleNamespace(raises=None, seen=[])

    def command(count: Annotated[int, typer.Option(help="How many.")] = 1) -> None:
        """Say how often it ran."""
        state.seen.append(count)
        if state.raises is not None:
            raise state.raises

    module = types.ModuleType("keptset_test_subcommand")
    module.command = command
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(main.COMMANDS, "try", (module.__name__, "A subcommand to try."))
    return state


def test_version_is_the_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"keptset {keptset.__version__}\n"


def test_help_lists_subcommands_without_importing_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "COMMANDS", {"never": ("keptset.no_such_module", "Listed by this line alone.")})
    assert run(monkeypatch, "--help") == 0
    assert "Listed by this line alone." in capsys.readouterr().out


def test_a_subcommand_reads_its_own_options(
    monkeypatch: pytest.MonkeyPatch, subcommand: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "try", "--count", "3") == 0
    assert subcommand.seen == [3]
    assert run(monkeypatch, "try", "--help") == 0
    assert "How many." in capsys.readouterr().out


@pytest.mark.usefixtures("subcommand")
@pytest.mark.parametrize("arguments", [["nothing-of-the-kind"], ["try", "--count", "many"], ["try", "--unknown"], []])
def test_wrong_use_exits_with_2(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    assert run(monkeypatch, *arguments) == 2


@pytest.mark.parametrize(("error", "code"), EXIT_CODES, ids=[type(error).__name__ for error, _ in EXIT_CODES])
def test_an_error_is_one_line_and_its_exit_code(
    error: errors.KeptsetError,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    subcommand: types.SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    subcommand.raises = error
    assert run(monkeypatch, "try") == code
    assert capsys.readouterr().err == f"keptset: {error}\n"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device", "/full"), "[Errno 28] No space left on device: '/full'"),
        (MemoryError(), "there is not enough memory"),
    ],
    ids=["disk", "memory"],
)
def test_what_the_machine_lacks_is_no_finding(
    error: Exception,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    subcommand: types.SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    subcommand.raises = error
    assert run(monkeypatch, "try") == 3
    assert capsys.readouterr().err == f"keptset: it broke off: {told}\n"


@pytest.mark.parametrize("name", main.COMMANDS)
def test_each_registered_subcommand_shows_its_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _ = main.COMMANDS[name]
    assert importlib.import_module(module).command.__doc__, f"{module}.command needs a docstring: it is the help text"
    assert run(monkeypatch, name, "--help") == 0
    assert f"keptset {name}" in capsys.readouterr().out
