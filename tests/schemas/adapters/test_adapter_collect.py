"""What becomes of responses: taken, told apart, or set aside whole with their reason."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.adapters import Adapted, Rejected, RejectedWriter, Stated, adapter_for, collect, from_vllm
from keptset.schemas.adapters.rejected import plain
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, StorageError, ViolationError
from keptset.schemas.findings import FindingKind

Adapt = Callable[..., Adapted]
Example = Callable[[str], Any]


def test_the_same_response_again_is_taken_once_and_told(adapt: Adapt, example: Example) -> None:
    tree = example("vllm_good.json")
    result = adapt("vllm", tree, tree)
    assert len(result.require()) == 2
    (finding,) = result.findings
    assert (finding.kind, finding.severity.value, finding.count) == (FindingKind.DUPLICATE, "warning", 2)


def test_another_response_under_the_same_id_is_a_conflict_and_not_lost(adapt: Adapt, example: Example) -> None:
    first, second = example("vllm_good.json"), example("vllm_good.json")
    second["response"]["choices"][0]["logprobs"]["content"][0]["logprob"] = -0.5
    result = adapt("vllm", first, second)
    (rejected,) = result.rejected
    assert [f.kind for f in rejected.findings] == [FindingKind.CONFLICT]
    assert isinstance(rejected.record, dict)
    assert rejected.record["response"]["choices"] == second["response"]["choices"][:1]
    assert len(result.batch) == 2


def changed(tree: dict[str, Any], field: str) -> dict[str, Any]:
    """The same reply but for one thing beside its ids, their sets and b."""
    tree = copy.deepcopy(tree)
    choice = tree["response"]["choices"][0]
    if field == "mask shape":
        first, second = choice["sampling_mask"][:2]
        choice["sampling_mask"][:2] = [[*first, second[0]], second[1:]]
    elif field == "setting":
        tree["request"]["sampling_params"]["top_p"] = 0.123
    elif field == "sampling_mask_logprobs":
        for token, row in enumerate(choice["sampling_mask"]):
            choice.setdefault(field, []).append([-1.0 - token] * len(row))
    else:
        choice[field] = {"finish_reason": "abort", "weight_versions": [{"version": "7", "start": 0, "end": 1}]}[field]
    return tree


@pytest.mark.parametrize(
    "field", ["finish_reason", "weight_versions", "sampling_mask_logprobs", "mask shape", "setting"]
)
def test_a_response_that_differs_in_any_field_is_not_the_same(adapt: Adapt, example: Example, field: str) -> None:
    first = example("vllm_good.json")
    second = changed(first, field)
    kinds = [[f.kind for f in one.findings] for one in adapt("vllm", first, second).rejected]
    assert [FindingKind.CONFLICT] in kinds
    assert len(kinds) == (2 if field == "setting" else 1)


def test_a_hidden_number_is_not_the_number_behind_it() -> None:
    shown, hidden = np.array([np.nan]), np.ma.MaskedArray([np.nan], [True])
    assert collect._content(shown) == collect._content(np.ma.MaskedArray(shown, [False])) == collect._content(+shown)
    assert collect._content(shown) != collect._content(hidden)


def test_ids_are_remembered_in_bounded_number(adapt: Adapt, example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_REMEMBERED", 3)
    trees = [{**example("vllm_good.json")} for _ in range(4)]
    for number, tree in enumerate(trees):
        tree["request"] = {**tree["request"], "request_id": f"r{number}"}
    assert len(adapt("vllm", *trees, trees[3]).batch) == 8
    result = adapt("vllm", *trees, trees[0])
    # Forgotten: it is taken again, and the batch's own check tells.
    assert {f.kind for f in result.findings} == {FindingKind.DUPLICATE}
    assert len(result.batch) == 10
    spoiled = copy.deepcopy(trees[0])
    spoiled["response"]["choices"][0]["sampling_mask"][1] = [4, 9, 15]
    (rejected,) = adapt("vllm", spoiled, *trees[1:], trees[0]).rejected
    assert [f.kind.value for f in rejected.findings] == ["member"]


def test_every_bad_response_is_rejected_however_much_is_wrong_with_the_one_before_it(
    adapt: Adapt, example: Example
) -> None:
    tree = example("vllm_good.json")
    tree["response"]["prompt_token_ids"] = tree["request"]["token_ids"] = list(range(1, 200))
    tree["response"]["choices"][0]["sampling_mask"][1] = [4, 9, 15]
    result = adapt("vllm", tree)
    assert (len(result.batch), [one.rollout_id for one in result.rejected]) == (0, ["demo-0001/0", "demo-0001/1"])
    first, second = ({f.kind.value: (f.count, f.responses) for f in one.findings} for one in result.rejected)
    assert first == {"range": (176, 1), "member": (1, 1)}
    assert second == {"range": (176, 1)}


def test_a_rejected_response_is_read_again_to_the_same_findings(adapt: Adapt, example: Example) -> None:
    for engine, name in (
        ("vllm", "vllm_bad_not_in_mask.json"),
        ("sglang", "sglang_bad_mask_short.json"),
        ("fastdeploy", "fastdeploy_bad_not_in_mask.json"),
        ("slime", "slime_bad_mask_short.json"),
    ):
        result = adapt(engine, example(name))
        for rejected in result.rejected:
            (again,) = adapt(engine, json.loads(rejected.to_json())["record"]).rejected
            assert again.findings == rejected.findings, engine


def test_findings_of_a_rejected_response_are_its_own(adapt: Adapt, example: Example) -> None:
    result = adapt("fastdeploy", example("fastdeploy_bad_not_in_mask.json"))
    assert [[e.rollout_id for f in r.findings for e in f.examples] for r in result.rejected] == [
        ["chatcmpl-demo/0"],
        ["chatcmpl-demo/1"],
    ]
    (merged,) = result.findings
    assert (merged.count, merged.responses) == (2, 2)


def test_requiring_all_names_the_first_that_is_bad(adapt: Adapt, example: Example) -> None:
    with pytest.raises(
        ViolationError, match=r"1 responses were rejected, the first \(.* line 1 response.choices\[0\]\)"
    ):
        adapt("vllm", example("vllm_bad_not_in_mask.json")).require()


def test_a_call_without_outputs_gives_an_empty_batch() -> None:
    result = from_vllm([], stated=Stated(identity=Identity(vocab_size=7)))
    assert (len(result.require()), result.batch.identity.engine) == (0, "vllm")


def test_large_sets_are_cut_into_batches_that_join_again(
    adapt: Adapt, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keptset.schemas.builder.MAX_KEPT_IDS", 20)
    result = adapt("vllm", example("vllm_good.json"))
    assert [len(batch) for batch in result.batches] == [1, 1]
    assert result.batch.rollout_ids == ["demo-0001/0", "demo-0001/1"]


def test_an_engine_without_an_adapter_is_named_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match="no adapter for 'tgi'; there are vllm, sglang, fastdeploy, slime, prime_rl"):
        adapter_for("tgi")
    with pytest.raises(InvalidInput, match="transformers writes no output to files; use from_transformers"):
        adapter_for("transformers")
    assert adapter_for("prime-rl").engine == "prime_rl"


class Status(Enum):
    DONE = "done"


@dataclass
class Reply:
    ids: Any
    status: Status
    _private: int = 1


class Slotted:
    __slots__ = ("a",)


def test_live_objects_are_written_field_by_field() -> None:
    reply = Reply(ids=np.array([1, 2]), status=Status.DONE)
    assert plain([reply, (1.5, None), b"\1", {1: {2}}]) == [
        {"ids": [1, 2], "status": "done"}, [1.5, None], {"base64": "AQ=="}, {"1": [2]}
    ]  # fmt: skip
    assert "Slotted" in plain(Slotted())
    assert plain(iter([1])) == [1]


def test_a_tree_that_bites_its_own_tail_is_written_to_a_depth() -> None:
    tail: list[Any] = []
    tail.append(tail)
    assert len(json.dumps(plain(tail))) < 1000


def test_the_writer_makes_its_file_with_the_first_line(tmp_path: Path) -> None:
    one = Rejected(place="here", path="choices[0]", rollout_id=None, findings=(), error="odd", record={"x": [1]})
    with RejectedWriter(tmp_path, "run") as writer:
        writer.write([])
        assert not writer.path.parent.exists()
        writer.write([one, one])
        assert writer.count == 2
    lines = writer.path.read_text().splitlines()
    assert [json.loads(line)["record"] for line in lines] == [{"x": [1]}] * 2
    assert writer.path == tmp_path / "rejected" / "run.jsonl"


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "rejected").write_text("a file in the way")
    one = Rejected(place="", path="", rollout_id=None, findings=(), error="odd", record=None)
    with RejectedWriter(tmp_path, "run") as writer, pytest.raises(StorageError, match="cannot be written to"):
        writer.write([one])
