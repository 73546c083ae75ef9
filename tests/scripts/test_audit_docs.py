"""docs/audit.md says what the audit says, and its commands exist."""

import re
from pathlib import Path

import pytest
import typer

from keptset.schemas.findings import FindingKind
from keptset.scripts import audit, audit_docs, inspect_
from keptset.trainer_bridge.audit.advice import ADVICE


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "audit.md").read_text(encoding="utf-8")


def test_the_table_of_kinds_is_what_the_audit_itself_says(page: str) -> None:
    assert audit_docs.up_to_date(page) == page, "run: python -m keptset.scripts.audit_docs docs/audit.md"


def test_every_kind_has_its_row_and_the_row_its_advice(page: str) -> None:
    assert set(ADVICE) == set(FindingKind)
    for kind, advice in ADVICE.items():
        (row,) = re.findall(rf"^\| `{kind.value}` \| (.*) \|$", page, re.MULTILINE)
        assert row.split(" | ") == [advice.sees, advice.cannot, advice.act]


def test_every_option_on_the_page_exists_and_every_option_of_the_audit_is_on_it(page: str) -> None:
    def options(command: object) -> set[str]:
        app = typer.Typer(add_completion=False)
        app.command()(command)  # type: ignore[type-var]
        return {
            name
            for parameter in typer.main.get_command(app).params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }

    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    there = {name for name in options(audit.command) | options(inspect_.command) if name.startswith("--")}
    assert named - there <= {"--working-dir"}  # of `ray job submit`
    assert {name for name in options(audit.command) if name.startswith("--")} - named <= {
        "--resume",
        "--help",
    }


def test_what_the_page_says_of_exit_codes_is_so(page: str) -> None:
    rows = dict(re.findall(r"^\| (\d) \| (.*) \|$", page, re.MULTILINE))
    assert set(rows) == {"0", "1", "2", "3"}
    assert (audit.FOUND, audit.UNREADABLE, audit.INTERRUPTED) == (1, 3, 130) and "130" in page
