"""`keptset bench audit-power` at a small size: real rollouts of a tiny model, every kind planted, seeds left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

paddle = pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")

from keptset.rollout.models import load_decoder  # noqa: E402
from keptset.schemas.findings import FindingKind  # noqa: E402
from keptset.scripts import bench_audit_power as bench  # noqa: E402
from keptset.scripts import bench_audit_power_docs as docs  # noqa: E402
from keptset.scripts.audit_planting import PLANTS, Plant, pairs  # noqa: E402
from keptset.scripts.audit_scorers import DecoderScorer  # noqa: E402
from keptset.scripts.bench_audit_power_chance import RUN_FAULTS  # noqa: E402
from keptset.scripts.bench_audit_power_kinds import Material, names  # noqa: E402
from keptset.scripts.bench_audit_power_material import Drawn  # noqa: E402
from keptset.scripts.bench_audit_power_rollouts import Source  # noqa: E402
from keptset.scripts.bench_audit_power_scores import heads_of  # noqa: E402
from keptset.trainer_bridge.audit.token_scores import ModelScorer  # noqa: E402

MODEL = Path(__file__).parents[1] / "data" / "tiny_checkpoints" / "qwen2_bias"
AMOUNTS = bench.Amounts(responses=32, clean_sets=30, repeats=1, grid=(500, 1_000), seeds=3)
BY_CHANCE = "logprob_mismatch in 2 of 32 responses: found was nothing"
"""It stands on a test of the mean ratio, and 48 tokens are few."""


def silent(doing: str, done: float) -> None:
    pass


@pytest.fixture(scope="module")
def source() -> Source:
    random = np.random.default_rng(5)
    prompts = [(f"p{n}", random.integers(0, 160, random.integers(2, 20)).astype(np.int32)) for n in range(8)]
    return Source(model=MODEL, prompts=tuple(prompts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("power")


@pytest.fixture(scope="module")
def interrupted(folder: Path, source: Source) -> list[str]:
    """Parts that were done when a run was interrupted."""
    done: list[str] = []

    def stop(doing: str, part: float) -> None:
        if doing == "planting mask_shifted":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.measure(folder, source, AMOUNTS, stop, done.append)
    return done


@pytest.fixture(scope="module")
def run(folder: Path, source: Source, interrupted: list[str]) -> tuple[bench.Found, list[str]]:
    """The same run, gone on with, and the parts that it did."""
    done: list[str] = []
    return bench.measure(folder, source, AMOUNTS, silent, done.append), done


@pytest.fixture(scope="module")
def drawn(folder: Path, source: Source, run: object, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return Drawn(folder, tmp_path_factory.mktemp("results"), source, AMOUNTS.responses, silent)


def test_every_kind_of_finding_is_planted() -> None:
    of_runs = {kind for fault in RUN_FAULTS for kind in fault.tests.values()}
    assert {plant.kind for plant in PLANTS} | of_runs == set(FindingKind)
    assert {plant.kind for plant in PLANTS} & of_runs == set()


def test_each_kind_is_the_one_finding_and_honest_seeds_have_none(run: tuple[bench.Found, list[str]]) -> None:
    found, _ = run
    assert set(found.failures()) <= {BY_CHANCE}
    assert len(found.kinds) == 2 * len(PLANTS) == len(names())
    assert all(planted.counted == planted.faulty for planted in found.kinds if planted.holds)
    assert [seed.findings for seed in found.seeds] == [()] * 3
    assert [seed.responses for seed in found.seeds] == [40] * 3


def test_an_interrupted_run_goes_on(folder: Path, interrupted: list[str], run: tuple[bench.Found, list[str]]) -> None:
    _, later = run
    parts = [line.split(":")[0] for line in [*interrupted, *later]]
    assert len(parts) == len(set(parts))
    assert interrupted and later[0].startswith("mask_shifted 0.02")
    assert not list(folder.glob("results-*"))


def test_what_chance_decides_is_measured(run: tuple[bench.Found, list[str]]) -> None:
    found, _ = run
    assert [size.test for size in found.sizes] == ["draws", "surprisal", "unit mean"]
    assert all(size.refused == 0 and size.smallest > 1e-6 for size in found.sizes)
    whole = {(one.fault, one.test): one for one in found.power if one.incidence == 1.0}
    assert whole["greedy, recorded as drawn", "draws"].enough == 500
    assert whole["the trainer scores the whole vocabulary", "unit mean"].enough is not None
    rare = [one for one in found.power if one.incidence == 0.02 and one.fault.startswith("the temperature")]
    assert [one.enough for one in rare] == [None] * 4


SCORED = [plant for plant in PLANTS if plant.scored]


@pytest.fixture(scope="module")
def run_models() -> Callable[[tuple[int, ...]], ModelScorer]:
    old, new = load_decoder(MODEL), load_decoder(MODEL)  # its head is not tied
    new.load_weights(new.weights() | {"lm_head.weight": heads_of(old)[1]})
    return lambda versions: ModelScorer(scorer=DecoderScorer({v: (old, new)[v] for v in versions}))


@pytest.mark.parametrize("plant", SCORED, ids=lambda plant: plant.kind.value)
def test_known_scores_are_what_running_the_model_says(
    plant: Plant, drawn: Drawn, run_models: Callable[[tuple[int, ...]], ModelScorer]
) -> None:
    material: Material = drawn.material
    batch = material.batch.filter([p != 1 for p in material.batch.column("repetition_penalty").to_pylist()])
    batch = batch.slice(0, 16)
    spoilt = plant.apply(batch, [0, 1, 6, 7], material.scored(batch))
    ours, theirs = material.scorer(plant.versions)().score(spoilt), run_models(plant.versions).score(spoilt)
    for name in ("kept_T", "full_T", "expected_T"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=2e-5, err_msg=name)
    np.testing.assert_array_equal(ours.same_version_T, theirs.same_version_T)
    assert set(ours.explained) == set(theirs.explained) != set()
    for kind, value_T in theirs.explained.items():
        np.testing.assert_allclose(ours.explained[kind], value_T, atol=5e-5, err_msg=kind.value)
        np.testing.assert_array_equal(ours.hints[kind], theirs.hints[kind])


def test_rows_are_spoilt_in_pairs_of_neighbours() -> None:
    rows = pairs(1_000, 0.02)
    assert len(rows) == 20 and rows == sorted(set(rows)) and rows[1::2] == [row + 1 for row in rows[::2]]
    assert pairs(1_000, 1.0) == list(range(1_000))
    assert len(pairs(40, 0.02)) == 2


def test_tables_show_what_was_found(run: tuple[bench.Found, list[str]]) -> None:
    found, _ = run
    told = json.loads(json.dumps(asdict(found)))
    assert "| `mask_swapped` | each two responses have each other's sets | yes | named: 2 of 2 | named: 32 of 32 |" in (
        docs.kinds_table(told)
    )
    assert docs.clean_table(told).splitlines()[2].startswith("| draws | 30 | ")
    assert docs.seeds_table(told).splitlines()[2].startswith("| 3 | 120 | ")
    assert "| greedy, recorded as drawn | `draws` | 100% |" in docs.power_table(told)


def test_a_fault_that_is_not_named_and_a_finding_without_a_fault_are_told() -> None:
    planted = bench.Planted(
        kind="nulls", told="", with_model=False, share=1.0, responses=9, faulty=8, named=(), counted=0, symptoms=()
    )
    seed = bench.Seed(seed=4, responses=1, tokens=1, findings=("draws",), p_values={}, max_abs_mean_ratio=0.0)
    size = bench.Size(
        test="draws", sets=9, tokens=9, refused=0, distance=0.4, p_value=1e-5, smallest=0.0, below_1_percent=0.5
    )
    found = bench.Found(kinds=(planted,), sizes=(size,), power=(), seeds=(seed,))
    assert list(found.failures()) == [
        "nulls in 8 of 9 responses: found was nothing",
        "p-values of draws are not uniform: D = 0.4000",
        "seed 4 is honest, and found was draws",
    ]
