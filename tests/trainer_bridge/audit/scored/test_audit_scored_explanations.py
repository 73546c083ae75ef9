"""Every named fault, in 2 % and in all responses, is named; honest records are left alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keptset.schemas.findings import FindingKind
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.audit.best_forms import best_forms
from keptset.trainer_bridge.audit.check import Outcome
from keptset.trainer_bridge.audit.checks.explanations import TEST, Explanations
from keptset.trainer_bridge.audit.explained import Fit, FitCounts, bin_of, decide
from keptset.trainer_bridge.audit.explanations import EXPLANATIONS, form
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.residuals import Affected
from keptset.trainer_bridge.audit.token_scores import ModelScorer

HONEST = 98
RARELY_BIASED = (SamplingParams(temperature=0.8, top_k=6, logit_bias={3: -1.0}),)
"""Few of whose sets hold the id that has a bias."""


def counted(scored: Any, world: Any, models: Any = None) -> Explanations:
    scorer = ModelScorer(scorer=scored.TableScorer(models or {0: world.model}))
    check = Explanations(AuditOptions())
    check.add(scored.audited(world.batch(), scorer))
    return check


def models_of(world: Any, kind: FindingKind) -> Any:
    return {0: world.model, 1: world.model.moved(17, 0.3)} if kind is FindingKind.WRONG_VERSION else None


def rows_of(kind: FindingKind) -> Sequence[int]:
    """Two responses in whose setting the fault shows; other half of each other's swap."""
    return [1, 5] if kind is FindingKind.PROCESSORS_MISSING else [3, 7]


@pytest.fixture(scope="module")
def honest(scored: Any) -> Explanations:
    """98 honest responses, counted."""
    return counted(scored, scored.draw(4, HONEST))


@pytest.mark.parametrize("kind", EXPLANATIONS, ids=lambda kind: kind.value)
def test_a_fault_in_two_responses_of_a_hundred_is_named_and_nothing_else(
    scored: Any, clean: Any, honest: Explanations, kind: FindingKind
) -> None:
    rows = rows_of(kind)
    faulty = scored.plant(clean, kind, rows)
    both = replace(faulty, responses=[faulty.responses[row] for row in rows])
    check = copy.deepcopy(honest)
    check.merge(counted(scored, both, models_of(clean, kind)))
    (found,) = check.outcome().evidence
    assert (found.kind, found.responses) == (kind, 2)
    assert found.test is None
    assert [example.rollout_id for example in found.examples] == [f"rollout-{row}" for row in rows]


@pytest.mark.parametrize("kind", EXPLANATIONS, ids=lambda kind: kind.value)
def test_a_fault_in_all_responses_is_named_and_nothing_else(scored: Any, clean: Any, kind: FindingKind) -> None:
    faulty = scored.plant(clean, kind, range(len(clean.responses)))
    outcome = counted(scored, faulty, models_of(clean, kind)).outcome()
    assert [found.kind for found in outcome.evidence] == [kind]
    assert not outcome.tests


def test_honest_responses_are_left_alone(honest: Explanations) -> None:
    assert honest.outcome() == Outcome()
    assert honest.counts.clean == HONEST


def noisy(world: Any, size: float, *, seed: int = 1) -> Any:
    """b as another honest path would have it: off by as much as bfloat16 is."""
    rng = np.random.default_rng(seed)

    def off(response: Any) -> Any:
        one_choice = np.diff(response.kept_offsets) == 1
        noise = np.where(one_choice, 0.0, rng.normal(0, size, len(one_choice)))
        return replace(response, behavior_logprobs=np.minimum(response.behavior_logprobs + noise, 0.0))

    return replace(world, responses=[off(response) for response in world.responses])


@pytest.mark.parametrize("seed", range(3))
def test_a_path_that_differs_as_bfloat16_does_is_no_finding(scored: Any, seed: int) -> None:
    outcome = counted(scored, noisy(scored.draw(7 + seed, 24), 0.04, seed=seed)).outcome()
    assert not standing(outcome)


