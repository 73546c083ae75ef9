"""Diagnostics of importance ratios as sums that can be added: over batches, ranks and files.

What is computed at each level stands in `ratio_sums`; here is what a batch adds to it, and the report. Nothing is
clipped. Where nothing was counted every diagnostic is "no data" (None): neither 0 nor an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.ratio_sums import LevelReport, RatioSums
from keptset.trainer_bridge.ratios import Level, LogRatios, check_log_ratios
from keptset.trainer_bridge.sampled_tokens import SampledTokens
from keptset.trainer_bridge.scoring.hand import hand_for
from keptset.trainer_bridge.scoring.run import Scores
from keptset.trainer_bridge.sketch import LogHistogram, SizeHistogram
from keptset.trainer_bridge.staleness import version_lag

LOG_RATIO_EDGES = np.linspace(-2.0, 2.0, 201)
"""Edges of the bins of `Diagnostics.histogram`; what lies outside has a bin at either end."""
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")


@dataclass
class Mean:
    """Count and sum of something that is not always known."""

    count: int = 0
    total: float = 0.0

    def add(self, values: NDArray[np.floating]) -> None:
        """Count the values that are not NaN."""
        known = values[~np.isnan(values)]
        self.count += len(known)
        self.total += float(known.sum())

    def merge(self, other: Mean) -> None:
        self.count += other.count
        self.total += other.total

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True, kw_only=True)
class DiagnosticsReport:
    """Every diagnostic; None stands for "no data"."""

    ratio_over: str | None
    """Which tokens entered: `trainable` or `sampled`."""
    over: str | None
    """What the trainer scored over: `kept` or `full`."""
    token: LevelReport
    sequence: LevelReport
    geometric: LevelReport
    num_choices: int
    """Counted tokens with more than one kept id."""
    abs_log_ratio_mean: float | None
    """Of |d| at those tokens, as the quantiles below (within 1 %)."""
    abs_log_ratio_p50: float | None
    abs_log_ratio_p90: float | None
    abs_log_ratio_p99: float | None
    abs_log_ratio_max: float | None
    kept_size_mean: float | None
    kept_size_median: float | None
    """Exact up to 1024, within 1 % above; so is p99."""
    kept_size_p99: float | None
    kept_share_of_one: float | None
    kept_mass_mean: float | None
    """Mean of exp(m) as recorded."""
    measured_kept_mass_mean: float | None
    """The same over the tokens on which the trainer's mass was measured."""
    trainer_kept_mass_mean: float | None
    """The trainer's mass on the recorded sets: what leaves them shows here, and in no ratio."""
    version_lag_mean: float | None
    version_lag_max: int | None
    excluded_tokens: dict[str, int]
    excluded_responses: dict[str, int]

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Names and numbers for a logger; what has no data is left out.

        >>> Diagnostics().report().flat("train/")
        {'train/token/count': 0.0, 'train/sequence/count': 0.0, 'train/geometric/count': 0.0, 'train/num_choices': 0.0}
        """
        numbers: dict[str, float] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, LevelReport):
                inner: Mapping[str, float | None] = {f.name: getattr(value, f.name) for f in fields(value)}
                numbers |= {f"{prefix}{item.name}/{name}": float(v) for name, v in inner.items() if v is not None}
            elif isinstance(value, dict):
                numbers |= {f"{prefix}{item.name}/{kind}": float(n) for kind, n in value.items()}
            elif isinstance(value, (int, float)):
                numbers[f"{prefix}{item.name}"] = float(value)
        return numbers


@dataclass
class Diagnostics:
    """Accumulates batches; two of them merge into what one would have seen.

    >>> import numpy as np
    >>> from keptset.trainer_bridge.ratios import log_ratios
    >>> diagnostics = Diagnostics()
    >>> diagnostics.add(log_ratios(np.array([-1.0, 0.0]), [-1.0, 0.0], [0, 0]), kept_sizes_T=[3, 1])
    >>> report = diagnostics.report()
    >>> report.token.mean_ratio, report.sequence.count, report.kept_share_of_one
    (1.0, 1, 0.5)
    """

    ratio_over: str | None = None
    over: str | None = None
    levels: dict[Level, RatioSums] = field(default_factory=lambda: {level: RatioSums() for level in LEVELS})
    choices: RatioSums = field(default_factory=RatioSums)
    """Tokens with more than one kept id."""
    abs_log_ratio: LogHistogram = field(default_factory=LogHistogram)
    """|d| of those."""
    sizes: SizeHistogram = field(default_factory=SizeHistogram)
    kept_mass: Mean = field(default_factory=Mean)
    measured_kept_mass: Mean = field(default_factory=Mean)
    trainer_kept_mass: Mean = field(default_factory=Mean)
    version_lag: Mean = field(default_factory=Mean)
    version_lag_max: float = -math.inf
    excluded_tokens: Counter[str] = field(default_factory=Counter)
    excluded_responses: Counter[str] = field(default_factory=Counter)
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(LOG_RATIO_EDGES) + 1, np.int64))
    """Counted tokens by log ratio: below the first of LOG_RATIO_EDGES, between each two, at or above the last."""

    def add(
        self,
        ratios: LogRatios,
        *,
        kept_sizes_T: ArrayLike | None = None,
        log_kept_mass_T: ArrayLike | None = None,
        trainer_log_kept_mass_T: ArrayLike | None = None,
        version_lag_T: ArrayLike | None = None,
    ) -> None:
        """Count a batch. Per-token arrays may hold NaN where something is unknown; size 0 is unknown, but not one.

        Errors: InvalidInput where an array has another length, or ratios over other tokens or another support were
        added before.
        """
        check_log_ratios(ratios)
        self._same(ratios.ratio_over, ratios.over)
        d_T, counted_T = ratios.host_delta_T, ratios.counted_T
        on_host = replace(ratios, delta_T=d_T)
        for level in LEVELS:
            self.levels[level].add(on_host.at(level).log_ratios_C)
        self.histogram += np.bincount(
            np.searchsorted(LOG_RATIO_EDGES, d_T[counted_T], side="right"), minlength=len(self.histogram)
        )
        if kept_sizes_T is not None:
            sizes_T = _known(kept_sizes_T, counted_T).astype(np.int64)
            chosen = d_T[counted_T][sizes_T != 1]
            self.choices.add(chosen)
            self.abs_log_ratio.add(np.abs(chosen))
            self.sizes.add(sizes_T[sizes_T > 0])
        recorded_T = np.full(len(d_T), np.nan) if log_kept_mass_T is None else np.asarray(log_kept_mass_T, np.float64)
        recorded = np.exp(_known(recorded_T, counted_T))
        self.kept_mass.add(recorded)
        if trainer_log_kept_mass_T is not None:
            measured = np.exp(_known(trainer_log_kept_mass_T, counted_T))
            self.trainer_kept_mass.add(measured)
            self.measured_kept_mass.add(recorded[~np.isnan(measured)])
        if version_lag_T is not None:
            lag = _known(version_lag_T, counted_T)
            self.version_lag.add(lag)
            self.version_lag_max = max(self.version_lag_max, float(np.nanmax(lag, initial=-math.inf)))
        self.excluded_tokens.update(ratios.violations.counts())
        self.excluded_responses.update(ratios.excluded_responses())

    def add_scored(
        self, ratios: LogRatios, tokens: SampledTokens, scores: Scores, *, current_version: int | None = None
    ) -> None:
        """Count a scored batch with all its record tells; version lag needs the trainer's `current_version`.

        Errors: as `add`; InvalidInput where a token is newer than `current_version`.
        """
        mass_T = None if scores.over == "full" else scores.log_kept_mass_T
        lag_T = None
        if current_version is not None:
            lag_T = version_lag(tokens.policy_versions_T, current_version, tokens.locate)
        self.add(
            ratios,
            kept_sizes_T=tokens.kept_sizes_T,
            log_kept_mass_T=tokens.log_kept_mass_T,
            trainer_log_kept_mass_T=None if mass_T is None else hand_for(mass_T).to_host(mass_T),
            version_lag_T=lag_T,
        )

    def merge(self, other: Diagnostics) -> None:
        """Add another's sums, as if its batches had been added here. InvalidInput where it counted other tokens."""
        if other.ratio_over is not None and other.over is not None:
            self._same(other.ratio_over, other.over)
        for level in LEVELS:
            self.levels[level].merge(other.levels[level])
        self.choices.merge(other.choices)
        self.abs_log_ratio.merge(other.abs_log_ratio)
        self.sizes.merge(other.sizes)
        self.kept_mass.merge(other.kept_mass)
        self.measured_kept_mass.merge(other.measured_kept_mass)
        self.trainer_kept_mass.merge(other.trainer_kept_mass)
        self.version_lag.merge(other.version_lag)
        self.version_lag_max = max(self.version_lag_max, other.version_lag_max)
        self.excluded_tokens.update(other.excluded_tokens)
        self.excluded_responses.update(other.excluded_responses)
        self.histogram += other.histogram

    def report(self) -> DiagnosticsReport:
        """What has been counted so far."""
        choices = self.choices.report()
        return DiagnosticsReport(
            ratio_over=self.ratio_over,
            over=self.over,
            token=self.levels["token"].report(),
            sequence=self.levels["sequence"].report(),
            geometric=self.levels["geometric"].report(),
            num_choices=choices.count,
            abs_log_ratio_mean=choices.mean_abs_log_ratio,
            abs_log_ratio_p50=self.abs_log_ratio.quantile(0.5),
            abs_log_ratio_p90=self.abs_log_ratio.quantile(0.9),
            abs_log_ratio_p99=self.abs_log_ratio.quantile(0.99),
            abs_log_ratio_max=choices.max_abs_log_ratio,
            kept_size_mean=self.sizes.mean(),
            kept_size_median=self.sizes.quantile(0.5),
            kept_size_p99=self.sizes.quantile(0.99),
            kept_share_of_one=self.sizes.share_of(1),
            kept_mass_mean=self.kept_mass.value,
            measured_kept_mass_mean=self.measured_kept_mass.value,
            trainer_kept_mass_mean=self.trainer_kept_mass.value,
            version_lag_mean=self.version_lag.value,
            version_lag_max=int(self.version_lag_max) if self.version_lag.count else None,
            excluded_tokens=dict(self.excluded_tokens),
            excluded_responses=dict(self.excluded_responses),
        )

    def _same(self, ratio_over: str, over: str) -> None:
        if self.ratio_over is None:
            self.ratio_over, self.over = ratio_over, over
        elif (self.ratio_over, self.over) != (ratio_over, over):
            raise InvalidInput(
                f"these diagnostics count {self.ratio_over} tokens scored over `{self.over}`; ratios over {ratio_over} "
                f"tokens scored over `{over}` need diagnostics of their own"
            )


def _known(values_T: ArrayLike, counted_T: NDArray[np.bool_]) -> NDArray[np.float64]:
    array: NDArray[np.float64] = np.asarray(values_T, np.float64)
    if array.shape != counted_T.shape:
        raise InvalidInput(f"a per-token array has shape {array.shape}; there are {len(counted_T)} tokens")
    return array[counted_T]
