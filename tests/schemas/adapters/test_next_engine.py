"""The adapter that docs/adapters.md shows is all that an engine needs."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keptset.schemas.adapters import Stated, adapt_files
from keptset.schemas.adapters.arrays import floats, ids, kept_sets
from keptset.schemas.adapters.base import Adapter, Names, Part, Record, finish_reason, support_columns
from keptset.schemas.adapters.collect import adapt_live
from keptset.schemas.builder import Response
from keptset.schemas.errors import SchemaError

SAMPLE = {"prompt": [1, 2], "ids": [5, 3], "kept": [[7, 5], [3]], "logprobs": [-0.5, 0.0], "finish_reason": "stop"}


@pytest.fixture
def example(repository: Path) -> Adapter:
    page = (repository / "docs" / "adapters.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^(    class Example\(Adapter\):\n(?:    .*\n|\n)*)", page, re.MULTILINE)
    given = (Adapter, Iterator, Names, Part, Record, Response, Stated)
    names: dict[str, Any] = {thing.__name__: thing for thing in (*given, finish_reason, floats, ids, kept_sets)}
    exec(textwrap.dedent(code), names | {"support_columns": support_columns, "__name__": "example"}, names)
    adapter: Adapter = names["Example"]()
    return adapter


def test_it_takes_live_objects_and_files(example: Adapter, tmp_path: Path) -> None:
    reply = {"samples": [SAMPLE, {**SAMPLE, "ids": [6, 3]}]}
    live = adapt_live(example, [reply], {"temperature": 0.5})
    assert live.batch.column("kept_ids").to_pylist() == [[[5, 7], [3]]]
    assert live.batch.column("temperature").to_pylist() == [0.5]
    assert [f.kind.value for f in live.rejected[0].findings] == ["member"]
    (tmp_path / "a.json").write_text('{"samples": [{"ids": [5]}]}')
    (recorded,) = adapt_files(example, [tmp_path / "a.json"])
    assert recorded.rejected[0].error == "samples[0].kept is missing; expected one list of ids per token"


def test_it_refuses_what_is_not_its_engines(example: Adapter) -> None:
    with pytest.raises(
        SchemaError, match=r"expected a reply of /sample \(samples\[\] with prompt, ids, kept, logprobs"
    ):
        adapt_live(example, [{"choices": []}])
