"""Synthetic results with known numbers, for what shows them; and `keptset audit` as its user runs it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keptset.schemas.findings import Example, FindingKind, Severity
from keptset.scripts import main
from keptset.scripts.ratio_table import Floor, RatioSummary, RunFacts, SettingResult
from keptset.trainer_bridge.audit.check import NotTested
from keptset.trainer_bridge.audit.report import (
    AuditFinding,
    AuditReport,
    Floors,
    HeatMap,
    Histogram,
    HypothesisTestResult,
    RatioRow,
    SettingRow,
    ShownResponse,
    ShownToken,
    Totals,
    VersionRow,
)
from keptset.trainer_bridge.budget import Term

MakeResult = Callable[..., SettingResult]
RunAudit = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunAudit:
    """`run_audit(*arguments)`: exit code, stdout and stderr of `keptset audit ARGUMENTS`, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["keptset", "audit", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main.main()
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out, err

    return call


@pytest.fixture
def make_result() -> MakeResult:
    """A setting that passes: kept mass 0.9 at half of the tokens and 0.7 at the others. Fields can be overridden."""

    def make(name: str = "top_p 0.7", tokens: int = 400, noise: float = 2e-6, **overrides: object) -> SettingResult:
        kept_d_T = np.where(np.arange(tokens) % 4 == 0, 0.0, noise * np.where(np.arange(tokens) % 2 == 0, 1, -1))
        choice_T = kept_d_T != 0
        mass_T = np.where(np.arange(tokens) % 2 == 0, 0.9, 0.7)
        full_d_T = kept_d_T + np.log(mass_T)
        result = SettingResult(
            name=name,
            sampling=f"T 1, {name}",
            tokens=tokens,
            choice_tokens=int(choice_T.sum()),
            kept_mass_mean=float(mass_T.mean()),
            kept_size_mean=6.25,
            kept_size_median=2.0,
            kept_size_p99=41.0,
            kept_size_one_share=0.25,
            full_vocabulary_ratio=RatioSummary.of(full_d_T, choice_T),
            kept_set_ratio=RatioSummary.of(kept_d_T, choice_T),
            choice_mass_gap=float(np.mean((np.exp(full_d_T) - mass_T)[choice_T])),
            path_floor=Floor.of([3.1e-6, -3.1e-6]),
            batch_floor=Floor.of([1.2e-6]),
        )
        return replace(result, **overrides)

    return make


@pytest.fixture
def run_facts() -> RunFacts:
    return RunFacts(
        model="Tiny-1M",
        engine="keptset 9.8.7 (Paddle 3.3.1, CPU)",
        scorer="the same decoder, one pass, float32",
        dtype="float32",
        prompts=64,
        responses=1320,
        actors=2,
        threads_per_actor=1,
        seed=77,
        started="2031-02-03T04:05:06+00:00",
        seconds=137.4,
        machine="2 cores",
        versions={"numpy": "2.4.0", "ray": "2.60.0"},
        command="keptset demo --seed 77",
    )


@pytest.fixture(scope="session")
def audit_report() -> AuditReport:
    """An audit that has something to say in every part: a shifted mask in 20 of 1,000 responses, scored by a model."""
    rng = np.random.default_rng(0)
    edges = tuple((2 * k + 1) / 200 for k in range(-161, 21))
    centres = (np.asarray(edges[:-1]) + np.asarray(edges[1:])) / 2
    near_one = np.round(40_000 * np.exp(-(((centres - 0.0) / 0.012) ** 2)) + 3 * (abs(centres) < 0.4)).astype(int)
    cut_away = np.round(2_000 * np.exp(-(((centres + 0.25) / 0.12) ** 2))).astype(int) + near_one // 4
    columns, rows = (0, 1, 2, 4, 8, 16, 32, 64, 128), (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
    heat = rng.poisson(np.outer([40, 900, 3000, 900, 60, 8, 3, 1], np.linspace(0.2, 2, 8)))
    places = tuple(
        Example(rollout_id=f"step-7/prompt-{n}", position=n + 3, detail=f"b -1.{n}31, l -2.{n}04; shift +1: -1.{n}30")
        for n in range(3)
    )
    symptom = AuditFinding(
        kind=FindingKind.UNIT_MEAN,
        severity=Severity.ERROR,
        count=47_512,
        responses=1000,
        share=1.0,
        summary="the mean ratio is 0.9612, 48 standard errors from 1",
        advice="look at the cause above first",
        examples=(),
    )
    shifted = AuditFinding(
        kind=FindingKind.MASK_SHIFTED,
        severity=Severity.ERROR,
        count=913,
        responses=20,
        share=0.02,
        summary="with the kept set of the next position the median |residual| falls from 0.83 to 2e-06 nats",
        advice="Align the recorded sets with the tokens they were drawn from.",
        examples=places,
        symptoms=(symptom,),
    )
    seeds = AuditFinding(
        kind=FindingKind.SEED_REUSED,
        severity=Severity.WARNING,
        count=4,
        responses=4,
        share=0.004,
        summary="4 responses share 2 row seeds",
        advice="Give each row a seed of its own.",
        examples=(Example(rollout_id="step-7/prompt-9", position=None, detail="seed 77 is also step-7/prompt-3's"),),
    )
    old = replace(seeds, kind=FindingKind.STALENESS, severity=Severity.INFO, summary="812 tokens lag by more than 2")
    ratio = RatioRow(
        mean=0.9999998, std_error=7.3e-8, median=1.0, share_outside=0.0, mean_abs_log=2.6e-6, max_abs_log=2.7e-5
    )
    return AuditReport(
        verdict="error: 1 root cause in 20 of 1,000 responses: mask_shifted; and 1 warning",
        severity=Severity.ERROR,
        totals=Totals(
            files=12,
            damaged_files=(Example(rollout_id="w-00000003.open", position=None, detail="batch 4: checksum differs"),),
            responses=1000,
            tokens=48_000,
            sampled_tokens=47_512,
            kept_ids=512_345,
            share_read=1.0,
        ),
        identities=({"model_id": "Tiny-1M", "engine": "keptset", "engine_version": "9.8.7"},),
        findings=(shifted, seeds, old),
        tests=(
            HypothesisTestResult(
                name="surprisal",
                statistic=1.31,
                p_value=0.19,
                effect=0.0021,
                effect_name="|mean of -b - H|",
                effect_bound=0.005,
                count=47_512,
                rejected=False,
                informational=False,
            ),
            HypothesisTestResult(
                name="unit mean",
                statistic=-48.2,
                p_value=0.0,
                effect=0.0388,
                effect_name="|mean ratio - 1|",
                effect_bound=0.002,
                count=1000,
                rejected=True,
                informational=False,
            ),
        ),
        not_tested=(
            NotTested(check="draws", reason="no kept distributions are recorded; record them on a share of the rows"),
            NotTested(
                check="distributions", reason="no kept distributions are recorded; record them on a share of the rows"
            ),
        ),
        settings=(
            SettingRow(
                name="T 1, top_k 20",
                responses=400,
                tokens=19_000,
                kept_mass_mean=0.90620,
                kept_size_mean=20.0,
                kept_size_median=20.0,
                kept_size_p99=20.0,
                kept_size_one_share=0.0,
                kept_ratio=ratio,
                full_ratio=replace(ratio, mean=0.9062, median=0.9605, share_outside=0.31, mean_abs_log=0.1041),
            ),
            SettingRow(
                name="T 0.7, top_k 512, top_p 0.95",
                responses=600,
                tokens=28_512,
                kept_mass_mean=0.97082,
                kept_size_mean=8.6,
                kept_size_median=3.0,
                kept_size_p99=87.0,
                kept_size_one_share=0.306,
                kept_ratio=replace(ratio, mean=0.9351201, std_error=1.2e-3, share_outside=0.032, max_abs_log=7.31),
                full_ratio=None,
            ),
        ),
        versions=tuple(
            VersionRow(
                version=version,
                last_version=version,
                tokens=8000 - 100 * version,
                mean_lag=5.0 - version,
                surprisal_excess=0.001 * (version - 3),
                kept_mass_mean=0.93 + 0.005 * version,
                mean_log_ratio=-0.004 * (5 - version),
                mean_abs_log_ratio=0.011 * (6 - version),
                mean_ratio=1.0 - 0.003 * (5 - version),
                ratio_std_error=0.001,
            )
            for version in range(6)
        ),
        finish_reasons={"stop": 903, "length": 97},
        group_sizes={4: 249, 3: 1, 1: 1},
        logprob_domains={"kept": 1000},
        kept_sizes=Histogram(
            edges=(1.0, 2.0, 3.0, 5.0, 9.0, 17.0, 33.0, 65.0, 129.0, 257.0),
            counts=(9000, 4000, 5000, 6000, 9000, 8000, 4000, 2000, 512),
        ),
        pit=Histogram(edges=tuple(np.linspace(0, 1, 21).tolist()), counts=tuple(rng.poisson(2000, 20).tolist())),
        kept_log_ratios=Histogram(edges=edges, counts=tuple(near_one.tolist())),
        full_log_ratios=Histogram(edges=edges, counts=tuple(cut_away.tolist())),
        positions=HeatMap(position_edges=columns, abs_log_ratio_edges=rows, counts=tuple(map(tuple, heat.tolist()))),
        budget={
            "truncation": Term(mean=-0.1053, mean_abs=0.1053),
            "staleness": Term(mean=0.0121, mean_abs=0.0871),
            "path": Term(mean=-0.0312, mean_abs=0.0401),
            "total": Term(mean=-0.1244, mean_abs=0.1702),
        },
        floors=Floors(path_mean_abs=2.3e-6, path_p99_abs=1.1e-5, batch_mean_abs=9e-8, batch_p99_abs=3e-7, tokens=402),
        worst=tuple(_shown_response(rng, n) for n in range(3)),
    )


def _shown_response(rng: np.random.Generator, number: int) -> ShownResponse:
    """120 tokens of a shifted mask; every seventh was not sampled."""
    words = [" The", " trainer", " asks", " why", " its", " ratio", " is", " not", "1", ",", "\n", " a", " set", "."]
    tokens = []
    for position in range(120):
        b = -float(rng.exponential(1.2))
        off = float(rng.normal(0, 0.5)) if position % 3 == 0 else 1e-6
        size = int(rng.integers(1, 40))
        kept = tuple((100 + k, words[k % len(words)], -0.4 * k - 0.3) for k in range(min(size, 8)))
        drawn = position % 7 != 3
        tokens.append(
            ShownToken(
                token_id=100 + position % len(words),
                text=words[position % len(words)],
                sampled=drawn,
                behavior_logprob=b if drawn else None,
                log_kept_mass=-0.1 if drawn else None,
                entropy=1.1 if drawn else None,
                score=b + off if drawn else None,
                version=3 if drawn else None,
                kept_size=size if drawn else None,
                kept=kept if drawn else (),
            )
        )
    return ShownResponse(
        rollout_id=f"step-7/prompt-{number}",
        prompt_id=f"prompt-{number}",
        setting="T 0.7, top_k 512, top_p 0.95",
        finish_reason="stop",
        prompt_token_ids=(1, 2, 3),
        prompt_text="Why is my ratio not 1 although nothing was learned in between?",
        reason=f"largest mean |log ratio|: 0.{83 - number}",
        tokens=tuple(tokens),
    )
