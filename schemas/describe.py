"""The tables in docs/schema.md and docs/findings.md, made from the code that defines what they list.

`python -m keptset.schemas.describe docs/schema.md docs/findings.md` brings the pages up to date; a test holds that
they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from keptset.schemas.columns import COLUMNS
from keptset.schemas.findings import FindingKind, Severity
from keptset.schemas.validation import SEVERITIES, STRUCTURAL

_BLOCK = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def type_name(kind: pa.DataType) -> str:
    """An Arrow type in words.

    >>> type_name(pa.list_(pa.list_(pa.int32())))
    'list<list<int32>>'
    """
    if pa.types.is_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{type_name(kind.key_type)}, {type_name(kind.item_type)}>"
    names = {pa.float32(): "float32", pa.float64(): "float64"}
    return names.get(kind, str(kind))


def columns_table() -> str:
    """Every column of the schema."""
    rows = [
        (f"`{column.name}`", f"`{type_name(column.type)}`", "yes" if column.required else "", column.meaning)
        for column in COLUMNS
    ]
    return table(("column", "type", "required", "meaning"), rows)


def findings_table() -> str:
    """Every kind of finding, and who finds it."""
    rows = []
    for kind in FindingKind:
        severity = SEVERITIES.get(kind, Severity.ERROR).value if kind in STRUCTURAL else ""
        rows.append((f"`{kind.value}`", "validation" if kind in STRUCTURAL else "audit", severity, kind.meaning))
    return table(("kind", "found by", "severity", "meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "columns": columns_table,
    "findings": findings_table,
}


def up_to_date(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The page with every marked table as the code has it now."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{tables[block['name']]()}\n{block[3]}", page)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def main(paths: list[str]) -> None:
    """Rewrite the pages in place."""
    for path in map(Path, paths):
        path.write_text(up_to_date(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
