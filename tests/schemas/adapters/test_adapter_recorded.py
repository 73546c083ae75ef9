"""Recorded output in every format: read alike, streamed, and refused by file and line."""

import builtins
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keptset.schemas.adapters import Stated, adapt_files, adapter_for, recorded
from keptset.schemas.adapters.recorded import read_trees
from keptset.schemas.columns import Identity
from keptset.schemas.errors import DamagedFile, InvalidInput, MissingDependency, SchemaError, StorageError

Example = Callable[[str], Any]
STATED = Stated(identity=Identity(vocab_size=24))


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def numbered(tree: dict[str, Any], number: int) -> dict[str, Any]:
    return {**tree, "request": {**tree["request"], "request_id": f"r{number}"}}


def test_one_tree_a_list_of_them_lines_and_their_gzip_are_read_alike(tmp_path: Path, example: Example) -> None:
    tree = example("vllm_good.json")
    text = json.dumps(tree)
    files = [
        write(tmp_path / "a.json", json.dumps(tree, indent=1)),
        write(tmp_path / "b.json", f"[{text}]"),
        write(tmp_path / "c.jsonl", f"\n{text}\n\n"),
        write(tmp_path / "d.ndjson", text),
        write(tmp_path / "e.json.gz", gzip.compress(text.encode())),
        write(tmp_path / "f.jsonl.gz", gzip.compress(text.encode())),
    ]
    batches = [next(adapt_files(adapter_for("vllm"), [file], STATED)).require().arrow for file in files]
    assert all(batch.equals(batches[0]) for batch in batches)


