"""What every HTML page of keptset has in common: how its template is filled, and how it comes to the disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from keptset.schemas.errors import MissingDependency, StorageError
from keptset.scripts import number_text

if TYPE_CHECKING:
    import jinja2

_TEMPLATES = Path(__file__).parent / "templates"


def page_environment() -> jinja2.Environment:
    """Templates that escape every value, with the filters for numbers. Errors: MissingDependency without Jinja."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependency("the report needs Jinja: pip install 'keptset[report]'") from error

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ratio=number_text.ratio,
        share=number_text.share,
        size=number_text.size,
        small=number_text.small_typeset,
    )
    return environment


def write_page(path: Path, page: str) -> Path:
    """Write a page, or another text, to `path`, whole or not at all, making its folder; returns the absolute path.

    Errors: StorageError where it cannot be written.
    """
    target = path.absolute()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(page, encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write the report to {target}: {error.strerror}; name another place") from error
    return target
