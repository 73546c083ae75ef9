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