@pytest.mark.parametrize("sharp", [0, 14], ids=["all alike", "most of them nearly certain"])
def test_logits_rounded_as_bfloat16_are_no_finding(scored: Any, sharp: int) -> None:
    """Even where most responses are so certain that little of it shows, and the others stand out."""
    model = scored.TwoTables.made(5)
    certain = scored.TwoTables(model.last_VV * 4, model.before_VV)
    drawn = [scored.draw(30, sharp, model=certain, bits=8), scored.draw(31, 20 - sharp, model=model, bits=8)]
    check = Explanations(AuditOptions())
    for world in drawn:
        if world.responses:
            check.merge(counted(scored, world))
    assert sum(number for number, _ in check.counts.fits.values()) >= 6
    assert not standing(check.outcome())


def standing(outcome: Outcome) -> list[FindingKind]:
    """Evidence that is left when tests are decided."""
    rejected = {t.name for t in outcome.tests if t.p_value < 1e-6 and t.effect >= t.effect_bound}
    return [found.kind for found in outcome.evidence if found.test is None or found.test in rejected]


@pytest.mark.parametrize(
    "kind", [FindingKind.RAW_LOGITS, FindingKind.MASK_SWAPPED, FindingKind.TEMPERATURE_ON_LOGPROBS], ids=str
)
def test_a_fault_is_named_beside_a_path_that_differs_as_bfloat16_does(
    scored: Any, clean: Any, kind: FindingKind
) -> None:
    rows = rows_of(kind)
    faulty = noisy(scored.plant(noisy(clean, 0.04), kind, rows), 0.01)
    check = counted(scored, noisy(scored.draw(4, 40), 0.04))
    check.merge(counted(scored, replace(faulty, responses=[faulty.responses[row] for row in rows])))
    assert standing(check.outcome()) == [kind]


def test_a_response_in_which_a_fault_reaches_few_tokens_joins_it(scored: Any) -> None:
    world = scored.draw(21, 16, RARELY_BIASED)
    faulty = scored.plant(world, FindingKind.PROCESSORS_MISSING, range(16))
    reached = [
        int((np.abs(ours.behavior_logprobs - theirs.behavior_logprobs) > 1e-3).sum())
        for ours, theirs in zip(faulty.responses, world.responses, strict=True)
    ]
    assert {1, 2} & set(reached) and max(reached) >= 3
    (found,) = counted(scored, faulty).outcome().evidence
    assert (found.kind, found.responses) == (FindingKind.PROCESSORS_MISSING, np.count_nonzero(reached))
    assert found.count == sum(reached)


def test_a_response_with_one_token_off_by_something_else_joins_no_fault(scored: Any, clean: Any) -> None:
    faulty = scored.plant(clean, FindingKind.FULL_VOCABULARY, [3, 7])
    off = np.abs(
        scored.plant(clean, FindingKind.FULL_VOCABULARY, [8]).responses[8].behavior_logprobs
        - clean.responses[8].behavior_logprobs
    )
    at_most = int(np.argmax(off))
    other = faulty.with_b(
        [8], lambda row, at: float(clean.responses[row].behavior_logprobs[at]) - (at == at_most) * 0.6 * float(off[at])
    )
    (found,) = counted(scored, other).outcome().evidence
    assert (found.kind, found.responses) == (FindingKind.FULL_VOCABULARY, 2)


def test_a_b_that_nothing_explains_is_a_mismatch_where_others_are_right(
    scored: Any, clean: Any, honest: Explanations
) -> None:
    rows = [3, 7, 11]
    rng = np.random.default_rng(4)
    spoilt = clean.with_b(
        rows, lambda row, at: float(clean.responses[row].behavior_logprobs[at]) - 0.2 - 0.5 * rng.random()
    )
    check = copy.deepcopy(honest)
    check.merge(counted(scored, replace(spoilt, responses=[spoilt.responses[row] for row in rows])))
    assert standing(check.outcome()) == [FindingKind.LOGPROB_MISMATCH]
    assert check.outcome().evidence[0].responses == 3


