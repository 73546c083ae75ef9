"""Every error keptset raises on purpose. All of them survive pickling, so they cross Ray unchanged.

KeptsetError
|-- InvalidInput (also a ValueError)   a setting, prompt or array that cannot be used as given
|   |-- ScoringRefused                 a batch that cannot be scored honestly; names the reason and the way out
|-- LogitsError                        NaN, +inf or no finite logit: the request fails, its neighbours go on
|-- SchemaError                        Arrow data that is not the rollout schema
|-- ViolationError                     data of the right shape that breaks an invariant; carries `findings`
|-- CheckpointError                    a checkpoint that cannot be read or is not supported
|-- StorageError                       a spool or archive that cannot be read or written
|   |-- DamagedFile                    a file whose bytes are not what was written
|-- RolloutError                       generation that could not be completed; names the prompts
|-- MissingDependency (also an ImportError)  an optional package is needed; names the extra to install
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keptset.schemas.findings import Finding


class KeptsetError(Exception):
    """Base of all errors raised by keptset."""


class InvalidInput(KeptsetError, ValueError):
    """A setting, prompt or array that cannot be used as given."""


class ScoringRefused(InvalidInput):
    """Scoring this batch would give numbers that do not mean what they say."""


class LogitsError(KeptsetError):
    """Logits from which nothing can be sampled: NaN, +inf, or no finite value."""


class SchemaError(KeptsetError):
    """Arrow data that does not follow the rollout schema, or follows another version of it."""


class ViolationError(KeptsetError):
    """Data that breaks an invariant of the contract.

    `findings` says which, where and how often.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(ViolationError("one row is bad", ()))).findings
    ()
    """

    def __init__(self, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message, findings)
        self.message = message
        self.findings = findings

    def __str__(self) -> str:
        return self.message


class CheckpointError(KeptsetError):
    """A checkpoint folder that cannot be read, or describes a model that is not supported."""


class StorageError(KeptsetError):
    """A spool or archive that cannot be read or written."""


class DamagedFile(StorageError):
    """A stored file whose bytes are not what was written: truncated, altered, or foreign."""


class RolloutError(KeptsetError):
    """Generation that could not be completed."""


class MissingDependency(KeptsetError, ImportError):
    """An optional package is needed for this; the message names the extra that brings it."""
