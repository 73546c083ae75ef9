"""Tokens that cannot be counted, and why: one policy for scoring and ratios.

`raise` stops with a ViolationError that names examples; `exclude` marks the tokens, so that whoever counts leaves them
out and says how many. Nothing is ever repaired.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput, ViolationError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity

OnViolation = Literal["raise", "exclude"]
Locate = Callable[[int], tuple[str, int | None]]
"""Token index to (rollout_id, position in the response)."""
NON_FINITE = "non_finite"
"""Kind of a token whose log ratio is no finite number, beside the structural kinds."""
NUM_EXAMPLES = 3


def locate_by_index(token: int) -> tuple[str, int | None]:
    """For bare arrays: nobody knows the rollout, so the token's index stands in."""
    return f"token {token} of the call", None


@dataclass(frozen=True, kw_only=True)
class Violations:
    """Why each token is out, or that it is not.

    >>> found = Violations.none(3).mark(np.array([False, True, True]), "member")
    >>> found.mark(np.array([False, False, True]), "non_finite").counts()
    {'member': 2}
    """

    kinds: tuple[str, ...]
    """Names that code_T indexes."""
    code_T: NDArray[np.int8]
    """-1 where the token is fine."""

    @classmethod
    def none(cls, num_tokens: int) -> Violations:
        return cls(kinds=(), code_T=np.full(num_tokens, -1, np.int8))

    @property
    def bad_T(self) -> NDArray[np.bool_]:
        return self.code_T >= 0

    def mark(self, bad_T: NDArray[np.bool_], kind: str) -> Violations:
        """Add one kind; a token already marked keeps its first."""
        new_T = bad_T & (self.code_T < 0)
        if not new_T.any():
            return self
        kinds = self.kinds if kind in self.kinds else (*self.kinds, kind)
        return Violations(kinds=kinds, code_T=np.where(new_T, kinds.index(kind), self.code_T).astype(np.int8))

    def union(self, other: Violations) -> Violations:
        """What either found; where both did, the kind found here."""
        both = self
        for code, kind in enumerate(other.kinds):
            both = both.mark(other.code_T == code, kind)
        return both

    def counts(self) -> dict[str, int]:
        """Number of tokens of each kind that occurs."""
        number = np.bincount(self.code_T[self.bad_T], minlength=len(self.kinds))
        return {kind: int(n) for kind, n in zip(self.kinds, number, strict=True) if n}

    def take(self, index: NDArray[np.int64]) -> Violations:
        """The same for some of the tokens."""
        return replace(self, code_T=self.code_T[index])


def check_policy(on_violation: str) -> None:
    """InvalidInput for a policy that does not exist."""
    if on_violation not in ("raise", "exclude"):
        raise InvalidInput(f"on_violation is {on_violation!r}; it must be 'raise' or 'exclude'")


def raise_violation(
    kind: FindingKind, bad_T: NDArray[np.bool_], detail: Callable[[int], str], locate: Locate, consequence: str
) -> None:
    """ViolationError for the marked tokens, with a few examples; nothing where none is marked."""
    bad = np.flatnonzero(bad_T)
    if not len(bad):
        return
    examples = []
    for token in bad[:NUM_EXAMPLES].tolist():
        rollout_id, position = locate(token)
        examples.append(Example(rollout_id=rollout_id, position=position, detail=detail(token)))
    finding = Finding(
        kind=kind,
        severity=Severity.ERROR,
        count=len(bad),
        responses=len({locate(token)[0] for token in bad.tolist()}),
        examples=tuple(examples),
    )
    raise ViolationError(f"{consequence}: {finding}", (finding,))
