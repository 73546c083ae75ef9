"""Causal grouped-query attention over flat tokens: softmax(q k^T + mask) v, one batched product a group.

The rows of one head of one token (D numbers) are the unit. Everything a layer attends to is picked from the projections
by one gather of such rows, already in the order of the batched products: no transposes, and the gradient of the whole
is one scatter. Queries arrive scaled by D^-1/2. K heads of keys serve Q queries heads each without being repeated: the
group's queries lie side by side in one matrix.

Dims: T tokens, N segments of a group, L queries, W keys, K key-value heads, G query heads per K, H = K * G,
Z = H + 2 * K heads of a token's projections, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from keptset.rollout.models.kv_cache import CacheRead, KVCache, whole_blocks
from keptset.rollout.models.segments import Group, Layout, groups_of


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Head counts and width of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def per_token(self) -> int:
        """Heads of a token's projections: queries, keys, values."""
        return self.num_heads + 2 * self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """One group's batched product."""

    rows: int
    """N."""
    mask: paddle.Tensor | None
    """0 or -inf, broadcastable to [N, K, G * L, W]; None where every query sees every key."""
    cached: CacheRead | None
    """Where its keys lie; None: among the tokens of this call."""


class AttentionPlan:
    """What attention does for one set of segments, the same in every layer: gather indices, masks, cache rows."""

    def __init__(self, layout: Layout, heads: HeadShape, cache: KVCache | None, place: Any) -> None:
        """`cache` has room for every segment already."""
        self._heads, self._cache = heads, cache
        self._tokens = len(layout.positions_T)
        self._batches: list[_Batch] = []
        groups, picks = [], []
        for group in groups_of(layout, heads.num_heads):
            cached = None
            if cache is None:
                picks += [_query_index(group, heads), _key_index(group, heads)]
            else:
                group, cached = _read_through(cache, group)
                picks.append(_query_index(group, heads))
            width = group.width if cached is None else cached.width
            mask = _mask(group.visible_NL, width, heads, place)
            self._batches.append(_Batch(rows=len(group.rows_NL), mask=mask, cached=cached))
            groups.append(group)
        if cache is not None:
            self._write = cache.plan_write(layout.slots_T, layout.positions_T)
            picks += [_heads_index(self._tokens, heads, side) for side in range(2)]
        self._sections = [pick.size for pick in picks]
        self._picked = paddle.to_tensor(np.concatenate([pick.reshape(-1) for pick in picks]), place=place)
        restore = _restore_index(groups, self._tokens, heads.num_heads)
        self._restore = None if restore is None else paddle.to_tensor(restore, place=place)

    def attend(self, qkv_TZD: paddle.Tensor, layer: int) -> paddle.Tensor:
        """Mixed values [T, H * D] of one layer; with a cache, the layer's keys and values are written to it first."""
        head_dim, kv_heads = self._heads.head_dim, self._heads.num_kv_heads
        pieces = paddle.gather(qkv_TZD.reshape([-1, head_dim]), self._picked).split(self._sections)
        if self._cache is not None:
            self._cache.write(layer, self._write, pieces[-2], pieces[-1])
        taken = iter(pieces)
        mixed = []
        for batch in self._batches:
            queries = next(taken).reshape([batch.rows, kv_heads, -1, head_dim])
            if self._cache is None or batch.cached is None:
                keys, values = next(taken).reshape([2, batch.rows, kv_heads, -1, head_dim]).unbind(0)
                scores = paddle.matmul(queries, keys, transpose_y=True)
            else:
                keys, values = self._cache.read(layer, batch.cached)
                scores = paddle.matmul(queries, keys)
            mixed.append(paddle.matmul(_weights(scores, batch.mask), values).reshape([-1, head_dim]))
        rows = mixed[0] if len(mixed) == 1 else paddle.concat(mixed)
        if self._restore is not None:
            rows = paddle.gather(rows, self._restore)
        return rows.reshape([self._tokens, self._heads.num_heads * head_dim])


def _weights(scores: paddle.Tensor, mask: paddle.Tensor | None) -> paddle.Tensor:
    """softmax(scores + mask) over the keys, taken in float32."""
    wide = scores if scores.dtype == paddle.float32 else scores.astype("float32")
    weights = F.softmax(wide if mask is None else wide + mask, axis=-1)
    return weights if weights.dtype == scores.dtype else weights.astype(scores.dtype)


