"""Every named fault, in 2 % and in all responses, is named; honest records are left alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge.audit.check import Outcome
from keptset.trainer_bridge.audit.checks.explanations import Explanations
from keptset.trainer_bridge.audit.explanations import EXPLANATIONS
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.token_scores import ModelScorer

HONEST = 98


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
