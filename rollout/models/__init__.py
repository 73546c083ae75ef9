"""Decoders in Paddle and the reading of their checkpoints.

The names below load on first use: `DecoderConfig` needs no Paddle, `load_decoder` does.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keptset.rollout.models.config import DecoderConfig as DecoderConfig
    from keptset.rollout.models.decoder import Decoder as Decoder
    from keptset.rollout.models.decoder import load_decoder as load_decoder
    from keptset.rollout.models.kv_cache import KVCache as KVCache
    from keptset.rollout.models.segments import Segment as Segment

_PUBLIC = {
    "Decoder": "decoder",
    "DecoderConfig": "config",
    "KVCache": "kv_cache",
    "Segment": "segments",
    "load_decoder": "decoder",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
