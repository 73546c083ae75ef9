"""FastDeploy: whole replies and streams, and the traps in each."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keptset.schemas.adapters import Adapted, Stated, adapt_files, adapter_for, fastdeploy_streams, from_fastdeploy
from keptset.schemas.adapters.base import Place, Tree
from keptset.schemas.columns import Identity
from keptset.schemas.errors import SchemaError

Adapt = Callable[..., Adapted]
Example = Callable[[str], Any]
STREAM = "fastdeploy_stream_good.jsonl"


@pytest.fixture
def pieces(engines: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (engines / STREAM).read_text().splitlines()]


def under(name: str, pieces: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The same pieces as another stream, or as another choice."""
    changed = json.loads(json.dumps(pieces))
    for piece in changed:
        piece["id"] = name
        for choice in piece["choices"]:
            choice["index"] = index
    return changed


def test_a_stream_says_what_the_whole_reply_says(adapt: Adapt, example: Example, pieces: list[Any]) -> None:
    streamed = adapt("fastdeploy", *pieces).require()
    whole = adapt("fastdeploy", example("fastdeploy_good.json")).require()
    for name in ("prompt_token_ids", "token_ids", "kept_ids", "behavior_logprobs", "support", "finish_reason"):
        assert streamed.column(name).to_pylist() == whole.column(name).to_pylist()[-1:]
    assert streamed.column("temperature").to_pylist() == [None]


def test_pieces_of_several_streams_may_alternate(adapt: Adapt, pieces: list[Any]) -> None:
    woven = [piece for pair in zip(under("a", pieces), under("b", pieces), strict=True) for piece in pair]
    assert adapt("fastdeploy", *woven).require().rollout_ids == ["a/0", "b/0"]


def test_choices_of_one_stream_are_told_apart_by_index(adapt: Adapt, pieces: list[Any]) -> None:
    first, second = under("a", pieces), under("a", pieces, index=1)
    usage = {**first[-1], "usage": {"completion_tokens": 8}}
    batch = adapt("fastdeploy", *first[:-1], *second[:-1], usage).require()
    assert batch.rollout_ids == ["a/0", "a/1"]
    assert batch.column("group_id").to_pylist() == ["a", "a"]


def test_a_piece_may_bring_several_tokens(adapt: Adapt, pieces: list[Any]) -> None:
    one, two = pieces[1]["choices"][0], pieces[2]["choices"][0]
    one["delta"]["completion_token_ids"] += two["delta"]["completion_token_ids"]
    one["sampling_mask"] += two["sampling_mask"]
    one["logprobs"]["content"] += two["logprobs"]["content"]
    assert adapt("fastdeploy", pieces[0], pieces[1], *pieces[3:]).require().column("token_ids").to_pylist() == [
        [11, 10, 19, 15]
    ]


def test_a_stream_without_one_of_its_pieces_is_told_by_its_usage(adapt: Adapt, pieces: list[Any]) -> None:
    del pieces[2]
    result = adapt("fastdeploy", *pieces)
    assert len(result.batch) == 0
    assert [rejected.error for rejected in result.rejected] == [
        "the stream holds 3 tokens, its usage says 4: pieces are missing"
    ]
    kept = result.rejected[0].record
    assert isinstance(kept, dict)
    assert kept["choices"][0]["message"]["completion_token_ids"] == [11, 19, 15]


def test_a_mask_that_a_piece_left_out_is_a_length_that_differs(adapt: Adapt, pieces: list[Any]) -> None:
    del pieces[2]["choices"][0]["sampling_mask"]
    assert [f.kind.value for f in adapt("fastdeploy", *pieces).rejected[0].findings] == ["lengths"]


def test_a_line_that_cannot_be_read_spoils_the_streams_that_it_may_belong_to(tmp_path: Path, pieces: list[Any]) -> None:
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(piece) for piece in pieces]
    path.write_text("\n".join([*lines[:2], '{"id": "chatc', *lines[2:], *map(json.dumps, under("later", pieces))]))
    (result,) = adapt_files(adapter_for("fastdeploy"), [path], Stated())
    assert result.batch.rollout_ids == ["later/0"]
    assert [rejected.place.rpartition(" ")[2] for rejected in result.rejected] == ["3", "1"]
    assert "a piece of the stream could not be read" in str(result.rejected[1].error)


