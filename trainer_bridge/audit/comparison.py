"""What a comparison of two recordings found, as records: for each aspect how much parts, where, and since when.

Numbers that do not exist are None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keptset.schemas.findings import Example

NAMES: Mapping[str, str] = {
    "token_ids": "tokens",
    "sampled": "what was sampled",
    "support": "support",
    "kept_ids": "kept sets",
    "behavior_logprobs": "b",
    "log_kept_mass": "m",
    "policy_versions": "versions",
}
"""Aspects as people call them."""
THROUGHOUT, SCATTERED = "throughout the recording", "scattered over the recording"
"""Where responses part from its beginning to its end: in most of its parts, in few."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """How many of some responses part."""

    responses: int
    parted: int


@dataclass(frozen=True, kw_only=True)
class AspectRow:
    """One column of the two recordings."""

    aspect: str
    """A column's name."""
    responses: int
    """That part in it."""
    places: int
    """That differ; for `token_ids` one a response, since nothing behind the first is comparable."""
    compared: int
    """Places that could differ."""
    first_position: int | None
    """The least position at which a response parts."""
    median_first_position: float | None
    """Of the positions at which responses part, within 1 %."""
    mean_abs: float | None
    """|difference| over all places where both have a number."""
    p99_abs: float | None
    """Within 1 %."""
    max_abs: float | None
    since: Example | None
    """The first response that parts, in the order of reading."""
    examples: tuple[Example, ...]
    """At most three, in that order."""
    by_order: tuple[Share, ...]
    """The responses of the first recording in order, in equal parts."""
    by_version: Mapping[int | None, Share]
    """By the first token's version in the first recording."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two recordings of the same rollouts, matched by rollout_id."""

    matched: int
    only_here: int
    only_there: int
    repeated: int
    """Further rows of an id within one recording; the first one counts."""
    tolerance: float
    """|difference| of b and m up to which they are the same, in nats."""
    aspects: tuple[AspectRow, ...]

    @property
    def parts(self) -> bool:
        """Whether anything differs."""
        return bool(self.only_here or self.only_there) or any(row.responses for row in self.aspects)

    def lines(self) -> list[str]:
        """The same in words."""
        told = [
            f"{self.matched:,} responses in both recordings; {self.only_here:,} only here, {self.only_there:,} only "
            f"there"
        ]
        if self.repeated:
            told.append(f"{self.repeated:,} further rows repeat an id and are left out")
        parting = [row for row in self.aspects if row.responses]
        told += [line for row in parting for line in _told(row, self.matched)]
        same = [NAMES[row.aspect] for row in self.aspects if not row.responses and row.compared]
        if same:
            told.append(f"the same in both: {', '.join(same)}")
        return told


def _told(row: AspectRow, matched: int) -> list[str]:
    share = row.responses / matched if matched else 0.0
    told = [
        f"{NAMES[row.aspect]} part in {row.responses:,} responses ({share:.1%}), in {row.places:,} of {row.compared:,} "
        f"places; the first at position {row.first_position}, half of them by {row.median_first_position:.0f}"
    ]
    if row.mean_abs is not None:
        told.append(f"  |difference| mean {row.mean_abs:.2g}, p99 {row.p99_abs:.2g}, largest {row.max_abs:.2g}")
    if row.since is not None:
        when = _when(row)
        first = "first" if when in (THROUGHOUT, SCATTERED) else "since"
        told.append(f"  {first} {row.since.rollout_id} ({row.since.detail}), {when}")
    return told


def _when(row: AspectRow) -> str:
    """By version where versions tell them apart, else by order."""
    versions = {version: share for version, share in row.by_version.items() if share.parted}
    if len(row.by_version) > 1 and len(versions) < len(row.by_version) and None not in versions:
        return (
            f"in versions {', '.join(str(version) for version in sorted(v for v in versions if v is not None))} alone"
        )
    parts = [number for number, share in enumerate(row.by_order) if share.parted]
    held = [number for number, share in enumerate(row.by_order) if share.responses]
    edge = len(held) // 10
    if parts[0] in held[: edge + 1] and parts[-1] in held[-edge - 1 :]:
        return THROUGHOUT if 2 * len(parts) >= len(held) else SCATTERED
    begin, end = parts[0] / len(row.by_order), (parts[-1] + 1) / len(row.by_order)
    return f"between {begin:.0%} and {end:.0%} of the recording"
