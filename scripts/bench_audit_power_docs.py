"""The tables of docs/audit-power.md, made from what `keptset bench audit-power` measured.

`python -m keptset.scripts.bench_audit_power_docs docs` brings the page up to date; a test holds that it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keptset.schemas import describe

Told = Mapping[str, Any]


def up_to_date(page: str, told: Told) -> str:
    """The page with its tables as they were measured."""
    tables = {"run": run_table, "kinds": kinds_table, "clean": clean_table, "seeds": seeds_table, "power": power_table}
    return describe.up_to_date(page, {name: lambda make=make: make(told) for name, make in tables.items()})  # type: ignore[misc]


def run_table(told: Told) -> str:
    """When and how it was measured."""
    head = ("date", "command", "model", "minutes")
    row = (told["date"], f"`{told['command']}`", told["model"], f"{told['seconds'] / 60:.0f}")
    return describe.table(head, [row])


def kinds_table(told: Told) -> str:
    """Planted kinds of responses: what was found, at each share."""
    rows: dict[str, list[str]] = {}
    for planted in told["kinds"]:
        row = rows.setdefault(
            planted["kind"],
            [f"`{planted['kind']}`", planted["told"], "yes" if planted["with_model"] else ""],
        )
        named = [f"`{kind}`" for kind in planted["named"] if kind != planted["kind"]]
        if planted["kind"] in planted["named"]:
            named.insert(0, "named")
        row.append(f"{' and '.join(named) or 'nothing'}: {planted['counted']} of {planted['faulty']}")
    shares = sorted({planted["share"] for planted in told["kinds"]})
    head = ("kind", "what is planted", "with the model", *(f"in {share:.0%}" for share in shares))
    return describe.table(head, [tuple(row) for row in rows.values()])


def clean_table(told: Told) -> str:
    """p-values over clean sets."""
    head = ("test", "sets", "tokens of a set", "D from uniform", "p-value of D", "smallest", "below 0.01")
    rows = [
        (
            size["test"],
            f"{size['sets'] - size['refused']:,}",
            f"{size['tokens']:,}",
            f"{size['distance']:.4f}",
            f"{size['p_value']:.2g}",
            f"{size['smallest']:.1e}",
            f"{size['below_1_percent']:.2%}",
        )
        for size in told["sizes"]
    ]
    return describe.table(head, rows)


def seeds_table(told: Told) -> str:
    """Honest rollouts of real seeds."""
    seeds = told["seeds"]
    found = [kind for seed in seeds for kind in seed["findings"]]
    head = ("seeds", "responses", "tokens", "findings", "smallest p-value", "largest \\|mean ratio - 1\\| of a setting")
    row = (
        str(len(seeds)),
        f"{sum(seed['responses'] for seed in seeds):,}",
        f"{sum(seed['tokens'] for seed in seeds):,}",
        ", ".join(found) or "none",
        f"{min(p for seed in seeds for p in seed['p_values'].values()):.2g}",
        f"{max(seed['max_abs_mean_ratio'] for seed in seeds):.1e}",
    )
    return describe.table(head, [row])


def power_table(told: Told) -> str:
    """Faults of a run: how often each is found."""
    grid = [tokens for tokens in told["power"][0]["found"] if int(tokens) in _SHOWN]
    head = ("fault", "kind", "in", *(f"{int(tokens):,}" for tokens in grid), "tokens for 95%")
    rows = [
        (
            one["fault"],
            f"`{one['kind']}`",
            f"{one['incidence']:.0%}",
            *(f"{one['found'][tokens]:.0%}" for tokens in grid),
            f"{one['enough']:,}" if one["enough"] else f"> {int(max(one['found'], key=int)):,}",
        )
        for one in told["power"]
    ]
    return describe.table(head, rows)


_SHOWN = (1_000, 3_000, 10_000, 30_000, 100_000)


def main(folder: Path) -> None:
    """Rewrite the page of a folder from the JSON beside it."""
    told = json.loads((folder / "audit_power.json").read_text(encoding="utf-8"))
    page = folder / "audit-power.md"
    page.write_text(up_to_date(page.read_text(encoding="utf-8"), told), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
