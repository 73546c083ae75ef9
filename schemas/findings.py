"""One vocabulary for what can be wrong with recorded rollouts: validation, adapters, audit and docs share it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How much a finding should stop you; ordered info < warning < error."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class FindingKind(str, Enum):
    """Name of a finding. The text is what it means; docs/findings is made from it."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> FindingKind:
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.meaning = meaning
        return kind

    LENGTHS = "lengths", "per-token columns of a response differ in length"
    NULLS = "nulls", "a null where the schema, `sampled` or `support` forbids it, or a value where it demands null"
    RANGE = "range", "an id outside [0, V)"
    SORTED = "sorted", "a kept set that is not strictly ascending (so also one with a duplicate)"
    EMPTY_SET = "empty_set", "a sampled token with an empty kept set"
    MEMBER = "member", "a sampled token outside its kept set"
    LOGPROB = "logprob", "b is not finite, > 1e-6, <= -1000, or not 0 where the set has one member"
    MASS = "mass", "m is not finite or > 1e-6, or the kept mass is < top_p where top_k = 0 and min_p = 0"
    SET_SIZE = "set_size", "a set larger than top_k (a warning: some engines keep ties)"
    VERSION_ORDER = "version_order", "policy versions decrease along a response"
    PROMPT = "prompt", "no prompt where token 0 was sampled"
    CONFLICT = "conflict", "the same rollout_id with other content"
    DUPLICATE = "duplicate", "the same rollout_id with the same content"
    SEED_REUSED = "seed_reused", "rows that share a row seed"
    SUPPORT_ABSENT = "support_absent", "no kept set was recorded"
    DISTRIBUTION = (
        "distribution",
        "the recorded kept distribution does not sum to 1, or disagrees with b or H; or H or Var(log p) is not finite "
        "or < -1e-4, or a full log-probability not finite, > 1e-6 or <= -1000",
    )
    LOGPROB_MISMATCH = (
        "logprob_mismatch",
        "b disagrees with the score over the recorded set at equal weights, and no better explanation was found",
    )
    FULL_VOCABULARY = "full_vocabulary", "b is explained by normalising over the whole vocabulary"
    RAW_LOGITS = "raw_logits", "b is explained by the logits before temperature and processors"
    RENORMALISED_TWICE = "renormalised_twice", "b is explained by subtracting the log kept mass twice"
    TEMPERATURE_MISSING = "temperature_missing", "b is explained by leaving the temperature out"
    TEMPERATURE_ON_LOGPROBS = (
        "temperature_on_logprobs",
        "b is explained by dividing log-probabilities, not logits, by the temperature",
    )
    PROCESSORS_MISSING = "processors_missing", "b is explained by leaving the penalties or biases out"
    MASK_SHIFTED = "mask_shifted", "b is explained by the kept set of a neighbouring position"
    MASK_SWAPPED = "mask_swapped", "b is explained by the kept sets of another response"
    WRONG_VERSION = "wrong_version", "b is explained by another version of the weights"
    DRAWS = "draws", "sampled tokens are not draws from the recorded distribution (order statistic test)"
    SURPRISAL = "surprisal", "sampled tokens are not draws from the recorded distribution (surprisal test)"
    UNIT_MEAN = "unit_mean", "the mean ratio differs from 1"
    SUPPORT_DRIFT = "support_drift", "the trainer's mass on the kept sets moved away from the recorded one"
    STALENESS = "staleness", "version lag beyond the asked bound"


@dataclass(frozen=True, kw_only=True)
class Example:
    """One place where a finding was seen."""

    rollout_id: str
    position: int | None
    """Index into the response's tokens; None where the finding is about the whole response."""
    detail: str
    """The numbers, ready to read."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """All occurrences of one kind, with a bounded number of examples."""

    kind: FindingKind
    severity: Severity
    count: int
    """How many places (tokens, or responses for kinds about whole responses)."""
    responses: int
    """How many distinct responses."""
    examples: tuple[Example, ...]

    def __str__(self) -> str:
        where = "; ".join(
            f"{e.rollout_id}" + (f" token {e.position}" if e.position is not None else "") + f": {e.detail}"
            for e in self.examples
        )
        counted = f"{self.count} in {self.responses} responses"
        return f"{self.severity.value} {self.kind.value}: {self.kind.meaning} ({counted}; {where})"
