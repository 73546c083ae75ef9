"""Float64 NumPy oracle of everything keptset computes: written to be obviously right, not fast.

One short function per formula, one module per step: `kept_set` (logits to recorded numbers), `score` (the trainer's
log-probability), `ratios` and `losses` (what a trainer does with it), `audit` (what a recorded batch shows). Fast code
elsewhere is tested against it, and never calls it.
"""

from keptset.trainer_bridge.reference.audit import (
    Position,
    audit_token,
    better_explanation,
    explanations,
    holm,
    honest,
    kolmogorov_smirnov,
    normal_p_value,
    pit,
    pit_uniform,
    surprisal_z,
)
from keptset.trainer_bridge.reference.kept_set import ReferenceKept, draw, logsumexp, process, tempered, truncate
from keptset.trainer_bridge.reference.losses import cispo_gradient_weight, dual_clip, gspo, ppo_clip
from keptset.trainer_bridge.reference.ratios import (
    Budget,
    Corrected,
    Counted,
    budget,
    chi2,
    correct,
    deltas,
    ess_fraction,
    exclude_non_finite,
    k1,
    k3,
    log_ratio,
    mean_ratio,
)
from keptset.trainer_bridge.reference.score import score, score_gradient, structural_finding, trainer_kept_mass

__all__ = [
    "Budget",
    "Corrected",
    "Counted",
    "Position",
    "ReferenceKept",
    "audit_token",
    "better_explanation",
    "budget",
    "chi2",
    "cispo_gradient_weight",
    "correct",
    "deltas",
    "draw",
    "dual_clip",
    "ess_fraction",
    "exclude_non_finite",
    "explanations",
    "gspo",
    "holm",
    "honest",
    "k1",
    "k3",
    "kolmogorov_smirnov",
    "log_ratio",
    "logsumexp",
    "mean_ratio",
    "normal_p_value",
    "pit",
    "pit_uniform",
    "ppo_clip",
    "process",
    "score",
    "score_gradient",
    "structural_finding",
    "surprisal_z",
    "tempered",
    "trainer_kept_mass",
    "truncate",
]
