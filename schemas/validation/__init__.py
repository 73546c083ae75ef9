"""Structural validation: what can be known to be wrong from the recorded data alone.

Nothing is repaired: not by adding a token to its set, not by clamping, not by dropping a row. The order
of the checks is the order in which the data may be trusted: Arrow's own structure, nulls and lengths, then values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from keptset.schemas.errors import SchemaError, ViolationError
from keptset.schemas.findings import Finding, FindingKind, Severity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.validation.collector import SEVERITIES, STRUCTURAL, Collector, Indices
from keptset.schemas.validation.distributions import check_distributions
from keptset.schemas.validation.kept_sets import check_kept_sets
from keptset.schemas.validation.numbers import check_numbers
from keptset.schemas.validation.responses import check_repeats, check_responses
from keptset.schemas.validation.tokens_view import line_up

__all__ = ["SEVERITIES", "STRUCTURAL", "Inspected", "inspect", "require_valid", "validate"]


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """What validation sees in a batch, and where."""

    findings: tuple[Finding, ...]
    """As `validate` gives them."""
    rows: Mapping[FindingKind, Indices]
    """Every row in which a kind was seen, ascending."""


def validate(batch: RolloutBatch, *, examples: int = 3) -> list[Finding]:
    """All violations in a batch, errors first; an empty list where there are none.

    Each kind occurs once, with its totals and its first `examples` places: the answer is small however bad the batch.
    Repeated rollout_ids and seeds are looked for within this batch. Errors: SchemaError where the data is not valid
    Arrow (offsets that fall, text that is no UTF-8): nothing in it can be read safely.

    >>> import numpy as np
    >>> from keptset.schemas.builder import BatchBuilder, Response
    >>> from keptset.schemas.columns import Identity
    >>> builder = BatchBuilder(Identity(vocab_size=8))
    >>> builder.add(Response(rollout_id="r", prompt_id="p", prompt_token_ids=np.array([0]), token_ids=np.array([3]),
    ...     finish_reason="stop", behavior_logprobs=np.array([-0.5]), kept_offsets=np.array([0, 2]),
    ...     kept_ids=np.array([1, 2])))
    >>> [str(finding.examples[0].detail) for finding in validate(builder.build())]
    ['token 3 is not among its 2 kept ids']
    """
    return list(inspect(batch, examples=examples).findings)


def inspect(batch: RolloutBatch, *, examples: int = 3, repeats: bool = True) -> Inspected:
    """As `validate`, with the rows of each kind.

    Without `repeats` neither repeated rollout_ids nor seeds are looked for: who reads many batches has to look for
    those over all of them. Errors: SchemaError as `validate`.
    """
    try:
        batch.arrow.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"not valid Arrow data, so nothing in it can be trusted: {error}") from error
    collector = Collector(batch.column("rollout_id"), examples)
    check_responses(batch, collector)
    if repeats:
        check_repeats(batch, collector)
    view = line_up(batch, collector)
    sets = view.sets("kept_ids")
    check_kept_sets(view, sets, collector)
    check_numbers(view, sets, collector)
    check_distributions(view, collector)
    return Inspected(findings=tuple(collector.findings()), rows=collector.rows())


def require_valid(batch: RolloutBatch, *, examples: int = 3) -> list[Finding]:
    """Refuse a batch with errors; returns the findings below that severity.

    Errors: ViolationError carrying the findings at severity `error`; SchemaError as `validate`.
    """
    findings = validate(batch, examples=examples)
    errors = tuple(finding for finding in findings if finding.severity is Severity.ERROR)
    if errors:
        told = "\n  ".join(str(finding) for finding in errors)
        raise ViolationError(f"{len(errors)} kinds of violation in {batch!r}:\n  {told}", errors)
    return findings
