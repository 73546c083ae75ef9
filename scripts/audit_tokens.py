"""A response that is shown whole, token by token: text, colour and the numbers behind it, for the page.

The colour is the log ratio d = l - b where the response was scored, and otherwise the surprise -b - H, which is 0 on
average for an honest sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keptset.scripts import number_text
from keptset.scripts.audit_words import given, small_number, visible
from keptset.trainer_bridge.audit.report import ShownResponse, ShownToken

LOG_RATIO_STEPS = (0.01, 0.1, 0.5, 1.5)
"""|d| at which the colour gets stronger, in nats."""
SURPRISE_STEPS = (1.0, 2.0, 4.0, 8.0)
MAX_TOKENS = 400
"""Of longer responses the part around the most conspicuous token is shown."""


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """One token as the page shows it."""

    position: int
    text: str
    shade: str
    """CSS class: `below-3`, `above-1`, `even`, or `forced` for a token that was not sampled."""
    facts: tuple[tuple[str, str], ...]
    """Name and number."""
    kept: tuple[tuple[str, str, bool], ...]
    """Text, probability, and whether it is the sampled one, of the first members of K."""
    more: int
    """Members of K beyond those."""


@dataclass(frozen=True, kw_only=True)
class ResponseView:
    """One response as the page shows it."""

    response: ShownResponse
    prompt: str | None
    scored: bool
    """Whether colours are log ratios; otherwise surprises."""
    before: int
    """Tokens left out before those shown."""
    tokens: tuple[TokenView, ...]
    after: int


def response_view(response: ShownResponse) -> ResponseView:
    """The response with at most `MAX_TOKENS` tokens, those around its most conspicuous one."""
    scored = any(token.score is not None for token in response.tokens)
    shades = [(_log_ratio if scored else _surprise)(token) for token in response.tokens]
    first, last = _window(shades)
    steps = LOG_RATIO_STEPS if scored else SURPRISE_STEPS
    return ResponseView(
        response=response,
        prompt=None if response.prompt_text is None else _lines(response.prompt_text),
        scored=scored,
        before=first,
        tokens=tuple(_token(n, response.tokens[n], shades[n], steps) for n in range(first, last)),
        after=len(response.tokens) - last,
    )


def token_text(token_id: int, text: str | None) -> str:
    r"""What a reader sees of a token; an id where nothing decodes it.

    >>> token_text(7, " the\n"), token_text(7, None), token_text(7, "\x1b[0m")
    (' the↵\n', '[7]', '\\x1b[0m')
    """
    return f"[{token_id}]" if text is None else _lines(text) or "∅"


def _lines(text: str) -> str:
    """Invisible characters spelled out, but lines stay lines."""
    return "↵\n".join(visible(line) for line in text.split("\n"))


def _window(values: Sequence[float]) -> tuple[int, int]:
    if len(values) <= MAX_TOKENS:
        return 0, len(values)
    sizes = [0.0 if math.isnan(value) else abs(value) for value in values]
    first = min(max(sizes.index(max(sizes)) - MAX_TOKENS // 2, 0), len(values) - MAX_TOKENS)
    return first, first + MAX_TOKENS


def _log_ratio(token: ShownToken) -> float:
    return given(token.score) - given(token.behavior_logprob)


def _surprise(token: ShownToken) -> float:
    return -given(token.behavior_logprob) - given(token.entropy)


def _token(position: int, token: ShownToken, value: float, steps: Sequence[float]) -> TokenView:
    return TokenView(
        position=position,
        text=token_text(token.token_id, token.text),
        shade=_shade(value, steps) if token.sampled else "forced",
        facts=tuple(_facts(token)) if token.sampled else (),
        kept=tuple(
            (token_text(token_id, text), _probability(logprob), token_id == token.token_id)
            for token_id, text, logprob in token.kept
        ),
        more=max((token.kept_size or 0) - len(token.kept), 0),
    )


def _shade(value: float, steps: Sequence[float]) -> str:
    if math.isnan(value):
        return "even"
    strength = sum(abs(value) >= step for step in steps)
    return f"{'below' if value < 0 else 'above'}-{strength}" if strength else "even"


def _facts(token: ShownToken) -> list[tuple[str, str]]:
    d = _log_ratio(token)
    shown = [
        ("ratio", number_text.NO_DATA if math.isnan(d) else small_number(math.exp(min(d, 700.0)))),
        ("log ratio", small_number(d, signed=True)),
        ("l, scored", small_number(given(token.score))),
        ("b, recorded", small_number(given(token.behavior_logprob))),
        ("entropy H", small_number(given(token.entropy))),
        ("kept mass", number_text.ratio(math.exp(min(given(token.log_kept_mass), 1.0)), 4)),
        ("kept ids", number_text.NO_DATA if token.kept_size is None else f"{token.kept_size:,}"),
        ("version", number_text.NO_DATA if token.version is None else str(token.version)),
    ]
    return [(name, number_text.typeset(text)) for name, text in shown if text != number_text.NO_DATA]


def _probability(logprob: float | None) -> str:
    return "" if logprob is None else number_text.share(min(math.exp(min(logprob, 0.0)), 1.0))
