"""What an audit found, as records: the terminal, the JSON and the page are three views of one `AuditReport`.

Numbers that do not exist are None. Log-probabilities and log ratios are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.trainer_bridge.audit.check import NotTested
from keptset.trainer_bridge.budget import Term


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """A root cause, with the symptoms that it explains."""

    kind: FindingKind
    severity: Severity
    count: int
    """Places: tokens, or responses for kinds about whole responses."""
    responses: int
    share: float
    """Of all responses."""
    summary: str
    """What was seen, in one sentence with its numbers."""
    advice: str
    """What to do about it."""
    examples: tuple[Example, ...]
    """At most three."""
    symptoms: tuple[AuditFinding, ...] = ()
    """What this explains; none of them has symptoms of its own."""


@dataclass(frozen=True, kw_only=True)
class HypothesisTestResult:
    """A statistical test, and what became of it."""

    name: str
    statistic: float
    p_value: float
    effect: float
    effect_name: str
    effect_bound: float
    count: int
    rejected: bool
    """By Holm's procedure at the family level, and with an effect at or above the bound."""
    informational: bool
    """It could not lead to a finding: a draw test over filtered rollouts."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What was looked at."""

    files: int
    damaged_files: tuple[Example, ...]
    """`rollout_id` is the file's name, `detail` the reason why it was not read to its end."""
    responses: int
    tokens: int
    sampled_tokens: int
    kept_ids: int
    share_read: float
    """Of the bytes of all files, about; below 1 for a sample."""


@dataclass(frozen=True, kw_only=True)
class RatioRow:
    """Ratios exp(l - b) under one way of scoring, over sampled tokens."""

    mean: float | None
    std_error: float | None
    """sqrt(sum (ratio - 1)^2) / n."""
    median: float | None
    share_outside: float | None
    """Of ratios outside [0.9, 1.1]."""
    mean_abs_log: float | None
    """Over |K| > 1."""
    max_abs_log: float | None


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One sampling setting: a row of the table."""

    name: str
    """Every setting that is not off, such as "T 0.7, top_k 512, top_p 0.95"."""
    responses: int
    tokens: int
    kept_mass_mean: float | None
    kept_size_mean: float | None
    kept_size_median: float | None
    kept_size_p99: float | None
    kept_size_one_share: float | None
    kept_ratio: RatioRow | None
    """l over the recorded kept sets; None without scores."""
    full_ratio: RatioRow | None
    """l over the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class VersionRow:
    """One version of the policy's weights, or several neighbours where a run has many: a step of the drift plot."""

    version: int | None
    """The first that the row counts."""
    last_version: int | None
    """The last: the same one, unless neighbours are counted together."""
    tokens: int
    mean_lag: float | None
    surprisal_excess: float | None
    """Mean of -b - H: 0 for draws from the recorded distribution."""
    kept_mass_mean: float | None
    mean_log_ratio: float | None
    mean_abs_log_ratio: float | None
    mean_ratio: float | None
    ratio_std_error: float | None


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts between edges; the first and last bin also hold everything beyond."""

    edges: tuple[float, ...]
    """One more than counts."""
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Tokens by position in the response (columns) and |log ratio| (rows)."""

    position_edges: tuple[int, ...]
    abs_log_ratio_edges: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]
    """counts[row][column]."""


@dataclass(frozen=True, kw_only=True)
class Floors:
    """How far honest ways to compute the same score lie apart, |d| over |K| > 1. Printed, never judged."""

    path_mean_abs: float | None
    path_p99_abs: float | None
    batch_mean_abs: float | None
    batch_p99_abs: float | None
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ShownToken:
    """A token of a response that is shown whole."""

    token_id: int
    text: str | None
    """Decoded; None without a tokenizer."""
    sampled: bool
    behavior_logprob: float | None
    log_kept_mass: float | None
    entropy: float | None
    score: float | None
    """l over the recorded kept set; None without scores."""
    version: int | None
    kept_size: int | None
    kept: tuple[tuple[int, str | None, float | None], ...]
    """The first members of K, most probable first where the distribution is recorded, with text and log-probability."""


@dataclass(frozen=True, kw_only=True)
class ShownResponse:
    """A response that is shown whole."""

    rollout_id: str
    prompt_id: str
    setting: str
    finish_reason: str
    prompt_text: str | None
    """Decoded; None without a tokenizer."""
    prompt_token_ids: tuple[int, ...] = ()
    """Empty where no prompt is recorded."""
    reason: str
    """Why it is shown, such as "largest mean |log ratio|: 0.83"."""
    tokens: tuple[ShownToken, ...]


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Everything an audit has to say."""

    verdict: str
    """One line."""
    severity: Severity | None
    """The highest among the findings; None where there is none."""
    totals: Totals
    identities: tuple[Mapping[str, str], ...]
    """Distinct model, tokenizer, engine and versions of the batches."""
    findings: tuple[AuditFinding, ...]
    """Root causes, errors first."""
    tests: tuple[HypothesisTestResult, ...]
    not_tested: tuple[NotTested, ...]
    settings: tuple[SettingRow, ...]
    versions: tuple[VersionRow, ...]
    """Ascending."""
    finish_reasons: Mapping[str, int]
    group_sizes: Mapping[int, int]
    """Responses of a group -> groups."""
    logprob_domains: Mapping[str, int]
    """Responses by what their log-probabilities are said to be over."""
    kept_sizes: Histogram | None
    pit: Histogram | None
    """Of u in [0, 1]: flat for an honest sampler."""
    kept_log_ratios: Histogram | None
    full_log_ratios: Histogram | None
    positions: HeatMap | None
    budget: Mapping[str, Term] | None
    """Terms of the signed budget, and their total."""
    floors: Floors | None
    worst: tuple[ShownResponse, ...]
