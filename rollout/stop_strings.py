"""Stop strings: whether the text of a response has just come to contain one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keptset.rollout.request import Request
from keptset.rollout.tokenizer import Tokenizer
from keptset.schemas.errors import InvalidInput

_SLACK = 4
"""Tokens read beyond as many as the string has bytes: a token that shows no text, or part of a character, is one."""


class StopStrings:
    """Looks at the end of a response only, so that a step does not cost more as a response grows."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def check(self, request: Request) -> None:
        """Errors: InvalidInput where a request has stop strings and there is no tokenizer to read its text with."""
        if request.params.stop_strings and self._tokenizer is None:
            raise InvalidInput(
                f"prompt {request.prompt_id}: stop_strings need a tokenizer; give the engine one, or use stop_token_ids"
            )

    def complete(self, request: Request, response_ids: npt.NDArray[np.int32]) -> bool:
        """Whether the last token completed one of the stop strings of a response that is long enough to end."""
        if len(response_ids) < request.params.min_new_tokens:
            return False
        for stop in request.params.stop_strings:
            assert self._tokenizer is not None
            last = response_ids[-(len(stop.encode()) + _SLACK) :]
            # One that was complete while the response was too short is not completed by what comes later.
            there = self._tokenizer.decode(last).count(stop)
            if there and there > self._tokenizer.decode(last[:-1]).count(stop):
                return True
        return False
