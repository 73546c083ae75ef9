"""How Hugging Face's tensors become the decoder's, and back: names, shapes, and one fused projection.

Checkpoints store projections as [out, in]; the decoder multiplies rows from the left and keeps [in, out], which CPU
matrix kernels read fastest. Query, key and value are one matrix, so that a step makes one product of three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from keptset.rollout.models.checkpoint import EMBEDDING, HEAD
from keptset.rollout.models.config import DecoderConfig

FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One tensor of the decoder and the checkpoint tensors it is made of."""

    key: str
    """The decoder's name, within its layer."""
    names: tuple[str, ...]
    """Hugging Face names, in order of their output rows."""
    outs: tuple[int, ...]
    """Output rows of each."""
    ins: int | None = None
    """Columns; None for a vector."""
    transposed: bool = False
    """Whether the decoder keeps it as [in, out]."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each checkpoint tensor."""
        columns = () if self.ins is None else (self.ins,)
        return {name: (out, *columns) for name, out in zip(self.names, self.outs, strict=True)}


def table_specs(config: DecoderConfig) -> list[ParameterSpec]:
    """Tensors outside the blocks: `embedding`, `final_norm`, and `head` unless it is tied."""
    vocab, hidden = config.vocab_size, config.hidden_size
    specs = [
        ParameterSpec(key="embedding", names=(EMBEDDING,), outs=(vocab,), ins=hidden),
        ParameterSpec(key="final_norm", names=(FINAL_NORM,), outs=(hidden,)),
    ]
    if not config.tie_word_embeddings:
        specs.append(ParameterSpec(key="head", names=(HEAD,), outs=(vocab,), ins=hidden))
    return specs


def layer_specs(config: DecoderConfig, layer: int) -> list[ParameterSpec]:
    """Tensors of one decoder block."""
    prefix = f"model.layers.{layer}."
    hidden, ffn = config.hidden_size, config.intermediate_size
    heads = (config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2)
    projections = [
        ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), heads, hidden, config.qkv_bias),
        ("output", ("self_attn.o_proj",), (hidden,), heads[0], config.output_bias),
        ("gate", ("mlp.gate_proj",), (ffn,), hidden, config.mlp_bias),
        ("up", ("mlp.up_proj",), (ffn,), hidden, config.mlp_bias),
        ("down", ("mlp.down_proj",), (hidden,), ffn, config.mlp_bias),
    ]
    vectors = [("input_norm", "input_layernorm", hidden), ("mlp_norm", "post_attention_layernorm", hidden)]
    if config.qk_norm:
        vectors += [("q_norm", "self_attn.q_norm", config.head_dim), ("k_norm", "self_attn.k_norm", config.head_dim)]
    specs = [ParameterSpec(key=key, names=(f"{prefix}{name}.weight",), outs=(size,)) for key, name, size in vectors]
    for key, names, outs, ins, biased in projections:
        specs.append(
            ParameterSpec(
                key=key, names=tuple(f"{prefix}{n}.weight" for n in names), outs=outs, ins=ins, transposed=True
            )
        )
        if biased:
            specs.append(ParameterSpec(key=f"{key}_bias", names=tuple(f"{prefix}{n}.bias" for n in names), outs=outs))
    return specs


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor a decoder needs, by Hugging Face name."""
    blocks = (spec for layer in range(config.num_layers) for spec in layer_specs(config, layer))
    return {name: shape for spec in (*table_specs(config), *blocks) for name, shape in spec.shapes.items()}


class Parameter:
    """A spec and the Paddle parameter that holds it."""

    def __init__(self, spec: ParameterSpec, read: Callable[[str], np.ndarray], dtype: str, trainable: bool) -> None:
        """`read` gives the checkpoint's float32 arrays by name."""
        self.spec = spec
        arrays = [read(name) for name in spec.names]
        fused = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if spec.transposed:
            fused = np.ascontiguousarray(fused.T)
        self.tensor = paddle.create_parameter(
            list(fused.shape), dtype, default_initializer=paddle.nn.initializer.Constant(0.0)
        )
        self.tensor.set_value(paddle.to_tensor(fused, place=self.tensor.place).astype(dtype))
        self.tensor.stop_gradient = not trainable

    def pieces(self) -> list[paddle.Tensor]:
        """Copies of the checkpoint's tensors, in the order of `spec.names`."""
        parts = self.tensor.detach().split(list(self.spec.outs), axis=-1 if self.spec.transposed else 0)
        return [part.t().contiguous() if self.spec.transposed else part for part in parts]

    def overwrite(self, pieces: Sequence[paddle.Tensor | np.ndarray]) -> None:
        """Set the values in place from the checkpoint's tensors."""
        tensors = [
            piece if isinstance(piece, paddle.Tensor) else paddle.to_tensor(piece, place=self.tensor.place)
            for piece in pieces
        ]
        fused = paddle.concat([tensor.detach().astype(self.tensor.dtype) for tensor in tensors])
        self.tensor.set_value(fused.t().contiguous() if self.spec.transposed else fused)
