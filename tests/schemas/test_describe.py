"""The pages about the schema and the findings list what the code has."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from keptset.schemas import describe
from keptset.schemas.columns import COLUMNS, WORDS, Identity, words
from keptset.schemas.findings import FindingKind


@pytest.mark.parametrize("name", ["schema.md", "findings.md"])
def test_the_tables_of_the_pages_are_up_to_date(repository: Path, name: str) -> None:
    page = (repository / "docs" / name).read_text(encoding="utf-8")
    assert "<!-- table:" in page
    assert describe.up_to_date(page) == page, f"run: python -m keptset.schemas.describe docs/{name}"


def test_tables_hold_every_column_and_every_kind() -> None:
    assert describe.columns_table().count("\n") == len(COLUMNS) + 2
    assert describe.findings_table().count("\n") == len(FindingKind) + 2


def test_every_entry_of_the_identity_is_explained(repository: Path) -> None:
    page = (repository / "docs" / "schema.md").read_text(encoding="utf-8")
    for name in ("schema_version", *(field.name for field in fields(Identity))):
        assert f"`keptset.{name}`" in page


@pytest.mark.parametrize("name", WORDS)
def test_the_meaning_of_a_column_of_words_names_them(name: str) -> None:
    (column,) = (column for column in COLUMNS if column.name == name)
    for word in words(name):
        assert word in column.meaning


def test_pages_are_rewritten_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: findings -->\nold\n<!-- end of table -->\nafter\n", encoding="utf-8")
    describe.main([str(page)])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- table: findings -->\n\n| kind |")
    assert text.endswith("|\n\n<!-- end of table -->\nafter\n")
    assert "old" not in text
