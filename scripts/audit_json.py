"""What an audit prints as JSON, and the JSON Schemas of it: both made from the records, so that they cannot part.

`python -m keptset.scripts.audit_json docs` writes the published schemas; a test holds that they are up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from keptset.trainer_bridge.audit.comparison import Comparison
from keptset.trainer_bridge.audit.report import AuditReport

FORMAT = 1
"""Raised when something is renamed, removed or means something else; new fields do not raise it."""

SCHEMAS: dict[str, tuple[type, str]] = {
    "audit.schema.json": (AuditReport, "audit --json"),
    "audit-against.schema.json": (Comparison, "audit --against OTHER --json"),
}
"""Published file -> (record, what prints it)."""

_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    # Infinite and undefined numbers become null: JSON has none.
    float: {"type": ["number", "null"]},
}


def to_json(report: AuditReport | Comparison) -> dict[str, Any]:
    """Plain values for `json.dumps`, as the published schemas describe them."""
    return {"format": FORMAT, **plain(report)}


def json_schema(name: str) -> dict[str, Any]:
    """JSON Schema 2020-12 of what `to_json` returns for the record that is published under this name."""
    record, prints = SCHEMAS[name]
    definitions: dict[str, Any] = {}
    whole = _record(record, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:keptset:{name.partition('.')[0]}:{FORMAT}",
        "title": f"keptset {prints}",
        "description": whole["description"] + " Fields may be added without a new format: read those you know.",
        "type": "object",
        "required": ["format", *whole["required"]],
        "properties": {"format": {"const": FORMAT, "description": "Of this JSON."}, **whole["properties"]},
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text(name: str) -> str:
    """The published file."""
    return json.dumps(json_schema(name), indent=2, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Records as mappings, words as their texts; a number that is infinite or undefined becomes null."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {"unknown" if key is None else str(plain(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _record(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a dataclass; those it holds go to `definitions`."""
    hints = typing.get_type_hints(cls)
    told = _field_docstrings(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        schema = _of_type(hints[field.name], definitions)
        properties[field.name] = {**schema, "description": told[field.name]} if field.name in told else schema
    return {
        "type": "object",
        "description": _described(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]),
        "required": list(properties),
        "properties": properties,
    }


def _of_type(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        schema = _of_type(inner, definitions)
        if set(schema) == {"type"}:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            return {"type": list(dict.fromkeys([*kinds, "null"]))}
        return {"anyOf": [schema, {"type": "null"}]}
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return {"type": "array", "items": _of_type(arguments[0], definitions)}
        entries = [_of_type(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": entries, "items": False, "minItems": len(entries)}
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {"type": "object", "additionalProperties": _of_type(arguments[1], definitions)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        definitions[hint.__name__] = {"type": "string", "enum": [member.value for member in hint]}
    elif hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # a record that holds records of its own kind refers to itself
        definitions[hint.__name__] = _record(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _field_docstrings(cls: type) -> dict[str, str]:
    """The text under each field of a record."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    told: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            told[field.target.id] = _described(below.value.value)
    return told


def _described(text: str) -> str:
    return re.sub(r"\bNone\b", "null", " ".join(text.split()))


def main(folders: list[str]) -> None:
    """Write the schemas to each folder."""
    for folder in folders:
        for name in SCHEMAS:
            (Path(folder) / name).write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
