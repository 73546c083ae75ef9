import numpy as np
import pytest

from keptset.rollout import truncation_device
from keptset.rollout.sampling import draw, uniforms
from keptset.rollout.truncation import truncate
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

paddle = pytest.importorskip("paddle")

SETTINGS = [
    SamplingParams(**values)
    for values in (
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"min_p": 0.1, "top_p": 0.6},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 0},
        {"top_k": 10**6},
        {"top_k": 10**6, "top_p": 0.5},
        {"temperature": 1e-3},
        {"temperature": 1e-3, "top_p": 0.5},
        {"temperature": 1e3, "top_p": 0.5},
        {"temperature": 1e3, "top_k": 7},
        {"min_p": 0.2, "top_k": 5, "top_p": 0.5},
        {"top_p": 0.999999},
        {"min_p": 1e-300},
        {"min_p": 1.0},
    )
]


def batch(vocab_size, dtype, seed=0):
    """Every setting over plain, tied, banned and unusable rows."""
    rng = np.random.default_rng(seed)
    shape = (len(SETTINGS), vocab_size)
    plain, tied, banned, broken = (rng.standard_normal(shape) * 3 for _ in range(4))
    tied = np.round(tied)
    away = rng.random(shape) < 0.4
    away[:, rng.integers(vocab_size)] = False
    banned[away] = -np.inf
    broken[0::3, -1], broken[1::3, 0], broken[2::3] = np.nan, np.inf, -np.inf
    return np.concatenate([plain, tied, banned, broken]).astype(dtype), SETTINGS * 4


def assert_same(device, host):
    assert device.errors == host.errors
    np.testing.assert_array_equal(device.offsets_B1, host.offsets_B1)
    np.testing.assert_array_equal(device.ids_N, host.ids_N)
    np.testing.assert_array_equal(device.is_full_B, host.is_full_B)
    for name in ("logprobs_N", "log_kept_mass_B", "entropy_B", "logprob_var_B"):
        np.testing.assert_allclose(getattr(device, name), getattr(host, name), rtol=1e-12, atol=1e-11, err_msg=name)
    np.testing.assert_allclose(device.full.block_mass_FC, host.full.block_mass_FC, rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 512, 513, 6000])
def test_a_tensor_worked_on_where_it_is_keeps_what_the_host_keeps(vocab_size, dtype):
    logits, params = batch(vocab_size, dtype)
    assert_same(truncate(paddle.to_tensor(logits), params, on_device=True), truncate(logits, params))


def test_rows_worked_on_in_groups_give_the_same_sets(monkeypatch):
    logits, params = batch(300, np.float32, seed=1)
    monkeypatch.setattr(truncation_device, "ELEMENTS_AT_ONCE", 5 * 300)
    assert_same(truncate(paddle.to_tensor(logits), params, on_device=True), truncate(logits, params))


@pytest.mark.parametrize("bisections", [0, 1, 60])
def test_any_number_of_bisections_gives_the_same_sets(monkeypatch, bisections):
    logits, params = batch(300, np.float32, seed=2)
    monkeypatch.setattr(truncation_device, "BISECTIONS", bisections)
    assert_same(truncate(paddle.to_tensor(logits), params, on_device=True), truncate(logits, params))


def test_only_what_is_near_the_top_comes_to_the_host_and_in_one_copy(monkeypatch):
    copies = []
    numpy = paddle.Tensor.numpy
    monkeypatch.setattr(paddle.Tensor, "numpy", lambda tensor: copies.append(numpy(tensor)) or copies[-1])
    logits = np.random.default_rng(3).standard_normal((8, 50_000)).astype(np.float32) * 3
    params = [SamplingParams(top_k=512, top_p=0.97), SamplingParams(top_p=0.5)] * 4
    kept = truncate(paddle.to_tensor(logits), params, on_device=True)
    assert len(copies) == 1
    per_row = copies[0].size / 8
    assert per_row < 100 + 2 * 600
    assert kept.sizes_B.min() > 50


def test_a_logit_far_below_all_others_brings_no_more_candidates(monkeypatch):
    sizes = []
    unpack = truncation_device._unpack
    monkeypatch.setattr(truncation_device, "_unpack", lambda *args: sizes.append(args[0].size) or unpack(*args))
    logits = np.random.default_rng(3).standard_normal((2, 20_000)).astype(np.float32) * 3
    logits[:, 5] = np.finfo(np.float32).min
    kept = truncate(paddle.to_tensor(logits), [SamplingParams(top_p=0.5), SamplingParams(top_k=50)], on_device=True)
    assert sizes[0] < 2 * 60 + 2.1 * kept.sizes_B.sum()


def test_rows_of_which_nothing_is_a_candidate_need_no_copy_of_ids():
    logits = np.random.default_rng(3).standard_normal((2, 30))
    logits[1] = np.nan
    kept = truncate(paddle.to_tensor(logits), [SamplingParams()] * 2, on_device=True)
    assert kept.is_full_B.tolist() == [True, False]
    assert len(truncate(paddle.zeros([0, 5]), [], on_device=True)) == 0


def test_draws_from_a_tensor_are_those_from_an_array():
    logits, params = batch(1300, np.float32, seed=5)
    numbers = uniforms(np.arange(len(logits)), np.arange(len(logits)))
    host = draw(truncate(logits, params), numbers)
    for on_device in (True, False, None):
        tokens, logprobs = draw(truncate(paddle.to_tensor(logits), params, on_device=on_device), numbers)
        np.testing.assert_array_equal(tokens, host[0])
        np.testing.assert_allclose(logprobs, host[1], rtol=1e-12, atol=1e-12)


def test_normaliser_and_log_probabilities_come_from_the_same_place():
    logits, params = batch(40, np.float32, seed=6)
    kept = truncate(paddle.to_tensor(logits), params, on_device=True)
    for row in range(len(kept)):
        if row not in kept.errors:
            assert np.exp(kept.members(row)[1]).sum() == pytest.approx(1, abs=1e-12)


def test_logits_at_the_end_of_their_range_give_no_false_moments():
    logits = paddle.to_tensor([[1e308, -1e308, 0.0], [0.0, -1.0, -2.0]], dtype="float64")
    kept = truncate(logits, [SamplingParams(), SamplingParams(temperature=1e-200)], on_device=True)
    assert kept.is_full_B.all()
    assert np.abs([kept.entropy_B, kept.logprob_var_B]).max() < 1e-250


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64"])
def test_tensors_narrower_than_float32_are_refused(dtype):
    with pytest.raises(InvalidInput, match=f"logits are {dtype}"):
        truncate(paddle.zeros([1, 4], dtype="float32").astype(dtype), [SamplingParams()])


def test_an_array_cannot_be_worked_on_elsewhere():
    with pytest.raises(InvalidInput, match="on_device needs a Paddle tensor"):
        truncate(np.zeros((1, 4)), [SamplingParams()], on_device=True)


@pytest.mark.gpu
def test_a_tensor_on_an_accelerator_is_not_moved_as_a_whole():
    logits, params = batch(6000, np.float32)
    assert_same(truncate(paddle.to_tensor(logits, place=paddle.CUDAPlace(0)), params), truncate(logits, params))
