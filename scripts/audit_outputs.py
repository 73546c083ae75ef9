"""Where an audit's answer goes: standard output, a JSON file, a page. What cannot be written is told beforehand."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from keptset.schemas.errors import InvalidInput, MissingDependency, StorageError
from keptset.scripts.audit_json import to_json
from keptset.scripts.audit_text import print_audit, print_comparison
from keptset.scripts.html_page import write_page
from keptset.scripts.table import open_console
from keptset.trainer_bridge.audit.comparison import Comparison
from keptset.trainer_bridge.audit.report import AuditReport


def check_outputs(html: Path | None, json_file: Path | None) -> None:
    """What would fail at the end of a long audit fails before it. Makes the folders of the files.

    Errors: MissingDependency, InvalidInput for a folder, StorageError for a place that cannot be written to.
    """
    if html is not None and find_spec("jinja2") is None:
        raise MissingDependency("--html needs Jinja: pip install 'keptset[report]'")
    for option, path in (("--html", html), ("--json-file", json_file)):
        if path is None:
            continue
        if path.is_dir():
            raise InvalidInput(f"{option} {path} is a folder; name a file")
        try:
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
        except OSError as error:
            raise StorageError(
                f"{option} {path} cannot be written: {error.strerror or error}; name another place"
            ) from error


def put_out(report: AuditReport | Comparison, *, as_json: bool, json_file: Path | None, html: Path | None) -> None:
    """The report on standard output, as text or JSON, and in these files. Errors: StorageError."""
    if as_json or json_file is not None:
        text = json.dumps(to_json(report), indent=2)
        if json_file is not None:
            write_page(json_file, text + "\n")
        if as_json:
            print(text)
    if not as_json:
        if isinstance(report, Comparison):
            print_comparison(report, open_console())
        else:
            print_audit(report, open_console())
    if html is not None and isinstance(report, AuditReport):
        from keptset.scripts.audit_page import write_audit

        print(f"report: {write_audit(html, report)}", file=sys.stderr)
