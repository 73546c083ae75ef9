"""Draws from kept sets, and the random numbers they use.

    y = the first id, in ascending order, whose cumulative probability over K exceeds u

u is a function of (row seed, absolute position in prompt + response) alone: the first word of the Philox4x64-10 block
with key (row seed, 0) and counter (position + 1, 0, 0, 0), its upper 53 bits as a number in [0, 1). So a row's tokens
do not depend on the batch, the order of steps or the machine. (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3".)

Legend: B rows, F full rows, C blocks of the vocabulary, J ids of one block.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from keptset.rollout.kept_sets import BLOCK, Float64, FullRows, Int64, KeptSets
from keptset.schemas.errors import InvalidInput

_PERSON = b"keptset.row_seed"
"""Separates this hash from every other use of blake2b."""


def row_seed(base_seed: int, prompt_id: str, sample_index: int) -> int:
    """63-bit seed of one response: blake2b keyed with the base seed.

    Fixed-width fields stand before the text, so no two triples are hashed as the same bytes.
    Errors: InvalidInput unless base_seed and sample_index lie in [0, 2**64).

    >>> row_seed(0, "p", 1) == row_seed(0, "p", 1) != row_seed(0, "p", 2)
    True
    """
    for name, value in (("base_seed", base_seed), ("sample_index", sample_index)):
        if not 0 <= value < 2**64:
            raise InvalidInput(f"{name} is {value}; it must lie in [0, 2**64)")
    message = int(sample_index).to_bytes(8, "little") + prompt_id.encode("utf-8", "surrogatepass")
    key = int(base_seed).to_bytes(8, "little")
    digest = hashlib.blake2b(message, key=key, person=_PERSON, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(row_seeds_B: npt.ArrayLike, positions_B: npt.ArrayLike) -> Float64:
    """One number in [0, 1) per row, float64 [B], from its seed in [0, 2**64) and its position in prompt + response.

    Errors: InvalidInput for a negative or fractional seed or position, or different numbers of them.
    """
    seeds_B, positions = _unsigned("row seeds", row_seeds_B), _unsigned("positions", positions_B)
    if seeds_B.shape != positions.shape or seeds_B.ndim != 1:
        raise InvalidInput(f"{seeds_B.shape} row seeds and {positions.shape} positions; give one of each a row")
    generator = np.random.Philox(0)
    state = generator.state
    counter, key = state["state"]["counter"], state["state"]["key"]
    counter[:], key[:] = 0, 0
    words_B = np.empty(len(seeds_B), np.uint64)
    for row, (seed, position) in enumerate(zip(seeds_B, positions, strict=True)):
        key[0], counter[0] = seed, position
        generator.state = state  # also discards words left over from the row before
        words_B[row] = generator.random_raw()
    return (words_B >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(kept: KeptSets, uniforms_B: npt.ArrayLike) -> tuple[npt.NDArray[np.int32], Float64]:
    """Token ids int32 [B] and their log-probabilities over K float64 [B], one from each row.

    Exact: cumulative sums in float64 in ascending id order. Never an id outside K, nor one of probability 0. Rows
    that failed in truncation get token -1 and NaN.
    Errors: InvalidInput unless there is one number in [0, 1) a row.
    """
    uniforms_B = np.asarray(uniforms_B, np.float64)
    if uniforms_B.shape != (len(kept),) or not ((uniforms_B >= 0) & (uniforms_B < 1)).all():
        raise InvalidInput(f"draw needs one number in [0, 1) for each of {len(kept)} rows, got {uniforms_B!r:.200}")
    token_ids_B = np.full(len(kept), -1, np.int32)
    logprobs_B = np.full(len(kept), np.nan)
    is_full_B = kept.is_full_B
    if is_full_B.any():
        token_ids_B[is_full_B], logprobs_B[is_full_B] = _draw_full(kept.full, uniforms_B[is_full_B])
    starts_B = kept.offsets_B1[:-1]
    sizes_B = np.diff(kept.offsets_B1)
    at_B = np.zeros(len(kept), np.int64)
    for row in np.flatnonzero(sizes_B > 1).tolist():  # row by row: a sum across rows would let neighbours round it
        span = slice(starts_B[row], kept.offsets_B1[row + 1])
        mass_through = np.cumsum(np.exp(kept.logprobs_N[span]))
        # u < 1, so u times the whole rounds to less than the whole: some member exceeds it.
        at_B[row] = np.searchsorted(mass_through, uniforms_B[row] * mass_through[-1], "right")
    stored = sizes_B > 0
    at = (starts_B + at_B)[stored]
    token_ids_B[stored], logprobs_B[stored] = kept.ids_N[at], kept.logprobs_N[at]
    return token_ids_B, logprobs_B


def _draw_full(full: FullRows, uniforms_F: Float64) -> tuple[Int64, Float64]:
    """The same draw over [0, V) in two steps: first the block, then the id within it."""
    index_F = np.arange(len(uniforms_F))
    mass_through_FC = np.cumsum(full.block_mass_FC, axis=1)
    target_F = uniforms_F * mass_through_FC[:, -1]
    block_F = np.count_nonzero(mass_through_FC <= target_F[:, None], axis=1)
    rest_F = target_F - np.where(block_F > 0, mass_through_FC[index_F, block_F - 1], 0.0)
    ids_FJ = block_F[:, None] * BLOCK + np.arange(min(BLOCK, full.vocab_size))
    exists_FJ = ids_FJ < full.vocab_size
    weights_FJ = np.exp(full.scaled(index_F[:, None], np.minimum(ids_FJ, full.vocab_size - 1))) * exists_FJ
    mass_through_FJ = np.cumsum(weights_FJ, axis=1)
    first_F = np.count_nonzero(mass_through_FJ <= rest_F[:, None], axis=1)
    # The block's mass was summed in another order; where rounding puts the rest beyond it, its last member is meant.
    last_F = np.count_nonzero(mass_through_FJ < mass_through_FJ[:, -1:], axis=1)
    tokens_F = ids_FJ[index_F, np.minimum(first_F, last_F)]
    return tokens_F, full.logprobs(index_F, tokens_F)


def _unsigned(name: str, values: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0):
        raise InvalidInput(f"{name} must be whole numbers >= 0, got {array!r:.200}")
    return array.astype(np.uint64)
