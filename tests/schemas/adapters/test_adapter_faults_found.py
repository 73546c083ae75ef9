"""Inputs that once got the better of an adapter, found by the soak: each is an error of ours, or is set aside."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.adapters import Adapted, adapt_files, adapter_for
from keptset.schemas.adapters.dense_scores import read_steps
from keptset.schemas.errors import DamagedFile, InvalidInput


def test_msgpack_whose_keys_are_lists_is_damage(tmp_path: Path) -> None:
    pytest.importorskip("msgpack", reason="prime-rl files are msgpack; install the extra [prime-rl]")
    path = tmp_path / "batches.msgpack"
    path.write_bytes(b"\x91\x81\x90\x01")  # [{[]: 1}]
    with pytest.raises(DamagedFile, match="micro-batch 0: not a msgpack list of micro-batches: unhashable"):
        list(adapt_files(adapter_for("prime_rl"), [path]))


def test_logprobs_that_are_not_finite_are_rejected_without_a_warning(
    adapt: Callable[..., Adapted], example: Callable[[str], Any]
) -> None:
    tree = json.loads(json.dumps(example("sglang_good.json")))
    meta = tree["response"][0]["meta_info"]
    meta["output_token_logprobs"][0][0] = -np.inf
    meta["output_token_sampling_logprobs"][0] = -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted = adapt("sglang", tree)
    assert [one.findings[0].kind.value for one in adapted.rejected] == ["logprob"]
    assert len(adapted.batch) == 1


def test_scores_that_are_no_numbers_and_logits_for_other_steps_are_refused() -> None:
    step, tokens, lengths = np.zeros((1, 3), np.float32), np.array([[0]]), np.array([1])
    with pytest.raises(InvalidInput, match=r"scores\[0\] holds <U1; expected a tensor of numbers"):
        read_steps([np.array([["a", "b", "c"]])], None, tokens, lengths, 1.0, greedy=False)
    with pytest.raises(InvalidInput, match="0 logits for 1 steps; expected one tensor for each"):
        read_steps([step], [], tokens, lengths, 1.0, greedy=False)


def test_a_temperature_at_which_logits_overflow_leaves_the_kept_mass_unknown() -> None:
    step, tokens, lengths = np.array([[0.5, 0.25, -np.inf]], np.float32), np.array([[0]]), np.array([1])
    found = read_steps([step], [step], tokens, lengths, 1e-320, greedy=False)
    assert found.m_TB is not None
    assert np.isnan(found.m_TB).all()


@pytest.mark.parametrize("index", [2**31, -(2**31) - 1, 10**40])
def test_a_choice_whose_number_no_column_holds_is_rejected_alone(
    index: int, adapt: Callable[..., Adapted], example: Callable[[str], Any]
) -> None:
    tree = json.loads(json.dumps(example("vllm_good.json")))
    good = len(adapt("vllm", tree).batch)
    tree["response"]["choices"][-1]["index"] = index
    adapted = adapt("vllm", tree)
    assert len(adapted.batch) == good - 1
    (rejected,) = adapted.rejected
    assert "expected one within 32 bits" in rejected.reason
