"""Prompt files in every form that is read."""

import json
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keptset.schemas.errors import InvalidInput, StorageError
from keptset.scripts.prompts import PromptFile

TALK = [{"role": "user", "content": "w1 w2"}]


class Words:
    """A tokenizer of words w0, w1, ... whose chat template says `w9` first."""

    def __init__(self, template=None):
        self.template = template

    def encode(self, text):
        return np.array([int(word[1:]) for word in text.split()], np.int32)

    def encode_chat(self, messages):
        return np.array([9, *self.encode(messages[0]["content"])], np.int32)


def written(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_messages_texts_and_token_ids_stand_side_by_side(tmp_path, name):
    rows = [
        {"prompt_id": "a", "messages": TALK, "x_level": 1},
        {"prompt_id": "b", "text": "w3 w4", "x_level": 2},
        {"token_ids": [5, 6], "x_level": 3},
    ]
    columns = ("prompt_id", "messages", "text", "token_ids", "x_level")
    if name == "p.parquet":
        rows = [{column: row.get(column) for column in columns} for row in rows]
    file = PromptFile(written(tmp_path / name, rows))
    assert file.prompt_ids == ["a", "b", "3"]
    assert file.extra_types == {"x_level": pa.int64()}
    prompts = [entry.encode(Words("a template")) for entry in file.entries()]
    assert [prompt.token_ids.tolist() for prompt in prompts] == [[9, 1, 2], [3, 4], [5, 6]]
    assert [prompt.extra for prompt in prompts] == [{"x_level": 1}, {"x_level": 2}, {"x_level": 3}]
    assert prompts[0].token_ids.dtype == np.int32


def test_without_a_template_a_conversation_is_its_contents(tmp_path):
    (entry,) = PromptFile(written(tmp_path / "p.jsonl", [{"messages": [*TALK, *TALK]}])).entries()
    assert entry.encode(Words()).token_ids.tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize(("value", "ids"), [("w3", [3]), (TALK, [9, 1, 2]), ([4, 5], [4, 5])])
def test_any_column_may_hold_the_prompts_whatever_they_are(tmp_path, value, ids):
    path = written(tmp_path / "p.jsonl", [{"question": value, "text": "w7", "key": 11}])
    file = PromptFile(path, prompt_column="question", id_column="key")
    (entry,) = file.entries()
    assert entry.encode(Words("a template")).token_ids.tolist() == ids and file.prompt_ids == ["11"]


def test_a_column_without_prompts_is_told_with_those_that_are_there(tmp_path):
    path = written(tmp_path / "p.parquet", [{"text": "w7", "score": 1.5}])
    with pytest.raises(
        InvalidInput, match="row 1: score holds neither messages nor text nor token ids; .* text, score"
    ):
        PromptFile(path, prompt_column="score")


def test_own_columns_get_one_type_for_the_whole_file(tmp_path):
    rows = [{"text": "w1"}, {"text": "w2", "x_a": None}, {"text": "w3", "x_a": 1}, {"text": "w4", "x_a": 2.5}]
    assert PromptFile(written(tmp_path / "p.jsonl", rows)).extra_types == {"x_a": pa.float64()}
    with pytest.raises(InvalidInput, match="line 2: x_a does not fit the lines before it"):
        PromptFile(written(tmp_path / "q.jsonl", [{"text": "w1", "x_a": 1}, {"text": "w2", "x_a": "one"}]))


def test_a_model_without_a_tokenizer_takes_token_ids_only(tmp_path):
    entries = list(PromptFile(written(tmp_path / "p.jsonl", [{"token_ids": [1]}, {"text": "w1"}])).entries())
    assert entries[0].encode(None).token_ids.tolist() == [1]
    with pytest.raises(InvalidInput, match=r"p\.jsonl line 2: the model's folder has no tokenizer\.json"):
        entries[1].encode(None)


@pytest.mark.parametrize("value", [["x"], [99999999999], [-1], [1.5], [[1], [2]], [None], [True]])
def test_what_cannot_be_encoded_is_told_by_line(tmp_path, value):
    (entry,) = PromptFile(written(tmp_path / "p.jsonl", [{"token_ids": value}])).entries()
    with pytest.raises(InvalidInput, match="line 1: "):
        entry.encode(None)


def test_files_that_cannot_be_read_are_told_apart_from_wrong_ones(tmp_path):
    broken = tmp_path / "p.parquet"
    broken.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(StorageError, match="cannot be read as Parquet"):
        PromptFile(broken)
    with pytest.raises(StorageError, match="cannot be read"):
        PromptFile(tmp_path / "nothing.parquet")
    (tmp_path / "q.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(StorageError, match="cannot be read"):
        PromptFile(tmp_path / "q.jsonl")


def test_entries_are_read_as_they_are_asked_for(tmp_path):
    rows = [{"text": f"w{i}"} for i in range(5000)]
    entries = PromptFile(written(tmp_path / "p.parquet", rows)).entries()
    assert isinstance(entries, types.GeneratorType)
    assert next(entries).value == "w0"