def test_lines_become_batches_before_all_of_them_are_read(
    tmp_path: Path, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = example("vllm_good.json")
    monkeypatch.setattr(recorded, "BLOCK", 3 * len(json.dumps(tree)))
    read = []
    spied = recorded._parsed
    monkeypatch.setattr(recorded, "_parsed", lambda text: read.append(1) or spied(text))
    file = write(tmp_path / "a.jsonl", "".join(json.dumps(numbered(tree, n)) + "\n" for n in range(50)))
    results = adapt_files(adapter_for("vllm"), [file], STATED)
    assert len(next(results).batch) == 6
    assert len(read) == 3
    assert sum(len(result.batch) for result in results) == 94


def test_lines_that_are_all_rejected_or_come_again_are_not_held_either(
    tmp_path: Path, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, short = example("vllm_good.json"), example("vllm_good.json")
    for choice in short["response"]["choices"]:
        choice["sampling_mask"].pop()
    other = {**first, "response": {"error": "too long"}}
    trees = [first] * 10 + [numbered(short, n) for n in range(10)] + [other] * 10 + [7] * 10
    file = write(tmp_path / "a.jsonl", "".join(json.dumps(tree) + "\n" for tree in trees))
    monkeypatch.setattr(recorded, "BLOCK", 3 * 1024)
    results = list(adapt_files(adapter_for("vllm"), [file], STATED))
    assert max(len(result.rejected) for result in results) <= 4
    assert sum(len(result.rejected) for result in results) == 40
    assert sum(len(result.batch) for result in results) == 2
    assert len(results) >= 15


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.msgpack"])
def test_trees_tell_the_bytes_that_they_were_read_from(tmp_path: Path, name: str) -> None:
    trees = [{"x": list(range(n))} for n in range(3)]
    if name == "a.msgpack":
        msgpack = pytest.importorskip("msgpack", reason="prime-rl files are msgpack; install the extra [prime-rl]")
        text = msgpack.packb(trees)
    else:
        text = (json.dumps(trees) if name == "a.json" else "".join(json.dumps(tree) + "\n" for tree in trees)).encode()
    file = write(tmp_path / name, gzip.compress(text) if name.endswith(".gz") else text)
    told = sum(tree.size for tree in read_trees(file, msgpack=name == "a.msgpack"))
    assert len(text) - 2 <= told <= len(text)  # an array's header, or a rest of the division, may be left out


def test_a_line_that_is_no_json_is_rejected_as_it_stands_and_the_others_go_on(tmp_path: Path, example: Example) -> None:
    tree = example("vllm_good.json")
    lines = [json.dumps(numbered(tree, 0)), '{"choices": [', "\xff", json.dumps(numbered(tree, 1))]
    file = tmp_path / "a.jsonl"
    file.write_bytes("\n".join(lines).encode("latin-1"))
    (result,) = adapt_files(adapter_for("vllm"), [file], STATED)
    assert len(result.batch) == 4
    assert [(r.place, r.record) for r in result.rejected] == [
        (f"{file} line 2", '{"choices": [\n'),
        (f"{file} line 3", "\ufffd\n"),
    ]
    assert all(str(r.error).startswith("not JSON") for r in result.rejected)


def test_a_later_record_of_another_layout_is_rejected_whole(tmp_path: Path, example: Example) -> None:
    file = write(tmp_path / "a.json", json.dumps([example("vllm_good.json"), {"error": "too long"}, 7]))
    (result,) = adapt_files(adapter_for("vllm"), [file], STATED)
    assert [(r.place, r.record) for r in result.rejected] == [
        (f"{file} entry 1", {"error": "too long"}),
        (f"{file} entry 2", 7),
    ]


def test_the_first_record_of_each_file_decides_whose_it_is_and_what_came_before_is_given(
    tmp_path: Path, example: Example
) -> None:
    good = write(tmp_path / "a.json", json.dumps(example("vllm_good.json")))
    other = write(tmp_path / "b.json", json.dumps(example("sglang_good.json")))
    results = adapt_files(adapter_for("vllm"), [good, other], STATED)
    assert len(next(results).require()) == 2
    with pytest.raises(SchemaError, match=r"b.json: response is a list of 2; expected an object with a field choices"):
        next(results)


DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.json", b"{", SchemaError, r"a.json: not JSON: .* \(one value per line needs a name that ends in .jsonl\)"),
        ("a.json", b"\xff\xfe", SchemaError, "a.json: not JSON"),
        ("a.json", DEEP, SchemaError, "a.json: nested too deeply|a.json: not JSON"),
        ("a.json", b"9" * 5000, SchemaError, "a.json: not JSON"),
        ("a.jsonl", b"{", SchemaError, "a.jsonl line 1: not JSON"),
        ("a.jsonl.gz", b"not gzip", DamagedFile, "a.jsonl.gz is cut off or not what gzip wrote"),
        ("a.json.gz", gzip.compress(b"{}")[:-6], DamagedFile, "a.json.gz is cut off or not what gzip wrote"),
        ("a.txt", b"", InvalidInput, "a.txt: the name says no format that is read here; rename it to end in .json/"),
        ("a.msgpack", b"\x90", InvalidInput, "the name says no format"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(adapt_files(adapter_for("vllm"), [write(tmp_path / name, content)]))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone.json cannot be read"):
        list(read_trees(tmp_path / "gone.json"))


@pytest.mark.parametrize(
    "content", [b"\xc1", b"\x80", b"\x91", b"\x91\xc1", b"", b"\x91\xa1\xff", b"\x90\x90", b"\x91" * 3000]
)
def test_bytes_that_are_no_msgpack_list_are_damage(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("msgpack", reason="prime-rl files are msgpack; install the extra [prime-rl]")
    with pytest.raises((DamagedFile, SchemaError)):
        list(adapt_files(adapter_for("prime_rl"), [write(tmp_path / "a.msgpack", content)]))


def test_an_empty_list_holds_nothing_and_is_no_error(tmp_path: Path) -> None:
    (result,) = adapt_files(adapter_for("vllm"), [write(tmp_path / "a.json", "[]")])
    assert len(result.require()) == 0


def test_msgpack_that_is_not_installed_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "msgpack":
            raise ImportError("No module named 'msgpack'")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"needs the package msgpack: pip install 'keptset\[prime-rl\]'"):
        list(adapt_files(adapter_for("prime_rl"), [write(tmp_path / "a.msgpack", b"\x90")]))
