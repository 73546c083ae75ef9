"""Reading an engine's data step by step, from JSON or from live objects alike, so that errors name the place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any

from keptset.schemas.errors import SchemaError

_LEAVES = (str, bytes, bytearray, int, float, list, tuple, set)
"""Values without fields. (Everything else that is no mapping is an object, whose attributes are its fields.)"""


class Node:
    """One value and the path that leads to it.

    >>> Node({"choices": [{"index": "two"}]}).require("choices", "a list").at(0).require("index", "a number").integer()
    Traceback (most recent call last):
        ...
    keptset.schemas.errors.SchemaError: choices[0].index is 'two'; expected a whole number
    """

    __slots__ = ("path", "value")

    def __init__(self, value: Any, path: str = "") -> None:
        self.value = value
        self.path = path

    def get(self, name: str) -> Node | None:
        """Field `name`; None where it is absent or null. Errors: SchemaError where this has no fields at all."""
        value = self.value
        found: Any
        if isinstance(value, Mapping):
            found = value.get(name)
        elif value is None or isinstance(value, _LEAVES):
            raise self.refuse(f"an object with a field {name}")
        else:
            found = getattr(value, name, None)
        return None if found is None else Node(found, f"{self.path}.{name}" if self.path else name)

    def has(self, name: str) -> bool:
        """Whether this has fields and `name` is among them with a value."""
        return self.has_fields and self.get(name) is not None

    @property
    def has_fields(self) -> bool:
        return self.value is not None and not isinstance(self.value, _LEAVES)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, (list, tuple))

    def require(self, name: str, expected: str) -> Node:
        """Field `name`. Errors: SchemaError saying what was expected."""
        found = self.get(name)
        if found is None:
            there = f"{self.path}.{name}" if self.path else name
            raise SchemaError(f"{there} is missing; expected {expected}")
        return found

    def rows(self) -> Sequence[Any]:
        """The entries of a list, as they are."""
        if not isinstance(self.value, (list, tuple)):
            raise self.refuse("a list")
        entries: Sequence[Any] = self.value
        return entries

    def items(self) -> list[Node]:
        """The entries of a list."""
        return [self.at(position) for position in range(len(self.rows()))]

    def at(self, position: int) -> Node:
        """One entry of a list."""
        return Node(self.rows()[position], f"{self.path}[{position}]")

    def text(self) -> str:
        """A string that UTF-8 can hold, or the value of an enum that is one."""
        value = self.value.value if isinstance(self.value, Enum) else self.value
        if not isinstance(value, str):
            raise self.refuse("a string")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.refuse("a string of whole Unicode characters") from None
        return value

    def integer(self) -> int:
        """A whole number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.refuse("a whole number")
        number: int = self.value
        return number

    def number(self) -> float:
        """A finite number."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse("a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.refuse("a finite number")
        return number

    def refuse(self, expected: str) -> SchemaError:
        """The error that says what is here instead of what was expected."""
        return SchemaError(f"{self.path or 'the record'} is {shown(self.value)}; expected {expected}")


def shown(value: object) -> str:
    """A value in a few words, however large it is.

    >>> shown([1] * 5000), shown({"id": 1, "text": "x"})
    ('a list of 5000', 'an object with id, text')
    """
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        names = ", ".join(str(name)[:40] for name in islice(value, 8))
        return f"an object with {names}{', ...' if len(value) > 8 else ''}" if value else "an empty object"
    if value is None:
        return "null"
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "a very large number"
    if isinstance(value, (str, bytes, int, float)):
        text = repr(value[:60] if isinstance(value, (str, bytes)) else value)
        return text if text.isprintable() else ascii(value)
    return f"a {type(value).__name__}"