def _read_through(cache: KVCache, group: Group) -> tuple[Group, CacheRead]:
    """Choose between reading a run of slots whole, with idle rows where it has gaps, and gathering what is needed.

    A gather reads and writes what it picks before the product reads it again, so that for single tokens reading twice
    as much in place is still the cheaper way. For longer runs every idle key costs a product with each query.
    """
    slots_N = group.slots_N
    first, run = int(slots_N[0]), int(slots_N[-1] - slots_N[0]) + 1
    needed = len(slots_N) * whole_blocks(group.width)
    if run * cache.allocated > needed * (2 if group.rows_NL.shape[1] == 1 else 1):
        return group, cache.plan_gather(slots_N, group.width)
    return _with_idle_rows(group, slots_N - first, run), cache.plan_run(first, run)


def _with_idle_rows(group: Group, at_N: np.ndarray, rows: int) -> Group:
    """The group spread over `rows` rows; an idle one repeats token 0, sees one key, and is dropped."""
    if rows == len(at_N):
        return group
    shape = (rows, group.rows_NL.shape[1])
    rows_NL, visible_NL, real_NL = np.zeros(shape, np.int64), np.ones(shape, np.int64), np.zeros(shape, bool)
    rows_NL[at_N], visible_NL[at_N], real_NL[at_N] = group.rows_NL, group.visible_NL, group.real_NL
    return replace(group, rows_NL=rows_NL, visible_NL=visible_NL, real_NL=real_NL)


def _query_index(group: Group, heads: HeadShape) -> np.ndarray:
    """Rows of [T * Z, D] that are the group's queries, int64 [N, H, L]."""
    return group.rows_NL[:, None, :] * heads.per_token + np.arange(heads.num_heads)[:, None]


def _key_index(group: Group, heads: HeadShape) -> np.ndarray:
    """Rows of [T * Z, D] that are the group's keys, then its values, int64 [2, N, K, W]."""
    heads_2K = heads.num_heads + np.arange(2 * heads.num_kv_heads).reshape(2, 1, -1, 1)
    return group.key_rows_NW[:, None, :] * heads.per_token + heads_2K


def _heads_index(tokens: int, heads: HeadShape, side: int) -> np.ndarray:
    """Rows of [T * Z, D] that are the tokens' keys (side 0) or values (side 1), int64 [T, K]."""
    first = heads.num_heads + side * heads.num_kv_heads
    return np.add.outer(np.arange(tokens) * heads.per_token, first + np.arange(heads.num_kv_heads))


def _mask(visible_NL: np.ndarray, width: int, heads: HeadShape, place: Any) -> paddle.Tensor | None:
    """0 where a key is visible, -inf where not, [N or 1, K or 1, G * L, W]; None where all is visible.

    Rows that all see the same share one mask. Otherwise it is laid out in full, once for all layers: on CPU, adding
    a mask broadcast over inner dimensions costs three times the product it masks.
    """
    if (visible_NL >= width).all():
        return None
    if (visible_NL == visible_NL[:1]).all():
        visible_NL = visible_NL[:1]
    rows, length = visible_NL.shape
    hidden = np.arange(width) >= visible_NL[:, None, None, :, None]
    mask = paddle.to_tensor(np.where(hidden, np.float32(-np.inf), np.float32(0)), place=place)
    copies = 1 if rows == 1 else heads.num_kv_heads
    per_kv = heads.num_heads // heads.num_kv_heads
    return mask.expand([rows, copies, per_kv, length, width]).reshape([rows, copies, per_kv * length, width])


def _restore_index(groups: list[Group], tokens: int, num_heads: int) -> np.ndarray | None:
    """Where each token's heads lie in the groups' concatenated results [N, H, L], int64 [T * H]; None: in order."""
    first_T, stride_T = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
    begin = 0
    for group in groups:
        rows, length = group.rows_NL.shape
        first_NL = begin + np.add.outer(np.arange(rows) * num_heads * length, np.arange(length))
        real_tokens = group.rows_NL[group.real_NL]
        first_T[real_tokens] = first_NL[group.real_NL]
        stride_T[real_tokens] = length
        begin += rows * num_heads * length
    index = (first_T[:, None] + np.arange(num_heads) * stride_T[:, None]).reshape(-1)
    return None if begin == index.size and (index == np.arange(begin)).all() else index
