"""Honest rollouts of real seeds under the demo's settings, audited with the model that drew them: nothing is found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from keptset.schemas.findings import Severity
from keptset.scripts.audit_scorers import OpenModel
from keptset.scripts.bench_audit_power_rollouts import Progress, Source, of_seed
from keptset.scripts.demo import SETTINGS
from keptset.trainer_bridge.audit import AuditOptions, audit

PROMPTS = 12


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What an audit says of the rollouts of one seed."""

    seed: int
    responses: int
    tokens: int
    findings: tuple[str, ...]
    """Kinds at warning or above."""
    p_values: dict[str, float]
    """By test."""
    max_abs_mean_ratio: float
    """Largest |mean ratio - 1| of the settings, over their kept sets."""


def audit_seed(folder: Path, source: Source, seed: int, progress: Progress) -> Seed:
    """Sample, where the rollouts are not there, and audit."""
    few = replace(source, prompts=source.prompts[:PROMPTS])
    spool = of_seed(folder, few, tuple(SETTINGS.values()), seed, progress)
    scorer = OpenModel(folders=((0, str(source.model)),))
    report = audit([spool], AuditOptions(workers=1, scorer=scorer, max_version_lag=0))
    means = [row.kept_ratio.mean for row in report.settings if row.kept_ratio is not None]
    return Seed(
        seed=seed,
        responses=report.totals.responses,
        tokens=report.totals.sampled_tokens,
        findings=tuple(found.kind.value for found in report.findings if found.severity is not Severity.INFO),
        p_values={test.name: test.p_value for test in report.tests},
        max_abs_mean_ratio=max(abs(mean - 1) for mean in means if mean is not None),
    )
