"""Every kind that a response can have, planted into real responses: what the audit makes of each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keptset.schemas.findings import Severity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolWriter
from keptset.scripts.audit_planting import PLANTS, Plant, Scored, pairs
from keptset.trainer_bridge.audit import AuditOptions, AuditReport, audit
from keptset.trainer_bridge.audit.options import BatchScorer

SHARES = (0.02, 1.0)


@dataclass(frozen=True, kw_only=True)
class Material:
    """Honest responses, and what the model says of them."""

    batch: RolloutBatch
    scored: Callable[[RolloutBatch], Scored]
    """Scores of some of its responses."""
    scorer: Callable[[tuple[int, ...]], Callable[[], BatchScorer]]
    """An audit's scorer with these versions of the weights."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One kind, planted into a share of the responses."""

    kind: str
    told: str
    with_model: bool
    share: float
    responses: int
    """In the set."""
    faulty: int
    named: tuple[str, ...]
    """Kinds of all findings at warning or above."""
    counted: int
    """Responses of the finding of this kind; 0 where there is none."""
    symptoms: tuple[str, ...]
    """Folded under the findings."""

    @property
    def holds(self) -> bool:
        """Whether the planted kind is the one finding at warning or above."""
        return self.named == (self.kind,)


def plant_and_audit(plant: Plant, share: float, material: Material, responses: int) -> Planted:
    """Plant one kind into `responses` of the material, and audit them."""
    batch = _chosen(material.batch, plant, responses)
    rows = pairs(len(batch), share)
    spoilt = plant.apply(batch, rows, material.scored(batch) if plant.scored else None)
    options = AuditOptions(
        workers=1,
        max_version_lag=plant.max_version_lag,
        scorer=material.scorer(plant.versions) if plant.scored else None,
    )
    report = audit_of(spoilt, options)
    loud = [finding for finding in report.findings if finding.severity is not Severity.INFO]
    return Planted(
        kind=plant.kind.value,
        told=plant.told,
        with_model=plant.scored,
        share=share,
        responses=len(batch),
        faulty=len(rows),
        named=tuple(finding.kind.value for finding in loud),
        counted=sum(finding.responses for finding in loud if finding.kind is plant.kind),
        symptoms=tuple(sorted({symptom.kind.value for finding in loud for symptom in finding.symptoms})),
    )


def audit_of(batch: RolloutBatch, options: AuditOptions) -> AuditReport:
    """The audit of one batch, stored as one."""
    with tempfile.TemporaryDirectory(prefix="keptset-bench-") as folder:
        with SpoolWriter(Path(folder) / "spool", "bench", fsync="never") as writer:
            writer.append(batch)
        return audit([Path(folder) / "spool"], options)


def _chosen(batch: RolloutBatch, plant: Plant, responses: int) -> RolloutBatch:
    """The first responses in which the kind can show."""
    if plant.needs_processors:
        batch = batch.filter([penalty != 1 for penalty in batch.column("repetition_penalty").to_pylist()])
    return batch.slice(0, responses)


def names() -> list[tuple[Plant, float]]:
    """What there is to plant."""
    return [(plant, share) for plant in PLANTS for share in SHARES]
