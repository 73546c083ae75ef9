"""One response on a terminal: what it is, its findings, its text, and its tokens with their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keptset.scripts import number_text
from keptset.scripts.audit_text import SEVERITY_STYLES
from keptset.scripts.audit_words import given, identity_line, plural, small_number, visible
from keptset.scripts.inspected import InspectedResponse, InspectedToken, Member

MEMBERS_IN_A_LINE = 6
MEMBERS_OF_ONE = 40
"""Members shown of a token that is looked at by itself."""


def print_response(response: InspectedResponse, console: Console) -> None:
    """The whole response."""
    _head(response, console)
    prompt = response.prompt_token_ids
    if prompt is not None:
        _section(console, f"Prompt, {plural(len(prompt), 'token')}")
        text = response.prompt_text
        console.print(_body(" ".join(map(str, prompt)) if text is None else text))
    _section(console, f"Response, {plural(len(response.tokens), 'token')}")
    if any(token.text is not None for token in response.tokens):
        console.print(_body("".join(token.text or f"[{token.token_id}]" for token in response.tokens)))
        console.print()
    console.print(_tokens(response.tokens))
    console.print(Text(_LEGEND, style="dim"))


def print_token(response: InspectedResponse, position: int, console: Console) -> None:
    """One token of the response, with its whole kept set as far as it fits."""
    _head(response, console)
    token = response.tokens[position]
    nearby = response.tokens[max(0, position - 20) : position + 1]
    if token.text is not None:
        _section(console, "Up to here")
        console.print(_body("".join(near.text or f"[{near.token_id}]" for near in nearby)))
    _section(console, f"Token {position} of {len(response.tokens)}")
    table = Table.grid(padding=(0, 2, 0, 0))
    b, m = given(token.behavior_logprob), given(token.log_kept_mass)
    for name, text in (
        ("id", f"{token.token_id} {_quoted(token.text)}"),
        ("sampled", "unknown" if token.sampled is None else "yes" if token.sampled else "no: it enters no ratio"),
        ("b", f"{small_number(b)}, probability {_probability(b)}"),
        ("m", f"{small_number(m)}, kept mass {_probability(m)}"),
        ("b + m", f"{small_number(b + m)}, probability before the filters {_probability(b + m)}"),
        ("H", small_number(given(token.entropy))),
        ("version", _whole(token.version)),
        ("|K|", _whole(token.kept_size)),
    ):
        table.add_row(Text(f"  {name}", style="dim"), Text(text))
    console.print(table)
    if token.kept:
        _section(console, "Kept set")
        console.print(_kept(token))


def _head(response: InspectedResponse, console: Console) -> None:
    console.print(Text(visible(response.rollout_id), style="bold"))
    console.print(Text(f"row {response.row:,}, {visible(response.file)}", style="dim"))
    if response.others:
        rows = ", ".join(f"{row:,}" for row in response.others[:5])
        more = "" if len(response.others) <= 5 else f" and {len(response.others) - 5} more"
        console.print(Text(f"the same rollout_id also stands in row {rows}{more}", style="bold yellow"))
    console.print(_body(response.setting))
    told = ", ".join(f"{name} {value}" for name, value in response.facts.items() if name not in _SETTINGS)
    console.print(_body(told))
    console.print(_body(identity_line(response.identity)))
    for finding in response.findings:
        text = Text.assemble(
            (finding.severity.value, SEVERITY_STYLES[finding.severity]),
            (f" {finding.kind.value}", "bold"),
            f": {finding.kind.meaning} ({plural(finding.count, 'place')})",
        )
        for example in finding.examples:
            where = "" if example.position is None else f"token {example.position}: "
            text.append(f"\n  {where}{visible(example.detail)}")
        console.print(Padding(text, (0, 0, 0, 2), expand=False))
    if not response.findings:
        console.print(Padding(Text("no finding by itself", style="green"), (0, 0, 0, 2), expand=False))


_SETTINGS = {
    *("temperature", "top_p", "min_p", "top_k", "repetition_penalty", "frequency_penalty", "presence_penalty"),
}
"""Facts that the name of the setting tells."""
_LEGEND = (
    "b: recorded log-probability over the kept set. p: exp(b). mass: probability of the kept set before it was "
    "renormalised. H: entropy of the kept distribution. kept: the first members of K, by probability where the "
    "distribution is recorded, else by id."
)


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def _body(text: str) -> Padding:
    return Padding(Text("\n".join(visible(line) for line in text.split("\n"))), (0, 0, 0, 2), expand=False)


def _tokens(tokens: Sequence[InspectedToken]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    decoded = any(token.text is not None for token in tokens)
    for name in ("at", "id", *(("token",) if decoded else ()), "b", "p", "mass", "H", "|K|", "version", "kept"):
        last = name in ("token", "kept")
        table.add_column(
            Text(name, style="dim"),
            justify="left" if last else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=24 if name == "token" else None,
            ratio=1 if name == "kept" else None,
        )
    for token in tokens:
        table.add_row(
            str(token.position),
            _whole(token.token_id),
            *((Text(_quoted(token.text)),) if decoded else ()),
            small_number(given(token.behavior_logprob)),
            _probability(given(token.behavior_logprob)),
            number_text.ratio(_exp(given(token.log_kept_mass)), 4),
            number_text.ratio(given(token.entropy), 3),
            _whole(token.kept_size),
            _whole(token.version),
            Text("not sampled", style="dim") if token.sampled is False else _line_of_members(token),
            style="dim" if token.sampled is False else "",
        )
    return table


def _line_of_members(token: InspectedToken) -> Text:
    line = Text()
    for member in token.kept[:MEMBERS_IN_A_LINE]:
        drawn = member.token_id == token.token_id
        line.append(_named(member), style="bold" if drawn else "")
        line.append(f" {_probability(member.logprob)}  " if member.logprob is not None else "  ", style="dim")
    left = (token.kept_size or 0) - min(len(token.kept), MEMBERS_IN_A_LINE)
    if left > 0:
        line.append(f"+{left:,}", style="dim")
    return line


def _kept(token: InspectedToken) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for member in token.kept[:MEMBERS_OF_ONE]:
        drawn = member.token_id == token.token_id
        probability = "" if member.logprob is None else _probability(member.logprob)
        style = "bold" if drawn else ""
        table.add_row(
            Text(f"  {member.token_id}", style=style),
            Text("" if member.text is None else _quoted(member.text), style=style),
            Text(probability, style=style, justify="right"),
            Text("drawn" if drawn else "", style="green"),
        )
    left = (token.kept_size or 0) - min(len(token.kept), MEMBERS_OF_ONE)
    if left > 0:
        table.add_row(Text(f"  and {left:,} more", style="dim"))
    return table


def _named(member: Member) -> str:
    return str(member.token_id) if member.text is None else _quoted(member.text)


def _quoted(text: str | None) -> str:
    """Text with its spaces to be seen; a dash where there is none."""
    return number_text.NO_DATA if text is None else '"' + visible(text).replace('"', '\\"') + '"'


def _probability(logprob: float | None) -> str:
    return number_text.share(_exp(given(logprob)))


def _exp(value: float) -> float:
    return value if math.isnan(value) else math.exp(min(value, 700.0))


def _whole(value: int | None) -> str:
    return number_text.NO_DATA if value is None else str(value)
