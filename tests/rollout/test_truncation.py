import json
import re
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset.rollout import filters
from keptset.rollout.truncation import truncate
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors" / "truncation.json").read_text())
LN2 = float(np.log(2.0))


def one(logits, dtype=np.float64, **params):
    return truncate(np.array([logits], dtype), [SamplingParams(**params)])


def kept_ids(kept, row=0):
    return kept.members(row)[0].tolist()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_shared_vectors_hold(vector):
    logits = [-np.inf if z is None else z for z in vector["logits"]]
    kept = one(logits, **vector["params"])
    ids, logprobs = kept.members(0)
    assert ids.tolist() == vector["expect"]["kept_ids"]
    np.testing.assert_allclose(logprobs, vector["expect"]["logprobs"], rtol=0, atol=1e-12)
    assert kept.log_kept_mass_B[0] == pytest.approx(vector["expect"]["log_kept_mass"], abs=1e-12)
    assert kept.is_full_B[0] == (len(ids) == len(logits))


# --- against the oracle -----------------------------------------------------------------------------------------------

TEMPERATURES = st.one_of(st.sampled_from([0.0, 1.0, 0.7, 1e-3, 1e3]), st.floats(1e-3, 1e3))
SHARES = st.one_of(st.sampled_from([0.3, 0.8, 0.95, 1.0, 1.0]), st.floats(1e-9, 1.0))


@st.composite
def settings_of_a_row(draw, vocab_size):
    return SamplingParams(
        temperature=draw(TEMPERATURES),
        top_k=draw(st.one_of(st.just(0), st.integers(0, 2 * vocab_size), st.integers(1, 64))),
        top_p=draw(SHARES),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-300, 1e-6, 0.05, 1.0]))),
    )


