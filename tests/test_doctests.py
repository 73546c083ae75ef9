"""Every example in a docstring says what the code does."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOMS = ("schemas", "rollout", "trainer_bridge", "scripts")
REPOSITORY = Path(__file__).resolve().parents[1]


def with_examples() -> list[str]:
    """Names of the modules that hold a docstring example."""
    sources = [
        REPOSITORY / "keptset.py",
        *(path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))),
    ]
    named = (
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in sources if ">>> " in path.read_text()
    )
    return ["keptset" if name == "keptset" else f"keptset.{name}".removesuffix(".__init__") for name in named]


@pytest.mark.parametrize("name", with_examples())
def test_docstring_examples_hold(name: str) -> None:
    tests = [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]
    assert tests, f"{name} holds `>>>` where doctest does not look"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
