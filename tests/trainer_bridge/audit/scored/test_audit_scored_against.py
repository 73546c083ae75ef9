"""Two recordings of the same rollouts: where they part, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, StorageError
from keptset.schemas.storage.spool import SpoolWriter
from keptset.trainer_bridge.audit.against import compare
from keptset.trainer_bridge.audit.comparison import Comparison, Share


def stored(folder: Path, responses: list[Any], step: int = 5) -> Path:
    with SpoolWriter(folder) as writer:
        for begin in range(0, len(responses), step):
            builder = BatchBuilder(Identity(vocab_size=48))
            for response in responses[begin : begin + step]:
                builder.add(response)
            writer.append(builder.build())
    return folder


def versioned(responses: list[Any]) -> list[Any]:
    """Five responses of each version."""
    return [
        replace(response, policy_versions=np.full(len(response.token_ids), number // 5))
        for number, response in enumerate(responses)
    ]


@pytest.fixture(scope="module")
def responses(scored: Any) -> list[Any]:
    return versioned(scored.draw(6, 20).responses)


@pytest.fixture(scope="module")
def here(responses: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("here") / "spool", responses)


def row(comparison: Comparison, aspect: str) -> Any:
    return next(found for found in comparison.aspects if found.aspect == aspect)


def parting(comparison: Comparison) -> list[str]:
    return [found.aspect for found in comparison.aspects if found.responses]


@pytest.mark.parametrize("piece_bytes", [1 << 26, 1 << 12, 1 << 8], ids=["one piece", "pieces", "rounds"])
def test_the_same_responses_in_another_order_do_not_part(
    here: Path, responses: list[Any], tmp_path: Path, piece_bytes: int
) -> None:
    there = stored(tmp_path / "there", responses[::-1], step=3)
    found = compare([here], [there], piece_bytes=piece_bytes)
    assert (found.matched, found.only_here, found.only_there, found.parts) == (20, 0, 0, False)
    assert row(found, "kept_ids").compared == row(found, "behavior_logprobs").compared == 20 * 24
    assert row(found, "behavior_logprobs").max_abs == 0


def test_b_that_parts_in_one_version_is_told_with_its_place(here: Path, responses: list[Any], tmp_path: Path) -> None:
    spoilt = list(responses)
    for number in (12, 13):
        b = spoilt[number].behavior_logprobs.copy()
        b[7:] -= 0.25
        spoilt[number] = replace(spoilt[number], behavior_logprobs=b)
    found = compare([here], [stored(tmp_path / "there", spoilt)])
    assert parting(found) == ["behavior_logprobs"]
    b = row(found, "behavior_logprobs")
    assert (b.responses, b.places, b.first_position, b.median_first_position) == (2, 2 * 17, 7, 7)
    assert (b.since.rollout_id, b.since.position) == ("rollout-12", 7)
    assert b.max_abs == pytest.approx(0.25, abs=1e-6)
    assert b.mean_abs == pytest.approx(0.25 * 34 / 480, abs=1e-6)
    assert b.by_version == {
        0: Share(responses=5, parted=0),
        1: Share(responses=5, parted=0),
        2: Share(responses=5, parted=2),
        3: Share(responses=5, parted=0),
    }
    assert [number for number, share in enumerate(b.by_order) if share.parted] == [12, 13]
    assert "since rollout-12 (row 12, position 7, version 2), in versions 2 alone" in "\n".join(found.lines())


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (range(20), "first rollout-0 (row 0, position 7), throughout the recording"),
        (range(1, 20, 2), "first rollout-1 (row 1, position 7), throughout the recording"),
        ((0, 9, 19), "first rollout-0 (row 0, position 7), scattered over the recording"),
        (range(8, 20), "since rollout-8 (row 8, position 7), between 40% and 100% of the recording"),
        ((4, 6), "since rollout-4 (row 4, position 7), between 20% and 35% of the recording"),
    ],
    ids=["all", "every other", "few", "since the middle", "a stretch"],
)
def test_where_rows_part_is_told_as_a_stretch_only_if_it_is_one(
    responses: list[Any], tmp_path: Path, numbers: Sequence[int], said: str
) -> None:
    plain = [replace(response, policy_versions=None) for response in responses]
    spoilt = list(plain)
    for number in numbers:
        b = spoilt[number].behavior_logprobs.copy()
        b[7:] -= 0.25
        spoilt[number] = replace(spoilt[number], behavior_logprobs=b)
    found = compare([stored(tmp_path / "here", plain)], [stored(tmp_path / "there", spoilt)])
    assert f"  {said}" in found.lines()


def test_recordings_of_other_rollouts_cannot_be_compared(here: Path, responses: list[Any], tmp_path: Path) -> None:
    others = [replace(response, rollout_id=f"other-{n}") for n, response in enumerate(responses[:3])]
    with pytest.raises(InvalidInput, match="no rollout_id is in both recordings: 20 are only here, 3 only there"):
        compare([here], [stored(tmp_path / "there", others)])


def test_nothing_behind_the_first_other_token_is_compared(here: Path, responses: list[Any], tmp_path: Path) -> None:
    other = list(responses)
    tokens, b = other[4].token_ids.copy(), other[4].behavior_logprobs.copy()
    tokens[9:] = (tokens[9:] + 1) % 48
    b[9:] -= 1.0
    other[4] = replace(other[4], token_ids=tokens, behavior_logprobs=b)
    found = compare([here], [stored(tmp_path / "there", other)])
    assert parting(found) == ["token_ids"]
    assert row(found, "token_ids").first_position == 9
    # Sets and m are of one context up to the token that differs; b is of that token.
    assert row(found, "kept_ids").compared == 19 * 24 + 10
    assert row(found, "behavior_logprobs").compared == 19 * 24 + 9


def test_a_shorter_response_parts_where_it_ends(here: Path, responses: list[Any], tmp_path: Path) -> None:
    short = responses[2]
    cut = replace(
        short,
        token_ids=short.token_ids[:11],
        behavior_logprobs=short.behavior_logprobs[:11],
        log_kept_mass=short.log_kept_mass[:11],
        policy_versions=short.policy_versions[:11],
        kept_offsets=short.kept_offsets[:12],
        kept_ids=short.kept_ids[: short.kept_offsets[11]],
    )
    found = compare([here], [stored(tmp_path / "there", [*responses[:2], cut, *responses[3:]])])
    assert parting(found) == ["token_ids"]
    assert row(found, "token_ids").since.position == 11


def test_sets_part_by_a_member_and_by_their_size(scored: Any, here: Path, responses: list[Any], tmp_path: Path) -> None:
    world = scored.World(list(responses), None)

    def spoilt(number: int) -> list[list[int]]:
        sets = scored.sets_of(responses[number])
        sets[3] = sorted({*sets[3], 47} if 47 not in sets[3] else {*sets[3]} - {47})
        sets[5] = [*sets[5][:-1], sets[5][-1] + 1]
        return sets

    found = compare([here], [stored(tmp_path / "there", world.with_sets([8], spoilt).responses)])
    assert parting(found) == ["kept_ids"]
    assert (row(found, "kept_ids").places, row(found, "kept_ids").since.position) == (2, 3)


def test_m_within_the_tolerance_is_the_same(here: Path, responses: list[Any], tmp_path: Path) -> None:
    moved = [replace(response, log_kept_mass=response.log_kept_mass - 1e-3) for response in responses]
    there = stored(tmp_path / "there", moved)
    assert parting(compare([here], [there])) == ["log_kept_mass"]
    assert parting(compare([here], [there], tolerance=2e-3)) == []


def test_rows_of_one_side_and_repeated_rows_are_counted(here: Path, responses: list[Any], tmp_path: Path) -> None:
    there = stored(tmp_path / "there", [*responses[1:], responses[3], replace(responses[0], rollout_id="another")])
    found = compare([here], [there], piece_bytes=1 << 12)
    assert (found.matched, found.only_here, found.only_there, found.repeated) == (19, 1, 1, 1)
    assert found.parts


def test_support_versions_and_flags_part(here: Path, responses: list[Any], tmp_path: Path) -> None:
    other = list(responses)
    other[1] = replace(other[1], support="full", kept_ids=None, kept_offsets=None)
    other[2] = replace(other[2], policy_versions=other[2].policy_versions + 1)
    sampled = np.ones(24, bool)
    sampled[20] = False
    other[3] = replace(other[3], sampled=sampled)
    found = compare([here], [stored(tmp_path / "there", other)])
    assert row(found, "support").since.rollout_id == "rollout-1"
    assert row(found, "policy_versions").since.rollout_id == "rollout-2"
    assert row(found, "sampled").since.position == 20


def test_wrong_use_is_refused(here: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="tolerance is nan"):
        compare([here], [here], tolerance=float("nan"))
    with pytest.raises(StorageError, match="is not there"):
        compare([here], [tmp_path / "nothing"])
