"""Errors and findings cross process borders unchanged, and their docstrings tell all there are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from keptset.schemas import errors
from keptset.schemas.errors import InvalidInput, KeptsetError, MissingDependency, ViolationError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity


def tree(root: type[KeptsetError]) -> Iterator[type[KeptsetError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


EXAMPLE = Example(rollout_id="r", position=3, detail="token 5 is not among its 2 kept ids")
FINDING = Finding(kind=FindingKind.MEMBER, severity=Severity.ERROR, count=7, responses=2, examples=(EXAMPLE,))
ALL = sorted(set(tree(KeptsetError)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_and_copying(kind: type[KeptsetError]) -> None:
    error = kind("what was wrong, where, and what to do")
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is kind
        assert str(back) == "what was wrong, where, and what to do"
        assert back.args == error.args


def test_a_violation_carries_its_findings_through_pickling() -> None:
    error = ViolationError("one kind of violation", (FINDING,))
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.findings) == ("one kind of violation", (FINDING,))
    assert back.findings[0].kind is FindingKind.MEMBER


def test_errors_are_caught_as_what_they_also_are() -> None:
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(MissingDependency, ImportError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if line.startswith(("|", "KeptsetError"))]
    told = {line.lstrip("|- ").split()[0]: line.count("|") for line in lines}
    ours = [kind for kind in ALL if kind.__module__ == errors.__name__]
    assert told == {kind.__name__: kind.__mro__.index(KeptsetError) for kind in ours}


def test_findings_read_as_a_sentence() -> None:
    assert str(FINDING) == (
        "error member: a sampled token outside its kept set (7 in 2 responses; "
        "r token 3: token 5 is not among its 2 kept ids)"
    )
    whole = Finding(
        kind=FindingKind.LENGTHS,
        severity=Severity.WARNING,
        count=1,
        responses=1,
        examples=(Example(rollout_id="r", position=None, detail="3 and 2"),),
    )
    assert str(whole).endswith("(1 in 1 responses; r: 3 and 2)")


@pytest.mark.parametrize("kind", list(FindingKind))
def test_kinds_are_their_names_and_say_what_they_mean(kind: FindingKind) -> None:
    assert FindingKind(kind.value) is pickle.loads(pickle.dumps(kind)) is kind
    assert kind == kind.value == kind.name.lower()
    assert len(kind.meaning.split()) >= 3
