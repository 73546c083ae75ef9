"""For one response whose b asks for an explanation: each fault in the form that fits best.

Legend: T tokens of the response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge.audit.explanations import (
    BatchSets,
    Form,
    form,
    from_logits,
    over_sets,
    over_swapped,
    token_chunks,
)
from keptset.trainer_bridge.audit.residuals import Affected, Floats, misfit
from keptset.trainer_bridge.audit.weights import ELSEWHERE, WeightsOfPass
from keptset.trainer_bridge.sampled_tokens import Ints, SampledTokens
from keptset.trainer_bridge.scoring.hand import Tensor

MAX_ELEMENTS = 1 << 22
"""Logits of a response that exist at once: 16 MiB of float32."""

EXPLAINED = 1e-3
"""Nats: what leaves no more than this explains b, and nothing further is tried,"""
EXPLAINED_PART = 0.01
"""if it is no more than this part of the residual either: where that is small itself, chance comes near it."""

Forms = dict[Form, Floats]
"""b [T] under each."""


def explain(
    weights: WeightsOfPass, affected: Affected, sets: BatchSets, row: int
) -> dict[FindingKind, tuple[Floats, int]]:
    """b [T] under each fault that can be tried, and which form of it that is; `row` is the response's in `sets`."""
    if weights.packed.tokens.temperature_T[affected.tokens[0]] == 0:
        return {}
    b_T = weights.packed.tokens.behavior_logprobs_T.astype(np.float64)
    near = _under_own_weights(weights, affected.tokens, partial(from_logits, sets=sets, row=row))
    return best_forms(affected, b_T, near, further_away(weights, affected, sets, row))


def further_away(
    weights: WeightsOfPass, affected: Affected, sets: BatchSets, row: int
) -> tuple[Callable[[], Forms], Callable[[], Forms]]:
    """What may explain b where nothing nearer does: other versions' weights, and then other responses' sets."""

    tokens = affected.tokens

    def swapped() -> Forms:
        others = sets.holding(weights.packed.tokens.take(tokens), row, affected.at_A)
        return _under_own_weights(weights, tokens, partial(over_swapped, sets=sets, others=others)) if others else {}

    return partial(_other_versions, weights, tokens), swapped


def best_forms(
    affected: Affected, b_T: Floats, near: Mapping[Form, Floats], further: tuple[Callable[[], Forms], ...]
) -> dict[FindingKind, tuple[Floats, int]]:
    """Of each fault the form that fits best, with its hint. What is further away is tried while nothing explains b, for
    it is many."""
    forms = dict(near)
    misfits = {f: misfit(affected, b_T, value_T) for f, value_T in forms.items()}
    enough = min(EXPLAINED, EXPLAINED_PART * affected.residual)
    for more_of in further:
        if any(value <= enough for value in misfits.values()):
            break
        more = more_of()
        forms |= more
        misfits |= {f: misfit(affected, b_T, value_T) for f, value_T in more.items()}
    best: dict[FindingKind, Form] = {}
    for f in sorted(forms):
        if not np.isnan(misfits[f]) and (f.kind not in best or misfits[f] < misfits[best[f.kind]]):
            best[f.kind] = f
    return {kind: (forms[f], f.hint) for kind, f in best.items()}


def _under_own_weights(weights: WeightsOfPass, tokens: Ints, b_of: Callable[[Tensor, SampledTokens], Forms]) -> Forms:
    """Forms whose logits are those that drew the tokens; NaN for tokens that were drawn elsewhere."""
    near = np.flatnonzero(weights.drawn_T[tokens] != ELSEWHERE)
    forms: Forms = {}
    for chunk in token_chunks(near, weights.scorer.vocab_size, MAX_ELEMENTS):
        part = weights.packed.tokens.take(tokens[chunk])
        for f, value_C in b_of(weights.logits_drawn(tokens[chunk]), part).items():
            forms.setdefault(f, np.full(len(tokens), np.nan))[chunk] = value_C
    return forms


def _other_versions(weights: WeightsOfPass, tokens: Ints) -> Forms:
    """l over the recorded sets under each version that did not draw all of the tokens."""
    versions = weights.scorer.versions
    forms: Forms = {}
    for index, version in enumerate(versions):
        if version is None or (weights.drawn_T[tokens] == index).all():
            continue
        value_T = np.full(len(tokens), np.nan)
        for chunk in token_chunks(np.arange(len(tokens)), weights.scorer.vocab_size, MAX_ELEMENTS):
            logits = weights.logits_of(index)(weights.packed.logit_index_T[tokens[chunk]])
            value_T[chunk] = over_sets(logits, weights.packed.tokens.take(tokens[chunk]))
        forms[form(FindingKind.WRONG_VERSION, version)] = value_T
    return forms