def test_a_piece_of_another_layout_spoils_its_stream_alone(adapt: Adapt, pieces: list[Any]) -> None:
    bad = under("bad", pieces)
    bad[2]["choices"][0]["delta"]["completion_token_ids"] = 7
    result = adapt("fastdeploy", *under("good", pieces), *bad)
    assert result.batch.rollout_ids == ["good/0"]
    assert [str(rejected.error).count("delta.completion_token_ids is 7") for rejected in result.rejected] == [1, 1]
    assert result.rejected[0].record == bad[2]


def test_a_stream_cut_off_is_rejected_with_what_came(adapt: Adapt, pieces: list[Any]) -> None:
    result = adapt("fastdeploy", *pieces[:3], *under("whole", pieces))
    assert result.batch.rollout_ids == ["whole/0"]
    (rejected,) = result.rejected
    assert rejected.error == "the stream has no finish reason: it was cut off, or its last piece is missing"
    assert isinstance(rejected.record, dict)
    assert rejected.record["choices"][0]["message"]["completion_token_ids"] == [11, 10]
    with_usage = adapt("fastdeploy", *pieces[:3], pieces[-1]).rejected
    assert [one.error for one in with_usage] == ["the stream holds 2 tokens, its usage says 4: pieces are missing"]


def test_tokens_after_the_finish_reason_spoil_the_stream(adapt: Adapt, pieces: list[Any]) -> None:
    pieces[2]["choices"][0]["finish_reason"] = "stop"
    result = adapt("fastdeploy", *pieces, *under("good", pieces[:1] + pieces[3:-1]))
    assert result.batch.rollout_ids == ["good/0"]
    errors = [str(one.error) for one in result.rejected]
    assert errors[0].endswith("completion_token_ids is a list of 1; expected no token after the finish reason")
    assert errors[-1].startswith("a piece of the stream does not fit")


@pytest.mark.parametrize("part", ["sampling_mask", "content"])
def test_a_mask_that_stands_with_the_tokens_of_another_piece_spoils_the_stream(
    adapt: Adapt, pieces: list[Any], part: str
) -> None:
    one, two = (pieces[n]["choices"][0] for n in (1, 2))
    if part == "content":
        one, two = one["logprobs"], two["logprobs"]
    one[part], two[part] = [*one[part], *two[part]], []
    result = adapt("fastdeploy", *pieces)
    assert len(result.batch) == 0
    assert f"{part} is a list of 2; expected one entry for each of this piece's 1 ids" in str(result.rejected[0].error)


def test_usage_in_every_piece_does_not_end_a_stream_before_its_other_choices_begin(
    adapt: Adapt, pieces: list[Any]
) -> None:
    first, second = under("a", pieces[:-1]), under("a", pieces[:-1], index=1)
    for choice in (first, second):
        for number, piece in enumerate(choice):
            piece["usage"] = {"completion_tokens": number}
    for end in ([], [{**first[-1], "choices": [], "usage": {"completion_tokens": 8}}]):
        assert adapt("fastdeploy", *first, *second, *end).require().rollout_ids == ["a/0", "a/1"]
    missing = adapt("fastdeploy", *first, *second[:2], *second[3:], *end)
    assert [str(one.error).split(",")[0] for one in missing.rejected] == ["the stream holds 7 tokens"]
    alone = adapt("fastdeploy", *first[:2], *first[3:])
    assert [str(one.error).split(",")[0] for one in alone.rejected] == ["the stream holds 3 tokens"]


