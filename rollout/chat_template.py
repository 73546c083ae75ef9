"""A checkpoint's chat template: finding it, and rendering messages with it as the field does.

Templates are Jinja programs that come with a download, so they run in a sandbox that can change nothing.
The functions and filters offered to them are the ones that published templates call.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keptset.schemas.errors import CheckpointError, InvalidInput, MissingDependency

if TYPE_CHECKING:
    import jinja2


def find(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template of a checkpoint, or None: chat_template.jinja before tokenizer_config.json's entry.

    The entry is one template, or a list of named ones of which `default` is taken.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        named = {
            item["name"]: item["template"]
            for item in entry
            if isinstance(item, dict) and item.keys() >= {"name", "template"}
        }
        entry = named.get("default")
        if entry is None:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'} has chat templates named {sorted(named)}, but none named 'default'"
            )
    if entry is not None and not isinstance(entry, str):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of templates"
        )
    return entry


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of a conversation. `variables` are the template's other names: add_generation_prompt, bos_token, ...

    Raises InvalidInput for messages that the template does not take, CheckpointError for a template that
    is no valid Jinja, MissingDependency without jinja2.
    """
    try:
        import jinja2
    except ImportError as missing:
        raise MissingDependency("chat templates need the package 'jinja2': pip install 'keptset[demo]'") from missing
    try:
        compiled = _compile(template)
    except jinja2.TemplateSyntaxError as broken:
        raise CheckpointError(f"the chat template is not valid Jinja: line {broken.lineno}: {broken}") from broken
    try:
        return str(compiled.render(messages=messages, **variables))
    except (jinja2.TemplateError, TypeError) as refused:
        raise InvalidInput(f"the chat template does not take these messages: {refused}") from refused


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote, for training masks; its body is rendered as it is."""

        def __init__(self, environment: jinja2.Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        # Jinja's own filter escapes HTML characters and sorts keys: models were trained on neither.
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return environment.from_string(template)
