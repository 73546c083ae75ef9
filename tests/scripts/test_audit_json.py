"""The JSON of an audit and its published schema."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from keptset.scripts import audit_json
from keptset.trainer_bridge.audit.comparison import AspectRow, Comparison, Share
from keptset.trainer_bridge.audit.report import AuditReport


@pytest.fixture(scope="module")
def published(repository: Path) -> dict[str, Any]:
    return json.loads((repository / "docs" / "audit.schema.json").read_text(encoding="utf-8"))


def closed(schema: Any) -> Any:
    """The schema with records that allow no other field: what consumers must not rely on, and we must."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {**inner, "additionalProperties": False} if "properties" in inner and "required" in inner else inner


@pytest.mark.parametrize("name", audit_json.SCHEMAS)
def test_a_published_schema_is_what_the_records_say_and_follows_its_own_standard(repository: Path, name: str) -> None:
    text = (repository / "docs" / name).read_text(encoding="utf-8")
    assert text == audit_json.schema_text(name), "run: python -m keptset.scripts.audit_json docs"
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    assert json.loads(text)["$schema"].endswith("2020-12/schema")


def test_a_whole_report_follows_the_schema_and_has_no_field_beyond_it(
    published: dict[str, Any], audit_report: AuditReport
) -> None:
    told = json.loads(json.dumps(audit_json.to_json(audit_report), allow_nan=False))
    jsonschema.Draft202012Validator(closed(published)).validate(told)


@pytest.mark.parametrize(
    ("field", "value"),
    [("verdict", None), ("severity", "fatal"), ("findings", [{"kind": "unheard_of"}]), ("pit", {"edges": [0, 1]})],
)
def test_the_schema_refuses_what_no_audit_says(
    published: dict[str, Any], audit_report: AuditReport, field: str, value: Any
) -> None:
    told = {**audit_json.to_json(audit_report), field: value}
    assert not jsonschema.Draft202012Validator(published).is_valid(told)


def test_every_number_of_a_report_is_in_its_json(audit_report: AuditReport) -> None:
    told = json.loads(json.dumps(audit_json.to_json(audit_report)))
    finding = audit_report.findings[0]
    assert told["findings"][0]["kind"] == finding.kind.value == "mask_shifted"
    assert told["findings"][0]["symptoms"][0]["count"] == 47_512
    assert told["group_sizes"] == {"4": 249, "3": 1, "1": 1}
    assert told["settings"][1]["full_ratio"] is None
    assert told["worst"][0]["tokens"][5]["kept"][0] == [100, " The", -0.3]
    assert told["budget"]["truncation"] == {"mean": -0.1053, "mean_abs": 0.1053}


def test_numbers_that_json_has_no_word_for_are_null(published: dict[str, Any], audit_report: AuditReport) -> None:
    token = replace(audit_report.worst[0].tokens[0], score=-math.inf, kept=((1, None, math.nan),))
    shown = replace(audit_report.worst[0], tokens=(token,))
    told = audit_json.to_json(replace(audit_report, worst=(shown,)))
    assert told["worst"][0]["tokens"][0]["score"] is None
    assert told["worst"][0]["tokens"][0]["kept"] == [[1, None, None]]
    jsonschema.Draft202012Validator(published).validate(told)


def test_what_is_said_under_a_field_is_its_description(published: dict[str, Any]) -> None:
    finding = published["$defs"]["AuditFinding"]["properties"]
    assert finding["share"]["description"] == "Of all responses."
    assert "None" not in json.dumps(published)


def test_a_version_that_nobody_knows_has_a_name_among_keys(repository: Path) -> None:
    share = Share(responses=3, parted=1)
    row = AspectRow(
        aspect="token_ids",
        responses=1,
        places=1,
        compared=9,
        first_position=4,
        median_first_position=4.0,
        mean_abs=None,
        p99_abs=None,
        max_abs=None,
        since=None,
        examples=(),
        by_order=(share,),
        by_version={None: share, 7: share},
    )
    comparison = Comparison(matched=3, only_here=0, only_there=1, repeated=0, tolerance=1e-4, aspects=(row,))
    told = json.loads(json.dumps(audit_json.to_json(comparison)))
    assert list(told["aspects"][0]["by_version"]) == ["unknown", "7"]
    schema = json.loads((repository / "docs" / "audit-against.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(closed(schema)).validate(told)


def test_the_schemas_are_written_to_the_folder_that_is_named(tmp_path: Path) -> None:
    audit_json.main([str(tmp_path)])
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {
        name: audit_json.schema_text(name) for name in audit_json.SCHEMAS
    }
