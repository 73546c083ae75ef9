"""What the demo found, as records, and the rule by which a setting passes.

One `SettingResult` per sampling setting holds the ratio exp(l - b) of every sampled token, summarised twice: with l
over the whole vocabulary, and with l over the recorded kept set K. At equal weights the first has mean E[exp(m)], the
kept mass, and the second is 1. `judge` says whether both hold to float32.

Legend: T sampled tokens of one setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.ratio_sums import LOWER, UPPER, RatioSums

CHOICE_MEAN_ABS_LOG = 2e-5
"""Largest mean |log ratio| over |K| > 1 at equal weights. One pass and the cached path of the same float32 weights
differ by about 3e-6 a token on a small model; several times that is a fault, not rounding."""

CHOICE_MAX_ABS_LOG = 2e-3
"""Largest |log ratio| of any token with |K| > 1: the tail of the same difference, where an improbable token was drawn.
A wrong kept set, temperature or position is off by 1e-2 and more."""

MASS_GAP = 1e-4
"""Largest |mean full-vocabulary ratio - mean kept mass|. Token by token the two are equal up to the path difference,
whose signed mean is far below this; a second source of bias is not."""

OUTSIDE = (LOWER, UPPER)
"""Ratios outside this are counted: what a trainer that clips or masks would start to notice."""

HISTOGRAM_EDGES: tuple[float, ...] = tuple((2 * k + 1) / 200 for k in range(-161, 21))
"""Bin edges of log-ratio histograms, -1.605 to 0.205 in steps of 0.01 (ratios 0.2 to 1.23): a ratio of 1 falls in the
middle of a bin, so that rounding does not split it over two. The first and last bin also count everything beyond."""


@dataclass(frozen=True, kw_only=True)
class RatioSummary:
    """Ratios exp(d) of one setting under one way of scoring."""

    mean: float
    """Over all sampled tokens."""
    std_error: float
    """sqrt(sum (ratio - 1)^2) / T: how far the mean may lie from 1 if the expected ratio is 1."""
    median: float
    share_outside: float
    """Share of tokens whose ratio lies outside `OUTSIDE`."""
    choice_abs_log_mean: float
    """Mean |d| over tokens with |K| > 1; nan where there are none."""
    choice_abs_log_max: float
    """Largest |d| over tokens with |K| > 1; nan where there are none."""
    histogram: tuple[int, ...]
    """Tokens per bin of `HISTOGRAM_EDGES`."""

    @classmethod
    def of(cls, log_ratios_T: ArrayLike, choice_T: ArrayLike) -> RatioSummary:
        """Summary of log ratios [T] (float, nats), `choice_T` [T] (bool) telling where |K| > 1.

        Errors: InvalidInput where one is no finite number.

        >>> summary = RatioSummary.of([0.0, np.log(0.5)], [False, True])
        >>> summary.mean, summary.share_outside, round(summary.choice_abs_log_max, 4)
        (0.75, 0.5, 0.6931)
        """
        d_T = np.asarray(log_ratios_T, np.float64)
        if not np.isfinite(d_T).all():
            bad = np.flatnonzero(~np.isfinite(d_T))
            raise InvalidInput(
                f"{len(bad)} of {len(d_T)} log ratios are no finite numbers, the first {d_T[bad[0]]} of token "
                f"{bad[0]}; score with on_violation='raise' to see why"
            )
        all_tokens, choices = RatioSums(), RatioSums()
        all_tokens.add(d_T)
        choices.add(d_T[np.asarray(choice_T, bool)])
        every, choice = all_tokens.report(), choices.report()
        return cls(
            mean=_or_nan(every.mean_ratio),
            std_error=_or_nan(every.mean_ratio_se),
            # Exact, since all of them are at hand; the report's own comes from a sketch.
            median=float(np.exp(np.median(d_T))) if len(d_T) else math.nan,
            share_outside=_or_nan(every.share_outside),
            choice_abs_log_mean=_or_nan(choice.mean_abs_log_ratio),
            choice_abs_log_max=_or_nan(choice.max_abs_log_ratio),
            histogram=tuple(log_ratio_histogram(d_T).tolist()),
        )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def log_ratio_histogram(log_ratios_T: ArrayLike) -> NDArray[np.int64]:
    """Tokens per bin of `HISTOGRAM_EDGES`.

    >>> int(log_ratio_histogram([-9.0, 0.0, 9.0]).sum())
    3
    """
    clipped = np.clip(np.asarray(log_ratios_T, np.float64), HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1])
    counts, _ = np.histogram(clipped, bins=np.asarray(HISTOGRAM_EDGES))
    return counts.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """How far the same weights disagree with themselves: |d| between two honest ways to compute a log-probability."""

    mean_abs: float
    p99_abs: float
    tokens: int
    """How many were compared, all with |K| > 1."""

    @classmethod
    def of(cls, differences_T: ArrayLike) -> Floor:
        """Floor of signed differences [T] (nats) over |K| > 1."""
        abs_T = np.abs(np.asarray(differences_T, np.float64))
        if not len(abs_T):
            return cls(mean_abs=math.nan, p99_abs=math.nan, tokens=0)
        return cls(mean_abs=float(abs_T.mean()), p99_abs=float(np.quantile(abs_T, 0.99)), tokens=len(abs_T))


@dataclass(frozen=True, kw_only=True)
class SettingResult:
    """One row of the demo's table. Numbers that do not exist (no token counted) are nan.

    A worked example: top_p 0.8 keeps 90 % of the probability on average. `kept_mass_mean` is 0.9, so is
    `full_vocabulary_ratio.mean`; `kept_set_ratio.mean` is 1 to seven digits.
    """

    name: str
    """Short, such as "top_p 0.8"."""
    sampling: str
    """Every setting that is not off, such as "T 0.7, top_k 512, top_p 0.95"."""
    tokens: int
    """Sampled tokens, T."""
    choice_tokens: int
    """Those with |K| > 1. The others have ratio 1 whatever happens."""
    kept_mass_mean: float
    """Mean of exp(m) over all sampled tokens."""
    kept_size_mean: float
    kept_size_median: float
    kept_size_p99: float
    kept_size_one_share: float
    """Share of tokens with |K| = 1."""
    full_vocabulary_ratio: RatioSummary
    """l over the whole vocabulary: what a trainer that knows nothing of K computes."""
    kept_set_ratio: RatioSummary
    """l over the recorded K."""
    choice_mass_gap: float
    """Mean of (full-vocabulary ratio - kept mass) over |K| > 1; signed."""
    path_floor: Floor
    """One pass against token by token through the cache."""
    batch_floor: Floor
    """Order and padding of the batch changed."""

    @property
    def mass_gap(self) -> float:
        """Mean full-vocabulary ratio less mean kept mass, over all sampled tokens; signed."""
        return self.full_vocabulary_ratio.mean - self.kept_mass_mean


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What was run, for the report and for `--json`."""

    model: str
    engine: str
    """What sampled, with its version."""
    scorer: str
    """What scored, in words: whether it is the same decoder, how it ran, in which precision."""
    dtype: str
    prompts: int
    responses: int
    actors: int
    threads_per_actor: int
    seed: int
    started: str
    """ISO 8601 with time zone."""
    seconds: float
    machine: str
    versions: Mapping[str, str]
    """Package to version."""
    command: str
    """What repeats the run."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a setting passes, and every bound it breaks."""

    passes: bool
    reasons: tuple[str, ...]


