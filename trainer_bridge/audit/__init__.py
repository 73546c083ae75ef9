"""The audit of recorded rollouts: find every way in which a recorded ratio can lie, over any amount of them.

    from keptset.trainer_bridge.audit import AuditOptions, audit
    report = audit(["runs/tonight/spool"], AuditOptions(max_version_lag=2))

`plan`, `audit_unit`, `Partial.merge` and `conclude` are its pieces, for whoever spreads units over machines.
"""

from keptset.trainer_bridge.audit.conclusion import conclude
from keptset.trainer_bridge.audit.options import AuditOptions, Progress
from keptset.trainer_bridge.audit.partial import Partial
from keptset.trainer_bridge.audit.planning import Plan, Unit, plan
from keptset.trainer_bridge.audit.report import AuditReport
from keptset.trainer_bridge.audit.runner import audit
from keptset.trainer_bridge.audit.unit_audit import audit_unit

__all__ = [
    "AuditOptions",
    "AuditReport",
    "Partial",
    "Plan",
    "Progress",
    "Unit",
    "audit",
    "audit_unit",
    "conclude",
    "plan",
]
