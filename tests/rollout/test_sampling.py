import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset.rollout.kept_sets import BLOCK
from keptset.rollout.sampling import draw, row_seed, uniforms
from keptset.rollout.truncation import truncate
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference

DRAWS = 200_000
LAST_BEFORE_1 = 1 - 2.0**-53


# --- random numbers ---------------------------------------------------------------------------------------------------

WORD = 2**64 - 1


def philox4x64_10(counter, key):
    """Written from the definition: Salmon, Moraes, Dror, Shaw 2011, section 3.3."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return c


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]),
        ([WORD] * 4, [WORD] * 2, [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]),
        (
            [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
            [0x452821E638D01377, 0xBE5466CF34E90C6C],
            [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
        ),
    ],
)
def test_the_philox_of_these_tests_gives_the_published_answers(counter, key, words):
    assert philox4x64_10(counter, key) == words


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), max_size=5))
def test_a_uniform_is_the_first_philox_word_of_seed_and_position(pairs):
    seeds, positions = [seed for seed, _ in pairs], [position for _, position in pairs]
    words = [philox4x64_10([position + 1, 0, 0, 0], [seed, 0])[0] for seed, position in pairs]
    assert uniforms(np.array(seeds, np.uint64), positions).tolist() == [(word >> 11) / 2**53 for word in words]


def test_uniforms_are_the_same_in_every_release():
    expected = [104003916602523, 3115428039479628, 7175943882841736]
    assert (uniforms([0, 1, 2**63 - 1], [0, 7, 100_000]) * 2**53).tolist() == expected


def test_uniforms_do_not_depend_on_their_neighbours():
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(0, 2**63, 50), rng.integers(0, 5000, 50)
    together = uniforms(seeds, positions)
    order = rng.permutation(50)
    assert (uniforms(seeds[order], positions[order]) == together[order]).all()
    assert [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)] == together.tolist()


def test_uniforms_are_uniform_along_a_row_and_across_rows():
    for numbers in (uniforms(np.full(20_000, 5), np.arange(20_000)), uniforms(np.arange(20_000), np.full(20_000, 5))):
        assert numbers.dtype == np.float64
        assert ((numbers >= 0) & (numbers < 1)).all()
        assert len(np.unique(numbers)) == 20_000
        distance = np.abs(np.sort(numbers) - (np.arange(20_000) + 0.5) / 20_000).max()
        assert distance * np.sqrt(20_000) < 1.95  # Kolmogorov-Smirnov at 1e-3; the numbers are always the same


@pytest.mark.parametrize(
    ("seeds", "positions", "match"),
    [
        ([-1], [0], "row seeds must be whole numbers >= 0"),
        ([0], [-1], "positions must be whole numbers >= 0"),
        ([0.5], [0], "row seeds must be whole"),
        ([1, 2], [0], r"\(2,\) row seeds and \(1,\) positions"),
    ],
)
def test_seeds_and_positions_that_cannot_be_used_are_refused(seeds, positions, match):
    with pytest.raises(InvalidInput, match=match):
        uniforms(seeds, positions)


# --- row seeds --------------------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(0, 2**64 - 1), st.text(), st.integers(0, 2**31)),
    st.tuples(st.integers(0, 2**64 - 1), st.text(), st.integers(0, 2**31)),
)
def test_row_seeds_are_63_bits_and_differ_where_anything_differs(one, other):
    assert 0 <= row_seed(*one) < 2**63
    assert row_seed(*one) == row_seed(*one)
    assert (row_seed(*one) == row_seed(*other)) == (one == other)


def test_fields_of_a_row_seed_cannot_run_into_each_other():
    seeds = {
        row_seed(1, "1", 11),
        row_seed(1, "11", 1),
        row_seed(11, "1", 1),
        row_seed(11, "", 11),
        row_seed(0, "\0", 0),
        row_seed(0, "", 0),
    }
    assert len(seeds) == 6


def test_a_row_seed_is_the_same_in_every_release():
    assert row_seed(7, "prompt/3", 2) == 3292484364163483703


@pytest.mark.parametrize(("base_seed", "sample_index"), [(-1, 0), (2**64, 0), (0, -1)])
def test_row_seeds_of_numbers_out_of_range_are_refused(base_seed, sample_index):
    with pytest.raises(InvalidInput, match=r"must lie in \[0, 2\*\*64\)"):
        row_seed(base_seed, "p", sample_index)


# --- draws ------------------------------------------------------------------------------------------------------------


def tokens_drawn(logits, params, numbers, rows_at_once=4000):
    """Tokens drawn from one row's set, one for each number."""
    kept = truncate(logits[None], [params])
    parts = np.split(numbers, range(rows_at_once, len(numbers), rows_at_once))
    return np.concatenate([draw(kept.take(np.zeros(len(part), int)), part)[0] for part in parts])


