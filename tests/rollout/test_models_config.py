"""config.json in every spelling that is supported; a refusal for everything else."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from keptset.rollout.models.config import DecoderConfig
from keptset.rollout.models.rope_settings import Llama3Scaling
from keptset.schemas.errors import CheckpointError

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_checkpoints"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 96,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "vocab_size": 160,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = QWEN2 | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
LLAMA3_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}


def test_a_sparse_llama_config_takes_its_architectures_defaults() -> None:
    config = DecoderConfig.from_dict(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (6, 8, 2048)
    assert (config.rms_norm_eps, config.rope.theta, config.rope.scaling) == (1e-6, 10000.0, None)
    assert not (
        config.tie_word_embeddings or config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm
    )
    assert config.eos_token_ids == ()


def test_each_architecture_has_its_biases_and_norms() -> None:
    def traits(values: dict) -> tuple[bool, bool, bool, bool]:
        config = DecoderConfig.from_dict(values)
        return config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert traits(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True, False)
    assert traits(QWEN2) == (True, False, False, False)
    assert traits(QWEN3) == (False, False, False, True)
    assert traits(QWEN3 | {"attention_bias": True}) == (True, True, False, True)


def test_a_qwen3_config_without_head_dim_means_128() -> None:
    assert DecoderConfig.from_dict(QWEN3).head_dim == 128
    assert DecoderConfig.from_dict(QWEN3 | {"head_dim": 16}).head_dim == 16
    assert DecoderConfig.from_dict(LLAMA | {"head_dim": None}).head_dim == 8


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE | {"type": "llama3"}},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3_ROPE | {"rope_type": "llama3"}},
        {"rope_parameters": LLAMA3_ROPE | {"rope_type": "llama3", "rope_theta": 5e5}},
        {
            "rope_theta": 5e5,
            "rope_parameters": LLAMA3_ROPE | {"rope_type": "llama3", "rope_theta": 5e5},
            "rope_scaling": LLAMA3_ROPE | {"rope_type": "llama3"},
        },
    ],
)
def test_llama3_rope_reads_alike_in_every_spelling(spelling: dict) -> None:
    rope = DecoderConfig.from_dict(LLAMA | spelling).rope
    assert rope.theta == 5e5
    assert rope.scaling == Llama3Scaling(**LLAMA3_ROPE)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1000000, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 1.0}},
    ],
)
def test_default_rope_reads_alike_in_every_spelling(spelling: dict) -> None:
    rope = DecoderConfig.from_dict(LLAMA | spelling).rope
    assert (rope.theta, rope.scaling) == (1e6, None)


@pytest.mark.parametrize(
    ("values", "key", "supported"),
    [
        ({"model_type": "mistral"}, "model_type", "llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type", "llama, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "model_type", "llama, qwen2, qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures", "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act", "silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "bfloat16"),
        ({"rope_interleaved": True}, "rope_interleaved", "false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "1.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "type", "llama3"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type", "llama3"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor", "1.0"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2, 3]}}, "mrope_section", "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention", "rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling", "object"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor", "required"),
        ({"rope_scaling": LLAMA3_ROPE | {"type": "llama3", "high_freq_factor": 1.0}}, "high_freq_factor", "exceed"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "rope_theta", "disagrees"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LLAMA3_ROPE | {"type": "llama3"}},
            "rope_scaling",
            "disagrees",
        ),
        ({"sliding_window": 1024}, "sliding_window", "null"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "full_attention"),
        ({"num_key_value_heads": 4}, "num_key_value_heads", "divide"),
        ({"head_dim": 7}, "head_dim", "halves"),
        ({"hidden_size": 50}, "head_dim", "name it"),
        ({"hidden_size": "48"}, "hidden_size", "whole number"),
        ({"hidden_size": True}, "hidden_size", "whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", ">= 1"),
        ({"vocab_size": None}, "vocab_size", "required"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "> 0"),
        ({"rope_theta": float("inf")}, "rope_theta", "finite"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "token id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id", "token id"),
    ],
)
def test_what_would_change_results_is_refused_by_file_key_and_value(values: dict, key: str, supported: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        DecoderConfig.from_dict(LLAMA | values, where="some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json")
    assert f"{key} is " in message
    assert supported in message.split(f"{key} is ", 1)[1]


def test_a_sliding_window_in_use_is_refused_and_an_unused_one_is_not() -> None:
    unused = {"sliding_window": 4096, "use_sliding_window": False}
    beyond_the_layers = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}
    wider_than_the_context = {"sliding_window": 32768, "use_sliding_window": True, "max_window_layers": 0}
    for fine in (unused, beyond_the_layers, wider_than_the_context):
        DecoderConfig.from_dict(QWEN2 | fine)
    with pytest.raises(CheckpointError, match="sliding_window is 4096"):
        DecoderConfig.from_dict(QWEN2 | beyond_the_layers | {"max_window_layers": 1})


def test_the_digest_ignores_layout_and_sees_values(tmp_path: Path) -> None:
    digests = set()
    for text in (json.dumps(LLAMA), json.dumps(dict(reversed(LLAMA.items())), indent=2)):
        (tmp_path / "config.json").write_text(text)
        digests.add(DecoderConfig.from_folder(tmp_path).digest)
    assert len(digests) == 1
    (digest,) = digests
    canonical = (
        b'{"architectures":["LlamaForCausalLM"],"hidden_size":48,"intermediate_size":96,"model_type":"llama",'
        b'"num_attention_heads":6,"num_hidden_layers":2,"vocab_size":160}'
    )
    assert digest == hashlib.sha256(canonical).hexdigest()
    assert DecoderConfig.from_dict(LLAMA | {"vocab_size": 161}).digest != digest


def test_generation_config_names_the_stop_tokens_where_it_has_some(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert DecoderConfig.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert DecoderConfig.from_folder(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert DecoderConfig.from_folder(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{", "not JSON"), (b"\xff\xfe\x00", "not JSON"), (b"[1]", "JSON list"), (b"[" * 100_000, "not JSON")],
)
def test_a_damaged_config_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        DecoderConfig.from_folder(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_an_absent_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        DecoderConfig.from_folder(tmp_path)


def test_the_fixtures_read_as_what_they_are() -> None:
    read = {folder.name: DecoderConfig.from_folder(folder) for folder in sorted(TINY.iterdir())}
    assert [name for name, config in read.items() if config.tie_word_embeddings] == ["llama_tied", "qwen3_qknorm"]
    assert [name for name, config in read.items() if config.rope.scaling] == ["llama_untied_llama3rope"]
    assert read["qwen3_qknorm"].head_dim == 16
    assert all(np.log2(config.max_position_embeddings) == 8 for config in read.values())
