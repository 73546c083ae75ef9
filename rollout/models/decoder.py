"""A decoder-only language model (Llama, Qwen2, Qwen3) over flat tokens, in Paddle.

Per block, on the residual stream x:  x += attend(rope(qkv(norm(x)))) o;  x += (silu(norm(x) g) * norm(x) u) d,
with norm(x) = w * x / sqrt(mean(x^2) + eps).  One pass serves whole sequences, prompt chunks and single steps alike:
all tokens of a call share every matrix product, and attention alone knows the sequences.

Dims: T tokens, V vocabulary, H hidden, Z heads of a token's projections, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from keptset.rollout.models.attention import AttentionPlan, HeadShape
from keptset.rollout.models.block import Block, rms_norm
from keptset.rollout.models.checkpoint import Checkpoint
from keptset.rollout.models.config import DecoderConfig
from keptset.rollout.models.kv_cache import KVCache
from keptset.rollout.models.parameters import Parameter, ParameterSpec, layer_specs, table_specs, weight_shapes
from keptset.rollout.models.rope import Rotation, inverse_frequencies
from keptset.rollout.models.segments import Layout, Segment, layout_of
from keptset.schemas.errors import InvalidInput

DTYPES = ("float32", "bfloat16", "float16")


class Decoder:
    """Weights and the one pass over them. Build it with `load_decoder`.

    `config` is its DecoderConfig. Tensors it makes lie where its weights lie.
    """

    def __init__(
        self,
        config: DecoderConfig,
        read: Callable[[str], np.ndarray],
        *,
        dtype: str = "float32",
        trainable: bool = False,
    ) -> None:
        """`read` gives a float32 array for each name of `weight_shapes(config)`; each is asked for once."""
        if dtype not in DTYPES:
            raise InvalidInput(f"dtype is {dtype!r}; supported are {', '.join(DTYPES)}")
        _check_products(dtype)
        self.config = config
        self.dtype = dtype
        self._heads = HeadShape(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        self._freqs_F = inverse_frequencies(config.rope, config.head_dim)

        def made(specs: list[ParameterSpec]) -> dict[str, Parameter]:
            return {spec.key: Parameter(spec, read, dtype, trainable) for spec in specs}

        tables = made(table_specs(config))
        layers = [made(layer_specs(config, i)) for i in range(config.num_layers)]
        self._owned = [parameter for group in (tables, *layers) for parameter in group.values()]
        self._embedding_VH = tables["embedding"].tensor
        self._final_norm_H = tables["final_norm"].tensor
        self._head_VH = tables.get("head", tables["embedding"]).tensor
        self._trainable = trainable
        # CPU kernels read a head laid out as [H, V] about 1.4 times as fast; made when it is first needed.
        self._head_HV: paddle.Tensor | None = None
        self._blocks = [
            Block({key: parameter.tensor for key, parameter in layer.items()}, self._heads, config.rms_norm_eps)
            for layer in layers
        ]

    @property
    def head_weight(self) -> paddle.Tensor:
        """The head, [V, H]; where it is tied, the embedding itself."""
        return self._head_VH

    @property
    def place(self) -> Any:
        """Where the weights lie."""
        return self._embedding_VH.place

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache for `slots` sequences of at most `capacity` tokens, in the weights' dtype and place."""
        c = self.config
        return KVCache(c.num_layers, slots, capacity, c.num_kv_heads, c.head_dim, self.dtype, self.place)

    def forward(
        self, token_ids_T: Sequence[int] | np.ndarray, segments: Sequence[Segment], cache: KVCache | None = None
    ) -> paddle.Tensor:
        """Hidden states after the final norm, [T, H], in the weights' dtype.

        `token_ids_T` holds the segments' tokens back to back. With a cache, a segment's keys and values are written to
        its slot at positions start .. start + length - 1 and each token attends to positions 0 .. its own of the slot;
        no gradient flows. Without one, segments are whole independent sequences (start 0), and the result is
        differentiable with regard to `parameters()`.

        Errors: InvalidInput for an id outside the vocabulary, a position beyond cache or model, a slot that is absent
        or named twice, a segment that starts beyond what its slot holds, or lengths that do not add up.
        """
        ids_T = self._checked_ids(token_ids_T)
        layout = layout_of(segments, len(ids_T), self.config.max_position_embeddings)
        if cache is None:
            if layout.starts_S.any():
                raise InvalidInput("a segment starts beyond position 0; without a cache segments are whole sequences")
            return self._hidden(ids_T, layout, None)
        self._check_cache(layout, cache)
        cache.reserve(int(layout.ends_S.max()))
        with paddle.no_grad():
            hidden_TH = self._hidden(ids_T, layout, cache)
        cache.lengths_S[layout.slots_S] = layout.ends_S
        return hidden_TH

    def logits(self, hidden_TH: paddle.Tensor) -> paddle.Tensor:
        """Logits over the vocabulary, float32 [T, V]; the product itself is in the weights' dtype."""
        if self._trainable or not self.place.is_cpu_place():
            return paddle.matmul(hidden_TH, self._head_VH, transpose_y=True).astype("float32")
        if self._head_HV is None:
            self._head_HV = self._head_VH.detach().t().contiguous()
        return paddle.matmul(hidden_TH, self._head_HV).astype("float32")

    def parameters(self) -> list[paddle.Tensor]:
        """The weights as the decoder keeps them, for an optimizer; a tied head is the embedding, once."""
        return [parameter.tensor for parameter in self._owned]

    def weights(self) -> dict[str, paddle.Tensor]:
        """A copy of every weight, by Hugging Face name and in its layout ([out, in])."""
        return {
            name: piece
            for parameter in self._owned
            for name, piece in zip(parameter.spec.names, parameter.pieces(), strict=True)
        }

    def load_weights(self, weights: Mapping[str, paddle.Tensor | np.ndarray]) -> None:
        """Overwrite every weight in place, from tensors or arrays named and laid out as `weights` gives them.

        Names and shapes are all checked before the first is written. Keys and values cached before belong to the old
        weights.

        Errors: InvalidInput names the first missing, unknown or misshapen weight.
        """
        shapes = weight_shapes(self.config)
        for name in (*shapes, *weights):
            if name not in weights or name not in shapes:
                kind = "missing" if name in shapes else "unknown"
                raise InvalidInput(f"weight {name!r} is {kind}; give each of the {len(shapes)} that weights() gives")
            if tuple(weights[name].shape) != shapes[name]:
                found, expected = list(weights[name].shape), list(shapes[name])
                raise InvalidInput(f"weight {name!r} has shape {found}; expected is {expected}")
        for parameter in self._owned:
            parameter.overwrite([weights[name] for name in parameter.spec.names])
        self._head_HV = None

    def _hidden(self, ids_T: np.ndarray, layout: Layout, cache: KVCache | None) -> paddle.Tensor:
        place = self.place
        rotation = Rotation(layout.positions_T, self._freqs_F, self._heads, self.dtype, place)
        plan = AttentionPlan(layout, self._heads, cache, place)
        hidden_TH = F.embedding(paddle.to_tensor(ids_T, place=place), self._embedding_VH)
        for layer, block in enumerate(self._blocks):
            hidden_TH = block.forward(hidden_TH, rotation, plan, layer)
        return rms_norm(hidden_TH, self._final_norm_H, self.config.rms_norm_eps)

    def _checked_ids(self, token_ids_T: Sequence[int] | np.ndarray) -> np.ndarray:
        ids_T = np.asarray(token_ids_T)
        if ids_T.size == 0:
            raise InvalidInput("no token ids; forward needs at least one")
        if ids_T.ndim != 1 or ids_T.dtype.kind not in "iu":
            raise InvalidInput(
                f"token ids are {ids_T.dtype} of shape {list(ids_T.shape)}; one row of integers is expected"
            )
        wrong_T = (ids_T < 0) | (ids_T >= self.config.vocab_size)
        if wrong_T.any():
            at = int(wrong_T.argmax())
            raise InvalidInput(
                f"token id {ids_T[at]} at {at} lies outside the vocabulary [0, {self.config.vocab_size})"
            )
        return ids_T.astype(np.int64)

    def _check_cache(self, layout: Layout, cache: KVCache) -> None:
        slots_S = layout.slots_S
        outside = (slots_S < 0) | (slots_S >= cache.slots)
        if outside.any():
            raise InvalidInput(f"slot {slots_S[outside.argmax()]} does not exist; the cache has {cache.slots}")
        if len(np.unique(slots_S)) != len(slots_S):
            raise InvalidInput(f"a slot is named twice in {slots_S.tolist()}; a call takes one segment of a sequence")
        gap = layout.starts_S > cache.lengths_S[slots_S]
        if gap.any():
            i = int(gap.argmax())
            raise InvalidInput(
                f"segment {i} starts at position {layout.starts_S[i]} of slot {slots_S[i]}, which holds "
                f"{cache.lengths_S[slots_S[i]]} positions; tokens between would be missing"
            )
        if (cache.num_layers, cache.kv_heads, cache.head_dim) != (
            self.config.num_layers,
            self.config.num_kv_heads,
            self.config.head_dim,
        ):
            raise InvalidInput("the cache was made for a model of another shape; make it with new_cache")


def _check_products(dtype: str) -> None:
    """16-bit products exist on some devices only; ask before gigabytes are read."""
    try:
        probe = paddle.zeros([1, 1], dtype)
        paddle.matmul(probe, probe)
    except RuntimeError as error:
        raise InvalidInput(f"this device has no {dtype} matrix product; use float32") from error


def load_decoder(folder: str | Path, dtype: str = "float32", *, trainable: bool = False) -> Decoder:
    """The decoder of a Hugging Face folder, its weights converted to `dtype`, on Paddle's current device.

    Errors: CheckpointError for a folder that cannot be read or a model that is not supported; InvalidInput for a dtype
    that does not exist or that the device cannot multiply.
    """
    config = DecoderConfig.from_folder(folder)
    checkpoint = Checkpoint(folder, weight_shapes(config))
    return Decoder(config, checkpoint.read, dtype=dtype, trainable=trainable)
