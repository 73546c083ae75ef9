"""Rotary frequencies against another implementation's, and rotation against its geometry."""

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from keptset.rollout.models.attention import HeadShape  # noqa: E402
from keptset.rollout.models.rope import Rotation, inverse_frequencies  # noqa: E402
from keptset.rollout.models.rope_settings import Llama3Scaling, RopeSettings  # noqa: E402

LLAMA_3_1 = RopeSettings(
    theta=5e5,
    scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
)
HEADS = HeadShape(num_heads=2, num_kv_heads=1, head_dim=8)


def test_llama3_frequencies_are_those_of_transformers() -> None:
    """Computed by transformers 5.24 with the settings of Llama 3.1 8B; 29 to 34 lie in the band that is blended."""
    expected = {
        0: 1,
        10: 0.128687382,
        28: 0.00321144611,
        29: 0.00216657063,
        30: 0.00137189368,
        31: 0.00085675146,
        32: 0.000524846022,
        33: 0.00031269365,
        34: 0.000178507791,
        35: 9.55621217e-05,
        36: 7.78465546e-05,
        63: 3.06892588e-07,
    }
    freqs_F = inverse_frequencies(LLAMA_3_1, 128)
    assert freqs_F.dtype == np.float32
    np.testing.assert_allclose(freqs_F[list(expected)], list(expected.values()), rtol=2e-6)


def test_default_frequencies_are_the_geometric_series() -> None:
    freqs_F = inverse_frequencies(RopeSettings(theta=100000.0), 64)
    np.testing.assert_allclose(freqs_F, 100000.0 ** (-np.arange(32) / 32), rtol=1e-6)


def test_pairs_turn_by_position_times_frequency() -> None:
    """In float64, as complex numbers: (a + ib) e^(i p f)."""
    positions_T = np.array([0, 1, 7, 300])
    freqs_F = inverse_frequencies(RopeSettings(theta=10000.0), 8)
    qkv_TZD = np.random.default_rng(0).standard_normal((4, 4, 8))
    rotation = Rotation(positions_T, freqs_F, HEADS, "float32", None)
    turned = rotation.rotate(paddle.to_tensor(qkv_TZD.astype(np.float32))).numpy()
    turns_T1F = np.exp(1j * positions_T[:, None, None] * freqs_F.astype(np.float64))
    pairs = (qkv_TZD[:, :3, :4] + 1j * qkv_TZD[:, :3, 4:]) * turns_T1F
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(turned[:, :2] * np.sqrt(8), expected[:, :2], atol=5e-5)
    np.testing.assert_allclose(turned[:, 2], expected[:, 2], atol=2e-5)
    np.testing.assert_array_equal(turned[:, 3], qkv_TZD[:, 3].astype(np.float32))
