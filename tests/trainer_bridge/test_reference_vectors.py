"""The oracle holds on every published test vector."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.findings import FindingKind
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors"
CLOSE = pytest.approx


def vectors(name: str) -> list[dict[str, Any]]:
    return json.loads((VECTORS / name).read_text())


def numbers(values: list[float | None]) -> np.ndarray:
    """null stands for -inf."""
    return np.array([-np.inf if v is None else v for v in values], np.float64)


@pytest.mark.parametrize("case", vectors("truncation.json"), ids=lambda case: case["name"])
def test_the_oracle_keeps_what_the_vector_keeps(case: dict[str, Any]) -> None:
    kept = reference.truncate(numbers(case["logits"]), SamplingParams(**case["params"]))
    expect = case["expect"]
    assert kept.kept_ids.tolist() == expect["kept_ids"]
    np.testing.assert_allclose(kept.logprobs, expect["logprobs"], rtol=0, atol=1e-12)
    assert kept.log_kept_mass == CLOSE(expect["log_kept_mass"], abs=1e-12)
    p = np.exp(expect["logprobs"])
    assert kept.entropy == CLOSE(-np.sum(p * expect["logprobs"]), abs=1e-12)
    assert kept.logprob_var == CLOSE(np.sum(p * (np.array(expect["logprobs"]) + kept.entropy) ** 2), abs=1e-12)


def restricted_logprob(case: dict[str, Any]) -> dict[str, Any]:
    logprob = reference.score(case["logits"], case["kept_ids"], case["token"], case["temperature"])
    return {"logprob": logprob, "ratio": math.exp(logprob - case.get("behavior_logprob", logprob))}


def audit(case: dict[str, Any]) -> dict[str, Any]:
    finding = reference.audit_token(
        case["logits"], case["got_kept"], case["token"], case["behavior_logprob"], 1.0, floor=1e-3
    )
    if finding is FindingKind.SORTED:
        return {"finding": finding.value}
    ratio = math.exp(reference.score(case["logits"], case["got_kept"], case["token"], 1.0) - case["behavior_logprob"])
    return {"finding": finding.value if finding else None, "ratio": ratio}


def ratio_reduce(case: dict[str, Any]) -> dict[str, Any]:
    counted = np.array(case["weights"]) > 0
    d, bad = reference.deltas(numbers(case["trainer_logprobs"])[counted], numbers(case["behavior_logprobs"])[counted])
    assert bad is None
    return {
        "sequence_ratio": math.exp(reference.log_ratio(d, "sequence")[0]),
        "mean_token_ratio": reference.mean_ratio(reference.log_ratio(d, "token"))[0],
    }


def anomaly(case: dict[str, Any]) -> dict[str, Any]:
    d, kind = reference.deltas(numbers(case["trainer_logprobs"]), numbers(case["behavior_logprobs"]))
    return {"anomaly": kind, "excluded": reference.exclude_non_finite([d], "token").excluded_tokens}


def ess(case: dict[str, Any]) -> dict[str, Any]:
    return {"ess_fraction": reference.ess_fraction(np.log(case["weights"]))}


def kl(case: dict[str, Any]) -> dict[str, Any]:
    return {"k1": reference.k1(case["delta"]), "k3": reference.k3(case["delta"])}


def levels(case: dict[str, Any]) -> dict[str, Any]:
    d = case["delta"]
    return {
        "token_mean": reference.mean_ratio(reference.log_ratio(d, "token"))[0],
        "sequence": math.exp(reference.log_ratio(d, "sequence")[0]),
        "geometric": math.exp(reference.log_ratio(d, "geometric")[0]),
    }


def correction(case: dict[str, Any]) -> dict[str, Any]:
    d = numbers(case["delta"])
    if case["correction"] == "none":
        counted = reference.exclude_non_finite([d], case["level"])
        return {"excluded_sequences": counted.excluded_sequences, "counted_sequences": len(counted.log_ratios)}
    bounds = {name: case[name] for name in ("lower", "upper") if name in case}
    done = reference.correct(d, correction=case["correction"], level=case["level"], **bounds)
    return {
        "weights": done.weights_T,
        "dropped": done.dropped_tokens,
        "dropped_sequences": done.dropped_sequences,
    }


def loss(case: dict[str, Any]) -> dict[str, Any]:
    kind = case["loss"]
    if kind == "gspo":
        ratio, objective = reference.gspo(case["delta"], case["advantage"], case["epsilon"])
        return {"geometric_ratio": ratio, "objective": objective}
    ratio, advantage = case["ratio"], case["advantage"]
    if kind == "ppo_clip":
        return {"objective": reference.ppo_clip(ratio, advantage, case["epsilon"])}
    if kind == "dual_clip":
        return {"objective": reference.dual_clip(ratio, advantage, case["epsilon"], case["c"])}
    return {"gradient_weight": reference.cispo_gradient_weight(ratio, advantage, case["epsilon_high"])}


def processors(case: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(
        repetition_penalty=case["repetition_penalty"],
        frequency_penalty=case["frequency_penalty"],
        presence_penalty=case["presence_penalty"],
        logit_bias={int(i): bias for i, bias in case["logit_bias"].items()},
    )
    return {"processed": reference.process(case["logits"], case["prompt"], case["response"], params)}


def pit(case: dict[str, Any]) -> dict[str, Any]:
    return {"u": reference.pit(case["kept_ids"], np.log(case["kept_probs"]), case["token"], case["v"])}


def surprisal(case: dict[str, Any]) -> dict[str, Any]:
    entropies, variances = [], []
    for probs in case["kept_probs"]:
        logp = np.log(probs)
        entropies.append(-np.sum(probs * logp))
        variances.append(np.sum(probs * (logp + entropies[-1]) ** 2))
    return {"z": reference.surprisal_z(case["b"], entropies, variances)}


def budget(case: dict[str, Any]) -> dict[str, Any]:
    terms = reference.budget(case["full_now"], case["kept_now"], case["kept_version"], case["b"])
    return {"truncation": terms.truncation, "staleness": terms.staleness, "path": terms.path, "total": terms.total}


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "restricted_logprob": restricted_logprob,
    "audit": audit,
    "ratio_reduce": ratio_reduce,
    "anomaly": anomaly,
    "ess": ess,
    "ess_sequence": ess,
    "kl": kl,
    "levels": levels,
    "correction": correction,
    "loss": loss,
    "processors": processors,
    "pit": pit,
    "surprisal": surprisal,
    "budget": budget,
}


@pytest.mark.parametrize("case", vectors("ratios.json"), ids=lambda case: case["name"])
def test_the_oracle_gives_the_ratio_that_the_vector_gives(case: dict[str, Any]) -> None:
    got = KINDS[case["kind"]](case)
    for name, expected in case["expect"].items():
        if isinstance(expected, str):
            assert got[name] == expected
        else:
            np.testing.assert_allclose(got[name], expected, rtol=1e-12, atol=1e-12, err_msg=name)
