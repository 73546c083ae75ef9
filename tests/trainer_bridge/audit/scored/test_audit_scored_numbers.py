"""Scores of a batch against the oracle, what cannot be scored, and the tables made of the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder
from keptset.schemas.columns import Identity
from keptset.schemas.findings import FindingKind
from keptset.schemas.sampling_params import KnownParams, SamplingParams
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.audit import token_scores, version_table
from keptset.trainer_bridge.audit.checks.budget import BudgetTable
from keptset.trainer_bridge.audit.checks.explanations import Explanations
from keptset.trainer_bridge.audit.checks.ratios import Ratios
from keptset.trainer_bridge.audit.checks.support_drift import SupportDrift
from keptset.trainer_bridge.audit.checks.unit_mean import UnitMean
from keptset.trainer_bridge.audit.checks.versions import Versions
from keptset.trainer_bridge.audit.checks.worst import Worst
from keptset.trainer_bridge.audit.mean_ratio import MeanRatio
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.recorded_logprobs import RecordedScorer
from keptset.trainer_bridge.audit.refusals import MAX_REASONS, OTHER, add_reasons
from keptset.trainer_bridge.audit.token_scores import ModelScorer
from keptset.trainer_bridge.reference.audit import explanations, honest

ROUNDING = 2e-6
"""Logits are float32 here."""


def every(world: Any, value: Any) -> np.ndarray:
    """value(row, position) of all tokens."""
    return np.array([value(row, at) for row, r in enumerate(world.responses) for at in range(len(r.token_ids))])


def scores_of(scored: Any, world: Any, models: Any = None, **settings: Any) -> Any:
    return ModelScorer(scorer=scored.TableScorer(models or {0: world.model}, **settings)).score(world.batch())


def changed(world: Any, **fields: Any) -> Any:
    return replace(world, responses=[replace(response, **fields) for response in world.responses])


def test_scores_are_those_of_the_oracle(scored: Any, clean: Any) -> None:
    scores = scores_of(scored, clean)
    kept = every(clean, lambda row, at: honest(clean.position(row, at)))
    full = every(clean, lambda row, at: explanations(clean.position(row, at))[FindingKind.FULL_VOCABULARY][0])
    np.testing.assert_allclose(scores.kept_T, kept, atol=ROUNDING)
    np.testing.assert_allclose(scores.full_T, full, atol=ROUNDING)
    np.testing.assert_array_equal(scores.expected_T, scores.kept_T)
    assert scores.same_version_T.all() and not scores.explained and not scores.refused


def test_every_explanation_is_that_of_the_oracle(scored: Any, clean: Any) -> None:
    """b is made to ask for one everywhere."""
    other = clean.model.moved(17, 0.3)
    asking = clean.with_b(range(16), lambda row, at: float(clean.responses[row].behavior_logprobs[at]) - 5.0)
    scores = scores_of(scored, asking, {0: clean.model, 1: other})
    forms = [explanations(clean.position(row, at, other_versions=[other])) for row in range(16) for at in range(24)]
    assert set(scores.explained) >= set(forms[0]) - {FindingKind.MASK_SWAPPED, FindingKind.PROCESSORS_MISSING}
    for kind, value_T in scores.explained.items():
        if kind is FindingKind.MASK_SWAPPED:
            continue
        for value, of_token in zip(value_T, forms, strict=True):
            if np.isfinite(value):
                assert np.min(np.abs(np.array(of_token[kind]) - value)) < 2 * ROUNDING
    processors = scores.explained[FindingKind.PROCESSORS_MISSING].reshape(16, 24)
    assert np.isfinite(processors).all(axis=1).tolist() == [row % 4 in (1, 3) for row in range(16)]


def test_the_newest_version_scores_and_the_one_that_drew_is_expected(scored: Any, clean: Any) -> None:
    new = clean.model.moved(17, 0.2)
    responses = [replace(r, policy_versions=np.full(24, row % 2)) for row, r in enumerate(clean.responses)]
    world = replace(clean, responses=responses)
    scores = scores_of(scored, world, {0: clean.model, 1: new})
    of_new = replace(world, model=new)
    np.testing.assert_allclose(
        scores.kept_T, every(world, lambda row, at: honest(of_new.position(row, at))), atol=ROUNDING
    )
    drawn = {0: world, 1: of_new}
    np.testing.assert_allclose(
        scores.expected_T, every(world, lambda row, at: honest(drawn[row % 2].position(row, at))), atol=ROUNDING
    )
    assert scores.same_version_T.reshape(16, 24)[:, 0].tolist() == [row % 2 == 1 for row in range(16)]


@pytest.mark.parametrize(
    ("domain", "kind"), [("full", FindingKind.FULL_VOCABULARY), ("raw", FindingKind.RAW_LOGITS)], ids=str
)
def test_b_of_another_domain_is_held_against_that_domain(scored: Any, clean: Any, domain: str, kind: Any) -> None:
    world = changed(scored.plant(clean, kind, range(16)), logprob_domain=domain)
    scores = scores_of(scored, world)
    b = world.batch().behavior_logprobs.values
    np.testing.assert_allclose(scores.expected_T, b, atol=ROUNDING)
    assert not scores.explained
    check = Ratios(AuditOptions())
    seen = scored.audited(world.batch(), ModelScorer(scorer=scored.TableScorer({0: world.model})))
    check.add(seen)
    assert check._kept.sum() == check._full.sum() == 0
    worst = Worst(AuditOptions())
    worst.add(seen)
    assert not worst.places, "a difference to b over something else is no log ratio"
    assert f"16 of 16 responses have no ratio: their b is not over the kept set, but of domain {domain} (16)" in (
        check.outcome().not_tested[0].reason
    )


def test_a_token_outside_its_set_has_no_score_and_cannot_have_been_expected(scored: Any, clean: Any) -> None:
    def without(row: int) -> list[list[int]]:
        sets, tokens = scored.sets_of(clean.responses[row]), clean.responses[row].token_ids
        return [[i for i in s if i != tokens[at]] or [int(tokens[at] + 1) % 48] for at, s in enumerate(sets)]

    scores = scores_of(scored, clean.with_sets([2], without))
    assert np.isnan(scores.kept_T[48:72]).all() and np.isneginf(scores.expected_T[48:72]).all()
    assert np.isfinite(scores.kept_T[:48]).all()


REFUSED = {
    "longer than the model's 20 positions": {},
    "the temperature is unknown": {"params": KnownParams(top_k=3)},
    "repetition_penalty of a response is unknown": {"params": KnownParams(temperature=1.0)},
    "temperature 0 with more than one kept id": {"params": SamplingParams(temperature=0)},
    "a response was sampled with dry_multiplier = 0.8": {"sampler_extras": '{"dry_multiplier": 0.8}'},
    "ids outside the model's vocabulary of 48: it is another model": {"token_ids": np.full(24, 60)},
    "no prompt was recorded": {"prompt_token_ids": None},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_scored_is_counted_by_reason_and_the_rest_is_scored(
    scored: Any, clean: Any, reason: str
) -> None:
    responses = list(clean.responses[:4])
    responses[2] = replace(responses[2], **REFUSED[reason])
    builder = BatchBuilder(Identity(vocab_size=99, processor_order=scored.order))
    for response in responses:
        builder.add(response)
    batch = builder.build()
    long = reason.startswith("longer")
    scorer = scored.TableScorer({0: clean.model}, max_positions=20 if long else None)
    scores = ModelScorer(scorer=scorer).score(batch)
    (told,) = scores.refused.items()
    assert told[0].startswith(reason) and told[1] == (4 if long else 1)
    assert np.isnan(scores.kept_T).reshape(4, 24).all(axis=1).tolist() == [long, long, True, long]
    check = Ratios(AuditOptions())
    check.add(scored.audited(batch, ModelScorer(scorer=scorer)))
    structural = reason.startswith(("temperature 0", "no prompt"))  # found by validation, and not scored at all
    assert [reason in entry.reason for entry in check.outcome().not_tested] == [True] * (not structural)


def test_reasons_do_not_pile_up() -> None:
    told: dict[str, int] = {}
    add_reasons(told, {f"reason {n}": 1 for n in range(20)})
    assert len(told) == MAX_REASONS + 1 and told[OTHER] == 20 - MAX_REASONS


def test_without_a_kept_set_the_vocabulary_is_scored_all_the_same(scored: Any, clean: Any) -> None:
    world = changed(clean, support="absent", kept_ids=None, kept_offsets=None, logprob_domain="full")
    world = world.with_b(
        range(16), lambda row, at: explanations(clean.position(row, at))[FindingKind.FULL_VOCABULARY][0]
    )
    scores = scores_of(scored, world)
    assert np.isnan(scores.kept_T).all()
    np.testing.assert_allclose(scores.expected_T, world.batch().behavior_logprobs.values, atol=ROUNDING)


def test_floors_are_measured_on_a_few_responses_of_each_batch(scored: Any, clean: Any) -> None:
    world = changed(clean)
    world = replace(world, responses=[replace(r, rollout_id=f"floor-{n}") for n, r in enumerate(clean.responses * 8)])
    scorer = ModelScorer(scorer=scored.TableScorer({0: clean.model}, noise=1e-3))
    whole = scorer.score(world.batch()).floors
    report = whole.report()
    assert report.batch_mean_abs < 1e-6 < 1e-4 < report.path_mean_abs < 5e-3
    assert 0 < report.tokens < 128 * 24 / 8
    assert all(scorer.score(world.batch().slice(row, 1)).floors is not None for row in range(4))


def test_floors_are_of_the_first_tokens_of_a_response(scored: Any, clean: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a step of the model, and responses may be long."""
    scorer = ModelScorer(scorer=scored.TableScorer({0: clean.model}))
    whole = scorer.score(clean.batch()).floors.report()
    monkeypatch.setattr(token_scores, "FLOOR_TOKENS", 5)
    monkeypatch.setattr(token_scores, "FLOOR_SHARE", 1.0)
    few = scorer.score(clean.batch()).floors.report()
    sizes = np.diff(clean.batch().kept_ids.inner.offsets).reshape(16, 24)
    assert few.tokens == int((sizes[:, :5] > 1).sum()) and whole.tokens > 5
    assert few.path_mean_abs < 1e-6, "the steps are those of the same tokens"


