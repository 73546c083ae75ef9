"""Decoders in Paddle and the reading of their checkpoints.

The names below load on first use: `DecoderConfig` needs no Paddle, `load_decoder` does.
"""

import importlib

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
