"""The plan of an audit: what there is to read, in which units of work, and which rows repeat others.

Rows repeat each other across files, so they are found in a first pass over three columns: rollout_id, seed, group_id.
A row's place in the order of reading decides which of them is the first; the others are left out of every statistic.
Rows that share a seed share the uniform numbers of all their positions whatever their prompts are, so one row of each
such cluster counts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import KeptsetError
from keptset.schemas.findings import Example
from keptset.trainer_bridge.audit.check import Evidence
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.reading.files import scan
from keptset.trainer_bridge.audit.reading.inputs import InputFile, find_inputs
from keptset.trainer_bridge.audit.reading.key_table import KeyTable
from keptset.trainer_bridge.audit.reading.repeats import PartPlace, Repeats, find_repeats
from keptset.trainer_bridge.audit.reading.row_keys import KEY_COLUMNS, keys_of

UNIT_BYTES = 2**23
"""Of a file, about: some million kept ids."""
SAMPLED_PLACES = 8
"""A sample comes from so many files and units at least: rows next to each other are of one prompt, or one step."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A piece of a file, the smallest that is worked on at once."""

    number: int
    file: InputFile
    first: int
    """Parts [first, last) of the file."""
    last: int
    start: int
    """Byte where they begin, in an open spool file."""
    rows: int
    """That are looked at."""
    size: int
    """Bytes of the file that they take, about."""
    uncounted: NDArray[np.int64]
    """Those that repeat others, as numbers among the rows that are looked at, ascending."""
    chosen: NDArray[np.int64] | None = None
    """Rows of the parts that are looked at, ascending; None: all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be read, and what was seen on the way to know it."""

    inputs: tuple[InputFile, ...]
    """Files that can be read, in their order."""
    damaged: tuple[Example, ...]
    """Files that cannot, or not to their end, with the reason."""
    units: tuple[Unit, ...]
    repeats: tuple[Evidence, ...]
    """`conflict`, `duplicate`, `seed_reused`."""
    group_sizes: Mapping[int, int]
    """Responses of a group -> groups; repeated rollout_ids left out."""
    share_read: float
    """Of the bytes of all files."""


def plan(paths: Sequence[str | Path], options: AuditOptions) -> Plan:
    """Look at every file, and divide them into units.

    Errors: as `find_inputs`; DamagedFile, SchemaError or StorageError where not one of the files can be read.
    """
    inputs = find_inputs(paths)
    opened = inputs if options.sample is None else _some_files(inputs, options)
    with _Survey(options) as survey:
        for file in opened:
            survey.look_at(file)
        if not survey.places and survey.failures:
            raise survey.failures[0][1]
        repeats = find_repeats(survey.ids, survey.seeds, survey.places, unguarded=options.unguarded)
        group_sizes = survey.groups.sizes(without=repeats.copies)
    units, share = list(_units(survey.places, repeats)), 1.0
    if options.sample is not None:
        units = _sampled(units, options.sample, options.seed)
        total = sum(file.size for file in inputs)
        share = min(sum(unit.size for unit in units) / total, 1.0) if total else 1.0
    return Plan(
        inputs=tuple(survey.read),
        damaged=tuple(Example(rollout_id=f.shown, position=None, detail=str(e)) for f, e in survey.failures),
        units=tuple(units),
        repeats=repeats.evidence,
        group_sizes=group_sizes,
        share_read=share,
    )


def _some_files(inputs: Sequence[InputFile], options: AuditOptions) -> list[InputFile]:
    """Files at random that hold enough responses for the sample, in their order: versions are told from that."""
    chosen: list[int] = []
    with _Survey(options) as survey:
        for index in np.random.default_rng(options.seed).permutation(len(inputs)).tolist():
            if len(chosen) >= SAMPLED_PLACES and survey.rows >= (options.sample or 0):
                break
            survey.look_at(inputs[index])
            chosen.append(index)
    return [inputs[index] for index in sorted(chosen)]