def audited(scored: Any, world: Any, models: Any = None) -> Any:
    return scored.audited(world.batch(), ModelScorer(scorer=scored.TableScorer(models or {0: world.model})))


def test_the_budget_is_exact_and_has_three_terms_with_the_weights_of_all_tokens(scored: Any, clean: Any) -> None:
    new = clean.model.moved(17, 0.2)
    batch = audited(scored, clean, {0: clean.model, 3: new})
    check = BudgetTable(AuditOptions())
    check.add(batch)
    terms = check.contribute(_Report()).budget
    of_new = replace(clean, model=new)
    kept_now = every(clean, lambda row, at: honest(of_new.position(row, at)))
    kept_then = every(clean, lambda row, at: honest(clean.position(row, at)))
    assert terms["staleness"].mean == pytest.approx((kept_now - kept_then).mean(), abs=ROUNDING)
    assert terms["truncation"].mean + terms["staleness"].mean + terms["path"].mean == pytest.approx(terms["total"].mean)
    check = BudgetTable(AuditOptions())
    check.add(audited(scored, clean, {3: new}))
    assert set(check.contribute(_Report()).budget) == {"truncation", "staleness_and_path", "total"}
    check = BudgetTable(AuditOptions())
    check.add(audited(scored, clean, {None: clean.model}))
    assert "path" in check.contribute(_Report(versions=(0,))).budget
    assert "path" not in check.contribute(_Report()).budget


