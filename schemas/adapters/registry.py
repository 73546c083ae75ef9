"""Which engines there are. A new one is one file beside this, and one line here."""

from __future__ import annotations

import importlib

from keptset.schemas.adapters.base import Adapter
from keptset.schemas.errors import InvalidInput

ADAPTERS = {
    "vllm": "Vllm",
    "sglang": "Sglang",
    "fastdeploy": "Fastdeploy",
    "slime": "Slime",
    "prime_rl": "PrimeRl",
}
"""Engine, which is also the name of its module here -> class of its adapter. (transformers has no recorded form.)"""


def adapter_for(engine: str) -> Adapter:
    """A fresh adapter: it may remember what it has read.

    Errors: InvalidInput naming the engines there are.
    """
    name = engine.replace("-", "_")
    if name == "transformers":
        raise InvalidInput("transformers writes no output to files; use from_transformers on what generate() returned")
    if name not in ADAPTERS:
        raise InvalidInput(f"no adapter for {engine!r}; there are {', '.join(ADAPTERS)}")
    adapter: Adapter = getattr(importlib.import_module(f"{__package__}.{name}"), ADAPTERS[name])()
    return adapter
