"""Weights in every stored form, and a clear error for every way a checkpoint can be broken."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keptset.rollout.models.checkpoint import Checkpoint
from keptset.rollout.models.config import DecoderConfig
from keptset.rollout.models.safetensors_file import SafetensorsFile
from keptset.schemas.errors import CheckpointError

pytest.importorskip("paddle")
from keptset.rollout.models.parameters import weight_shapes

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_checkpoints"
EMBEDDING = "model.embed_tokens.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def tiny_weights(name: str = "llama_tied") -> dict[str, np.ndarray]:
    return load_file(TINY / name / "model.safetensors")


def opened(folder: Path, name: str = "llama_tied") -> Checkpoint:
    return Checkpoint(folder, weight_shapes(DecoderConfig.from_folder(TINY / name)))


def save_sharded(folder: Path, weights: dict[str, np.ndarray], shards: int = 3) -> dict[str, str]:
    """Write shards and their index; returns the weight map."""
    names = sorted(weights)
    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: weights[name] for name in names if weight_map[name] == shard}, folder / shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_raw(path: Path, header: object, data: bytes) -> None:
    """A safetensors file byte by byte, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("name", ["llama_tied", "llama_untied_llama3rope", "qwen2_bias", "qwen3_qknorm"])
def test_float32_reads_as_stored(name: str) -> None:
    checkpoint = opened(TINY / name, name)
    for tensor, values in tiny_weights(name).items():
        np.testing.assert_array_equal(checkpoint.read(tensor), values)


def test_float16_reads_exactly(tmp_path: Path) -> None:
    halves = {name: values.astype(np.float16) for name, values in tiny_weights().items()}
    save_file(halves, tmp_path / "model.safetensors")
    checkpoint = opened(tmp_path)
    for name, values in halves.items():
        read = checkpoint.read(name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, values.astype(np.float32))


def test_bfloat16_reads_exactly(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 0.0], [3.140625, 1e-40, -np.inf]], dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2")
    write_raw(tmp_path / "a", {"x": entry("BF16", [2, 3], 0, 12)}, bits.tobytes())
    truth = (bits.astype(np.uint32) << 16).view(np.float32).reshape(2, 3)
    read = SafetensorsFile(tmp_path / "a").read("x")
    np.testing.assert_array_equal(read, truth)
    np.testing.assert_array_equal(read[0], [1.0, -2.5, 0.0])
    assert read[1, 0] == 3.140625 and read[1, 2] == -np.inf


def test_tensors_at_odd_offsets_and_empty_ones_read(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    header = json.dumps({"e": entry("F32", [0, 4], 0, 0), "x": entry("F32", [2, 3], 0, 24)}).encode()
    for padding in range(4):
        write_raw(tmp_path / "a", header + b" " * padding, values.tobytes())
        file = SafetensorsFile(tmp_path / "a")
        np.testing.assert_array_equal(file.read("x"), values.reshape(2, 3))
        assert file.read("e").shape == (0, 4)


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    write_raw(tmp_path / "a", {"__metadata__": {"format": "pt"}, "x": entry("F32", [1], 0, 4)}, bytes(4))
    assert SafetensorsFile(tmp_path / "a").names == ["x"]


def test_shards_read_as_one(tmp_path: Path) -> None:
    weights = tiny_weights()
    save_sharded(tmp_path, weights)
    checkpoint = opened(tmp_path)
    for name, values in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), values)


