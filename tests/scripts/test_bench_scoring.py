"""`keptset bench scoring`: its dense ways are right, its case is the one it names, its report holds every number."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from keptset.schemas.errors import KeptsetError, MissingDependency
from keptset.scripts import bench_scoring, main
from keptset.scripts.bench_scoring_case import LARGEST_SET, Shape, kept_case
from keptset.scripts.bench_scoring_run import Bench, measure
from keptset.trainer_bridge import reference

SMALL = Shape(tokens=64, hidden=32, vocab=2048)


@pytest.fixture(params=["paddle", "torch"])
def bench(request: pytest.FixtureRequest) -> Bench:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return Bench(importlib.import_module(f"keptset.scripts.bench_scoring_{request.param}"), SMALL)


def host(values: Any) -> np.ndarray:
    return values.detach().numpy().astype(np.float64)


def dense_logits(bench: Bench) -> np.ndarray:
    return host(bench.hidden) @ host(bench.weight).T


def test_set_sizes_are_those_of_the_formula_and_sets_are_sound() -> None:
    case = kept_case(Shape())
    sizes = np.diff(case.kept_offsets_T1)
    drawn = np.random.default_rng(0).standard_normal(2048)
    np.testing.assert_array_equal(sizes, np.minimum(512, np.ceil(np.exp(0.19 + 1.9 * drawn))))
    for t, kept in enumerate(np.split(case.kept_ids_N, case.kept_offsets_T1[1:-1])):
        assert reference.structural_finding(kept, int(case.token_ids_T[t]), Shape().vocab) is None
    assert len(np.unique(case.kept_ids_N)) > 0.9 * case.num_kept, "ids spread over the vocabulary"


@pytest.mark.parametrize("logsumexp", ["logsumexp_by_parts", "logsumexp_by_operator"])
def test_the_dense_forward_pass_is_the_full_softmax(bench: Bench, logsumexp: str) -> None:
    got = bench.of.forward_block(bench.hidden, bench.weight, bench.tokens, getattr(bench.of, logsumexp))
    expected = [
        reference.score(z, None, y, 1.0)
        for z, y in zip(dense_logits(bench), host(bench.tokens).astype(int), strict=True)
    ]
    np.testing.assert_allclose(host(got)[:, 0], expected, rtol=0, atol=1e-5)


def test_the_dense_backward_pass_gives_the_full_gradient(bench: Bench) -> None:
    head_gradient = bench.of.zeros([SMALL.vocab, SMALL.hidden])
    hidden_gradient = bench.of.gradient_block(bench.hidden, bench.weight, bench.tokens, head_gradient)
    tokens = host(bench.tokens).astype(int)
    d = np.stack([reference.score_gradient(z, None, y, 1.0) for z, y in zip(dense_logits(bench), tokens, strict=True)])
    np.testing.assert_allclose(host(hidden_gradient), d @ host(bench.weight), rtol=0, atol=1e-5)
    np.testing.assert_allclose(host(head_gradient), d.T @ host(bench.hidden), rtol=0, atol=1e-4)


def test_padded_candidates_score_as_the_kept_sets_do(bench: Bench) -> None:
    candidates_TC, bias_TC = bench.padded_candidates()
    got = bench.of.padded_block(bench.hidden, bench.weight, bench.of.tensor(candidates_TC), bench.of.tensor(bias_TC))
    offsets, z = bench.case.kept_offsets_T1, dense_logits(bench)
    expected = [
        reference.score(z[t], bench.case.kept_ids_N[offsets[t] : offsets[t + 1]], int(y), 1.0)
        for t, y in enumerate(bench.case.token_ids_T)
    ]
    assert candidates_TC.shape == (SMALL.tokens, LARGEST_SET)
    np.testing.assert_allclose(host(got)[:, 0], expected, rtol=0, atol=1e-5)


def test_every_number_of_the_report_is_measured(bench: Bench) -> None:
    said: list[str] = []
    result = measure(bench.of, SMALL, said.append)
    assert set(bench_scoring.GOALS) <= set(result)
    assert all(result[key] >= 0 for key in bench_scoring.GOALS)
    assert result["dense_gflops"]["forward"] > 0
    assert said
    json.dumps(result)


RESULT = {
    **dict.fromkeys(bench_scoring.GOALS, 2.0),
    "padded_in_blocks_speedup": 1.0,
    "version": "0",
    "kept_ids": 9,
    "dense_gflops": {"forward": 1.0},
    "dense_uses": {"threads": 1, "logsumexp": "logsumexp_by_parts"},
    "kept_seconds": {"forward": 0.001},
}


def test_paddle_stands_at_the_top_of_the_report_and_torch_under_its_name() -> None:
    report = bench_scoring.to_report({"paddle": RESULT, "torch": {**RESULT, "linearity": 3.0}})
    assert report["linearity"] == 2.0
    assert report["torch"]["linearity"] == 3.0
    assert bench_scoring.to_report({"paddle": RESULT})["torch"] is None
    alone = bench_scoring.to_report({"torch": RESULT})
    assert all(alone[key] is None for key in bench_scoring.GOALS)


@pytest.mark.parametrize("name", ["paddle", "torch"])
def test_the_table_names_the_goals(name: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120)
    console.print(bench_scoring.to_table(name, RESULT, SMALL))
    assert ">=" not in out.getvalue(), "goals are for the whole shape"
    console.print(bench_scoring.to_table(name, RESULT, Shape()))
    assert (">= 200x" if name == "paddle" else ">= 100x") in out.getvalue()


def test_the_command_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_scoring.importlib.util, "find_spec", lambda name: name == "paddle" or None)
    monkeypatch.setattr(bench_scoring, "_measure", lambda name, quick: RESULT)
    main.command_line()(["bench", "scoring", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["forward_speedup"] == 2.0
    main.command_line()(["bench", "scoring"], standalone_mode=False)
    assert "2.00" in capsys.readouterr().out


def test_without_a_framework_the_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_scoring.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"keptset\[cpu\] or keptset\[torch\]"):
        bench_scoring.command(quick=True)


def test_a_process_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([sys.executable], 3, stdout="")
    monkeypatch.setattr(bench_scoring.subprocess, "run", lambda *args, **more: failed)
    with pytest.raises(KeptsetError, match="measuring torch failed with exit code 3"):
        bench_scoring._measure("torch", quick=True)