def test_streams_whose_clients_went_away_are_held_in_bounded_number(
    pieces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastdeploy_streams, "MAX_SILENCE", 10)
    streams = fastdeploy_streams.Streams()
    given: list[Any] = []

    def add(piece: dict[str, Any]) -> None:
        place = Place(text="", file="", number=0)
        given.extend(streams.add(Tree(value=piece, place=place, size=7)))
        assert len(streams._under_way) <= 6

    for number in range(20):
        for piece in under(f"s{number}", pieces[:2]):
            add(piece)
    assert [tree.value["id"] for tree in given] == [f"s{number}" for number in range(len(given))]
    assert len(given) >= 14
    assert {(str(tree.error).split(":")[0], tree.size) for tree in given} == {("the stream has no finish reason", 14)}
    given.clear()
    add(under("s0", pieces)[2])
    assert "stream s0 was taken for ended long before this piece" in str(given[0].error)


def test_a_usage_that_comes_late_is_held_against_what_was_taken(
    pieces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastdeploy_streams, "MAX_HELD", 0)
    streams = fastdeploy_streams.Streams()
    place = Place(text="", file="", number=0)
    for name, told in (("whole", pieces), ("short", pieces[:2] + pieces[3:])):
        errors = [tree.error for piece in under(name, told) for tree in streams.add(Tree(value=piece, place=place))]
        late = "stream short was taken with 3 tokens, its usage says 4: pieces are missing"
        assert errors == ([None] if name == "whole" else [None, late])


def test_a_stream_of_which_only_the_usage_is_left_is_not_lost_unseen(adapt: Adapt, pieces: list[Any]) -> None:
    result = adapt("fastdeploy", *under("whole", pieces), pieces[-1])
    assert [one.error for one in result.rejected] == ["the stream holds 0 tokens, its usage says 4: pieces are missing"]
    silent = {**pieces[-1], "usage": None}
    assert len(adapt("fastdeploy", *pieces, silent).require()) == 1


def test_an_abort_before_any_token_is_a_response_without_tokens(adapt: Adapt, pieces: list[Any]) -> None:
    end = {**pieces[1]["choices"][0], "finish_reason": "abort", "sampling_mask": None, "logprobs": None}
    end["delta"] = {"completion_token_ids": None, "content": ""}
    batch = adapt("fastdeploy", pieces[0], {**pieces[1], "choices": [end]}).require()
    assert batch.token_ids.lengths.tolist() == [0]
    assert batch.column("finish_reason").to_pylist() == ["abort"]


def test_streams_that_never_tell_their_usage_wait_in_bounded_number(
    tmp_path: Path, pieces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastdeploy_streams, "MAX_HELD", 3)
    streams = fastdeploy_streams.Streams()
    given = []
    for number in range(10):
        for piece in under(f"s{number}", pieces[:-1]):
            tree = Tree(value=piece, place=Place(text="", file="", number=0))
            given += [tree.value["id"] for tree in streams.add(tree)]
            assert len(streams._waiting) + len(streams._under_way) <= 4
    given += [tree.value["id"] for tree in streams.rest()]
    assert given == [f"s{number}" for number in range(10)]


def test_a_recorded_stream_may_stand_in_one_record_with_its_request(
    adapt: Adapt, example: Example, pieces: list[Any]
) -> None:
    tree = {**example("fastdeploy_good.json"), "response": pieces}
    batch = adapt("fastdeploy", tree).require()
    assert batch.column("logprob_domain").to_pylist() == ["kept"]
    assert batch.column("top_k").to_pylist() == [8]
    with pytest.raises(SchemaError, match="response holds 2 replies; expected one reply or the pieces of one stream"):
        adapt("fastdeploy", {**tree, "response": [*pieces, *under("other", pieces)]})
    for lost, told in ((1, "pieces are missing"), (len(pieces) - 2, "pieces are missing")):
        (rejected,) = adapt("fastdeploy", {**tree, "response": pieces[:lost] + pieces[lost + 1 :]}).rejected
        assert told in str(rejected.error)
        again = adapt("fastdeploy", json.loads(rejected.to_json())["record"]).rejected
        assert [one.error for one in again] == [rejected.error]


RAW = {"engine": {"flags": []}}
PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": None}


