"""The published vectors hold for what a trainer calls, in every framework, and not for the oracle alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import ViolationError
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.budget import Budget
from keptset.trainer_bridge.corrections import Mask, Reject, Truncate, correct
from keptset.trainer_bridge.losses import cispo_loss, dual_clip_loss, gspo_loss, ppo_clip_loss
from keptset.trainer_bridge.ratio_sums import RatioSums
from keptset.trainer_bridge.ratios import LogRatios, log_ratios
from keptset.trainer_bridge.replay import REPLAYED_ORDER, Replayer
from keptset.trainer_bridge.sampled_tokens import sampled_tokens
from keptset.trainer_bridge.scoring import score_from_logits

VECTORS = json.loads((Path(__file__).resolve().parents[1] / "data" / "vectors" / "ratios.json").read_text())
IN_THE_ORACLE_ALONE = {"pit", "surprisal"}
"""What only an audit computes."""


def numbers(values: list[float | None]) -> np.ndarray:
    """null stands for -inf."""
    return np.array([-np.inf if v is None else v for v in values], np.float64)


def ratios_of(framework: Any, delta: list[float | None], **settings: Any) -> LogRatios:
    d = numbers(delta)
    return log_ratios(framework.tensor(d), np.zeros(len(d)), np.zeros(len(d), int), **settings)


def scored(framework: Any, case: dict[str, Any], kept: list[int] | None) -> float:
    kept = list(range(len(case["logits"]))) if kept is None else kept
    logits = framework.tensor([case["logits"]])
    scores = score_from_logits(logits, [case["token"]], [0, len(kept)], kept, [case.get("temperature", 1.0)])
    return float(framework.host(scores.logprobs_T)[0])


def restricted_logprob(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    logprob = scored(framework, case, case["kept_ids"])
    d = log_ratios(np.array([logprob]), [case.get("behavior_logprob", logprob)], [0])
    return {"logprob": logprob, "ratio": d.at("token").ratios_C[0]}


def audit(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    try:
        logprob = scored(framework, case, case["got_kept"])
    except ViolationError as error:
        return {"finding": error.findings[0].kind.value}
    # A score that disagrees with b is no violation of the record: which fault it is, an audit says.
    return {"finding": "logprob_mismatch", "ratio": math.exp(logprob - case["behavior_logprob"])}


def ratio_reduce(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    d = log_ratios(
        framework.tensor(numbers(case["trainer_logprobs"])),
        numbers(case["behavior_logprobs"]),
        [0] * len(case["weights"]),
        trainable_T=np.array(case["weights"]) > 0,
    )
    return {
        "sequence_ratio": framework.host(d.at("sequence").ratios_C)[0],
        "mean_token_ratio": framework.host(d.at("token").ratios_C).mean(),
    }


def anomaly(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    logprobs, b = framework.tensor(numbers(case["trainer_logprobs"])), case["behavior_logprobs"]
    with pytest.raises(ViolationError):
        log_ratios(logprobs, b, [0])
    excluded = log_ratios(logprobs, b, [0], on_violation="exclude").at("token").excluded_tokens
    return {"anomaly": next(iter(excluded)), "excluded": sum(excluded.values())}


def sums(delta: np.ndarray) -> Any:
    collected = RatioSums()
    collected.add(delta)
    return collected.report()


def ess(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    return {"ess_fraction": sums(np.log(case["weights"])).ess_fraction}


def ess_sequence(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    rows = np.repeat(np.arange(len(case["lengths"])), case["lengths"])
    d = (np.log(case["weights"]) / case["lengths"])[rows]
    sequence = log_ratios(framework.tensor(d), np.zeros(len(d)), rows).at("sequence")
    return {"ess_fraction": sums(framework.host(sequence.log_ratios_C)).ess_fraction}


def kl(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    report = sums(np.array(case["delta"]))
    return {"k1": report.k1, "k3": report.k3}


def levels(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    d = ratios_of(framework, case["delta"])
    ratio = {level: framework.host(d.at(level).ratios_C) for level in ("token", "sequence", "geometric")}
    return {"token_mean": ratio["token"].mean(), "sequence": ratio["sequence"][0], "geometric": ratio["geometric"][0]}


def correction(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    if case["correction"] == "none":
        done = ratios_of(framework, case["delta"], on_violation="exclude").at(case["level"])
        return {
            "excluded_sequences": sum(done.excluded_responses.values()),
            "counted_sequences": len(done.index_C),
        }
    kind = {"truncate": Truncate, "mask": Mask, "reject": Reject}[case["correction"]]
    bounds = {name: case[name] for name in ("lower", "upper") if name in case}
    done = correct(ratios_of(framework, case["delta"]), kind(level=case["level"], **bounds))
    report = done.report
    return {
        "weights": done.weights_T,
        "dropped": report.dropped_tokens,
        "dropped_sequences": report.dropped_responses,
    }


def loss(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    kind = case["loss"]
    if kind == "gspo":
        d = ratios_of(framework, case["delta"])
        bounds = {"clip_lower": case["epsilon"], "clip_upper": case["epsilon"]}
        done = gspo_loss(d, [case["advantage"]], **bounds)
        return {
            "geometric_ratio": framework.host(d.at("geometric").ratios_C)[0],
            "objective": -float(framework.host(done.value)),
        }
    d = framework.tensor(np.log(case["ratio"]))
    rows = np.arange(len(case["ratio"]))
    separate = [log_ratios(d[i : i + 1], [0.0], [0]) for i in rows]
    advantages = [[a] for a in case["advantage"]]
    if kind == "cispo":
        done = [
            cispo_loss(one, a, clip_upper=case["epsilon_high"]) for one, a in zip(separate, advantages, strict=True)
        ]
        return {"gradient_weight": [-one.gradient_T[0] for one in done]}
    settings = {"clip_lower": case["epsilon"], "clip_upper": case["epsilon"]}
    if kind == "dual_clip":
        settings["dual"] = case["c"]
    function = {"ppo_clip": ppo_clip_loss, "dual_clip": dual_clip_loss}[kind]
    done = [function(one, a, **settings) for one, a in zip(separate, advantages, strict=True)]
    return {"objective": [-float(framework.host(one.value)) for one in done]}


def processors(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    """A token after the response of the vector, that keeps the whole vocabulary: its logits are replayed."""
    vocab = len(case["logits"])
    tokens = np.array([*case["response"], 0])
    builder = BatchBuilder(Identity(vocab_size=vocab, processor_order=",".join(REPLAYED_ORDER)))
    builder.add(
        Response(
            rollout_id="r",
            prompt_id="p",
            prompt_token_ids=np.array(case["prompt"]),
            token_ids=tokens,
            behavior_logprobs=np.zeros(len(tokens)),
            kept_offsets=np.arange(len(tokens) + 1) * vocab,
            kept_ids=np.tile(np.arange(vocab), len(tokens)),
            finish_reason="stop",
            params=SamplingParams(
                repetition_penalty=case["repetition_penalty"],
                frequency_penalty=case["frequency_penalty"],
                presence_penalty=case["presence_penalty"],
                logit_bias={int(i): bias for i, bias in case["logit_bias"].items()},
            ),
        )
    )
    replay = Replayer(sampled_tokens(builder.build())).kept()
    assert replay is not None
    last = replay.take(slice(-vocab, None))
    z = np.array(case["logits"])
    return {"processed": np.where(z > 0, z / last.divisor_N, z * last.divisor_N) + last.shift_N}


def budget(framework: Any, case: dict[str, Any]) -> dict[str, Any]:
    collected = Budget()
    collected.add(
        full_now_T=[case["full_now"]],
        kept_now_T=[case["kept_now"]],
        kept_version_T=[case["kept_version"]],
        behavior_T=[case["b"]],
    )
    return {name: term.mean for name, term in collected.report().items()}


KINDS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "restricted_logprob": restricted_logprob,
    "audit": audit,
    "ratio_reduce": ratio_reduce,
    "anomaly": anomaly,
    "ess": ess,
    "ess_sequence": ess_sequence,
    "kl": kl,
    "levels": levels,
    "correction": correction,
    "loss": loss,
    "processors": processors,
    "budget": budget,
}


@pytest.mark.parametrize(
    "case", [case for case in VECTORS if case["kind"] not in IN_THE_ORACLE_ALONE], ids=lambda case: case["name"]
)
def test_a_trainer_gets_what_the_vector_gives(framework: Any, case: dict[str, Any]) -> None:
    got = KINDS[case["kind"]](framework, case)
    for name, expected in case["expect"].items():
        if isinstance(expected, str):
            assert got[name] == expected
        else:
            tolerance = 1e-6 if case["kind"] == "processors" else 1e-12  # biases are recorded as float32
            np.testing.assert_allclose(got[name], expected, rtol=tolerance, atol=tolerance, err_msg=name)