def chi_square_z(tokens, logits, params):
    """Chi-square against the oracle's probabilities, as a normal deviate (Wilson and Hilferty). Rare ids are pooled."""
    expected = reference.truncate(logits, params)
    assert np.isin(tokens, expected.kept_ids).all()
    counts = np.bincount(np.searchsorted(expected.kept_ids, tokens), minlength=len(expected.kept_ids))
    mean = np.exp(expected.logprobs) * len(tokens)
    rare = mean < 5
    counts, mean = np.append(counts[~rare], counts[rare].sum()), np.append(mean[~rare], mean[rare].sum())
    counts, mean = counts[mean > 0], mean[mean > 0]
    freedom = len(mean) - 1
    statistic = ((counts - mean) ** 2 / mean).sum()
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize(
    ("vocab_size", "params"),
    [
        (50, SamplingParams(top_k=12, temperature=1.3)),
        (50, SamplingParams(top_p=0.9)),
        (40, SamplingParams()),
        (2 * BLOCK + 100, SamplingParams(temperature=2.0)),
    ],
    ids=["top_k", "top_p", "full", "full in blocks"],
)
def test_200000_draws_have_the_exact_probabilities(vocab_size, params):
    logits = np.random.default_rng(11).standard_normal(vocab_size) * 1.5
    numbers = uniforms(np.full(DRAWS, row_seed(3, "chi", 0)), np.arange(DRAWS))
    tokens = tokens_drawn(logits, params, numbers, rows_at_once=2000)
    assert abs(chi_square_z(tokens, logits, params)) < 3.5


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.one_of(st.integers(1, 60), st.integers(BLOCK - 1, 3 * BLOCK)),
    params=st.sampled_from([SamplingParams(), SamplingParams(top_p=0.7), SamplingParams(temperature=0.2, top_k=9)]),
    number=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, LAST_BEFORE_1])),
)
def test_a_draw_is_the_oracles_for_the_same_number(seed, vocab_size, params, number):
    logits = np.random.default_rng(seed).standard_normal((1, vocab_size)) * 3
    tokens, logprobs = draw(truncate(logits, [params]), [number])
    expected = reference.truncate(logits[0], params)
    token = reference.draw(expected, number)
    cumulative = np.cumsum(np.exp(expected.logprobs))
    if np.abs(cumulative - number * cumulative[-1]).min() > 1e-12:  # else rounding may decide
        assert tokens[0] == token
        assert logprobs[0] == pytest.approx(expected.logprobs[expected.kept_ids == token][0], abs=1e-10)
    assert tokens[0] in expected.kept_ids


@pytest.mark.parametrize("ban", [False, True], ids=["full", "stored"])
def test_numbers_on_the_edge_go_to_the_next_id(ban):
    logits = np.append(np.array([0.5, 0.25, 0.25]), 0.0 if ban else [])
    logits = np.where(logits > 0, -np.log2(np.maximum(logits, 1e-9)) * -np.log(2), -np.inf)
    numbers = np.array([0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(0.75, 0), 0.75, LAST_BEFORE_1])
    assert tokens_drawn(logits, SamplingParams(), numbers).tolist() == [0, 0, 1, 1, 2, 2]


