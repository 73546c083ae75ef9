"""Each kind of violation, planted in a sound batch, is found as that kind, at its place, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.columns import Identity
from keptset.schemas.errors import ViolationError
from keptset.schemas.findings import Finding, FindingKind, Severity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.validation import STRUCTURAL, require_valid, validate

NAN, INF = float("nan"), float("inf")
Row = dict[str, Any]


@dataclass(frozen=True)
class Plant:
    """A fault in row 4 (three tokens, all sampled) or row 5 (four tokens, of which token 2 is forced)."""

    name: str
    kind: FindingKind
    position: int | None
    change: Callable[[Row], None]
    detail: str = ""
    row: int = 4


def put(column: str, *path: int, value: Any) -> Callable[[Row], None]:
    """A change that sets column[path] = value."""

    def change(row: Row) -> None:
        if not path:
            row[column] = value
            return
        target = row[column]
        for index in path[:-1]:
            target = target[index]
        target[path[-1]] = value

    return change


def also(*changes: Callable[[Row], None]) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        for one in changes:
            one(row)

    return change


def forget_distribution(row: Row) -> None:
    row["kept_logprobs"] = None


def swap_first_two(row: Row) -> None:
    ids = row["kept_ids"][3]
    ids[0], ids[1] = ids[1], ids[0]
    row["kept_logprobs"] = None


def repeat_first(row: Row) -> None:
    row["kept_ids"][3].insert(0, row["kept_ids"][3][0])
    row["kept_logprobs"] = None


def leave_set(row: Row) -> None:
    row["token_ids"][2] = next(i for i in range(50) if i not in row["kept_ids"][2])


def foreign_member(row: Row) -> None:
    row["kept_ids"][3].append(50)
    row["kept_logprobs"] = None


def negative_member(row: Row) -> None:
    row["kept_ids"][3].insert(0, -1)
    row["kept_logprobs"] = None


def halve(row: Row) -> None:
    row["kept_logprobs"][3] = [x - 0.6931472 for x in row["kept_logprobs"][3]]


def impossible_member(row: Row) -> None:
    ids = row["kept_ids"][3]
    other = next(i for i in range(50) if i > ids[-1])
    ids.append(other)
    row["kept_logprobs"][3].append(-INF)


def beyond_top_k(row: Row) -> None:
    first, second, third = row["token_ids"]
    row.update(top_k=1, kept_ids=[[first], [second, 49], [third]], behavior_logprobs=[0.0] * 3, kept_logprobs=None)


def top(ids: Any, logprobs: Any) -> Callable[[Row], None]:
    return also(put("top_ids", value=ids), put("top_logprobs", value=logprobs))


K = FindingKind
PLANTS = [
    Plant(
        "b short",
        K.LENGTHS,
        None,
        lambda r: r["behavior_logprobs"].pop(),
        "token_ids has 3 entries, behavior_logprobs 2",
    ),
    Plant("sampled long", K.LENGTHS, None, lambda r: r["sampled"].append(True), "sampled 4"),
    Plant("trainable short", K.LENGTHS, None, put("trainable", value=[True]), "trainable 1"),
    Plant("full logprobs short", K.LENGTHS, None, put("full_logprobs", value=[]), "full_logprobs 0"),
    Plant("m short", K.LENGTHS, None, lambda r: r["log_kept_mass"].pop(), "log_kept_mass 2"),
    Plant("H short", K.LENGTHS, None, lambda r: r["kept_entropy"].pop(), "kept_entropy 2"),
    Plant("variance long", K.LENGTHS, None, lambda r: r["kept_logprob_var"].append(0.0), "kept_logprob_var 4"),
    Plant("versions short", K.LENGTHS, None, lambda r: r["policy_versions"].pop(), "policy_versions 2"),
    Plant("sets short", K.LENGTHS, None, lambda r: r["kept_ids"].pop(), "kept_ids 2"),
    Plant("distributions short", K.LENGTHS, None, lambda r: r["kept_logprobs"].pop(), "kept_logprobs 2"),
    Plant("top ids short", K.LENGTHS, None, top([[1]], [[-1.0]] * 3), "top_ids 1"),
    Plant("set and distribution", K.LENGTHS, 2, lambda r: r["kept_logprobs"][2].pop(), "kept_logprobs"),
    Plant(
        "top ids and logprobs",
        K.LENGTHS,
        1,
        top([[1], [1, 2], [3]], [[-1.0]] * 3),
        "top_ids has 2 entries, top_logprobs 1",
    ),
    *[
        Plant(f"no {name}", K.NULLS, None, put(name, value=None), f"{name} is null; it is required")
        for name in ("prompt_id", "sample_index", "token_ids", "sampled", "logprob_domain", "finish_reason")
    ],
    Plant("no support", K.NULLS, None, also(put("support", value=None), forget_distribution), "support is null"),
    Plant("token null", K.NULLS, 1, put("token_ids", 1, value=None), "token_ids is null"),
    Plant("sampled null", K.NULLS, 2, put("sampled", 2, value=None), "sampled is null"),
    Plant("trainable null", K.NULLS, 0, put("trainable", value=[None, True, True]), "trainable is null"),
    Plant("prompt null", K.NULLS, None, put("prompt_token_ids", value=[3, None]), "prompt_token_ids"),
    Plant("b null", K.NULLS, 0, put("behavior_logprobs", 0, value=None), "behavior_logprobs is null though"),
    Plant("b of a forced token", K.NULLS, 2, put("behavior_logprobs", 2, value=-1.0), "is not null though", row=5),
    Plant("m of a forced token", K.NULLS, 2, put("log_kept_mass", 2, value=-0.01), "log_kept_mass is not null", row=5),
    Plant("H of a forced token", K.NULLS, 2, put("kept_entropy", 2, value=0.5), "kept_entropy is not null", row=5),
    Plant("variance of a forced token", K.NULLS, 2, put("kept_logprob_var", 2, value=0.5), "kept_logprob_var", row=5),
    Plant("version of a forced token", K.NULLS, 2, put("policy_versions", 2, value=6), "policy_versions is not", row=5),
    Plant("set null", K.NULLS, 1, also(put("kept_ids", 1, value=None), forget_distribution), "kept_ids is null though"),
    Plant(
        "set of a forced token",
        K.NULLS,
        2,
        also(put("kept_ids", 2, value=[1]), forget_distribution),
        "kept_ids is not",
        row=5,
    ),
    Plant("distribution null", K.NULLS, 1, put("kept_logprobs", 1, value=None), "kept_logprobs is null though"),
    Plant(
        "distribution of a forced token", K.NULLS, 2, put("kept_logprobs", 2, value=[]), "kept_logprobs is not", row=5
    ),
    Plant("member null", K.NULLS, 1, also(put("kept_ids", 1, 0, value=None)), "an entry of kept_ids is null"),
    Plant("probability null", K.NULLS, 1, put("kept_logprobs", 1, 0, value=None), "an entry of kept_logprobs is null"),
    Plant("top id null", K.NULLS, 1, top([[1], [None], [3]], [[-1.0]] * 3), "an entry of top_ids is null"),
    Plant("top logprobs alone", K.NULLS, 1, top([[1], None, [3]], [[-1.0]] * 3), "only one is null"),
    Plant(
        "no sets",
        K.NULLS,
        None,
        also(put("kept_ids", value=None), forget_distribution),
        "kept_ids is null though support",
    ),
    Plant(
        "sets with full support",
        K.NULLS,
        None,
        also(put("support", value="full"), forget_distribution),
        "kept_ids is not null",
    ),
    Plant(
        "distribution with full support",
        K.NULLS,
        None,
        also(put("support", value="full"), put("kept_ids", value=None)),
        "kept_logprobs is not null",
    ),
    Plant("token above", K.RANGE, 2, put("token_ids", 2, value=50), "token_ids holds 50, outside [0, 50)"),
    Plant("token below", K.RANGE, 0, put("token_ids", 0, value=-1), "token_ids holds -1"),
    Plant("member above", K.RANGE, 3, foreign_member, "kept_ids holds 50", row=5),
    Plant("member below", K.RANGE, 3, negative_member, "kept_ids holds -1", row=5),
    Plant("prompt id above", K.RANGE, None, put("prompt_token_ids", value=[3, 99]), "prompt_token_ids holds 99"),
    Plant("top id above", K.RANGE, 1, top([[1], [99], [3]], [[-1.0]] * 3), "top_ids holds 99"),
    Plant("bias of an id above", K.RANGE, None, put("logit_bias", value=[(77, 1.0)]), "logit_bias holds 77"),
    Plant("descending set", K.SORTED, 3, swap_first_two, "at place 1", row=5),
    Plant("repeated member", K.SORTED, 3, repeat_first, "at place 1", row=5),
    Plant("empty set", K.EMPTY_SET, 0, also(put("kept_ids", 0, value=[]), forget_distribution), "no member"),
    Plant("not a member", K.MEMBER, 2, leave_set, "is not among its"),
    Plant("b NaN", K.LOGPROB, 0, put("behavior_logprobs", 0, value=NAN), "b = nan"),
    Plant("b positive", K.LOGPROB, 0, also(put("behavior_logprobs", 0, value=2e-6), forget_distribution), "b = 2"),
    Plant("b a marker", K.LOGPROB, 2, also(put("behavior_logprobs", 2, value=-9999.0), forget_distribution), "-9999"),
    Plant(
        "b at the bound", K.LOGPROB, 2, also(put("behavior_logprobs", 2, value=-1000.0), forget_distribution), "-1000"
    ),
    Plant(
        "b of a single member",
        K.LOGPROB,
        1,
        also(put("behavior_logprobs", 1, value=-1e-3), forget_distribution),
        "one member",
    ),
    Plant("m NaN", K.MASS, 0, put("log_kept_mass", 0, value=NAN), "m = nan"),
    Plant("m infinite", K.MASS, 0, put("log_kept_mass", 0, value=-INF), "m = -inf"),
    Plant("m positive", K.MASS, 2, put("log_kept_mass", 2, value=1e-5), "m = 1e-05, not finite or above 1e-06"),
    Plant("mass below top_p", K.MASS, 2, put("log_kept_mass", 2, value=-0.0513), "is below top_p = 0.95"),
    Plant("set beyond top_k", K.SET_SIZE, 1, beyond_top_k, "has 2 members, top_k is 1"),
    Plant("older version", K.VERSION_ORDER, 2, put("policy_versions", value=[7, 8, 7]), "version 7 after 8"),
    Plant(
        "older version beyond a null",
        K.VERSION_ORDER,
        3,
        put("policy_versions", value=[7, 8, None, 7]),
        "version 7 after 8",
        row=5,
    ),
    Plant("no prompt", K.PROMPT, 0, put("prompt_token_ids", value=None), "null or empty"),
    Plant("empty prompt", K.PROMPT, 0, put("prompt_token_ids", value=[]), "null or empty"),
    Plant(
        "no support recorded",
        K.SUPPORT_ABSENT,
        None,
        also(put("support", value="absent"), put("kept_ids", value=None), forget_distribution),
        "absent",
    ),
    Plant("sum", K.DISTRIBUTION, 3, also(halve, put("behavior_logprobs", 3, value=-1.0)), "sum to 0.5", row=5),
    Plant("a member of probability 0", K.DISTRIBUTION, 3, impossible_member, "sum to nan", row=5),
    Plant("probability NaN", K.DISTRIBUTION, 2, put("kept_logprobs", 2, 0, value=NAN), "sum to nan"),
    Plant("b of another distribution", K.DISTRIBUTION, 0, put("behavior_logprobs", 0, value=-0.001), "b = -0.001"),
    Plant("H of another distribution", K.DISTRIBUTION, 0, put("kept_entropy", 0, value=9.0), "H = 9,"),
    *(
        Plant(
            f"{symbol} {value}", K.DISTRIBUTION, 3, put(name, 3, value=value), f"{symbol} = {shown}, not finite", row=5
        )
        for name, symbol in (("kept_entropy", "H"), ("kept_logprob_var", "Var(log p)"))
        for value, shown in ((NAN, "nan"), (INF, "inf"), (-INF, "-inf"), (-0.5, "-0.5"), (-2e-4, "-0.0002"))
    ),
    *(
        Plant(
            f"full log-probability {value}",
            K.DISTRIBUTION,
            1,
            put("full_logprobs", value=[-1.0, value, None]),
            f"full_logprobs = {shown}, outside (-1000, 1e-06]",
        )
        for value, shown in ((NAN, "nan"), (INF, "inf"), (-INF, "-inf"), (0.5, "0.5"), (-9999.0, "-9999"))
    ),
]


@pytest.fixture
def good(batch_of: Callable[..., RolloutBatch]) -> RolloutBatch:
    return batch_of(0, 8)


def planted(good: RolloutBatch, plant: Plant, changed: Callable[..., RolloutBatch]) -> RolloutBatch:
    return changed(good, lambda rows: plant.change(rows[plant.row]))


def expect(found: list[Finding], plant: Plant) -> None:
    assert [finding.kind for finding in found] == [plant.kind], "\n".join(map(str, found))
    (finding,) = found
    assert (finding.count, finding.responses) == (1, 1)
    (example,) = finding.examples
    assert (example.rollout_id, example.position) == (f"rollout-{plant.row}", plant.position)
    assert plant.detail in example.detail


def test_a_sound_batch_has_no_findings(good: RolloutBatch) -> None:
    assert validate(good) == []
    assert require_valid(good) == []


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.kind.value}: {plant.name}")
def test_a_planted_violation_is_found_as_itself_where_it_is(plant: Plant, good, changed) -> None:
    expect(validate(planted(good, plant, changed)), plant)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.kind.value}: {plant.name}")
def test_a_slice_is_validated_as_if_its_neighbours_were_not_there(plant: Plant, good, changed) -> None:
    batch = planted(good, plant, changed)
    expect(validate(batch.slice(plant.row, 1)), plant)
    expect(validate(batch.slice(plant.row - 2)), plant)
    assert validate(batch.slice(0, plant.row)) == []
    assert validate(batch.slice(plant.row + 1)) == []


def test_every_structural_kind_has_a_planted_violation() -> None:
    elsewhere = {K.CONFLICT, K.DUPLICATE, K.SEED_REUSED}  # these take two rows: see below
    assert {plant.kind for plant in PLANTS} | elsewhere == set(STRUCTURAL)


def test_a_missing_rollout_id_is_named_by_its_row(good, changed) -> None:
    (finding,) = validate(changed(good, lambda rows: rows[2].update(rollout_id=None)))
    assert finding.kind is K.NULLS
    assert finding.examples[0].rollout_id == "(row 2, without rollout_id)"


def test_several_missing_rollout_ids_are_not_one_response(good, changed) -> None:
    (finding,) = validate(changed(good, lambda rows: [row.update(rollout_id=None) for row in rows]))
    assert (finding.kind, finding.count, len(finding.examples)) == (K.NULLS, 8, 3)


def test_a_response_that_comes_twice_is_a_duplicate_once(good) -> None:
    (finding,) = validate(good.take([0, 1, 2, 1]))
    assert (finding.kind, finding.count, finding.examples[0].rollout_id) == (K.DUPLICATE, 1, "rollout-1")
    assert finding.examples[0].detail == "row 3 repeats the rollout_id of row 1"


def test_other_content_under_the_same_rollout_id_is_a_conflict(good, changed) -> None:
    batch = changed(good, lambda rows: rows[6].update(rollout_id="rollout-1"))
    (finding,) = validate(batch)
    assert (finding.kind, finding.severity, finding.count) == (K.CONFLICT, Severity.ERROR, 1)
    assert finding.examples[0].detail == "row 6 repeats the rollout_id of row 1"


def test_duplicates_and_conflicts_are_told_apart_row_by_row(good, changed) -> None:
    batch = changed(good.take([0, 1, 2, 1, 0]), lambda rows: rows[3].update(x_note="another"))
    assert {(f.kind, f.examples[0].detail) for f in validate(batch)} == {
        (K.CONFLICT, "row 3 repeats the rollout_id of row 1"),
        (K.DUPLICATE, "row 4 repeats the rollout_id of row 0"),
    }


def test_a_duplicate_stays_one_where_a_number_is_not_a_number(good, changed) -> None:
    batch = changed(good, lambda rows: rows[1].update(full_logprobs=[NAN] * 4))
    found = [finding.kind for finding in validate(batch.take([1, 0, 1]))]
    assert found == [K.DISTRIBUTION, K.DUPLICATE], "the number is told, and no conflict"


def test_a_shared_seed_is_told_for_each_row_that_has_it(good, changed) -> None:
    (finding,) = validate(changed(good, lambda rows: rows[5].update(seed=rows[2]["seed"])))
    assert (finding.kind, finding.severity) == (K.SEED_REUSED, Severity.WARNING)
    assert (finding.count, finding.responses) == (2, 2)
    assert [example.rollout_id for example in finding.examples] == ["rollout-2", "rollout-5"]
    assert finding.examples[0].detail == "seed 1002 is that of 2 rows"


def test_unknown_seeds_are_not_shared(good, changed) -> None:
    assert validate(changed(good, lambda rows: [row.update(seed=None) for row in rows])) == []


def test_without_a_vocabulary_size_ids_are_checked_for_sign_only(batch_of, changed) -> None:
    batch = batch_of(0, 4, identity=Identity(engine="test"))
    assert validate(changed(batch, lambda rows: rows[0].update(prompt_token_ids=[2_000_000_000]))) == []
    (finding,) = validate(changed(batch, lambda rows: rows[0].update(prompt_token_ids=[-2])))
    assert finding.examples[0].detail == "prompt_token_ids holds -2, outside [0, V)"


@pytest.mark.parametrize("setting", ["top_k", "min_p", "top_p"])
def test_a_small_mass_is_no_fault_where_another_filter_may_have_cut(setting: str, good, changed) -> None:
    low = lambda value: lambda rows: rows[4].update(log_kept_mass=[-3.0] * 3, **{setting: value})  # noqa: E731
    assert validate(changed(good, low(None))) == []
    assert validate(changed(good, low({"top_k": 40, "min_p": 0.1, "top_p": 0.01}[setting]))) == []


def test_the_kept_mass_may_miss_top_p_by_the_tolerance_alone(good, changed) -> None:
    at = lambda mass: lambda rows: rows[4].update(log_kept_mass=[math.log(mass)] * 3)  # noqa: E731
    assert validate(changed(good, at(0.95 - 1e-6))) == []
    assert [finding.kind for finding in validate(changed(good, at(0.95 - 4e-6)))] == [K.MASS]


@pytest.mark.parametrize("domain", ["full", "raw", "unknown"])
def test_b_over_another_domain_need_not_be_0_for_a_single_member(domain: str, good, changed) -> None:
    def change(rows: list[Row]) -> None:
        rows[4]["logprob_domain"] = domain
        rows[4]["behavior_logprobs"] = [-1.5] * 3

    assert validate(changed(good, change)) == []


def test_numbers_an_engine_did_not_give_for_some_tokens_are_unknown_not_wrong(good, changed) -> None:
    def change(rows: list[Row]) -> None:
        for name in ("log_kept_mass", "kept_entropy", "kept_logprob_var", "policy_versions"):
            rows[4][name][1] = None
        rows[5]["behavior_logprobs"] = None

    assert validate(changed(good, change)) == []


def test_entropy_and_variance_may_fall_below_0_by_rounding(good, changed) -> None:
    def change(rows: list[Row]) -> None:
        rows[4]["kept_entropy"] = rows[4]["kept_logprob_var"] = [-1e-8, None, -5e-5]
        rows[4]["kept_logprobs"] = None

    assert validate(changed(good, change)) == []


def test_an_entropy_that_is_no_number_is_told_without_a_distribution_and_once_beside_one(good, changed) -> None:
    for forget in (True, False):

        def change(rows: list[Row], forget: bool = forget) -> None:
            rows[5]["kept_entropy"] = [NAN, None, None, NAN]
            if forget:
                rows[5]["kept_logprobs"] = None

        (finding,) = validate(changed(good, change))
        assert (finding.kind, finding.count, finding.responses) == (K.DISTRIBUTION, 2, 1)


def test_numbers_about_tokens_that_were_not_sampled_are_no_measurements(good, changed) -> None:
    """An engine may give the log-probability of a forced token, also of one it could not have drawn."""
    assert validate(changed(good, lambda rows: rows[5].update(full_logprobs=[-1.0, -1.0, -INF, -1.0]))) == []


def test_a_response_without_a_token_needs_no_set_and_no_prompt(batch_of) -> None:
    recorded = ("kept_ids", "kept_logprobs", "behavior_logprobs", "log_kept_mass", "kept_entropy", "kept_logprob_var")
    unknown = dict.fromkeys((*recorded, "policy_versions", "prompt_token_ids"))
    nothing = {"token_ids": np.zeros(0, int), "sampled": np.zeros(0, bool)}
    assert validate(batch_of(0, 1, **nothing, **unknown, finish_reason="error")) == []


def test_findings_are_totals_with_bounded_examples(good, changed) -> None:
    def change(rows: list[Row]) -> None:
        for row in rows:
            row["behavior_logprobs"] = [None if b is None else 1.0 for b in row["behavior_logprobs"]]
            row["kept_logprobs"] = None

    batch = changed(good, change)
    sampled = int(batch.sampled.values.sum())
    (finding,) = validate(batch, examples=2)
    assert (finding.count, finding.responses) == (sampled, 8)
    assert [(e.rollout_id, e.position) for e in finding.examples] == [("rollout-0", 0), ("rollout-0", 1)]
    (bare,) = validate(batch, examples=0)
    assert (bare.count, bare.examples) == (sampled, ())


def test_examples_of_one_kind_come_in_the_order_of_the_rows_whichever_check_found_them(good, changed) -> None:
    def change(rows: list[Row]) -> None:
        rows[5]["prompt_token_ids"] = [99]
        rows[4]["token_ids"][2] = 50
        rows[2]["token_ids"][1] = 60

    (finding,) = validate(changed(good, change))
    assert [(e.rollout_id, e.position) for e in finding.examples] == [
        ("rollout-2", 1),
        ("rollout-4", 2),
        ("rollout-5", None),
    ]


def test_require_valid_raises_what_is_an_error_and_returns_what_is_not(good, changed) -> None:
    def warn(rows: list[Row]) -> None:
        rows[5]["seed"] = rows[2]["seed"]

    assert [f.kind for f in require_valid(changed(good, warn))] == [K.SEED_REUSED]

    def fail(rows: list[Row]) -> None:
        warn(rows)
        rows[0]["token_ids"][0] = 99

    with pytest.raises(
        ViolationError, match=r"error range: an id outside .* rollout-0 token 0: token_ids holds 99"
    ) as told:
        require_valid(changed(good, fail))
    assert [finding.kind for finding in told.value.findings] == [K.RANGE]


def test_errors_come_before_warnings(good, changed) -> None:
    def change(rows: list[Row]) -> None:
        rows[5]["seed"] = rows[2]["seed"]
        rows[0]["kept_entropy"] = [55.0] * 3
        rows[0]["log_kept_mass"] = [1.0] * 3
        rows[1]["top_k"] = 1

    severities = [finding.severity for finding in validate(changed(good, change))]
    assert severities == sorted(severities, key=[Severity.ERROR, Severity.WARNING].index)
    assert {*severities} == {Severity.ERROR, Severity.WARNING}


def test_an_empty_batch_has_no_findings(good) -> None:
    assert validate(good.slice(0, 0)) == []
    assert validate(RolloutBatch.from_arrow(pa.RecordBatch.from_pylist([], schema=good.arrow.schema))) == []


def test_a_member_recorded_twice_is_not_compared_with_b_since_either_could_be_meant(good, changed) -> None:
    def change(rows: list[Row]) -> None:
        row, token = rows[4], rows[4]["token_ids"][2]
        row["kept_ids"][2] = [token, token]
        row["kept_logprobs"][2] = [math.log(0.25), math.log(0.75)]
        row["behavior_logprobs"][2] = math.log(0.25)
        row["kept_entropy"][2] = None

    assert [finding.kind for finding in validate(changed(good, change))] == [K.SORTED]
