"""Typed access to a JSON object of a checkpoint folder; every refusal names file, key and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keptset.schemas.errors import CheckpointError

_REQUIRED: Any = object()


class Fields:
    """A JSON object and where it came from."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; null reads as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int = _REQUIRED, *, least: int = 1) -> int:
        """A whole number >= `least`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"it must be a whole number >= {least}")
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number > 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise self.refuse(key, "it must be a finite number > 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "it must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or null (no id)."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.refuse(key, "it must be a token id >= 0, a list of them, or null")
        return tuple(ids)

    def nested(self, key: str) -> Fields:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.refuse(key, "it must be an object")
        return Fields(value, f"{self.where}: {key}")

    def refuse_unknown(self, known: set[str], what: str) -> None:
        """Refuse keys outside `known` that hold a value: they might change results."""
        for key in self.values:
            if key not in known and self.values[key] is not None:
                raise self.refuse(key, f"{what} is supported with {', '.join(sorted(known))} only")

    def refuse(self, key: str, why: str) -> CheckpointError:
        """The error to raise for this key."""
        found = repr(self.values[key]) if key in self.values else "missing"
        return CheckpointError(f"{self.where}: {key} is {found}; {why}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is _REQUIRED:
            raise self.refuse(key, "it is required")
        return value


def read_json_object(path: Path) -> Fields:
    """The object a JSON file holds. Errors: CheckpointError where the file is absent, unreadable or something else."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder holds config.json and safetensors") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(values).__name__}; an object is expected")
    return Fields(values, str(path))