@st.composite
def rows(draw, vocab_sizes):
    """Logits [B, V] of many shapes, and settings of each row."""
    vocab_size, count = draw(vocab_sizes), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal((count, vocab_size)) * draw(st.sampled_from([0.0, 1e-4, 0.3, 3.0, 30.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    if draw(st.booleans()):
        logits[:, rng.integers(vocab_size)] += draw(st.sampled_from([20.0, 200.0, 1e4]))  # a huge gap
    if draw(st.booleans()):
        banned = rng.random(logits.shape) < draw(st.sampled_from([0.01, 0.5, 0.99]))
        banned[np.arange(count), rng.integers(vocab_size, size=count)] = False
        logits[banned] = -np.inf
    logits = logits.astype(draw(st.sampled_from([np.float32, np.float64])))
    return logits, [draw(settings_of_a_row(vocab_size)) for _ in range(count)]


def assert_as_the_oracle(logits_BV, params, kept):
    for row, (z, p) in enumerate(zip(logits_BV, params, strict=True)):
        expected = reference.truncate(z, p)
        ids, logprobs = kept.members(row)
        assert ids.dtype == np.int32
        assert (np.diff(ids) > 0).all()
        assert kept.is_full_B[row] == (len(ids) == len(z))
        differing = np.setxor1d(ids, expected.kept_ids)
        if len(differing):
            assert_within_tolerance(z.astype(np.float64), p, differing)
            continue
        np.testing.assert_allclose(logprobs, expected.logprobs, rtol=1e-12, atol=1e-10)
        in_float32 = z.dtype == np.float32 and len(z) >= 2**14 and p.top_k > 0 and p.min_p == 0
        assert kept.log_kept_mass_B[row] == pytest.approx(expected.log_kept_mass, abs=1e-7 if in_float32 else 1e-9)
        for mine, theirs in (
            (kept.entropy_B[row], expected.entropy),
            (kept.logprob_var_B[row], expected.logprob_var),
        ):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-9)
        if len(ids) == 1:
            assert (logprobs[0], kept.entropy_B[row], kept.logprob_var_B[row]) == (0, 0, 0)
        if len(ids) == np.isfinite(z).sum():
            assert kept.log_kept_mass_B[row] == 0


def assert_within_tolerance(z_V, p, ids):
    """Members may differ where the mass before them is within 1e-6 W of the bound, or w within 1e-6 of min_p."""
    w = np.exp((z_V - z_V.max()) / p.temperature)
    order = np.lexsort((np.arange(len(w)), -z_V))
    order = order[w[order] >= p.min_p * (1 - 1e-6)][: p.top_k or None]
    whole = w[order].sum()
    before = dict(zip(order.tolist(), (np.cumsum(w[order]) - w[order]).tolist(), strict=True))
    for token in ids.tolist():
        near_top_p = p.top_p < 1 and abs(before.get(token, np.inf) - p.top_p * whole) <= 1e-6 * whole
        near_min_p = p.min_p > 0 and abs(w[token] - p.min_p) <= 1e-6 * p.min_p
        assert near_top_p or near_min_p, f"id {token} differs, with mass {before.get(token)} before it of {whole}"


@settings(deadline=None, max_examples=300)
@given(rows(st.integers(2, 200)))
def test_small_vocabularies_match_the_float64_oracle(case):
    assert_as_the_oracle(*case, truncate(*case))


@settings(deadline=None, max_examples=25)
@given(rows(st.one_of(st.integers(2_000, 20_000), st.integers(20_000, 200_000))))
def test_large_vocabularies_match_the_float64_oracle(case):
    assert_as_the_oracle(*case, truncate(*case))


@settings(deadline=None, max_examples=50)
@given(rows(st.integers(2, 3_000)))
def test_a_row_gives_the_same_bits_alone_as_among_others(case):
    logits, params = case
    together = truncate(logits, params)
    for row, p in enumerate(params):
        alone = truncate(logits[row : row + 1], [p])
        for mine, theirs in zip(alone.members(0), together.members(row), strict=True):
            assert mine.tobytes() == theirs.tobytes()
        assert alone.log_kept_mass_B[0] == together.log_kept_mass_B[row]


# --- ties, exactly ----------------------------------------------------------------------------------------------------


def exact_kept(exponents, top_k, top_p, min_p):
    """The definition in whole numbers and fractions: token i has mass 2**-exponents[i]."""
    order = sorted(range(len(exponents)), key=lambda i: (exponents[i], i))
    least = min(exponents)
    weight = [Fraction(1, 2 ** (e - least)) for e in exponents]
    order = [i for i in order if weight[i] >= Fraction(min_p)]
    order = order[: top_k or None]
    bound, before, kept = Fraction(top_p) * sum(weight[i] for i in order), Fraction(0), []
    for i in order:
        if kept and before >= bound and top_p < 1:
            break
        kept.append(i)
        before += weight[i]
    return sorted(kept)


@st.composite
def halvings(draw):
    """Exponents of masses that sum to a power of two: 1, halved again and again. So ties with top_p are common."""
    exponents = [0]
    for choice in draw(st.lists(st.integers(0, 1000), min_size=1, max_size=30)):
        halved = choice % len(exponents)
        exponents[halved] += 1
        exponents.append(exponents[halved])
    return draw(st.permutations(exponents))


@settings(deadline=None, max_examples=300)
@given(
    exponents=halvings() | st.lists(st.integers(0, 10), min_size=2, max_size=40),
    top_k=st.integers(0, 12),
    top_p=st.integers(1, 64).map(lambda n: n / 64),
    min_p=st.sampled_from([0.0, 0.0, 2.0**-6, 0.125, 0.5, 1.0]),
    temperature=st.sampled_from([1.0, 0.5, 2.0, 4.0]),
    shift=st.sampled_from([0.0, 0.1, -7.3]),
)
def test_dyadic_masses_decide_ties_as_exact_arithmetic_does(exponents, top_k, top_p, min_p, temperature, shift):
    logits = -np.array(exponents) * LN2 * temperature  # a shift rounds every logit, and changes no tie
    logits += shift
    kept = one(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept_ids(kept) == exact_kept(exponents, top_k, top_p, min_p)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 1023 / 1024])
def test_dyadic_ties_are_exact_in_a_vocabulary_too_wide_to_sort(top_p):
    exponents = np.random.default_rng(4).integers(0, 6, 8192)
    assert kept_ids(one(-exponents * LN2, top_p=top_p)) == exact_kept(exponents.tolist(), 0, top_p, 0)


@pytest.mark.parametrize("vocab_size", [8, 4096, 100_000])
def test_equal_logits_are_kept_by_lowest_id(vocab_size):
    logits = np.zeros(vocab_size)
    assert kept_ids(one(logits, top_p=0.5)) == list(range(vocab_size // 2))
    assert kept_ids(one(logits, top_k=3)) == [0, 1, 2]
    assert kept_ids(one(logits, temperature=0)) == [0]
    assert kept_ids(one(logits, min_p=1.0)) == list(range(vocab_size))


# --- faults seen elsewhere --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from([5, 50, 3000]), data=st.data())
def test_the_set_moves_with_the_ids_and_not_with_the_sorted_order(seed, vocab_size, data):
    rng = np.random.default_rng(seed)
    logits, moved_to = rng.standard_normal(vocab_size), rng.permutation(vocab_size)
    params = data.draw(settings_of_a_row(vocab_size))
    moved = np.empty(vocab_size)
    moved[moved_to] = logits
    kept = truncate(np.stack([logits, moved]), [params, params])
    (ids, logprobs), (moved_ids, moved_logprobs) = kept.members(0), kept.members(1)
    assert sorted(moved_to[ids].tolist()) == moved_ids.tolist()
    np.testing.assert_allclose(moved_logprobs[np.searchsorted(moved_ids, moved_to[ids])], logprobs, rtol=1e-9)


def test_tokens_outside_the_set_have_log_probability_minus_infinity():
    logits = np.array([[1.0, 2.0, 2.0, -np.inf, 3.0]] * 3)
    kept = truncate(logits, [SamplingParams(top_k=2), SamplingParams(), SamplingParams(temperature=0)])
    everything = np.arange(5)
    top = kept.logprobs_of(np.zeros(5, int), everything)
    assert np.isneginf(top[[0, 2, 3]]).all()
    assert np.exp(top).sum() == pytest.approx(1)
    assert np.isneginf(kept.logprobs_of(np.ones(5, int), everything)).tolist() == [False, False, False, True, False]
    assert kept.logprobs_of(np.full(5, 2), everything).tolist() == [-np.inf] * 4 + [0.0]


def test_bans_leave_mass_0_and_yet_not_the_whole_vocabulary():
    kept = one([0.0, -np.inf, 1.0])
    assert kept.log_kept_mass_B[0] == 0
    assert not kept.is_full_B[0]
    assert kept_ids(kept) == [0, 2]


def test_top_k_beyond_the_finite_logits_keeps_no_banned_id():
    kept = one([0.0, -np.inf, 1.0, -np.inf, -np.inf], top_k=4)
    assert kept_ids(kept) == [0, 2]
    assert kept.log_kept_mass_B[0] == 0


def test_a_filter_that_lets_everything_pass_keeps_the_whole_vocabulary():
    kept = one([0.0, 1.0, 2.0], min_p=1e-9)
    assert kept.is_full_B[0]
    assert kept.log_kept_mass_B[0] == 0


# --- rows that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "what"),
    [([0.0, np.nan, np.inf], "NaN"), ([0.0, np.inf, 1.0], r"\+inf"), ([-np.inf] * 3, "no finite value")],
)
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 1}])
def test_a_row_that_cannot_be_drawn_from_fails_alone(bad, what, params):
    logits = np.array([[1.0, 2.0, 3.0], bad, [3.0, 2.0, 1.0]], np.float32)
    kept = truncate(logits, [SamplingParams(**params)] * 3)
    assert list(kept.errors) == [1]
    assert re.search(f"row 1 hold {what}", kept.errors[1])
    assert kept.sizes_B.tolist()[1] == 0
    assert np.isnan([kept.log_kept_mass_B[1], kept.entropy_B[1], kept.logprob_var_B[1]]).all()
    assert np.isnan(kept.logprobs_of([1], [0])).all()
    for row in (0, 2):
        alone = truncate(logits[row : row + 1], [SamplingParams(**params)])
        assert kept_ids(kept, row) == kept_ids(alone)