@dataclass(frozen=True)
class _Report:
    """The part of a report that the budget fills in."""

    budget: Any = None
    versions: tuple[int, ...] = (0, 1)


def test_the_mean_ratio_is_one_for_any_weights_and_not_for_another_normalisation(scored: Any) -> None:
    world = scored.draw(12, 60)
    new = world.model.moved(17, 0.05)
    for versions, models in ((0, {0: world.model}), (1, {0: world.model, 1: new})):
        check = UnitMean(AuditOptions())
        check.add(audited(scored, world, models))
        (test,) = check.outcome().tests
        assert test.p_value > 1e-4, versions
    check = UnitMean(AuditOptions())
    check.add(audited(scored, scored.plant(world, FindingKind.RAW_LOGITS, range(60)), {1: new}))
    counted = check.ratios.count
    assert 0 < counted < 60 * 24, "responses that contradict themselves are left out"


def test_the_mean_ratio_and_its_standard_error_are_those_of_the_oracle(scored: Any, clean: Any) -> None:
    new = clean.model.moved(17, 0.2)
    check = UnitMean(AuditOptions())
    check.add(audited(scored, clean, {5: new}))
    of_new = replace(clean, model=new)
    b = clean.batch().behavior_logprobs.values.astype(np.float64)
    w = np.exp(every(clean, lambda row, at: honest(of_new.position(row, at))) - b)
    assert check.ratios.mean == pytest.approx(w.mean(), abs=1e-5)
    assert check.ratios.std_error == pytest.approx(np.sqrt(((w - 1) ** 2).sum()) / len(w), rel=1e-4)


