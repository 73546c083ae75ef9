"""Policy-gradient objectives (to be maximised) from ratios r and advantages A, elementwise.

ppo_clip min(rA, clip(r)A); dual_clip the same, not below cA where A < 0; gspo ppo_clip of the geometric ratio, once per
response; cispo weights the gradient of log pi by the clipped ratio, a constant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from keptset.trainer_bridge.reference.kept_set import Float64
from keptset.trainer_bridge.reference.ratios import log_ratio


def ppo_clip(ratio: ArrayLike, advantage: ArrayLike, epsilon: float) -> Float64:
    """min(rA, clip(r, 1 - epsilon, 1 + epsilon) A)."""
    r, a = np.asarray(ratio, np.float64), np.asarray(advantage, np.float64)
    return np.minimum(r * a, np.clip(r, 1 - epsilon, 1 + epsilon) * a)


def dual_clip(ratio: ArrayLike, advantage: ArrayLike, epsilon: float, c: float) -> Float64:
    """ppo_clip, and max(., cA) where A < 0."""
    a = np.asarray(advantage, np.float64)
    clipped = ppo_clip(ratio, a, epsilon)
    return np.where(a < 0, np.maximum(clipped, c * a), clipped)


def gspo(delta_T: ArrayLike, advantage: float, epsilon: float) -> tuple[float, float]:
    """Geometric ratio exp(mean d) of one response, and its clipped objective."""
    ratio = float(np.exp(log_ratio(delta_T, "geometric")[0]))
    return ratio, float(ppo_clip(ratio, advantage, epsilon))


def cispo_gradient_weight(ratio: ArrayLike, advantage: ArrayLike, epsilon_high: float) -> Float64:
    """min(r, 1 + epsilon_high) A, the constant that multiplies the gradient of log pi."""
    return np.minimum(np.asarray(ratio, np.float64), 1 + epsilon_high) * np.asarray(advantage, np.float64)
