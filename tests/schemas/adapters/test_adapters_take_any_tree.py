"""Whatever the tree: a refusal, a rejected response, or a batch without errors. Nothing else ever comes out."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keptset.schemas.adapters import Stated, adapter_for
from keptset.schemas.adapters.base import Place, Tree
from keptset.schemas.adapters.collect import Collector
from keptset.schemas.columns import Identity
from keptset.schemas.errors import SchemaError
from keptset.schemas.findings import Severity
from keptset.schemas.validation import validate

ENGINES = Path(__file__).resolve().parents[2] / "data" / "engines"
TREES = [
    (
        entry["format"],
        [json.loads(line) for line in text.splitlines()] if "jsonl" in entry["file"] else [json.loads(text)],
    )
    for entry in json.loads((ENGINES / "manifest.json").read_text())
    if entry["verdict"] == "good" and "msgpack" not in entry["file"]
    for text in [(ENGINES / entry["file"]).read_text()]
]
NUMBERS = st.integers() | st.integers(-2, 30) | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, -9999.0])
LEAVES = (
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=3) | st.sampled_from(["\ud800", "AAAA"])
)
ANY = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["index", "token_ids", "choices", "7", "logprob"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, entry in entries for place in places(entry, (*path, key)))]


def spoil(draw: st.DataObject, tree: Any) -> Any:
    """The tree with one place replaced, removed or doubled."""
    place = draw.draw(st.sampled_from(places(tree)))
    if not place:
        return draw.draw(ANY)
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    how = draw.draw(st.sampled_from(["replace", "replace", "remove", "double"]))
    if how == "replace":
        holder[place[-1]] = draw.draw(ANY)
    elif how == "remove":
        del holder[place[-1]]
    elif isinstance(holder, list):
        holder.insert(place[-1], copy.deepcopy(holder[place[-1]]))
    return tree


def check(engine: str, trees: list[Any]) -> None:
    adapter = adapter_for(engine)
    collector = Collector(adapter, Stated(identity=Identity(vocab_size=24)))
    located = [Tree(value=tree, place=Place(text="t", file="f", number=n)) for n, tree in enumerate(trees)]
    try:
        for number, tree in enumerate(adapter.whole(located)):
            collector.take_tree(tree, first=number == 0)
    except SchemaError:
        return
    result = collector.flush()
    for batch in result.batches:
        assert not [finding for finding in validate(batch) if finding.severity is Severity.ERROR]
    for rejected in result.rejected:
        assert rejected.reason
        assert json.loads(rejected.to_json())["place"] == "t"


@pytest.mark.parametrize("number", range(len(TREES)))
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_a_spoiled_record_never_gets_through_and_never_breaks_the_reader(number: int, data: st.DataObject) -> None:
    engine, trees = TREES[number]
    trees = copy.deepcopy(trees)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(trees) - 1))
        trees[at] = spoil(data, trees[at])
    check(engine, trees)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "fastdeploy", "slime"])
@settings(max_examples=60)
@given(st.lists(ANY, max_size=3))
def test_arbitrary_trees_are_refused_or_rejected(engine: str, trees: list[Any]) -> None:
    check(engine, trees)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_spoiled_micro_batch_never_gets_through_and_never_breaks_the_reader(data: st.DataObject) -> None:
    msgpack = pytest.importorskip("msgpack", reason="prime-rl files are msgpack; install the extra [prime-rl]")
    micro_batches = msgpack.unpackb((ENGINES / "prime_rl_good.msgpack").read_bytes())
    check("prime_rl", [spoil(data, micro_batches[0])])