def test_a_tied_head_stored_twice_and_old_rotary_constants_are_fine(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["lm_head.weight"] = weights[EMBEDDING].copy()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    opened(tmp_path)


def edited(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        weights = tiny_weights()
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return write


def truncated(folder: Path) -> None:
    shutil.copy(TINY / "llama_tied" / "model.safetensors", folder)
    os.truncate(folder / "model.safetensors", 100_000)


def without_a_shard(folder: Path) -> None:
    save_sharded(folder, tiny_weights())
    (folder / "model-00002-of-00003.safetensors").unlink()


def with_a_shard_that_lacks_a_tensor(folder: Path) -> None:
    weight_map = save_sharded(folder, tiny_weights())
    path = folder / weight_map[Q_PROJ]
    save_file({name: values for name, values in load_file(path).items() if name != Q_PROJ}, path)


def with_a_shard_that_holds_another_tensor(folder: Path) -> None:
    weight_map = save_sharded(folder, tiny_weights())
    path = folder / weight_map[Q_PROJ]
    save_file(load_file(path) | {"more": np.zeros(1, np.float32)}, path)


def with_a_shard_elsewhere(folder: Path) -> None:
    weight_map = save_sharded(folder, tiny_weights())
    write_index(folder, weight_map | {Q_PROJ: "../model.safetensors"})


def with_an_index_of_no_names(folder: Path) -> None:
    save_sharded(folder, tiny_weights())
    write_index(folder, ["model.safetensors"])


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda folder: None, ["neither model.safetensors nor model.safetensors.index.json"]),
        (edited(lambda w: w.pop(Q_PROJ)), [Q_PROJ, "1 tensors are missing"]),
        (edited(lambda w: w.update(extra=np.zeros(2, np.float32))), ["model.safetensors", "'extra'", "unexpected"]),
        (edited(lambda w: w.update({Q_PROJ: w[Q_PROJ][:-1]})), ["model.safetensors", Q_PROJ, "[47, 48]", "[48, 48]"]),
        (
            edited(lambda w: w.update({"lm_head.weight": w[EMBEDDING] + 1})),
            ["model.safetensors", "lm_head.weight", "ties"],
        ),
        (truncated, ["model.safetensors", "truncated"]),
        (without_a_shard, ["model-00002-of-00003.safetensors", "no such file"]),
        (with_a_shard_that_lacks_a_tensor, [".safetensors", Q_PROJ, "missing"]),
        (with_a_shard_that_holds_another_tensor, [".safetensors", "'more'", "unexpected"]),
        (with_a_shard_elsewhere, ["model.safetensors.index.json", Q_PROJ, "../model.safetensors"]),
        (with_an_index_of_no_names, ["model.safetensors.index.json", "weight_map"]),
    ],
)
def test_a_broken_folder_is_refused_by_file_and_tensor(
    tmp_path: Path, write: Callable[[Path], None], named: list[str]
) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    for part in (str(tmp_path), *named):
        assert part in str(caught.value)


def test_a_missing_head_says_how_tying_is_said(tmp_path: Path) -> None:
    save_file(tiny_weights(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head.weight'.*tie_word_embeddings"):
        opened(tmp_path, "llama_untied_llama3rope")


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        opened(tmp_path / "absent")


GOOD = entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be read"),
        (b"GGUF", "less than a header"),
        (b"\xff" * 16, "truncated or foreign"),
        (struct.pack("<Q", 3) + b"{]}", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (({"x": 3}, b""), "'x' lacks"),
        (({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)), "'x' lacks"),
        (({"x": entry("F32", [-2, -1], 0, 8)}, bytes(8)), "'x' lacks"),
        (({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, bytes(8)), "'x' lacks"),
        (({"x": entry("F32", [3], 0, 8)}, bytes(8)), "'x' of shape (3,) and F32 spans 8 bytes"),
        (({"x": entry("F32", [2], 8, 0)}, bytes(8)), "'x' of shape"),
        (({"x": GOOD}, bytes(4)), "truncated"),
        (({"x": GOOD}, bytes(12)), "foreign bytes"),
        (({"x": GOOD, "y": entry("F32", [2], 4, 12)}, bytes(12)), "'y' begins"),
        (({"x": GOOD, "y": entry("F32", [1], 12, 16)}, bytes(16)), "'y' begins"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes | tuple[object, bytes], says: str) -> None:
    path = tmp_path / "model.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write_raw(path, *content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value) and says in str(caught.value)


def test_a_dtype_that_is_not_supported_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"x": entry("F8_E4M3", [4], 0, 4)}, bytes(4))
    with pytest.raises(CheckpointError, match="'x' is F8_E4M3; supported are float32"):
        SafetensorsFile(path).read("x")


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    save_file({"x": np.arange(4, dtype=np.float32), "y": np.ones((2, 2), np.float16)}, whole)
    content = whole.read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(tmp_path / "cut")
