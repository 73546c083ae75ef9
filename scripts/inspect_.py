"""`keptset inspect`: one recorded response, readable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from keptset.schemas.errors import InvalidInput
from keptset.scripts.audit_json import plain
from keptset.scripts.inspect_text import print_response, print_token
from keptset.scripts.inspected import MEMBERS_SHOWN, find_response
from keptset.scripts.table import open_console


def command(
    paths: Annotated[
        list[str], typer.Argument(help="Spools, archives, Arrow files, folders of these, globs, addresses.")
    ],
    rollout_id: Annotated[str | None, typer.Option(help="The response of this id; of several the first.")] = None,
    row: Annotated[
        int | None, typer.Option(help="The response in this row, counted from 0 over all files.", min=0)
    ] = None,
    position: Annotated[
        int | None, typer.Option(help="Look at one token: its number in the response, from 0.", min=0)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json, such as the model's: text instead of ids.")
    ] = None,
    unguarded: Annotated[
        bool, typer.Option("--unguarded", help="Also take Parquet files without keptset's checksums.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; of each kept set the first members.")
    ] = False,
) -> None:
    """Show one recorded response: prompt, tokens with their numbers and kept sets, and what is wrong with it.

    Ends with 1 where the response has a finding at severity error.
    """
    reader = None
    if tokenizer is not None:
        from keptset.rollout.tokenizer import Tokenizer

        reader = Tokenizer.from_folder(tokenizer)
    response = find_response(
        paths,
        rollout_id=rollout_id,
        row=row,
        tokenizer=reader,
        members=MEMBERS_SHOWN if position is None else None,
        unguarded=unguarded,
    )
    if position is not None and position >= len(response.tokens):
        raise InvalidInput(f"--position {position}: the response has {len(response.tokens)} tokens, counted from 0")
    if as_json:
        shown = response if position is None else replace(response, tokens=(response.tokens[position],))
        print(json.dumps(plain(shown), indent=2))
    elif position is None:
        print_response(response, open_console())
    else:
        print_token(response, position, open_console())
    if any(finding.severity.value == "error" for finding in response.findings):
        raise typer.Exit(1)