def test_the_largest_number_draws_a_member_from_every_full_row():
    logits = np.random.default_rng(8).standard_normal((300, 3 * BLOCK - 12))
    logits[:, -3:] = -5000.0
    tokens, logprobs = draw(truncate(logits, [SamplingParams()] * 300), np.full(300, LAST_BEFORE_1))
    assert set(tokens.tolist()) == {3 * BLOCK - 16}
    assert (logprobs > -20).all()


@pytest.mark.parametrize("vocab_size", [4, 3 * BLOCK])
@pytest.mark.parametrize("top_k", [0, 3])
def test_members_of_probability_zero_are_never_drawn(vocab_size, top_k):
    logits = np.full(vocab_size, -5000.0)
    logits[vocab_size // 2] = 0.0
    numbers = np.array([0.0, 1e-300, 0.5, LAST_BEFORE_1])
    assert set(tokens_drawn(logits, SamplingParams(top_k=top_k), numbers)) == {vocab_size // 2}


def test_a_single_member_has_log_probability_exactly_0():
    kept = truncate(np.array([[1.0, 3.0, 3.0]] * 2), [SamplingParams(temperature=0), SamplingParams(top_k=1)])
    tokens, logprobs = draw(kept, [0.0, LAST_BEFORE_1])
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [1, 1]
    assert logprobs.tolist() == [0.0, 0.0]


def test_failed_rows_get_no_token_and_their_neighbours_do():
    logits = np.array([[0.0, 1.0], [np.nan, 1.0], [0.0, 1.0]])
    tokens, logprobs = draw(truncate(logits, [SamplingParams()] * 3), [0.0, 0.5, LAST_BEFORE_1])
    assert tokens.tolist() == [0, -1, 1]
    assert np.isnan(logprobs).tolist() == [False, True, False]


@pytest.mark.parametrize("numbers", [[0.5], [0.5, 1.0], [0.5, -0.1], [0.5, np.nan], [[0.5, 0.5]]])
def test_numbers_that_are_not_uniforms_are_refused(numbers):
    kept = truncate(np.zeros((2, 3)), [SamplingParams()] * 2)
    with pytest.raises(InvalidInput, match="one number in"):
        draw(kept, numbers)


# --- rows of a batch --------------------------------------------------------------------------------------------------

MIX = [
    SamplingParams(),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=20, temperature=0.7),
    SamplingParams(min_p=0.05),
]


def respond(logits_TV, rows, length=20):
    """Tokens and log-probabilities of rows (seed, params) over the same logits, decoded together."""
    seeds, params = np.array([seed for seed, _ in rows]), [p for _, p in rows]
    steps = [
        draw(truncate(np.tile(logits_TV[t], (len(rows), 1)), params), uniforms(seeds, np.full(len(rows), t)))
        for t in range(length)
    ]
    return np.array([tokens for tokens, _ in steps]).T, np.array([logprobs for _, logprobs in steps]).T


def test_the_same_row_seed_gives_the_same_tokens_in_any_batch():
    rng = np.random.default_rng(2)
    logits_TV = (rng.standard_normal((20, 3000)) * 2).astype(np.float32)
    rows = [(row_seed(1, f"p{i}", 0), MIX[i % 4]) for i in range(16)]
    tokens, logprobs = respond(logits_TV, rows)
    order = rng.permutation(16)
    shuffled, shuffled_logprobs = respond(logits_TV, [rows[i] for i in order])
    assert (shuffled == tokens[order]).all()
    assert shuffled_logprobs.tobytes() == logprobs[order].tobytes()
    for i in (0, 1, 2, 3):
        alone, alone_logprobs = respond(logits_TV, [rows[i]])
        assert (alone[0] == tokens[i]).all()
        assert alone_logprobs[0].tobytes() == logprobs[i].tobytes()


def test_samples_of_one_prompt_differ():
    logits_TV = np.random.default_rng(3).standard_normal((20, 500))
    tokens, _ = respond(logits_TV, [(row_seed(1, "p", sample), SamplingParams()) for sample in range(8)])
    assert len(np.unique(tokens, axis=0)) == 8
    other_step, _ = respond(logits_TV, [(row_seed(2, "p", sample), SamplingParams()) for sample in range(8)])
    assert not (tokens == other_step).all(axis=1).any()