def test_a_mean_that_a_few_tokens_carry_is_not_tested(scored: Any, clean: Any) -> None:
    check = UnitMean(AuditOptions())
    check.add(audited(scored, clean, {5: clean.model.moved(17, 3.0)}))
    outcome = check.outcome()
    assert not outcome.tests and "carry the mean ratio" in outcome.not_tested[0].reason


def test_where_a_few_tokens_carry_the_mean_honest_draws_are_left_alone_and_wild_ones_told() -> None:
    rng = np.random.default_rng(5)
    size = 2.5
    honest = rng.normal(-(size**2) / 2, size, 100_000)  # E[exp(d)] = 1, carried by a few
    wild = rng.normal(0, size, 1000)
    sums = MeanRatio()
    sums.add(honest, np.full(len(honest), -1.0))
    assert sums.obstacle() is not None
    sums = MeanRatio()
    sums.add(wild, np.full(len(wild), -1.0))
    assert sums.obstacle() is None
    test = sums.test("wild")
    assert test.p_value < 1e-9
    assert test.effect == pytest.approx(np.minimum(np.exp(wild), 4).mean() - 1, abs=1e-6)


def test_mass_that_leaves_the_sets_is_told_with_its_versions_and_equal_weights_are_not(scored: Any, clean: Any) -> None:
    check = SupportDrift(AuditOptions())
    check.add(audited(scored, clean))
    (test,) = check.outcome().tests
    assert test.effect < 1e-6 and test.name == "support drift, the same weights"
    new = clean.model.moved(17, 1.0)
    check = SupportDrift(AuditOptions())
    check.add(audited(scored, clean, {0: clean.model, 4: new}))
    (found,), (test,) = check.outcome().evidence, check.outcome().tests
    assert test.p_value < 1e-6 and test.effect > test.effect_bound and found.test == test.name
    of_new = replace(clean, model=new)

    def mass(row: int, at: int) -> float:
        position = of_new.position(row, at)
        z = reference.process(position.logits_V, position.prompt_ids, position.response_ids, position.params)
        return float(np.exp(reference.trainer_kept_mass(z, position.kept_ids, position.params.temperature)))

    recorded, now = np.exp(every(clean, lambda row, at: clean.responses[row].log_kept_mass[at])), every(clean, mass)
    assert (found.kind, found.count, found.responses) == (FindingKind.SUPPORT_DRIFT, 16 * 24, 16)
    assert f"{recorded.mean():.3f} recorded, {now.mean():.3f} by the trainer" in found.summary
    assert "other weights" in found.summary and "of version 0" in found.summary


def with_column(world: Any, values: Any, **more: Any) -> Any:
    return replace(
        world,
        responses=[
            replace(r, extra={"x_l": values(row).tolist(), **{name: of(row) for name, of in more.items()}})
            for row, r in enumerate(world.responses)
        ],
    )