def judge(result: SettingResult) -> Verdict:
    """Apply the bounds above to one setting. A number that is missing (nan) breaks its bound."""
    checks = [
        ("mean |log ratio| of kept-set scoring", result.kept_set_ratio.choice_abs_log_mean, CHOICE_MEAN_ABS_LOG),
        ("largest |log ratio| of kept-set scoring", result.kept_set_ratio.choice_abs_log_max, CHOICE_MAX_ABS_LOG),
        ("|mean full-vocabulary ratio - mean kept mass|", abs(result.mass_gap), MASS_GAP),
        ("|mean full-vocabulary ratio - mean kept mass| over |K| > 1", abs(result.choice_mass_gap), MASS_GAP),
    ]
    reasons = tuple(
        f"{name} is {'no data' if math.isnan(value) else format(value, '.2e')}; the bound is {bound:.0e}"
        for name, value, bound in checks
        if not value <= bound
    )
    return Verdict(passes=not reasons, reasons=reasons)


def verdict_line(results: Sequence[SettingResult]) -> str:
    """One sentence over all settings."""
    failed = [result.name for result in results if not judge(result).passes]
    if not results:
        return "Nothing was measured."
    if failed:
        return f"{len(failed)} of {len(results)} settings break a bound: {', '.join(failed)}."
    tokens = sum(result.tokens for result in results)
    return (
        f"All {len(results)} settings pass: over {tokens:,} tokens, scoring on the kept set gives ratio 1, and "
        "scoring on the full vocabulary gives the kept mass."
    )


def to_json(run: RunFacts, results: Sequence[SettingResult]) -> dict[str, object]:
    """Plain values for `json.dumps`, described in docs/demo.md; a number that is nan or infinite becomes null."""
    settings = []
    for result in results:
        verdict = judge(result)
        flat = _flat(asdict(result))
        settings.append({**flat, "mass_gap": _plain(result.mass_gap), **_flat(asdict(verdict))})
    return {
        "passes": bool(results) and all(judge(result).passes for result in results),
        "run": {**asdict(run), "versions": dict(run.versions)},
        "histogram_edges": list(HISTOGRAM_EDGES),
        "settings": settings,
    }


def _flat(record: Mapping[str, object]) -> dict[str, object]:
    """Records within records become prefix_name."""
    flat: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat.update({f"{name}_{inner}": plain for inner, plain in _flat(value).items()})
        else:
            flat[name] = _plain(value)
    return flat


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
