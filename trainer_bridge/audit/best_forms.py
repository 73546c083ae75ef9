"""For one response whose b asks for an explanation: each fault in the form that fits best.

Legend: T tokens of the response.
"""

from __future__ import annotations

import numpy as np

from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge.audit.explanations import BatchSets, Form, form, from_logits, over_sets, token_chunks
from keptset.trainer_bridge.audit.residuals import Affected, Floats, misfit
from keptset.trainer_bridge.audit.weights import ELSEWHERE, WeightsOfPass
from keptset.trainer_bridge.sampled_tokens import Ints

MAX_ELEMENTS = 1 << 22
"""Logits of a response that exist at once: 16 MiB of float32."""

EXPLAINED = 1e-3
"""Nats: what leaves no more than this explains b, and nothing further is tried."""


def explain(
    weights: WeightsOfPass, affected: Affected, sets: BatchSets, row: int
) -> dict[FindingKind, tuple[Floats, int]]:
    """b [T] under each fault that can be tried, and which form of it that is; `row` is the response's in `sets`.

    Other responses' sets and other versions' weights are tried only where nothing nearer explains b: they are many.
    """
    tokens = weights.packed.tokens.take(affected.tokens)
    if tokens.temperature_T[0] == 0:
        return {}
    b_T = weights.packed.tokens.behavior_logprobs_T.astype(np.float64)
    forms = _from_logits(weights, affected.tokens, sets, row, ())
    misfits = {f: misfit(affected, b_T, value_T) for f, value_T in forms.items()}
    if not any(value <= EXPLAINED for value in misfits.values()):
        more = _other_versions(weights, affected.tokens)
        swaps = sets.holding(tokens, row)
        if swaps:
            more |= {
                f: value_T
                for f, value_T in _from_logits(weights, affected.tokens, sets, row, swaps).items()
                if f.kind is FindingKind.MASK_SWAPPED
            }
        forms |= more
        misfits |= {f: misfit(affected, b_T, value_T) for f, value_T in more.items()}
    best: dict[FindingKind, Form] = {}
    for f in sorted(forms):
        if not np.isnan(misfits[f]) and (f.kind not in best or misfits[f] < misfits[best[f.kind]]):
            best[f.kind] = f
    return {kind: (forms[f], f.hint) for kind, f in best.items()}


def _from_logits(
    weights: WeightsOfPass, tokens: Ints, sets: BatchSets, row: int, swaps: tuple[int, ...]
) -> dict[Form, Floats]:
    """Every form whose logits are those that drew the tokens; NaN for tokens that were drawn elsewhere."""
    near = np.flatnonzero(weights.drawn_T[tokens] != ELSEWHERE)
    forms: dict[Form, Floats] = {}
    for chunk in token_chunks(near, weights.scorer.vocab_size, MAX_ELEMENTS):
        part = weights.packed.tokens.take(tokens[chunk])
        for f, value_C in from_logits(weights.logits_drawn(tokens[chunk]), part, sets, row, swaps).items():
            forms.setdefault(f, np.full(len(tokens), np.nan))[chunk] = value_C
    return forms


def _other_versions(weights: WeightsOfPass, tokens: Ints) -> dict[Form, Floats]:
    """l over the recorded sets under each version that did not draw all of the tokens."""
    versions = weights.scorer.versions
    forms: dict[Form, Floats] = {}
    for index, version in enumerate(versions):
        if version is None or (weights.drawn_T[tokens] == index).all():
            continue
        value_T = np.full(len(tokens), np.nan)
        for chunk in token_chunks(np.arange(len(tokens)), weights.scorer.vocab_size, MAX_ELEMENTS):
            logits = weights.logits_of(index)(weights.packed.logit_index_T[tokens[chunk]])
            value_T[chunk] = over_sets(logits, weights.packed.tokens.take(tokens[chunk]))
        forms[form(FindingKind.WRONG_VERSION, version)] = value_T
    return forms
