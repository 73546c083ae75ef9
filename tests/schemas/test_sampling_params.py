"""Settings that cannot be meant are refused with the setting, its value and what is allowed."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be finite and >= 0, where 0 is greedy"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1; it must be in"),
        ({"top_k": 2**31}, "top_k is 2147483648"),
        ({"top_k": 2.0}, "top_k is 2.0; it must be a whole number"),
        ({"top_k": True}, "top_k is True; it must be a whole number"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids"),
        ({"stop_strings": "END"}, "stop_strings is 'END'; it must be a list of texts"),
        ({"allowed_token_ids": (True,)}, "allowed_token_ids"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must lie in \(0, 1\], where 1 switches the filter off"),
        ({"top_p": 1.0001}, "top_p is 1.0001"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"min_p": -0.1}, r"min_p is -0.1; it must lie in \[0, 1\], where 0 switches the filter off"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": NAN}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be finite and > 0, where 1 is off"),
        ({"repetition_penalty": NAN}, "repetition_penalty is nan"),
        ({"frequency_penalty": INF}, "frequency_penalty is inf; it must be finite, where 0 is off"),
        ({"presence_penalty": -INF}, "presence_penalty is -inf; it must be finite"),
        (
            {"logit_bias": {3: INF}},
            r"logit_bias\[3\] is inf; it must be finite, of an id >= 0; to ban a token use a ban",
        ),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias\[-1\] is 1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be >= 1"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, r"min_new_tokens is 5; it must lie in \[0, max_new_tokens = 4\]"),
        ({"stop_token_ids": (1, -2)}, r"stop_token_ids is \(1, -2\); it must hold ids >= 0"),
        ({"seed": -1}, r"seed is -1; it must be a whole number in \[0, 2\*\*63\)"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        SamplingParams(**settings)
    with pytest.raises(ValueError, match=told):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"top_p": 1.0, "min_p": 0.0, "top_k": 0},
        {"top_p": 1e-9, "min_p": 1.0, "top_k": 1},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"min_new_tokens": 4, "max_new_tokens": 4},
    ],
)
def test_the_bounds_themselves_are_allowed(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("settings", "truncates"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.5}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
    ],
)
def test_whether_settings_truncate(settings: dict[str, Any], truncates: bool) -> None:
    assert SamplingParams(**settings).truncates is truncates


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, False),
        ({"logit_bias": {1: 0.5}}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"temperature": 0.5, "min_new_tokens": 3}, False),
    ],
)
def test_whether_settings_change_values_that_a_trainer_must_replay(settings: dict[str, Any], changes: bool) -> None:
    assert SamplingParams(**settings).changes_values is changes
