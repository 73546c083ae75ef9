"""What other encodings of kept sets would take: compressed sizes only, nothing here is ever written.

Legend: T tokens, N kept ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keptset.schemas.ragged import AnyArray, offsets_of, row_index
from keptset.schemas.rollout_batch import RolloutBatch

LEVELS = (1, 9, 19)
"""Of zstd: as the spool has it, as the archive has it, and the most that is of use."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One encoding."""

    name: str
    bytes_per_token: float


def try_encodings(batch: RolloutBatch, levels: tuple[int, ...] = LEVELS) -> list[Tried]:
    """Compressed sizes of the kept ids, of their list boundaries and of the sampled tokens, one encoding after another.

    Needs a batch in which every token was sampled.
    """
    assert batch.kept_ids is not None
    inner = batch.kept_ids.inner
    ids_N, offsets_T1 = inner.values.astype(np.int32), np.asarray(inner.offsets, np.int64)
    tokens_T = batch.token_ids.values.astype(np.int32)
    pieces = _pieces(ids_N, offsets_T1, tokens_T)
    return [
        Tried(name=f"{name}, zstd {level}", bytes_per_token=_compressed(arrays, level) / len(tokens_T))
        for name, arrays in pieces.items()
        for level in levels
    ]


def _pieces(ids_N: AnyArray, offsets_T1: AnyArray, tokens_T: AnyArray) -> dict[str, list[AnyArray]]:
    sizes_T = np.diff(offsets_T1)
    token_N = row_index(offsets_T1)
    gaps_N = np.diff(ids_N, prepend=np.int32(0))
    starts = offsets_T1[:-1][sizes_T > 0]
    gaps_N[starts] = ids_N[starts]
    by_frequency, rank_N = _frequency_ranks(ids_N)
    codes_T, set_sizes, set_ids = _distinct_sets(ids_N, offsets_T1)
    place_T = _places(ids_N, offsets_T1, token_N, tokens_T)
    return {
        "ids, int32 (as it is)": [ids_N],
        "ids, int32, bytes split": [_split(ids_N)],
        "ids, narrowest type": [_narrow(ids_N)],
        "gaps, int32": [gaps_N],
        "gaps, int32, bytes split": [_split(gaps_N)],
        "gaps, narrowest type, bytes split": [_split(_narrow(gaps_N))],
        "gaps, 7 bits a byte": [_seven_bits(gaps_N)],
        "frequency ranks, narrowest type": [_narrow(rank_N), by_frequency],
        "each distinct set once": [_split(codes_T), _narrow(set_sizes), set_ids],
        "ids without the sampled token's": [np.delete(ids_N, offsets_T1[:-1] + place_T)],
        "list boundaries, offsets (as in Arrow)": [offsets_T1.astype(np.int32)],
        "list boundaries, sizes, bytes split": [_split(sizes_T.astype(np.uint16))],
        "sampled tokens, ids (as it is)": [tokens_T],
        "sampled tokens, places in their sets": [_split(_narrow(place_T))],
    }


def _compressed(arrays: list[AnyArray], level: int) -> int:
    codec = pa.Codec("zstd", level)
    return sum(len(codec.compress(np.ascontiguousarray(array).tobytes())) for array in arrays)


def _split(values: AnyArray) -> AnyArray:
    """First bytes of all values, then their second bytes, and so on."""
    return values.view(np.uint8).reshape(-1, values.dtype.itemsize).T


def _narrow(values: AnyArray) -> AnyArray:
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _seven_bits(values: AnyArray) -> npt.NDArray[np.uint8]:
    """Seven bits a byte, the eighth says whether more follow."""
    sizes = np.ones(len(values), np.int64)
    for shift in (7, 14, 21, 28):
        sizes += values >= 1 << shift
    offsets = offsets_of(sizes)
    row = row_index(offsets)
    place = np.arange(offsets[-1]) - offsets[row]
    more = place < sizes[row] - 1
    return (((values[row] >> (7 * place)) & 127) | (more << 7)).astype(np.uint8)


def _frequency_ranks(ids_N: AnyArray) -> tuple[AnyArray, AnyArray]:
    """The distinct ids, most frequent first, and for each id its place there."""
    distinct, inverse, counts = np.unique(ids_N, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[inverse]


def _distinct_sets(ids_N: AnyArray, offsets_T1: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    """For each token the number of its set, in order of first sight; sizes and ids of the distinct sets."""
    seen: dict[bytes, int] = {}
    sets = (ids_N[start:stop].tobytes() for start, stop in pairwise(offsets_T1))
    codes = np.array([seen.setdefault(kept, len(seen)) for kept in sets], np.int32)
    return codes, np.array([len(kept) // 4 for kept in seen]), np.frombuffer(b"".join(seen), np.int32)


def _places(ids_N: AnyArray, offsets_T1: AnyArray, token_N: AnyArray, tokens_T: AnyArray) -> AnyArray:
    """The place of each sampled token in its set."""
    span = 1 + int(max(ids_N.max(initial=0), tokens_T.max(initial=0)))
    keys = token_N * span + ids_N
    return np.searchsorted(keys, np.arange(len(tokens_T)) * span + tokens_T) - offsets_T1[:-1]
