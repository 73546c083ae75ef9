"""What an audit is asked to do."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

from keptset.schemas.errors import InvalidInput
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.audit.audited_batch import TokenScores

FAMILY_LEVEL = 1e-6
"""How often all statistical tests of a clean run together may be wrong."""


class BatchScorer(Protocol):
    """What recomputes log-probabilities: a model, or a column in which a trainer recorded its own."""

    def score(self, batch: RolloutBatch) -> TokenScores:
        """Scores of the sampled tokens of a batch, all of whose rows are counted ones."""
        ...


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far an audit is."""

    units_done: int
    units_total: int
    tokens: int
    """Looked at so far."""
    note: str | None = None
    """Something to tell once, such as why an interrupted audit starts over."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Settings of one audit.

    Errors: InvalidInput names the setting, its value and what is allowed.
    """

    max_version_lag: int | None = None
    """Tokens more versions behind than this are a finding, `staleness`; None: versions are shown, not judged."""
    filtered: bool = False
    """Rollouts were chosen by reward, or otherwise by what was drawn: tests of the draws are then informational."""
    sample: int | None = None
    """Responses to look at, for a quick look, chosen at random from pieces of files chosen at random. What is repeated
    is looked for among all responses of the files that were opened for it. None: everything."""
    seed: int = 0
    """Of that choice, and of what else an audit draws."""
    workers: int | None = None
    """Processes; None: as many as there are usable cores, if there is work for them, and this one alone with a scorer,
    which has threads of its own."""
    family_level: float = FAMILY_LEVEL
    unguarded: bool = False
    """Also take Parquet and Arrow files without keptset's checksums, as other tools write them. A damaged one may end
    the process."""
    work: Path | None = None
    """A folder in which an audit keeps what it has done so far, so that an interrupted one goes on there. Where nothing
    can be kept it goes on without, and says so as a note of its progress."""
    work_stays: bool = False
    """That stays there when the audit is done, for whoever has to put the report out first: `checkpoint.remove`."""
    progress: Callable[[Progress], None] | None = field(default=None, compare=False)
    """Called in this process after each unit of work."""
    scorer: Callable[[], BatchScorer] | None = None
    """Makes the scorer, once in each process; can be pickled, and equal ones are made once."""

    def __post_init__(self) -> None:
        for name, least in (("max_version_lag", 0), ("sample", 1), ("workers", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(f"{name} is {value}; it must be at least {least}, or None")
        if not 0 < self.family_level < 1:
            raise InvalidInput(f"family_level is {self.family_level}; it must lie in (0, 1)")

    def for_worker(self) -> AuditOptions:
        """What another process needs of them."""
        return replace(self, progress=None, work=None)

    def digest(self) -> str:
        """Equal where the same input gives the same report."""
        counted = [
            (f.name, getattr(self, f.name))
            for f in fields(self)
            if f.name not in ("workers", "work", "work_stays", "progress", "scorer")
        ]
        scorer = b"" if self.scorer is None else pickle.dumps(self.scorer)
        return hashlib.blake2b(repr(counted).encode() + scorer, digest_size=16).hexdigest()
