"""What docs/rollout.md shows of one engine runs as it stands."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "data" / "tiny_checkpoints" / "llama_tied"


def test_the_example_of_one_engine_draws_what_it_asks_for() -> None:
    page = (ROOT / "docs" / "rollout.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].replace("path/to/checkpoint", str(CHECKPOINT))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "rollout.md", "exec"), {"__name__": "page"})
    tokens, kept = printed.getvalue().split()
    assert int(tokens) == 4 * 64 and float(kept) > 1
