"""Synthetic results with known numbers, for what shows them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from keptset.scripts.ratio_table import Floor, RatioSummary, RunFacts, SettingResult

MakeResult = Callable[..., SettingResult]


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
