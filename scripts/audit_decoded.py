"""Text for the responses that an audit shows whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from keptset.rollout.tokenizer import Tokenizer
from keptset.trainer_bridge.audit.report import AuditReport, ShownResponse, ShownToken


def with_text(report: AuditReport, tokenizer: Tokenizer) -> AuditReport:
    """The report with decoded tokens and prompts; an id that the tokenizer does not know reads as one."""
    return replace(report, worst=tuple(_response(response, tokenizer) for response in report.worst))


def recorded_otherwise(report: AuditReport, tokenizer: Tokenizer) -> bool:
    """Whether rollouts say that they were made with another tokenizer."""
    recorded = {identity.get("tokenizer_digest") for identity in report.identities} - {None}
    return bool(recorded - {tokenizer.digest})


def tokenizer_folder(given: Path | None, models: Iterable[str]) -> Path | None:
    """The folder to read a tokenizer from: the one that was named, or else the first model's that has one."""
    if given is not None:
        return given
    folders = (Path(model.partition("=")[2] or model) for model in models)
    return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)


def _response(response: ShownResponse, tokenizer: Tokenizer) -> ShownResponse:
    ids = {i for token in response.tokens for i in (token.token_id, *(member[0] for member in token.kept))}
    known = sorted(i for i in ids if i >= 0)
    texts = dict(zip(known, tokenizer.decode_tokens(known), strict=True))
    prompt = response.prompt_token_ids
    return replace(
        response,
        prompt_text=tokenizer.decode([i for i in prompt if i >= 0]) if prompt else None,
        tokens=tuple(_token(token, texts) for token in response.tokens),
    )


def _token(token: ShownToken, texts: Mapping[int, str]) -> ShownToken:
    kept = tuple((i, texts.get(i), logprob) for i, _, logprob in token.kept)
    return replace(token, text=texts.get(token.token_id), kept=kept)
