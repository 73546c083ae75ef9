"""A Llama model in one GGUF file -> an ordinary Hugging Face folder, its values dequantised and unchanged.

The two formats differ in the order of the query and key rows. GGUF keeps the rows that one rotation
turns beside each other, (2i, 2i+1) of each head; Hugging Face keeps them half a head apart, (i, i + D/2):

    huggingface[h, j, i] = gguf[h, i, j]        h head, i in 0..D/2-1 frequency, j in {0, 1} half

Weights are written in float32: a dequantised value (scale * integer + offset, in float32) has more
bits than float16 or bfloat16 holds, and the folder should be the file's model, not one near it.

Shape legend: O output rows, I input columns.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keptset.schemas.errors import CheckpointError, MissingDependency

if TYPE_CHECKING:
    import gguf
    import numpy as np

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""What `convert` writes."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens: never produced by merges, never split."""


def convert(gguf_file: Path, folder: Path, progress: Callable[[float], None] = lambda done: None) -> None:
    """Writes `FILES` into `folder`, which must exist. `progress` gets the share of weights written, 0 to 1.

    One tensor at a time is dequantised, so memory stays near the size of the largest.

    Raises CheckpointError for a file that is no GGUF file, or whose model this does not know how to
    spell: an architecture other than Llama, scaled or partial rotary positions, an unknown tensor or
    tokenizer. Raises MissingDependency without the packages of the demo extra, and OSError from writing.
    """
    require_packages()
    import gguf

    try:
        reader = gguf.GGUFReader(gguf_file)
    except (ValueError, IndexError) as broken:
        raise CheckpointError(f"{gguf_file} is not a readable GGUF file: {broken}") from broken
    config = _config(reader)
    # Weights last: whatever is not supported is found before the long part.
    tensors = [(_huggingface_name(tensor.name), tensor) for tensor in reader.tensors]
    tokenizer, tokenizer_config = _tokenizer(reader)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: config[name] for name in ids if name in config})
    _write_weights(folder / "model.safetensors", tensors, config, progress)


def require_packages() -> None:
    """Raises MissingDependency where a package that `convert` uses is not installed."""
    for name in ("gguf", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            raise MissingDependency(
                f"reading a GGUF model needs the package {name!r}: pip install 'keptset[rollout,demo]'"
            )


def half_split(weight_OI: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows from GGUF's order of neighbours to Hugging Face's order of halves; same shape."""
    rows, columns = weight_OI.shape
    return weight_OI.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _read(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise CheckpointError(f"the GGUF file's metadata lack {key!r}")
    return field.contents()


def _read_or_none(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _config(reader: gguf.GGUFReader) -> dict[str, Any]:
    architecture = _read(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"a GGUF model of architecture {architecture!r} is not supported; only 'llama' is")
    hidden = _read(reader, "llama.embedding_length")
    heads = _read(reader, "llama.attention.head_count")
    head_dim = _read_or_none(reader, "llama.attention.key_length") or hidden // heads
    scaling = _read_or_none(reader, "llama.rope.scaling.type")
    if scaling not in (None, "none"):
        raise CheckpointError(f"a GGUF model with rotary scaling {scaling!r} is not supported")
    if (rotated := _read_or_none(reader, "llama.rope.dimension_count")) not in (None, head_dim):
        raise CheckpointError(f"only {rotated} of {head_dim} dimensions of a head are rotated: not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_read(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": _read(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _read(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _read_or_none(reader, "llama.attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _read(reader, "llama.context_length"),
        "rms_norm_eps": _shortest(_read(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(_read_or_none(reader, "llama.rope.freq_base") or 10000.0),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token_id := _read_or_none(reader, f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = token_id
    return config


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 is how GGUF keeps 1e-5."""
    import numpy as np

    return float(str(np.float32(value)))


def _tokenizer(reader: gguf.GGUFReader) -> tuple[Any, dict[str, Any]]:
    """The byte-level BPE of the file as a `tokenizers.Tokenizer`, and its tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, splitting = _read(reader, "tokenizer.ggml.model"), _read(reader, "tokenizer.ggml.pre")
    if (kind, splitting) != ("gpt2", "smollm"):
        raise CheckpointError(f"a GGUF tokenizer of kind {kind!r} that splits as {splitting!r} is not supported")
    tokens = _read(reader, "tokenizer.ggml.tokens")
    types = _read(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _read(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    config: dict[str, Any] = {
        # Any other class name makes transformers rebuild the splitting rules instead of reading them.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _read(reader, "llama.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := _read_or_none(reader, f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token_id]
    if (template := _read_or_none(reader, "tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return tokenizer, config


def _huggingface_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or not layer.isdigit() or part not in _LAYER_NAMES:
        raise CheckpointError(f"the GGUF file holds a tensor that is no part of a plain Llama model: {name!r}")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}"


def _write_weights(
    path: Path,
    tensors: list[tuple[str, gguf.ReaderTensor]],
    config: dict[str, Any],
    progress: Callable[[float], None],
) -> None:
    """A safetensors file, tensor by tensor: header length, JSON header, then the values one after another."""
    import gguf
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        # GGUF lists dimensions innermost first.
        shape = [int(size) for size in reversed(tensor.shape)]
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Padded so that the values start at a multiple of 8, as readers that map the file expect.
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            if name.endswith("q_proj.weight"):
                values = half_split(values, config["num_attention_heads"])
            elif name.endswith("k_proj.weight"):
                values = half_split(values, config["num_key_value_heads"])
            file.write(np.ascontiguousarray(values.reshape(header[name]["shape"])).data)
            progress(header[name]["data_offsets"][1] / end)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