def test_a_wild_b_is_a_mismatch_though_a_few_tokens_carry_the_mean_ratio(scored: Any, clean: Any) -> None:
    rng = np.random.default_rng(4)

    def wild(row: int, at: int) -> float:
        b = float(clean.responses[row].behavior_logprobs[at])
        return b and -abs(b + 3 * rng.normal())

    spoilt = clean.with_b(range(16), wild)
    assert standing(counted(scored, spoilt).outcome()) == [FindingKind.LOGPROB_MISMATCH]


def test_a_b_that_nothing_explains_anywhere_is_a_mismatch_if_the_mean_ratio_says_so(scored: Any) -> None:
    world = scored.draw(9, 40)
    rng = np.random.default_rng(2)
    spoilt = world.with_b(
        range(40), lambda row, at: float(world.responses[row].behavior_logprobs[at]) - 0.2 + 0.3 * rng.normal()
    )
    outcome = counted(scored, spoilt).outcome()
    assert [(found.kind, found.test) for found in outcome.evidence] == [(FindingKind.LOGPROB_MISMATCH, TEST)]
    (test,) = outcome.tests
    assert test.p_value < 1e-12 and test.effect > 0.1


def test_two_faults_at_once_are_both_named(scored: Any, clean: Any, honest: Explanations) -> None:
    faulty = scored.plant(clean, FindingKind.FULL_VOCABULARY, [3])
    faulty = scored.plant(faulty, FindingKind.TEMPERATURE_MISSING, [4, 8])
    check = copy.deepcopy(honest)
    check.merge(counted(scored, replace(faulty, responses=[faulty.responses[row] for row in (3, 4, 8)])))
    named = {found.kind: found.responses for found in check.outcome().evidence}
    assert named == {FindingKind.FULL_VOCABULARY: 1, FindingKind.TEMPERATURE_MISSING: 2}


def test_a_shift_is_told_with_its_direction_and_a_version_with_its_number(scored: Any, clean: Any) -> None:
    shifted = scored.plant(clean, FindingKind.MASK_SHIFTED, range(16))
    (found,) = counted(scored, shifted).outcome().evidence
    assert "one before" in found.summary
    assert found.together[frozenset({FindingKind.MEMBER, FindingKind.LOGPROB})] > 0
    moved = scored.plant(clean, FindingKind.WRONG_VERSION, range(16))
    (found,) = counted(scored, moved, models_of(clean, FindingKind.WRONG_VERSION)).outcome().evidence
    assert "version 1" in found.summary


def test_merging_in_parts_gives_what_the_whole_gives(scored: Any, clean: Any) -> None:
    faulty = scored.plant(clean, FindingKind.RENORMALISED_TWICE, [3, 7, 11])
    whole, parts = counted(scored, faulty), Explanations(AuditOptions())
    for begin in range(0, 16, 4):
        parts.merge(counted(scored, replace(faulty, responses=faulty.responses[begin : begin + 4])))
    ours, theirs = whole.outcome(), parts.outcome()
    assert [replace(e, examples=()) for e in ours.evidence] == [replace(e, examples=()) for e in theirs.evidence]


def test_a_response_after_an_update_with_the_old_cache_is_not_judged(scored: Any, clean: Any) -> None:
    """Its later tokens belong to no version; those before the update are judged."""
    faulty = scored.plant(clean, FindingKind.FULL_VOCABULARY, range(16))
    versions = np.repeat([0, 1], 12)
    models = {0: clean.model, 1: clean.model.moved(17, 0.3)}

    def judged(kv_policy: str) -> int:
        responses = [replace(r, policy_versions=versions, kv_policy=kv_policy) for r in faulty.responses]
        check = counted(scored, replace(faulty, responses=responses), models)
        return check.without_expectation

    assert (judged("kept"), judged("recomputed")) == (16 * 12, 0)


def test_a_model_of_untold_version_judges_tokens_of_one_version_alone(scored: Any, clean: Any) -> None:
    world = scored.plant(clean, FindingKind.FULL_VOCABULARY, range(16))
    assert counted(scored, world, {None: world.model}).outcome().evidence
    check = counted(scored, world, {None: world.model})
    check.merge(counted(scored, world.with_versions(3), {None: world.model}))
    outcome = check.outcome()
    assert not outcome.evidence
    assert "versions 0 to 3" in outcome.not_tested[0].reason and "--model 3=FOLDER" in outcome.not_tested[0].reason