@pytest.mark.parametrize(
    ("request_", "flags", "domain"),
    [
        ({"temperature": 0.7}, ["--logprobs-mode=processed_logprobs"], "kept"),
        ({"temperature": 1.0, **PENALTIES}, [], "kept"),
        ({"temperature": 0.7, **PENALTIES}, [], "unknown"),
        ({"temperature": 1.0, **PENALTIES, "presence_penalty": 0.5}, [], "unknown"),
        ({"temperature": 1.0}, [], "unknown"),
    ],
)
def test_logprobs_are_over_the_kept_set_only_if_nothing_raw_is_left_in_them(
    adapt: Adapt, example: Example, request_: dict[str, Any], flags: list[str], domain: str
) -> None:
    tree = example("fastdeploy_good.json")
    tree["request"], tree["engine"]["flags"] = request_, flags
    assert adapt("fastdeploy", tree).require().column("logprob_domain").to_pylist() == [domain] * 2
    for choice in tree["response"]["choices"]:
        choice["sampling_mask"] = None
    assert adapt("fastdeploy", tree).require().column("logprob_domain").to_pylist() == ["unknown"] * 2
    stated = Stated(identity=Identity(vocab_size=24), logprob_domain="full")
    assert adapt("fastdeploy", tree, stated=stated).require().column("logprob_domain").to_pylist() == ["full"] * 2


def test_texts_of_tokens_are_no_substitute_for_ids(adapt: Adapt, example: Example) -> None:
    tree = example("fastdeploy_good.json")
    tree["response"]["choices"][0]["message"]["completion_token_ids"] = None
    result = adapt("fastdeploy", tree)
    assert str(result.rejected[0].error).startswith("response.choices[0].message.completion_token_ids is missing")
    assert result.batch.rollout_ids == ["chatcmpl-demo/1"]
    del tree["response"]["choices"][1]["message"]["completion_token_ids"]
    with pytest.raises(SchemaError, match="ask with return_token_ids, since texts of tokens are ambiguous"):
        adapt("fastdeploy", tree)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", "stop"),
        ("tool_calls", "tool_calls"),
        ("abort", "abort"),
        ("pd_reschedule", "unknown"),
        (None, "unknown"),
    ],
)
def test_finish_reasons_without_a_word_in_the_schema_are_unknown(
    adapt: Adapt, example: Example, word: str | None, reason: str
) -> None:
    tree = example("fastdeploy_good.json")
    for choice in tree["response"]["choices"]:
        choice["finish_reason"] = word
    assert adapt("fastdeploy", tree).require().column("finish_reason").to_pylist() == [reason] * 2


def as_objects(value: Any) -> Any:
    """As a client library hands replies over."""
    if isinstance(value, dict):
        return SimpleNamespace(**{name: as_objects(entry) for name, entry in value.items()})
    return [as_objects(entry) for entry in value] if isinstance(value, list) else value


def test_live_replies_are_taken_as_dictionaries_and_as_objects(example: Example, pieces: list[Any]) -> None:
    reply = example("fastdeploy_good.json")["response"]
    from_dict = from_fastdeploy([reply], {"top_k": 8}).require()
    assert from_fastdeploy([as_objects(reply)], {"top_k": 8}).require().arrow.equals(from_dict.arrow)
    assert from_fastdeploy(as_objects(pieces)).require().column("token_ids").to_pylist() == [[11, 10, 19, 15]]
    assert from_fastdeploy(as_objects(pieces), prompt_ids=["p"]).require().rollout_ids == ["p/0"]


@pytest.mark.parametrize("tree", [{"outputs": []}, {"choices": [{"index": 0, "text": "a"}]}, 5, {"choices": 5}])
def test_another_layout_is_refused(adapt: Adapt, tree: Any) -> None:
    with pytest.raises(SchemaError, match=r"line 1: .*; expected"):
        adapt("fastdeploy", tree)


@pytest.mark.parametrize("piece", [{"choices": []}, {"id": 5}, {"id": "a", "choices": [{"index": "x", "delta": {}}]}])
def test_a_piece_without_its_place_is_refused(adapt: Adapt, piece: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="expected"):
        adapt("fastdeploy", {"object": "chat.completion.chunk", **piece})
