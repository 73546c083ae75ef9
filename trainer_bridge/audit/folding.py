"""Which finding is a symptom of which: the one table by which an audit tells causes from what follows from them.

    cause                                              explains
    lengths, nulls, range, sorted, empty_set, member   what else looks wrong in a set that is not whole
    logprob                                            distribution (b disagrees with it)
    distribution                                       logprob_mismatch
    logprob_mismatch                                   surprisal, unit_mean: both are made of b
    a named fault of b                                 every way in which b, or the set, disagrees with something
    mask_swapped                                       set_size, where the other response had a larger top_k
    draws                                              surprisal, the same thing seen by its mean
    staleness                                          support_drift

A symptom is folded under a cause where it is seen in no response without one. A statistical finding is about all
responses together, so it is folded as soon as there is a cause among what it counts, which responses with structural
errors are not: once the cause is put right the test says more. `conflict`, `duplicate`, `seed_reused`, `set_size` and
the like explain nothing, and follow from nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from keptset.schemas.findings import FindingKind as Kind

NAMED_FAULTS = (
    Kind.FULL_VOCABULARY,
    Kind.RAW_LOGITS,
    Kind.RENORMALISED_TWICE,
    Kind.TEMPERATURE_MISSING,
    Kind.TEMPERATURE_ON_LOGPROBS,
    Kind.PROCESSORS_MISSING,
    Kind.MASK_SHIFTED,
    Kind.MASK_SWAPPED,
    Kind.WRONG_VERSION,
)
"""The better explanations of SEMANTICS 6."""
_STATISTICAL = (Kind.DRAWS, Kind.SURPRISAL, Kind.UNIT_MEAN)
_OF_B = (Kind.LOGPROB, Kind.DISTRIBUTION, Kind.LOGPROB_MISMATCH, Kind.SUPPORT_DRIFT, *_STATISTICAL)
_OF_SETS = (Kind.LENGTHS, Kind.NULLS, Kind.EMPTY_SET, Kind.MEMBER, Kind.MASS)

EXPLAINS: Mapping[Kind, frozenset[Kind]] = {
    Kind.SORTED: frozenset({Kind.LENGTHS, Kind.MEMBER, Kind.DISTRIBUTION, Kind.LOGPROB_MISMATCH}),
    Kind.EMPTY_SET: frozenset({Kind.LENGTHS}),
    Kind.RANGE: frozenset({Kind.SORTED, Kind.MEMBER, Kind.DISTRIBUTION, Kind.LOGPROB_MISMATCH}),
    Kind.MEMBER: frozenset({Kind.LENGTHS, Kind.LOGPROB, Kind.DISTRIBUTION, Kind.LOGPROB_MISMATCH}),
    Kind.LOGPROB: frozenset({Kind.DISTRIBUTION, Kind.LOGPROB_MISMATCH}),
    Kind.DISTRIBUTION: frozenset({Kind.LOGPROB_MISMATCH}),
    Kind.LOGPROB_MISMATCH: frozenset({Kind.SURPRISAL, Kind.UNIT_MEAN}),
    Kind.DRAWS: frozenset({Kind.SURPRISAL, Kind.UNIT_MEAN}),
    Kind.SURPRISAL: frozenset({Kind.UNIT_MEAN}),
    Kind.STALENESS: frozenset({Kind.SUPPORT_DRIFT}),
    **{kind: frozenset(_OF_B) for kind in NAMED_FAULTS},
    Kind.MASK_SHIFTED: frozenset((*_OF_B, *_OF_SETS)),
    Kind.MASK_SWAPPED: frozenset((*_OF_B, *_OF_SETS, Kind.SET_SIZE)),
}
"""Cause -> what it explains."""


def explained_by(kind: Kind) -> tuple[Kind, ...]:
    """The causes that would explain this kind, those that explain most first."""
    causes = [cause for cause, symptoms in EXPLAINS.items() if kind in symptoms]
    return tuple(sorted(causes, key=lambda cause: -len(EXPLAINS[cause])))