@pytest.mark.parametrize(
    ("logits", "count", "match"),
    [
        (np.zeros(3), 1, r"got shape \[3\]"),
        (np.zeros((2, 0)), 2, r"got shape \[2, 0\]"),
        (np.zeros((2, 3), np.float16), 2, "float16; cast them to float32"),
        (np.zeros((2, 3), int), 2, "int64; cast"),
        (np.zeros((2, 3)), 1, "2 rows of logits but settings for 1"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(logits, count, match):
    with pytest.raises(InvalidInput, match=match):
        truncate(logits, [SamplingParams()] * count)


# --- extremes ---------------------------------------------------------------------------------------------------------


def test_an_empty_batch_is_no_error():
    assert len(truncate(np.zeros((0, 5), np.float32), [])) == 0


def test_a_vocabulary_of_one_is_full_however_it_is_sampled():
    kept = truncate(np.array([[-3.0]] * 3), [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=1)])
    assert kept.is_full_B.all()
    assert [kept.members(row)[1].tolist() for row in range(3)] == [[0.0]] * 3


def test_logits_and_temperatures_at_the_end_of_their_range_give_no_nan():
    logits = np.array([[1e308, -1e308, 0.0], [0.0, -1.0, -2.0], [3e38, -3e38, 0.0]])
    kept = truncate(logits, [SamplingParams(), SamplingParams(temperature=1e-300), SamplingParams(temperature=1e-3)])
    assert kept.is_full_B.all()
    assert np.abs([kept.entropy_B, kept.logprob_var_B]).max() == 0
    assert [kept.members(row)[1].max() for row in range(3)] == [0.0] * 3


def test_the_logits_are_not_changed():
    logits = np.random.default_rng(0).standard_normal((4, 50))
    before = logits.copy()
    logits.flags.writeable = False
    truncate(logits, [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=2), SamplingParams(min_p=0.1)])
    assert (logits == before).all()


def test_no_row_is_sorted_whole(monkeypatch):
    sorted_lengths = []
    argsort = np.argsort
    monkeypatch.setattr(filters.np, "argsort", lambda a, **kw: sorted_lengths.append(len(a)) or argsort(a, **kw))
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((3, 50_000)) * np.array([[3.0], [0.3], [1e-3]])).astype(np.float32)
    truncate(logits, [SamplingParams(top_p=0.8)] * 3)
    truncate(logits, [SamplingParams(top_p=0.97, top_k=512)] * 3)
    truncate(logits, [SamplingParams(min_p=0.01, top_k=20_000)] * 3)
    assert sorted_lengths
    assert max(sorted_lengths) <= filters.SORT_AT_MOST