class _Survey:
    """The first pass: parts of files, and the keys of their rows."""

    def __init__(self, options: AuditOptions) -> None:
        self._unguarded = options.unguarded
        self._closing = contextlib.ExitStack()
        self.ids, self.seeds, self.groups = (self._closing.enter_context(KeyTable()) for _ in KEY_COLUMNS)
        self.read: list[InputFile] = []
        self.failures: list[tuple[InputFile, KeptsetError]] = []
        self.places: list[PartPlace] = []
        self.rows = 0

    def __enter__(self) -> _Survey:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def look_at(self, file: InputFile) -> None:
        """Every part of a file, up to where it is damaged."""
        try:
            for part in scan(file, KEY_COLUMNS, unguarded=self._unguarded):
                found = [keys_of(part.columns, name) for name in KEY_COLUMNS]
                rows_R = np.arange(self.rows, self.rows + part.rows)
                for table, (keys_R2, known_R) in zip((self.ids, self.seeds, self.groups), found, strict=True):
                    table.add(keys_R2[known_R], rows_R[known_R])
                self.places.append(
                    PartPlace(file=file, part=part.number, start=part.start, first_row=self.rows, rows=part.rows)
                )
                self.rows += part.rows
        except KeptsetError as error:
            self.failures.append((file, error))
            if not self.places or self.places[-1].file is not file:
                return
        self.read.append(file)


def _units(places: Sequence[PartPlace], repeats: Repeats) -> Iterator[Unit]:
    """Parts of each file in pieces of about UNIT_BYTES; a part that is larger stays whole."""
    number = 0
    for _, of_file in groupby(places, key=lambda place: place.file.shown):
        parts = list(of_file)
        file_rows = sum(part.rows for part in parts) or 1
        bytes_per_row = parts[0].file.size / file_rows
        piece: list[PartPlace] = []
        for part in parts:
            if piece and (part.first_row - piece[0].first_row) * bytes_per_row >= UNIT_BYTES:
                yield _unit(number, piece, bytes_per_row, repeats)
                number, piece = number + 1, []
            piece.append(part)
        yield _unit(number, piece, bytes_per_row, repeats)
        number += 1


def _unit(number: int, parts: Sequence[PartPlace], bytes_per_row: float, repeats: Repeats) -> Unit:
    first_row, rows = parts[0].first_row, sum(part.rows for part in parts)
    begin, end = np.searchsorted(repeats.uncounted, [first_row, first_row + rows])
    return Unit(
        number=number,
        file=parts[0].file,
        first=parts[0].part,
        last=parts[-1].part + 1,
        start=parts[0].start,
        rows=rows,
        size=round(rows * bytes_per_row),
        uncounted=repeats.uncounted[begin:end] - first_row,
    )


def _sampled(units: Sequence[Unit], responses: int, seed: int) -> list[Unit]:
    """So many responses at random, of units at random, in their order."""
    generator = np.random.default_rng([seed, 1])
    opened: list[Unit] = []
    for index in _one_of_each_file_first(units, generator.permutation(len(units)).tolist()):
        if len(opened) >= SAMPLED_PLACES and sum(unit.rows for unit in opened) >= responses:
            break
        opened.append(units[index])
    opened.sort(key=lambda unit: unit.number)
    ends = np.cumsum([unit.rows for unit in opened])
    total = int(ends[-1]) if opened else 0
    picked = np.sort(generator.choice(total, min(responses, total), replace=False))
    of_unit = np.split(picked, np.searchsorted(picked, ends))
    reduced = [_reduced(unit, rows - (end - unit.rows)) for unit, rows, end in zip(opened, of_unit, ends, strict=False)]
    return [replace(unit, number=number) for number, unit in enumerate(unit for unit in reduced if unit.rows)]


def _one_of_each_file_first(units: Sequence[Unit], order: Sequence[int]) -> list[int]:
    """The same indices: first those of files that none before is of, then the second ones of files, and so on."""
    seen: Counter[str] = Counter()
    rounds: dict[int, int] = {}
    for index in order:
        rounds[index] = seen[units[index].file.shown]
        seen[units[index].file.shown] += 1
    return sorted(order, key=lambda index: rounds[index])


def _reduced(unit: Unit, chosen: NDArray[np.int64]) -> Unit:
    """A unit of which these rows alone are looked at."""
    return replace(
        unit,
        rows=len(chosen),
        size=round(unit.size * len(chosen) / unit.rows) if unit.rows else 0,
        uncounted=np.flatnonzero(np.isin(chosen, unit.uncounted)),
        chosen=chosen,
    )
