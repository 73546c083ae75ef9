"""keptset: importance ratios that stay true when rollouts are sampled from a truncated distribution.

The folders beside this file are its subpackages (``keptset.schemas``, ``keptset.rollout``,
``keptset.trainer_bridge``, ``keptset.scripts``), from a checkout and from an installed wheel alike.
Names below load on first use, so ``import keptset`` itself brings in neither Paddle, Ray nor PyTorch.
"""

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keptset.schemas.errors import KeptsetError as KeptsetError
    from keptset.schemas.findings import FindingKind as FindingKind
    from keptset.schemas.rollout_batch import RolloutBatch as RolloutBatch
    from keptset.schemas.rollout_batch import concat_batches as concat_batches
    from keptset.schemas.sampling_params import SamplingParams as SamplingParams
    from keptset.schemas.validation import validate as validate

__version__ = "0.1.0"
__path__ = [os.path.dirname(os.path.abspath(__file__))]

_PUBLIC = {
    "FindingKind": "keptset.schemas.findings",
    "KeptsetError": "keptset.schemas.errors",
    "RolloutBatch": "keptset.schemas.rollout_batch",
    "SamplingParams": "keptset.schemas.sampling_params",
    "concat_batches": "keptset.schemas.rollout_batch",
    "validate": "keptset.schemas.validation",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'keptset' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
