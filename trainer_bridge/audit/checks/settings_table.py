"""What each sampling setting keeps: kept mass and kept sizes, as the record has them. A table, no judgement.

Counts sound responses. Settings beyond MAX_SETTINGS are counted together.

Legend: S sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.check import Check, Outcome
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.report import AuditReport, Histogram, SettingRow
from keptset.trainer_bridge.audit.settings import setting_names
from keptset.trainer_bridge.sketch import SizeHistogram

MAX_SETTINGS = 200
OTHERS = "other settings"
_DOUBLINGS = 20
"""Of kept sizes in the histogram: 1, 2 to 3, 4 to 7, ..."""


@dataclass
class _Setting:
    responses: int = 0
    tokens: int = 0
    mass: ExactSum = field(default_factory=ExactSum)
    sizes: SizeHistogram = field(default_factory=SizeHistogram)

    def merge(self, other: _Setting) -> None:
        self.responses += other.responses
        self.tokens += other.tokens
        self.mass.merge(other.mass)
        self.sizes.merge(other.sizes)


class SettingsTable(Check):
    """Kept mass and kept sizes by setting."""

    name = "settings"

    def __init__(self, options: AuditOptions) -> None:
        self._settings: dict[str, _Setting] = {}
        self._doublings: NDArray[np.int64] = np.zeros(_DOUBLINGS, np.int64)

    def _of(self, name: str) -> _Setting:
        if name not in self._settings and len(self._settings) >= MAX_SETTINGS:
            name = OTHERS
        return self._settings.setdefault(name, _Setting())

    def add(self, batch: AuditedBatch) -> None:
        tokens = batch.sound_tokens
        names = setting_names(batch.sound)
        mass_S, sizes_S = np.exp(tokens.log_kept_mass_T.astype(np.float64)), tokens.kept_sizes_T
        known = sizes_S[sizes_S > 0]
        doublings = np.minimum(np.frexp(known.astype(np.float64))[1] - 1, _DOUBLINGS - 1)
        self._doublings += np.bincount(doublings, minlength=_DOUBLINGS)
        distinct = list(dict.fromkeys(names))
        code_S = np.array([distinct.index(name) for name in names], np.int64)[tokens.row_T]
        for code, name in enumerate(distinct):
            here = slice(None) if len(distinct) == 1 else code_S == code
            setting = self._of(name)
            setting.responses += names.count(name)
            setting.tokens += len(sizes_S[here])
            setting.mass.add_known(mass_S[here])
            sizes = sizes_S[here]
            setting.sizes.add(sizes[sizes > 0])

    def merge(self, other: SettingsTable) -> None:
        for name, theirs in other._settings.items():
            self._of(name).merge(theirs)
        self._doublings += other._doublings

    def outcome(self) -> Outcome:
        return Outcome()

    def contribute(self, report: AuditReport) -> AuditReport:
        rows = sorted(self._settings.items(), key=lambda item: (-item[1].tokens, item[0]))
        edges = tuple(2.0**n for n in range(_DOUBLINGS + 1))
        counts = tuple(self._doublings.tolist())
        return replace(
            report,
            settings=tuple(_row(name, setting) for name, setting in rows),
            kept_sizes=Histogram(edges=edges, counts=counts) if any(counts) else None,
        )


def _row(name: str, setting: _Setting) -> SettingRow:
    return SettingRow(
        name=name,
        responses=setting.responses,
        tokens=setting.tokens,
        kept_mass_mean=setting.mass.mean,
        kept_size_mean=setting.sizes.mean(),
        kept_size_median=setting.sizes.quantile(0.5),
        kept_size_p99=setting.sizes.quantile(0.99),
        kept_size_one_share=setting.sizes.share_of(1),
        kept_ratio=None,
        full_ratio=None,
    )
