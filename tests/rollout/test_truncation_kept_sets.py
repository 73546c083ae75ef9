import numpy as np
import pytest

from keptset.rollout.kept_sets import BLOCK
from keptset.rollout.truncation import truncate
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

VOCAB_SIZE = 2 * BLOCK + 9


@pytest.fixture
def kept():
    """Rows: truncated, full, failed, greedy, full at another temperature."""
    logits = np.random.default_rng(0).standard_normal((5, VOCAB_SIZE)).astype(np.float32)
    logits[2, 7] = np.nan
    return truncate(
        logits,
        [
            SamplingParams(top_k=5),
            SamplingParams(),
            SamplingParams(),
            SamplingParams(temperature=0),
            SamplingParams(temperature=0.5),
        ],
    )


def test_full_rows_store_no_ids_and_yet_have_all_members(kept):
    assert kept.is_full_B.tolist() == [False, True, False, False, True]
    assert np.diff(kept.offsets_B1).tolist() == [5, 0, 0, 1, 0]
    assert kept.sizes_B.tolist() == [5, VOCAB_SIZE, 0, 1, VOCAB_SIZE]
    ids, logprobs = kept.members(4)
    assert ids.tolist() == list(range(VOCAB_SIZE))
    assert np.exp(logprobs).sum() == pytest.approx(1)
    assert kept.entropy_B[4] == pytest.approx(-(np.exp(logprobs) * logprobs).sum())


def test_entropy_and_variance_are_those_of_the_members(kept):
    for row in (0, 1, 3, 4):
        logprobs = kept.members(row)[1]
        p = np.exp(logprobs)
        entropy = -(p * logprobs).sum()
        assert kept.entropy_B[row] == pytest.approx(entropy, abs=1e-12)
        assert kept.logprob_var_B[row] == pytest.approx((p * (logprobs + entropy) ** 2).sum(), abs=1e-11)


def test_log_probabilities_by_id_are_those_of_the_members(kept):
    for row in (0, 1, 3, 4):
        dense = kept.logprobs_of(np.full(VOCAB_SIZE, row), np.arange(VOCAB_SIZE))
        ids, logprobs = kept.members(row)
        assert np.flatnonzero(dense > -np.inf).tolist() == ids.tolist()
        assert dense[ids].tolist() == logprobs.tolist()


def test_rows_can_be_taken_by_mask_and_by_index(kept):
    good = kept.take(np.array([row not in kept.errors for row in range(5)]))
    assert len(good) == 4
    assert good.errors == {}
    again = kept.take([4, 0, 2, 0, 1])
    assert list(again.errors) == [2]
    for new, old in enumerate([4, 0, 2, 0, 1]):
        for mine, theirs in zip(again.members(new), kept.members(old), strict=True):
            assert mine.tolist() == theirs.tolist()
    assert len(kept.take([])) == 0


@pytest.mark.parametrize(("rows", "ids"), [([5], [0]), ([-1], [0]), ([0], [VOCAB_SIZE]), ([0], [-1])])
def test_rows_and_ids_that_do_not_exist_are_refused(kept, rows, ids):
    with pytest.raises(InvalidInput, match=r"rows must lie in \[0, 5\)"):
        kept.logprobs_of(rows, ids)


def test_a_tensor_is_read_as_it_lies():
    paddle = pytest.importorskip("paddle", reason="needs Paddle")
    logits = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    whole, transposed = paddle.to_tensor(logits), paddle.to_tensor(np.ascontiguousarray(logits.T)).T
    settings = [SamplingParams(top_k=3)] * 6
    for tensor, expected in ((whole, logits), (transposed, logits), (whole[2:5], logits[2:5])):
        kept = truncate(tensor, settings[: len(expected)])
        np.testing.assert_array_equal(kept.ids_N, truncate(expected, settings[: len(expected)]).ids_N)
    assert len(truncate(whole[:0], [])) == 0


def test_a_full_row_outlives_the_tensor_it_came_from():
    paddle = pytest.importorskip("paddle", reason="needs Paddle")
    logits = np.random.default_rng(0).standard_normal((2, 5_000)).astype(np.float32)
    tensor = paddle.to_tensor(logits)
    kept, expected = truncate(tensor, [SamplingParams()] * 2), truncate(logits, [SamplingParams()] * 2)
    tensor.cast_("float64") if hasattr(tensor, "cast_") else None
    del tensor
    others = [paddle.full([2, 5_000], 9.0) for _ in range(20)]
    np.testing.assert_array_equal(kept.members(1)[1], expected.members(1)[1])
    assert len(others) == 20
