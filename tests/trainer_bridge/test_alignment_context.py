"""Layouts cut along the sequence: every rank scores exactly the tokens whose predicting position it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.alignment import PackedBatch, PaddedBatch, to_packed, to_padded
from keptset.trainer_bridge.context_split import ContextSlice, context_slice, gather_order
from keptset.trainer_bridge.losses import ppo_clip_loss
from keptset.trainer_bridge.ratios import log_ratios_of
from keptset.trainer_bridge.scoring import score_aligned

LAYOUTS = {
    "left": lambda batch, multiple: to_padded(batch, pad_token_id=39, side="left", length=multiple * 2),
    "right": lambda batch, multiple: to_padded(batch, pad_token_id=39, side="right", length=multiple * 2),
    "packed": lambda batch, multiple: to_packed(batch, row_multiple=multiple, pad_token_id=39),
}
RANKS = [1, 2, 4]
SCHEMES = ["contiguous", "zigzag"]
CUTS = [(layout, ranks, scheme) for layout in LAYOUTS for ranks in RANKS for scheme in SCHEMES]
MULTIPLE = 8
"""Takes every cut of CUTS; rows of `turns` have at most 16 tokens."""


@pytest.fixture
def turns(simulate: Any, rng: np.random.Generator) -> Any:
    """Responses of several turns: tokens that were not sampled lie between sampled ones."""
    penalised = SamplingParams(top_k=5, repetition_penalty=1.4, presence_penalty=0.3)
    return simulate(rng, [SamplingParams(top_k=4), penalised, SamplingParams(temperature=0.6)] * 2, forced_share=0.4)


def flat_logits(world: Any, aligned: PaddedBatch | PackedBatch) -> np.ndarray:
    """As a model gives them on one axis, and nan where there is padding."""
    flat = np.full((aligned.num_positions, world.vocab_size), np.nan)
    for row, logits in enumerate(world.logits):
        if isinstance(aligned, PackedBatch):
            start = int(aligned.cu_seqlens_B1[row])
        else:
            start = row * aligned.input_ids_BL.shape[1] + int(np.argmax(aligned.attention_mask_BL[row]))
        flat[start : start + len(logits)] = logits
    return flat


def slices(aligned: PaddedBatch | PackedBatch, ranks: int, scheme: Any) -> list[ContextSlice]:
    return [context_slice(aligned, rank, ranks, scheme=scheme) for rank in range(ranks)]


def flat(aligned: PaddedBatch | PackedBatch, name: str) -> np.ndarray:
    return getattr(aligned, name + ("_BL" if isinstance(aligned, PaddedBatch) else "_P")).reshape(-1)


@pytest.mark.parametrize(("layout", "ranks", "scheme"), CUTS)
def test_ranks_hold_every_position_and_score_every_token_once(turns: Any, layout: str, ranks: int, scheme: str) -> None:
    aligned = LAYOUTS[layout](turns.batch, MULTIPLE)
    parts = slices(aligned, ranks, scheme)
    held = np.concatenate([part.position_index.reshape(-1) for part in parts])
    assert sorted(held.tolist()) == list(range(aligned.num_positions))
    assert len({part.num_positions for part in parts}) == 1, "every rank holds as many"
    scored = np.concatenate([part.token_index_T for part in parts])
    assert sorted(scored.tolist()) == list(range(aligned.tokens.num_tokens))
    for name in ("input_ids", "position_ids", "response_mask", "loss_mask"):
        for part in parts:
            np.testing.assert_array_equal(getattr(part, name), flat(aligned, name)[part.position_index])


@pytest.mark.parametrize(("layout", "ranks", "scheme"), CUTS)
def test_a_token_is_predicted_by_the_position_before_it_in_its_own_row(
    turns: Any, layout: str, ranks: int, scheme: str
) -> None:
    aligned = LAYOUTS[layout](turns.batch, MULTIPLE)
    ids, positions = flat(aligned, "input_ids"), flat(aligned, "position_ids")
    for part in slices(aligned, ranks, scheme):
        before = part.position_index.reshape(-1)[part.logit_index_T]
        tokens = part.tokens
        assert ids[before + 1].tolist() == tokens.token_ids_T.tolist()
        prompts = np.array([len(turns.prompts[row]) for row in tokens.row_T], np.int64)
        assert positions[before].tolist() == (prompts + tokens.position_T - 1).tolist(), "another row, or off by one"
        assert part.position_ids.reshape(-1)[part.logit_index_T].tolist() == positions[before].tolist()


@pytest.mark.parametrize(("layout", "ranks", "scheme"), CUTS)
def test_the_ranks_scores_are_the_oracles(turns: Any, layout: str, ranks: int, scheme: Any) -> None:
    aligned = LAYOUTS[layout](turns.batch, MULTIPLE)
    logits = flat_logits(turns, aligned)
    scores = [score_aligned(part, logits[part.position_index]).logprobs_T for part in slices(aligned, ranks, scheme)]
    together = np.concatenate(scores)[gather_order(aligned, ranks, scheme=scheme)]
    np.testing.assert_allclose(together, turns.oracle_scores(), atol=1e-6)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize(("layout", "ranks", "scheme"), CUTS)
def test_logits_that_are_off_by_one_would_be_seen(turns: Any, layout: str, ranks: int, scheme: Any, shift: int) -> None:
    aligned = LAYOUTS[layout](turns.batch, MULTIPLE)
    logits = np.roll(np.nan_to_num(flat_logits(turns, aligned)), shift, axis=0)
    scores = [score_aligned(part, logits[part.position_index]).logprobs_T for part in slices(aligned, ranks, scheme)]
    together = np.concatenate(scores)[gather_order(aligned, ranks, scheme=scheme)]
    chooses = aligned.tokens.kept_sizes_T > 1
    assert np.median(np.abs(together - turns.oracle_scores())[chooses]) > 0.1


@pytest.mark.parametrize(("layout", "ranks", "scheme"), [cut for cut in CUTS if cut[1] == 2])
def test_each_rank_carries_its_share_of_the_gradient(
    turns: Any, framework: Any, layout: str, ranks: int, scheme: Any
) -> None:
    aligned = LAYOUTS[layout](turns.batch, MULTIPLE)
    host = np.nan_to_num(flat_logits(turns, aligned) * 1.2)
    whole = framework.tensor(host)
    loss = ppo_clip_loss(log_ratios_of(score_aligned(aligned, whole), aligned.tokens), np.arange(6.0))
    expected = framework.gradient(loss.value, whole)
    for part in slices(aligned, ranks, scheme):
        own = framework.tensor(host[part.position_index])
        # The loss of the whole batch, from numbers alone; each rank passes its own tokens' gradient on.
        scores = score_aligned(part, own).logprobs_T
        weight = loss.gradient_T[part.token_index_T]
        surrogate = (scores * framework.tensor(weight).detach()).sum()
        np.testing.assert_allclose(framework.gradient(surrogate, own), expected[part.position_index], atol=1e-12)


def one_row(prompt: list[int], tokens: list[int]) -> RolloutBatch:
    builder = BatchBuilder(Identity(vocab_size=100))
    builder.add(
        Response(
            rollout_id="r",
            prompt_id="p",
            prompt_token_ids=np.array(prompt),
            token_ids=np.array(tokens),
            behavior_logprobs=np.zeros(len(tokens)),
            kept_offsets=np.arange(len(tokens) + 1),
            kept_ids=np.array(tokens),
            finish_reason="stop",
            params=SamplingParams(temperature=0),
        )
    )
    return builder.build()


def test_a_token_whose_predicting_position_lies_on_another_rank_is_scored_there() -> None:
    packed = to_packed(one_row([10, 11, 12, 13], [14, 15, 16, 17]))
    first, second = slices(packed, 2, "contiguous")
    assert first.input_ids.tolist() == [10, 11, 12, 13]
    assert first.tokens.token_ids_T.tolist() == [14], "predicted at the last prompt position, on the first rank"
    assert first.logit_index_T.tolist() == [3]
    assert first.response_mask.tolist() == [False] * 4
    assert second.tokens.token_ids_T.tolist() == [15, 16, 17]
    assert second.logit_index_T.tolist() == [0, 1, 2]


def test_zigzag_is_what_one_writes_by_hand() -> None:
    padded = to_padded(one_row([10, 11, 12, 13], [14, 15, 16, 17]), pad_token_id=99, side="right")
    first, second = slices(padded, 2, "zigzag")
    assert first.input_ids.tolist() == [[10, 11, 16, 17]]
    assert first.position_ids.tolist() == [[0, 1, 6, 7]]
    assert first.tokens.token_ids_T.tolist() == [17]
    assert first.logit_index_T.tolist() == [2]
    assert second.input_ids.tolist() == [[12, 13, 14, 15]]
    assert second.tokens.token_ids_T.tolist() == [14, 15, 16]
    assert second.logit_index_T.tolist() == [1, 2, 3]
    assert gather_order(padded, 2).tolist() == [1, 2, 3, 0]


def test_zigzag_cuts_a_packed_axis_row_by_row() -> None:
    batch = concat_batches([one_row([10, 11], [12, 13]), one_row([20], [21])])
    packed = to_packed(batch, row_multiple=4, pad_token_id=99)
    assert packed.input_ids_P.tolist() == [10, 11, 12, 13, 20, 21, 99, 99]
    assert packed.position_ids_P.tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    assert packed.cu_seqlens_B1.tolist() == [0, 4, 8]
    assert packed.response_mask_P.tolist() == [False, False, True, True, False, True, False, False]
    first, second = slices(packed, 2, "zigzag")
    assert first.input_ids.tolist() == [10, 13, 20, 99]
    assert second.input_ids.tolist() == [11, 12, 21, 99]
    assert first.tokens.token_ids_T.tolist() == [21]
    assert second.tokens.token_ids_T.tolist() == [12, 13]


def test_padding_of_a_grid_stays_padding() -> None:
    padded = to_padded(one_row([10], [11, 12]), pad_token_id=99, side="left", length=4)
    first, second = slices(padded, 2, "contiguous")
    assert first.attention_mask.tolist() == [[False, True]]
    assert second.attention_mask.tolist() == [[True, True]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_empty_batch_has_empty_slices(turns: Any, scheme: Any) -> None:
    part = context_slice(to_packed(turns.batch.slice(0, 0)), 1, 2, scheme=scheme)
    assert part.num_positions == 0
    assert part.tokens.num_tokens == 0


def test_a_layout_that_cannot_be_cut_evenly_is_refused_with_the_way_out(turns: Any) -> None:
    with pytest.raises(InvalidInput, match="zigzag over 4 ranks cuts rows into 8 pieces.*say 16"):
        context_slice(to_padded(turns.batch, pad_token_id=0, side="left", length=15), 0, 4)
    with pytest.raises(InvalidInput, match="each row into 8 pieces.*row_multiple=8"):
        context_slice(to_packed(turns.batch), 0, 4)
    with pytest.raises(InvalidInput, match="the axis into 64 pieces.*row_multiple=64"):
        context_slice(to_packed(turns.batch), 0, 64, scheme="contiguous")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda packed: context_slice(packed, 2, 2), "rank is 2 of 2"),
        (lambda packed: context_slice(packed, -1, 2), "rank is -1 of 2"),
        (lambda packed: context_slice(packed, 0, 1, scheme="spiral"), "scheme is 'spiral'"),
    ],
)
def test_what_does_not_exist_is_refused(turns: Any, call: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        call(to_packed(turns.batch, row_multiple=2))


def test_a_row_multiple_below_one_is_refused(turns: Any) -> None:
    with pytest.raises(InvalidInput, match="row_multiple is 0"):
        to_packed(turns.batch, row_multiple=0)
