"""Every layout finds, for every sampled token, the position whose logits predict it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, ScoringRefused, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.alignment import PackedBatch, PaddedBatch, to_packed, to_padded
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION, sampled_tokens
from keptset.trainer_bridge.scoring import score_aligned


def batch_of(*responses: dict[str, Any]) -> RolloutBatch:
    """Rows of prompt and response; every sampled token keeps itself and the next id."""
    builder = BatchBuilder(Identity(vocab_size=100))
    for number, given in enumerate(responses):
        tokens = np.array(given.pop("token_ids"), np.int64)
        sampled = np.array(given.pop("sampled", [True] * len(tokens)), bool)
        sizes = np.where(sampled, 2, 0)
        defaults: dict[str, Any] = {
            "behavior_logprobs": np.arange(len(tokens)) * -0.125,
            "kept_offsets": np.concatenate([[0], np.cumsum(sizes)]),
            "kept_ids": np.stack([tokens, tokens + 1], 1)[sampled].ravel(),
        }
        settings = defaults | given
        builder.add(
            Response(
                rollout_id=f"r{number}",
                prompt_id=f"p{number}",
                token_ids=tokens,
                sampled=sampled,
                finish_reason="stop",
                **settings,
            )
        )
    return builder.build()


@pytest.fixture
def batch() -> RolloutBatch:
    """Prompts of 2, 1 and 3 tokens; responses of 2, 3 (its second forced) and 1."""
    return batch_of(
        {"prompt_token_ids": np.array([10, 11]), "token_ids": [12, 13]},
        {"prompt_token_ids": np.array([20]), "token_ids": [21, 22, 23], "sampled": [True, False, True]},
        {"prompt_token_ids": np.array([30, 31, 32]), "token_ids": [33]},
    )


SAMPLED = [12, 13, 21, 23, 33]
BEFORE = [11, 12, 20, 22, 32]
"""What stands at the position that predicts each of SAMPLED."""


def layouts(batch: RolloutBatch) -> dict[str, PaddedBatch | PackedBatch]:
    return {
        "left": to_padded(batch, pad_token_id=99, side="left"),
        "right": to_padded(batch, pad_token_id=99, side="right"),
        "left, wider": to_padded(batch, pad_token_id=99, side="left", length=7),
        "right, wider": to_padded(batch, pad_token_id=99, side="right", length=7),
        "packed": to_packed(batch),
    }


def flat(aligned: PaddedBatch | PackedBatch, name: str) -> np.ndarray:
    """A field of either layout on one axis."""
    suffix = "_BL" if isinstance(aligned, PaddedBatch) else "_P"
    return getattr(aligned, name + suffix).reshape(-1)


@pytest.mark.parametrize("name", ["left", "right", "left, wider", "right, wider", "packed"])
def test_a_token_is_predicted_one_position_before_its_own(batch: RolloutBatch, name: str) -> None:
    aligned = layouts(batch)[name]
    ids = flat(aligned, "input_ids")
    assert ids[aligned.logit_index_T + 1].tolist() == SAMPLED
    assert ids[aligned.logit_index_T].tolist() == BEFORE
    assert aligned.tokens.token_ids_T.tolist() == SAMPLED


@pytest.mark.parametrize("name", ["left", "right", "left, wider", "right, wider", "packed"])
def test_the_predicting_position_lies_in_the_same_row(batch: RolloutBatch, name: str) -> None:
    aligned = layouts(batch)[name]
    positions = flat(aligned, "position_ids")
    own = positions[aligned.logit_index_T + 1]
    assert (positions[aligned.logit_index_T] == own - 1).all(), "a packed end or a row's end was crossed"
    assert own.tolist() == [2, 3, 1, 3, 3]


def test_padded_right_is_what_one_writes_by_hand(batch: RolloutBatch) -> None:
    padded = to_padded(batch, pad_token_id=99, side="right")
    assert padded.input_ids_BL.tolist() == [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]
    wider = to_padded(batch, pad_token_id=99, side="right", length=5)
    assert wider.input_ids_BL.tolist() == [[10, 11, 12, 13, 99], [20, 21, 22, 23, 99], [30, 31, 32, 33, 99]]
    assert wider.position_ids_BL.tolist() == [[0, 1, 2, 3, 0]] * 3
    assert wider.attention_mask_BL.tolist() == [[True] * 4 + [False]] * 3
    assert wider.logit_index_T.tolist() == [1, 2, 5, 7, 12]


def test_padded_left_is_what_one_writes_by_hand() -> None:
    batch = batch_of(
        {"prompt_token_ids": np.array([10, 11]), "token_ids": [12, 13]},
        {"prompt_token_ids": np.array([20]), "token_ids": [21], "trainable": np.array([False])},
    )
    padded = to_padded(batch, pad_token_id=99, side="left")
    assert padded.input_ids_BL.tolist() == [[10, 11, 12, 13], [99, 99, 20, 21]]
    assert padded.position_ids_BL.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert padded.attention_mask_BL.tolist() == [[True] * 4, [False, False, True, True]]
    assert padded.response_mask_BL.tolist() == [[False, False, True, True], [False, False, False, True]]
    assert padded.loss_mask_BL.tolist() == [[False, False, True, True], [False] * 4]
    assert padded.logit_index_T.tolist() == [1, 2, 6]
    assert padded.on_grid([1.0, 2.0, 3.0], 0.0).tolist() == [[0, 0, 1, 2], [0, 0, 0, 3]]


def test_packed_is_what_one_writes_by_hand(batch: RolloutBatch) -> None:
    packed = to_packed(batch)
    assert packed.input_ids_P.tolist() == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]
    assert packed.position_ids_P.tolist() == [0, 1, 2, 3] * 3
    assert packed.cu_seqlens_B1.tolist() == [0, 4, 8, 12]
    assert packed.cu_seqlens_B1.dtype == np.int32
    assert packed.max_seqlen == 4
    assert packed.response_mask_P.tolist() == [False, False, True, True] + [False, True, True, True] + [False] * 3 + [
        True
    ]
    assert packed.logit_index_T.tolist() == [1, 2, 4, 6, 10]


def test_forced_tokens_are_input_but_neither_scored_nor_trained_on(batch: RolloutBatch) -> None:
    packed = to_packed(batch)
    assert 22 in packed.input_ids_P
    assert packed.response_mask_P[6]
    assert not packed.loss_mask_P[6]
    assert packed.tokens.kept_ids_N.tolist() == [12, 13, 13, 14, 21, 22, 23, 24, 33, 34]
    assert packed.tokens.kept_offsets_T1.tolist() == [0, 2, 4, 6, 8, 10]
    assert packed.tokens.behavior_logprobs_T.tolist() == [0.0, -0.125, 0.0, -0.25, 0.0]


def test_the_callers_loss_mask_follows_its_tokens_past_forced_ones() -> None:
    batch = batch_of(
        {
            "prompt_token_ids": np.array([20]),
            "token_ids": [21, 22, 23, 24],
            "sampled": [True, False, True, True],
            "trainable": np.array([False, True, True, False]),
        }
    )
    for aligned in layouts(batch).values():
        assert aligned.tokens.trainable_T.tolist() == [False, True, False]
        assert flat(aligned, "input_ids")[flat(aligned, "loss_mask")].tolist() == [23]


def test_kept_sets_that_foreign_data_gives_forced_tokens_are_left_out() -> None:
    batch = batch_of(
        {
            "prompt_token_ids": np.array([1]),
            "token_ids": [2, 3, 4],
            "sampled": [True, True, True],
            "kept_offsets": np.array([0, 2, 4, 6]),
            "kept_ids": np.array([2, 7, 3, 8, 4, 9]),
        }
    )
    columns = {name: batch.column(name) for name in batch.arrow.schema.names}
    columns["sampled"] = pa.array([[True, False, True]])
    foreign = RolloutBatch.from_arrow(pa.RecordBatch.from_pydict(columns, schema=batch.arrow.schema))
    tokens = sampled_tokens(foreign)
    assert tokens.kept_ids_N.tolist() == [2, 7, 4, 9]
    assert tokens.position_T.tolist() == [0, 2]


@pytest.mark.parametrize("prompt", [None, np.zeros(0, np.int64)])
@pytest.mark.parametrize("layout", [to_packed, lambda b: to_padded(b, pad_token_id=0, side="left")])
def test_a_first_token_that_nothing_predicts_is_refused(
    prompt: np.ndarray | None, layout: Callable[[RolloutBatch], object]
) -> None:
    batch = batch_of(
        {"prompt_token_ids": np.array([5]), "token_ids": [6]}, {"prompt_token_ids": prompt, "token_ids": [7]}
    )
    with pytest.raises(ViolationError, match="r1") as caught:
        layout(batch)
    assert caught.value.findings[0].kind is FindingKind.PROMPT


def test_without_a_prompt_a_forced_first_token_carries_the_rest() -> None:
    batch = batch_of({"prompt_token_ids": None, "token_ids": [6, 7], "sampled": [False, True]})
    packed = to_packed(batch)
    assert packed.input_ids_P.tolist() == [6, 7]
    assert packed.logit_index_T.tolist() == [0]


def test_rows_are_never_cut_to_a_length(batch: RolloutBatch) -> None:
    with pytest.raises(InvalidInput, match="r0 has 4 tokens with its prompt, more than length = 3"):
        to_padded(batch, pad_token_id=0, side="right", length=3)


def test_an_unknown_side_is_refused(batch: RolloutBatch) -> None:
    with pytest.raises(InvalidInput, match="'middle'"):
        to_padded(batch, pad_token_id=0, side="middle")  # type: ignore[arg-type]


def test_an_empty_batch_has_an_empty_layout(batch: RolloutBatch) -> None:
    empty = batch.slice(0, 0)
    assert to_packed(empty).cu_seqlens_B1.tolist() == [0]
    assert to_padded(empty, pad_token_id=0, side="left").input_ids_BL.shape == (0, 0)


def test_a_slice_of_a_batch_aligns_like_the_rows_alone(batch: RolloutBatch) -> None:
    packed = to_packed(batch.slice(1, 2))
    assert packed.input_ids_P.tolist() == [20, 21, 22, 23, 30, 31, 32, 33]
    assert packed.logit_index_T.tolist() == [0, 2, 6]
    assert packed.tokens.kept_ids_N.tolist() == [21, 22, 23, 24, 33, 34]


def test_settings_of_a_response_reach_each_of_its_tokens(world: Any) -> None:
    # One temperature per response where tokens per response vary: a broadcast over the wrong axis would mix them.
    tokens = sampled_tokens(world.batch)
    for token in range(tokens.num_tokens):
        row = int(tokens.row_T[token])
        assert tokens.temperature_T[token] == world.params[row].temperature
        assert tokens.policy_versions_T[token] == row
        assert tokens.locate(token) == (f"rollout-{row}", tokens.position_T[token])
    assert len(set(np.bincount(tokens.row_T))) > 1


def test_numbers_that_were_not_recorded_read_as_unknown() -> None:
    tokens = sampled_tokens(
        batch_of(
            {"prompt_token_ids": np.array([1]), "token_ids": [2], "behavior_logprobs": None},
            {"prompt_token_ids": np.array([1]), "token_ids": [2, 3], "policy_versions": np.array([4, -1])},
        )
    )
    assert np.isnan(tokens.behavior_logprobs_T).tolist() == [True, False, False]
    assert np.isnan(tokens.log_kept_mass_T).all()
    assert np.isnan(tokens.temperature_T).all()
    assert tokens.policy_versions_T.tolist() == [UNKNOWN_VERSION, 4, UNKNOWN_VERSION]
    assert tokens.trainable_T.all()


def altered(batch: RolloutBatch, **columns: pa.Array) -> RolloutBatch:
    """The batch with columns replaced, as a foreign writer might have left them."""
    arrays = {name: columns.get(name, batch.column(name)) for name in batch.arrow.schema.names}
    return RolloutBatch.from_arrow(pa.RecordBatch.from_pydict(arrays, schema=batch.arrow.schema))


@pytest.mark.parametrize(
    ("column", "values", "kind"),
    [
        ("behavior_logprobs", [[0.0], [0.0, None, 0.0], [0.0]], FindingKind.LENGTHS),
        ("kept_ids", [[[12, 13]], [[21], None, [23]], [[33]]], FindingKind.LENGTHS),
        ("kept_ids", [None, [[21], None, [23]], [[33]]], FindingKind.NULLS),
        ("support", ["full", "kept", "kept"], FindingKind.NULLS),
        ("token_ids", [[12, None], [21, 22, 23], [33]], FindingKind.NULLS),
        ("prompt_token_ids", [[None, 11], None, [30, 31, 32]], FindingKind.NULLS),
        ("sampled", [[True, None], [True, False, True], [True]], FindingKind.NULLS),
        ("sampled", [None, [True, False, True], [True]], FindingKind.NULLS),
        ("trainable", [[True, None], None, None], FindingKind.NULLS),
    ],
)
def test_columns_that_do_not_fit_their_response_are_refused_by_name(
    batch: RolloutBatch, column: str, values: list[Any], kind: FindingKind
) -> None:
    array = pa.array(values, batch.arrow.schema.field(column).type)
    with pytest.raises(ViolationError, match="r0") as caught:
        sampled_tokens(altered(batch, **{column: array}))
    assert caught.value.findings[0].kind is kind


@pytest.mark.parametrize("domain", ["full", "raw", "unknown"])
def test_behaviour_log_probabilities_over_anything_but_the_kept_set_are_refused(
    batch: RolloutBatch, domain: str
) -> None:
    foreign = altered(batch, logprob_domain=pa.array(["kept", domain, "kept"]))
    with pytest.raises(ScoringRefused, match=f"r1 have domain {domain}"):
        score_aligned(to_packed(foreign), np.zeros((12, 100)))


@pytest.mark.parametrize("name", ["left", "right", "left, wider", "packed"])
def test_logits_that_were_shifted_or_cut_are_refused(batch: RolloutBatch, name: str) -> None:
    aligned = layouts(batch)[name]
    with pytest.raises(InvalidInput, match="not shifted and not cut"):
        score_aligned(aligned, np.zeros((aligned.num_positions - 1, 100)))


def test_arrow_data_that_is_no_batch_yet_is_refused_with_the_way_to_one(batch: RolloutBatch) -> None:
    with pytest.raises(InvalidInput, match=r"RecordBatch.*RolloutBatch\.from_arrow"):
        to_packed(batch.arrow)  # type: ignore[arg-type]