@pytest.mark.parametrize("params", [{"top_k": 50}, {"top_k": 50, "top_p": 0.6, "temperature": 0.7}])
@pytest.mark.parametrize("banned", [0, 19_000])
def test_wide_rows_of_float32_lose_a_last_digit_of_m_and_nothing_else(params, banned):
    z = (np.random.default_rng(0).standard_normal(20_000) * 2).astype(np.float32)
    z[:banned] = -np.inf
    settings = SamplingParams(**params)
    kept = truncate(z[None], [settings])
    ids, logprobs = kept.members(0)
    expected = reference.truncate(z.astype(np.float64), settings)
    assert ids.tolist() == expected.kept_ids.tolist()
    np.testing.assert_allclose(logprobs, expected.logprobs, rtol=0, atol=1e-12)
    assert kept.log_kept_mass_B[0] == pytest.approx(expected.log_kept_mass, abs=1e-7)
    assert kept.log_kept_mass_B[0] != pytest.approx(expected.log_kept_mass, abs=1e-14), "made in float32"


@pytest.mark.parametrize("temperature", [1e-30, 1e-41, 1e-60])
def test_wide_rows_take_temperatures_that_float32_does_not_hold(temperature):
    z = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = truncate(z[None], [SamplingParams(top_k=50, temperature=temperature)])
    assert (kept.log_kept_mass_B[0], kept.entropy_B[0]) == (0, 0)
    assert kept.logprobs_of([0], [int(z.argmax())]).tolist() == [0]
