"""The `keptset` command: which subcommands there are, and what an error means for the exit code.

A subcommand is a module with a function `command`, whose parameters typer reads, and perhaps `with_left_out_values`,
which has its arguments before typer; its line in `COMMANDS` is all that registers it. The module is imported when its
subcommand is called, so `keptset --help` loads neither Paddle nor Ray.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import keptset
from keptset.schemas.errors import (
    InvalidInput,
    KeptsetError,
    LogitsError,
    MissingDependency,
    RolloutError,
    ScoringRefused,
    ViolationError,
)
from keptset.scripts.bench import BENCHES, LINE

COMMANDS = {
    "demo": (
        "keptset.scripts.demo",
        "Sample a small real model on this machine and score it twice: ratios, table, report.",
    ),
    "rollout": (
        "keptset.scripts.rollout",
        "Sample responses to a file of prompts into a spool, on this machine or a cluster.",
    ),
    "import": (
        "keptset.scripts.import_",
        "Read an engine's recorded output into a spool.",
    ),
    "audit": (
        "keptset.scripts.audit",
        "Search recorded rollouts for every way in which their ratios can be wrong.",
    ),
    "inspect": (
        "keptset.scripts.inspect_",
        "Show one recorded response: its tokens, kept sets and numbers.",
    ),
    "archive": (
        "keptset.scripts.archive",
        "Write a spool as one Parquet file, or bring it back.",
    ),
}
"""Subcommand -> (module, one line of help)."""

FOUND, WRONG_USE, UNREADABLE = 1, 2, 3
"""Exit codes beside 0: findings or rejected rows, wrong use, unreadable input or work that broke off."""


def exit_code(error: KeptsetError) -> int:
    """The exit code that says what kind of error ended the command.

    1 is said of data that was looked at, and of nothing else: a gate takes it for a finding.

    >>> exit_code(InvalidInput("top_p is 0")), exit_code(KeptsetError("a process ended early"))
    (2, 3)
    """
    if isinstance(error, ScoringRefused | ViolationError | RolloutError | LogitsError):
        return FOUND
    if isinstance(error, InvalidInput | MissingDependency):
        return WRONG_USE
    return UNREADABLE


class LazyCommand(TyperCommand):
    """A subcommand known by its name and one line of help until it is called; then its module takes over."""

    def __init__(self, name: str, module: str, line: str) -> None:
        super().__init__(name, help=line)
        self.module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module = importlib.import_module(self.module)
        app = typer.Typer(add_completion=False)
        app.command(self.name)(module.command)
        # A value that may be left out is nothing that typer knows.
        args = getattr(module, "with_left_out_values", list)(args)
        return typer.main.get_command(app).make_context(info_name, args, parent=parent, **extra)


def command_line() -> Any:
    """The whole command as a callable click group."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback()(_options)
    group = typer.main.get_group(app)
    _add_lazily(group, COMMANDS)
    benches = TyperGroup(name="bench", help=LINE, no_args_is_help=True)
    _add_lazily(benches, BENCHES)
    group.add_command(benches, "bench")
    return group


def _add_lazily(group: TyperGroup, commands: Mapping[str, tuple[str, str]]) -> None:
    for name, (module, line) in commands.items():
        group.add_command(LazyCommand(name, module, line), name)


def main() -> None:
    """Run the command; the process ends with its exit code."""
    # Paddle says so at every import; nothing here is compiled.
    warnings.filterwarnings("ignore", message="No ccache found", category=UserWarning)
    try:
        command_line()(prog_name="keptset")
    except KeptsetError as error:
        print(f"keptset: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    except (OSError, MemoryError) as error:
        print(f"keptset: it broke off: {str(error) or 'there is not enough memory'}", file=sys.stderr)
        sys.exit(UNREADABLE)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"keptset {keptset.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Importance ratios that stay true when rollouts are sampled from a truncated distribution."""


if __name__ == "__main__":
    main()
