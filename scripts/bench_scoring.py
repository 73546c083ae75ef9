"""`keptset bench scoring`: scoring from hidden states against the dense ways, in each framework that is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from keptset.schemas.errors import KeptsetError, MissingDependency
from keptset.scripts.bench_scoring_case import QUICK, Shape

FRAMEWORKS = {"paddle": "cpu", "torch": "torch"}
"""Framework -> the extra that brings it."""
GOALS: dict[str, tuple[str, float]] = {
    "forward_speedup": ("forward, against full vocabulary", 200),
    "backward_hidden_speedup": ("... and backward to hidden states", 200),
    "backward_head_dense_speedup": ("... and head, dense gradient", 40),
    "backward_head_sparse_speedup": ("... and head, row-sparse gradient", 150),
    "padded_speedup": ("forward, against candidates padded to 512", 100),
    "memory_share": ("peak extra memory, of the [T, V] logits", 0.01),
    "linearity": ("time per kept id, slowest to fastest of 1k to 64k tokens", 1.5),
}
"""Key of the JSON -> (what it is, goal in Paddle): at least, for a speedup; at most, for the others."""
TORCH_FORWARD_GOAL = 100


def command(
    quick: Annotated[
        bool, typer.Option("--quick", help="A small shape, to see that it runs; its numbers mean little.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON; torch's under `torch`.")] = False,
) -> None:
    """Score kept sets of a heavy-tailed size from hidden states, against the ways that make every logit.

    Takes some minutes in each framework, nearly all of them in the dense ways.
    """
    shape = QUICK if quick else Shape()
    found = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    if not found:
        raise MissingDependency("neither Paddle nor torch is installed: install keptset[cpu] or keptset[torch]")
    results = {name: _measure(name, quick) for name in found}
    if as_json:
        print(json.dumps(to_report(results), indent=2))
        return
    console = Console()
    for name, result in results.items():
        console.print(to_table(name, result, shape))
        console.print(_dense_line(result))


def to_report(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Paddle's numbers at the top, torch's under `torch`; null for what is not installed."""
    paddle: dict[str, Any] = results.get("paddle", dict.fromkeys(GOALS))
    return {**paddle, "torch": results.get("torch")}


def to_table(name: str, result: dict[str, Any], shape: Shape) -> Table:
    """One framework's numbers, beside the goals where the shape is the one that they are for."""
    table = Table(
        title=f"{name} {result['version']}: T = {shape.tokens}, H = {shape.hidden}, V = {shape.vocab}, "
        f"{result['kept_ids']} kept ids"
    )
    for heading in ("", "measured", "goal"):
        table.add_column(heading, justify="left" if not heading else "right")
    for key, (what, goal) in GOALS.items():
        value = result[key]
        if shape != Shape():
            table.add_row(what, f"{value:.2f}", "")
            continue
        if key.endswith("speedup"):
            if name == "torch":
                goal = TORCH_FORWARD_GOAL if key == "forward_speedup" else 0
            table.add_row(what, f"{value:.0f}x", f">= {goal:.0f}x" if goal else "")
        elif key == "memory_share":
            table.add_row(what, f"{value:.2%}", f"<= {goal:.0%}")
        else:
            table.add_row(what, f"{value:.2f}", f"<= {goal:g}")
    return table


def _dense_line(result: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in result["dense_gflops"].items())
    uses = result["dense_uses"]
    kept = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in result["kept_seconds"].items())
    blocks = f"candidates padded in blocks: {result['padded_in_blocks_speedup']:.0f}x; "
    return (
        blocks
        + f"dense ways in GFLOP/s: {rates} ({uses['threads']} threads, {uses['logsumexp']}); kept ways in ms: {kept}\n"
    )


def _measure(name: str, quick: bool) -> dict[str, Any]:
    """In a process of its own: each framework brings its own threads, and its settings are read once.

    Errors: KeptsetError where the process fails; it has printed why.
    """
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "keptset.scripts.bench_scoring_run",
            name,
            *(["--quick"] if quick else []),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if run.returncode:
        raise KeptsetError(f"measuring {name} failed with exit code {run.returncode}; what it printed says why")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result
