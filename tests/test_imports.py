"""Which room may import which, and what an import may bring along."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "schemas": {"schemas"},
    "rollout": {"rollout", "schemas"},
    "trainer_bridge": {"trainer_bridge", "schemas"},
    "scripts": {"scripts", "rollout", "schemas", "trainer_bridge"},
}
HEAVY = ("paddle", "ray", "torch", "transformers", "tokenizers", "safetensors", "gguf", "matplotlib", "jinja2")
"""What a bare install lacks; light modules work without."""


def modules(*rooms: str) -> list[str]:
    """The import names of all modules of these rooms."""
    paths = (path for room in rooms for path in sorted((REPOSITORY / room).rglob("*.py")))
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in paths]
    return [f"keptset.{name}".removesuffix(".__init__") for name in names]


def imported_rooms(source: str, home: str) -> Iterator[tuple[int, str]]:
    """(line, room) of each import of ours in `source`, a module of `home`; imports within functions count too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = home.split(".")[: len(home.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "keptset" and rest.split(".")[0] in MAY_IMPORT:
                yield node.lineno, rest.split(".")[0]


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("import keptset.rollout.engine", ["rollout"]),
        ("from keptset import rollout, schemas", ["rollout", "schemas"]),
        ("def late():\n    from keptset.scripts.main import main", ["scripts"]),
        ("from ..rollout import engine", ["rollout"]),
        ("from . import ratios", ["trainer_bridge"]),
        ("import keptsetlike.rollout, numpy", []),
        ("from keptset import __version__", []),
    ],
)
def test_every_spelling_of_an_import_is_seen(source: str, rooms: list[str]) -> None:
    assert [room for _, room in imported_rooms(source, "keptset.trainer_bridge")] == rooms


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room: str) -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports keptset.{other}"
        for path in sorted((REPOSITORY / room).rglob("*.py"))
        for line, other in imported_rooms(path.read_text(), package_of(path))
        if other not in MAY_IMPORT[room]
    ]
    assert not wrong, "\n".join(wrong)


def package_of(path: Path) -> str:
    return ".".join(["keptset", *path.relative_to(REPOSITORY).parent.parts])


def loaded_by(statements: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the heavy packages a fresh interpreter has loaded after these statements."""
    program = f"{statements}\nimport sys\nprint('loaded:', *(name for name in {heavy!r} if name in sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1].split()[1:]


def test_the_contract_and_the_oracle_load_nothing_heavy() -> None:
    light = tuple(
        f"keptset.trainer_bridge.{name}" for name in ("alignment", "audit", "diagnostics", "ratios", "reference")
    )
    names = ["keptset", *modules("schemas"), *(name for name in modules("trainer_bridge") if name.startswith(light))]
    assert loaded_by("\n".join(f"import {name}" for name in names)) == []


def test_the_public_names_load_nothing_heavy() -> None:
    assert loaded_by("import keptset\nfor name in keptset.__all__:\n    getattr(keptset, name)") == []


def test_the_command_and_its_help_load_nothing_heavy() -> None:
    show_help = (
        "import contextlib, keptset.scripts.main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    keptset.scripts.main.command_line()(['--help'])"
    )
    assert loaded_by(show_help, (*HEAVY, "numpy", "pyarrow")) == []


def test_only_the_pool_needs_ray_in_rollout() -> None:
    without_ray = [name for name in modules("rollout") if not name.startswith("keptset.rollout.pool")]
    assert loaded_by("\n".join(f"import {name}" for name in without_ray), ("ray", "torch")) == []
