"""Sampling settings of other engines: what is told is taken, what is not stays unknown."""

from types import SimpleNamespace
from typing import Any

import pytest

from keptset.schemas.adapters.settings import Stated, flag_settings, read_flags, read_settings
from keptset.schemas.adapters.tree import Node
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, SchemaError
from keptset.schemas.sampling_params import KnownParams, SamplingParams


def known(request: Any, **stated: Any) -> KnownParams:
    return read_settings(None if request is None else Node(request, "request"), Stated(**stated)).params


def test_a_setting_that_nobody_tells_is_unknown() -> None:
    assert known({"temperature": 0.7}) == KnownParams(temperature=0.7)
    assert known(None) == KnownParams()


def test_the_record_goes_before_what_is_stated_and_that_before_off() -> None:
    told = known({"top_p": 0.9}, settings={"top_p": 0.5, "temperature": 0.7}, others_off=True)
    assert told == KnownParams(
        temperature=0.7,
        top_k=0,
        top_p=0.9,
        min_p=0.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logit_bias={},
    )


def test_a_temperature_is_never_assumed() -> None:
    assert known(None, others_off=True).temperature is None


@pytest.mark.parametrize(("asked", "top_k"), [(-1, 0), (0, 0), (1 << 30, 0), (5, 5)])
def test_top_k_off_has_one_spelling(asked: int, top_k: int) -> None:
    assert known({"top_k": asked}).top_k == top_k


def test_a_bias_has_texts_for_ids_in_json_and_null_says_none() -> None:
    assert known({"logit_bias": {"7": 0.5, 3: -1}}).logit_bias == {7: 0.5, 3: -1.0}
    assert known({"logit_bias": None}).logit_bias == {}
    assert known(SimpleNamespace(logit_bias=None)).logit_bias == {}
    assert known({}).logit_bias is None


def test_settings_of_keptset_and_of_engine_objects_are_read_by_attribute() -> None:
    assert known(SamplingParams(temperature=0.5, top_k=3)).top_k == 3
    assert known(SimpleNamespace(temperature=0.5, min_p=0.1)) == KnownParams(temperature=0.5, min_p=0.1)


def test_rare_settings_are_kept_as_canonical_json_and_an_engine_seed_is_no_row_seed() -> None:
    request = {"seed": 0, "stop": ["x"], "min_tokens": 4, "stop_token_ids": (7,), "bad_words": None, "other": 1}
    assert read_settings(Node(request), Stated()).extras == (
        '{"engine_seed":0,"min_new_tokens":4,"stop":["x"],"stop_token_ids":[7]}'
    )
    assert read_settings(Node({"stop": [], "min_tokens": 0}), Stated()).extras is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"top_p": 1.5}, "request: top_p is 1.5; it must lie in"),
        ({"top_p": "0.9"}, "request.top_p is '0.9'; expected a number"),
        ({"temperature": True}, "request.temperature is True; expected a number"),
        ({"temperature": float("nan")}, "request.temperature is nan; expected a finite number"),
        ({"temperature": 10**400}, "request.temperature is a very large number; expected a finite number"),
        ({"top_k": 2.0}, "request.top_k is 2.0; expected a whole number"),
        ({"top_k": -2}, "request.top_k is -2; expected a whole number >= -1"),
        ({"logit_bias": [1]}, "request.logit_bias is a list of 1; expected an object"),
        ({"logit_bias": {"x": 1}}, "request.logit_bias has a field 'x'; expected token ids"),
        ({"logit_bias": {"1": "a"}}, "request.logit_bias.1 is 'a'; expected a number"),
        ([1], "request is a list of 1; expected an object of sampling settings"),
        ({"stop": {1, 2j}}, "request cannot be kept as JSON"),
    ],
)
def test_a_setting_that_is_none_is_refused_by_name(request_: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        known(request_)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"settings": {"temprature": 1}}, "no such setting: temprature; there are temperature"),
        ({"settings": {"top_p": 2.0}}, "top_p is 2.0"),
        ({"settings": {"top_p": "x"}}, "top_p is 'x'; expected a number"),
        ({"logprob_domain": "some"}, "logprob_domain is 'some'; it must be one of kept, full, raw, unknown"),
    ],
)
def test_what_is_stated_wrongly_is_refused_at_once(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Stated(identity=Identity(), **stated)


def test_launch_flags_are_read_in_each_spelling() -> None:
    words = ["--logprobs-mode=processed_logprobs", "--rollout-top-p", "0.9", "--verbose", "--rollout-top-k=-1"]
    flags = read_flags(Node(words))
    assert flags == {
        "logprobs_mode": "processed_logprobs",
        "rollout_top_p": "0.9",
        "verbose": "",
        "rollout_top_k": "-1",
    }
    assert read_flags(Node({"logprobs-mode": "raw"})) == {"logprobs_mode": "raw"}
    told = flag_settings(flags, {"rollout_top_p": "top_p", "rollout_top_k": "top_k"})
    assert told is not None
    assert told.value == {"top_p": 0.9, "top_k": -1}
    assert flag_settings({}, {"rollout_top_p": "top_p"}) is None


def test_a_flag_that_is_no_number_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"rollout_top_p is 'half'; expected a number"):
        flag_settings({"rollout_top_p": "half"}, {"rollout_top_p": "top_p"})
    with pytest.raises(SchemaError, match=r"\[1\] is 5; expected a string"):
        read_flags(Node(["--a", 5]))