def test_recorded_scores_are_used_as_they_are(scored: Any, clean: Any) -> None:
    world = with_column(clean, lambda row: clean.responses[row].behavior_logprobs + 0.01 * row)
    scores = RecordedScorer(column="x_l").score(world.batch())
    b = world.batch().behavior_logprobs.values
    np.testing.assert_allclose(scores.kept_T - b, np.repeat(np.arange(16) * 0.01, 24), atol=ROUNDING)
    assert scores.full_T is None and not scores.same_version_T.any() and np.isnan(scores.expected_T).all()


@pytest.mark.parametrize("kind", [FindingKind.FULL_VOCABULARY, FindingKind.RENORMALISED_TWICE], ids=str)
def test_recorded_scores_of_the_same_version_explain_what_l_and_m_can(scored: Any, clean: Any, kind: Any) -> None:
    l_of = [np.array([honest(clean.position(row, at)) for at in range(24)]) for row in range(16)]
    world = with_column(scored.plant(clean, kind, range(16)), lambda row: l_of[row], x_l_version=lambda row: row % 2)
    check = Explanations(AuditOptions())
    check.add(scored.audited(world.batch(), RecordedScorer(column="x_l")))
    (found,) = check.outcome().evidence
    assert found.kind is kind and found.responses <= 8
    assert check.without_expectation == 8 * 24


def test_a_column_that_cannot_be_read_is_told(scored: Any, clean: Any) -> None:
    def told(column: str, world: Any) -> dict[str, int]:
        return dict(RecordedScorer(column=column).score(world.batch()).refused)

    short = with_column(clean, lambda row: np.zeros(24 - (row == 3)))
    assert told("x_l", short) == {"x_l has another length than token_ids": 1}
    assert told("x_other", short) == {"no column x_other; the caller's own are: x_l": 16}
    text = changed(clean, extra={"x_l": "text"})
    assert told("x_l", text) == {"x_l does not hold lists of numbers": 16}


def test_tables_by_setting_and_version_hold_the_oracles_ratios(scored: Any, clean: Any) -> None:
    check = Ratios(AuditOptions())
    new = clean.model.moved(17, 0.2)
    check.add(audited(scored, clean, {5: new}))
    of_new = replace(clean, model=new)
    b = clean.batch().behavior_logprobs.values.astype(np.float64)
    d = every(clean, lambda row, at: honest(of_new.position(row, at))) - b
    of_first = d.reshape(16, 24)[::4].ravel()
    row = check._settings["T 0.8, top_p 0.9"].kept.row()
    assert row.mean == pytest.approx(np.exp(of_first).mean(), rel=1e-5)
    assert row.max_abs_log == pytest.approx(np.abs(of_first).max(), rel=1e-4)
    assert row.share_outside == pytest.approx(np.mean((np.exp(of_first) < 0.9) | (np.exp(of_first) > 1.1)))
    assert check._versions.get(0).d.mean == pytest.approx(d.mean(), abs=1e-5)
    assert check._heat.sum() == check._kept.sum() == 16 * 24


def test_ratios_and_drift_of_many_versions_are_of_the_rows_of_the_table(
    scored: Any, clean: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_table, "MAX_ROWS", 2)
    new = clean.model.moved(17, 0.2)
    responses = [replace(r, policy_versions=np.full(24, row)) for row, r in enumerate(clean.responses)]
    batch = audited(scored, replace(clean, responses=responses), {99: new})
    table, ratios, drift = (kind(AuditOptions()) for kind in (Versions, Ratios, SupportDrift))
    for check in (table, ratios, drift):
        check.add(batch)
    rows = [ratios._with_drift(row) for row in table.contribute(_Report()).versions]
    assert [(row.version, row.last_version, row.tokens) for row in rows] == [(0, 7, 192), (8, 15, 192)]
    of_new = replace(clean, model=new)
    b = clean.batch().behavior_logprobs.values.astype(np.float64)
    d = every(clean, lambda row, at: honest(of_new.position(row, at))) - b
    assert [row.mean_log_ratio for row in rows] == pytest.approx([d[:192].mean(), d[192:].mean()], abs=1e-5)
    (found,) = drift.outcome().evidence
    assert "of versions 0 to 7" in found.summary or "of versions 8 to 15" in found.summary
