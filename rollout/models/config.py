"""What a decoder computes, read from a config.json; what would change results and is not built is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keptset.rollout.models.json_fields import Fields, read_json_object
from keptset.rollout.models.rope_settings import RopeSettings, rope_settings

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# What the architectures assume where config.json is silent.
_DEFAULT_CONTEXT = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_HEAD_DIM = {"qwen3": 128}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and constants of a Llama, Qwen2 or Qwen3 decoder."""

    model_type: str
    """`llama`, `qwen2` or `qwen3`."""
    vocab_size: int
    """Rows of the embedding; token ids lie in [0, vocab_size)."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_layers: int
    """Decoder blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; each serves num_heads / num_kv_heads query heads."""
    head_dim: int
    """Width of one head, even."""
    max_position_embeddings: int
    """Longest sequence, prompt and response together, in tokens."""
    rms_norm_eps: float
    """Added to the mean square before its root."""
    rope: RopeSettings
    """Rotary position embedding."""
    tie_word_embeddings: bool
    """Whether the head is the embedding."""
    qkv_bias: bool
    """Whether query, key and value projections have biases."""
    output_bias: bool
    """Whether the attention's output projection has one."""
    mlp_bias: bool
    """Whether the MLP's projections have them."""
    qk_norm: bool
    """Whether each query and key head is RMS-normalised before rotation."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a response: generation_config.json's where it names some, else config.json's."""
    digest: str
    """sha256 of the canonical config.json (`model_digest` of a rollout's identity)."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> DecoderConfig:
        """Read config.json, and generation_config.json where there is one.

        Errors: CheckpointError names file, key and value, and says what is supported.
        """
        folder = Path(folder)
        config = read_json_object(folder / "config.json")
        generation_path = folder / "generation_config.json"
        eos_token_ids: tuple[int, ...] = ()
        if generation_path.exists():
            eos_token_ids = read_json_object(generation_path).token_ids("eos_token_id")
        return _build(config, eos_token_ids)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
        """From the parsed config.json; `where` names it in errors."""
        return _build(Fields(values, where), ())


def config_digest(values: Mapping[str, Any]) -> str:
    """sha256 over the JSON with sorted keys and no white space: formatting and key order do not matter.

    >>> config_digest({"b": 1, "a": 2}) == config_digest({"a": 2, "b": 1})
    True
    """
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _build(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderConfig:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise config.refuse("model_type", f"supported are {', '.join(ARCHITECTURES)}")
    _refuse_what_is_not_built(config, model_type)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"it must divide num_attention_heads = {num_heads}")
    if config.get("head_dim") is None and model_type not in _DEFAULT_HEAD_DIM and hidden_size % num_heads:
        raise config.refuse("head_dim", f"hidden_size {hidden_size} is no multiple of {num_heads} heads, so name it")
    head_dim = config.integer("head_dim", _DEFAULT_HEAD_DIM.get(model_type, hidden_size // num_heads))
    if head_dim % 2:
        raise config.refuse("head_dim", f"heads of {head_dim} cannot be split into halves for rotation")
    attention_bias = model_type != "qwen2" and config.flag("attention_bias")
    built = DecoderConfig(
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings", _DEFAULT_CONTEXT[model_type]),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_settings(config),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=model_type == "llama" and config.flag("mlp_bias"),
        qk_norm=model_type == "qwen3",
        eos_token_ids=eos_token_ids or config.token_ids("eos_token_id"),
        digest=config_digest(config.values),
    )
    _refuse_windows(config, built)
    return built


def _refuse_what_is_not_built(config: Fields, model_type: str) -> None:
    architecture = ARCHITECTURES[model_type]
    if config.get("architectures", [architecture]) != [architecture]:
        raise config.refuse("architectures", f"model_type {model_type!r} is supported as [{architecture!r}]")
    if config.get("hidden_act", "silu") != "silu":
        raise config.refuse("hidden_act", "supported is 'silu'")
    if config.get("quantization_config") is not None:
        raise config.refuse(
            "quantization_config", "quantised weights are not supported; use a float32, bfloat16 or float16 checkpoint"
        )
    if config.flag("rope_interleaved"):
        raise config.refuse("rope_interleaved", "supported is the half-split rotation (false)")
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.refuse("partial_rotary_factor", "only whole-head rotation (1.0) is supported")


def _refuse_windows(config: Fields, built: DecoderConfig) -> None:
    """Refuse attention that does not see the whole sequence; a window that is configured and not in use is fine."""
    layer_types = config.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise config.refuse("layer_types", "supported is 'full_attention' in every layer")
    window = config.get("sliding_window")
    if window is None or not config.flag("use_sliding_window", built.model_type == "llama"):
        return
    first_windowed = 0 if built.model_type == "llama" else config.integer("max_window_layers", 28, least=0)
    if first_windowed < built.num_layers and config.integer("sliding_window") < built.max_position_embeddings:
        raise config.refuse("sliding_window", "supported is attention over the whole sequence (null)")