def test_tokens_of_versions_that_are_not_at_hand_are_not_judged(scored: Any, clean: Any) -> None:
    outcome = counted(scored, scored.plant(clean, FindingKind.FULL_VOCABULARY, range(16)).with_versions(8)).outcome()
    assert not outcome.evidence
    assert f"for {16 * 24} tokens" in outcome.not_tested[0].reason


def test_a_response_whose_tokens_lie_outside_their_sets_is_left_to_validation(scored: Any, clean: Any) -> None:
    def without(row: int) -> list[list[int]]:
        sets, tokens = scored.sets_of(clean.responses[row]), clean.responses[row].token_ids
        return [[i for i in s if i != tokens[at]] or [int(tokens[at] + 1) % 48] for at, s in enumerate(sets)]

    assert counted(scored, clean.with_sets([2, 3], without)).outcome() == Outcome()


def fit(residual: float, *kinds: FindingKind, well: bool = True, few: bool = False) -> Fit:
    mask = sum(1 << EXPLANATIONS.index(kind) for kind in kinds)
    return Fit(bin=bin_of(residual), well=mask if well else 0, at_all=mask, errors=frozenset(), few=few)


def decided(*groups: tuple[Fit, int, int], clean: int = 0) -> dict[FindingKind, int]:
    counts = FitCounts(clean=clean)
    for one, responses, tokens in groups:
        counts.add(one, tokens, responses)
    return {kind: tally.responses for kind, tally in decide(counts).named.items()}


def test_what_is_further_away_is_tried_where_something_near_fits_by_chance() -> None:
    """As where two samples of a prompt have each other's sets, which are nearly alike."""
    twice, swapped = form(FindingKind.RENORMALISED_TWICE), form(FindingKind.MASK_SWAPPED, 3)
    b_T = np.log(np.array([0.9, 0.8, 0.7, 0.6]))
    off = Affected(row=0, tokens=np.arange(4), at_A=np.arange(4), residual=5e-3, few=False)
    best = best_forms(off, b_T, {twice: b_T + 6e-4}, (lambda: {swapped: b_T},))
    assert best[FindingKind.MASK_SWAPPED][1] == 3
    far = replace(off, residual=0.5)
    assert FindingKind.MASK_SWAPPED not in best_forms(far, b_T, {twice: b_T + 6e-4}, (lambda: {swapped: b_T},))


def test_a_fault_needs_company_to_be_named() -> None:
    raw, swapped = FindingKind.RAW_LOGITS, FindingKind.MASK_SWAPPED
    noise = (fit(0.03), 100, 2000)
    by_chance = (fit(0.03, raw), 4, 16)
    assert decided(noise, by_chance) == {}
    assert decided((fit(0.03, raw), 2, 11), clean=500) == {}
    assert decided((fit(0.03, raw), 2, 13), clean=500) == {raw: 2}
    # Further out than the rest: judged apart from it.
    assert decided(noise, (fit(0.5, raw), 2, 40)) == {raw: 2}
    assert decided(noise, (fit(0.2, raw), 2, 40)) == {}
    # Half of the residual is enough where half of many responses lose it.
    assert decided((fit(0.1, raw, well=False), 60, 1200), (fit(0.1), 40, 800)) == {raw: 60}
    assert decided((fit(0.1, raw, well=False), 40, 800), (fit(0.1), 60, 1200)) == {}
    assert decided((fit(0.1, raw, well=False), 7, 140)) == {}
    # Of two that fit the same responses the one that fits more; short ones and bad fits join it.
    both = (fit(0.1, raw, swapped), 5, 100)
    assert decided(both, (fit(0.1, swapped), 5, 100)) == {swapped: 10}
    joining = [(fit(0.1, swapped, few=True), 3, 3), (fit(0.1, swapped, well=False), 1, 20)]
    assert decided(both, (fit(0.1, swapped), 5, 100), *joining) == {swapped: 14}
    assert decided((fit(0.1, swapped, few=True), 30, 60)) == {}
