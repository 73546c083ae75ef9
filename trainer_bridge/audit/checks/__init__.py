"""Every check of an audit, in the order in which batches go through them and their parts are put into the report.

A check is a module here and its class in one of the two lists.
"""

from __future__ import annotations

from keptset.trainer_bridge.audit.check import Check, NotTested
from keptset.trainer_bridge.audit.checks.draws import Draws
from keptset.trainer_bridge.audit.checks.responses import Responses
from keptset.trainer_bridge.audit.checks.settings_table import SettingsTable
from keptset.trainer_bridge.audit.checks.structure import Structure
from keptset.trainer_bridge.audit.checks.surprisal import Surprisal
from keptset.trainer_bridge.audit.checks.versions import Versions
from keptset.trainer_bridge.audit.checks.worst import Worst
from keptset.trainer_bridge.audit.options import AuditOptions

CHECKS: tuple[type[Check], ...] = (Structure, Responses, Surprisal, Draws, Versions, SettingsTable, Worst)
"""From the files alone."""


def scored_checks() -> tuple[type[Check], ...]:
    """With scores, from a model or a column, in addition. They come after those whose tables they complete."""
    from keptset.trainer_bridge.audit.checks.budget import BudgetTable
    from keptset.trainer_bridge.audit.checks.explanations import Explanations
    from keptset.trainer_bridge.audit.checks.ratios import Ratios
    from keptset.trainer_bridge.audit.checks.support_drift import SupportDrift
    from keptset.trainer_bridge.audit.checks.unit_mean import UnitMean

    return (Explanations, UnitMean, SupportDrift, Ratios, BudgetTable)


NEED_SCORES = ("explanations", "unit mean", "support drift")
"""Of those, the ones that can find something."""
_NO_SCORES = (
    "there were no scores to hold b against: give a model (--model DIR), or the trainer's own log-probabilities "
    "(--trainer-logprobs COLUMN)"
)


def not_asked_for(options: AuditOptions) -> tuple[NotTested, ...]:
    """What these options leave out."""
    return () if options.scorer else tuple(NotTested(check=name, reason=_NO_SCORES) for name in NEED_SCORES)


def start_checks(options: AuditOptions) -> list[Check]:
    """Fresh aggregates of every check that these options ask for."""
    kinds = CHECKS if options.scorer is None else (*CHECKS, *scored_checks())
    return [kind(options) for kind in kinds]
