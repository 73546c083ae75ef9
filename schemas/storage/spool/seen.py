"""Which responses a reader has had: the first of each rollout_id counts, whatever comes later under it.

A table of 16-byte digests in SQLite: in memory as far as MEMORY_BYTES go, beyond that in a file; with a path, in that
file alone, so that a restarted reader knows what came before its position. Beside each id stands the place of its first
response: one that is read again is no duplicate of itself.
"""

from __future__ import annotations

import contextlib
import sqlite3
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keptset.schemas.errors import StorageError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity
from keptset.schemas.ragged import BoolArray
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool.names import SpoolFile
from keptset.schemas.storage.spool.row_digest import content_digests, id_digests
from keptset.schemas.validation import SEVERITIES

MEMORY_BYTES = 64 * 2**20
"""Of the table held in memory: about 1,200,000 responses. More lie in a temporary file, or in the one asked for."""
_EXAMPLES = 3
_FORMAT = 1
_TABLES = f"""
    create table files (file integer primary key, writer text not null, seq integer not null, unique (writer, seq));
    create table responses (id blob primary key, content blob not null, file integer not null, batch integer not null,
        row integer not null) without rowid;
    pragma user_version = {_FORMAT};
"""

Place = tuple[int, int, int]
"""Number of the file in `files`, batch, row."""


class SeenResponses:
    """The responses handed out so far, and what came under their ids again.

    Errors, of each use: StorageError where the table cannot be read or written.
    """

    def __init__(self, path: Path | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        """Open the table in `path`, made if need be; None: one that ends with this object."""
        self._where = "the table of rollout_ids read" if path is None else str(path)
        self._counts: Counter[FindingKind] = Counter()
        self._shown: dict[FindingKind, list[Example]] = {FindingKind.CONFLICT: [], FindingKind.DUPLICATE: []}
        with self._failures():
            self._table = sqlite3.connect("" if path is None else path, check_same_thread=False)
            self._closing = weakref.finalize(self, self._table.close)
            self._prepare(durable=path is not None, memory_bytes=memory_bytes)

    def _prepare(self, *, durable: bool, memory_bytes: int) -> None:
        run = self._table.execute
        run(f"pragma cache_size = {-(memory_bytes // 1024) or -1}")
        # A crash of the process loses nothing either way; of the temporary table nothing is wanted after one.
        run(f"pragma journal_mode = {'wal' if durable else 'off'}")
        run(f"pragma synchronous = {'normal' if durable else 'off'}")
        (version,) = run("pragma user_version").fetchone()
        if version not in (0, _FORMAT) or (version == 0 and run("select 1 from sqlite_master").fetchone()):
            raise StorageError(f"{self._where} is a database of another kind or version; name a file of its own")
        if version == 0:
            self._table.executescript(f"begin; {_TABLES} commit;")

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(f"cannot use {self._where}: {error}") from error

    def close(self) -> None:
        """Let go of the table; it cannot be used afterwards."""
        self._closing()

    def first_of_their_ids(self, batch: RolloutBatch, place: SpoolFile, number: int) -> RolloutBatch | None:
        """The rows whose ids no other place had before, None where there is none; they are remembered at once.

        Rows without a rollout_id are all handed on: to say what is wrong with them is validation's.
        """
        with self._failures():
            fresh_B = self._judge(batch, place, number)
        if fresh_B.all():
            return batch
        return batch.filter(fresh_B) if fresh_B.any() else None

    def _judge(self, batch: RolloutBatch, place: SpoolFile, number: int) -> BoolArray:
        file = self._file_number(place)
        contents = content_digests(batch)
        new: dict[bytes, tuple[bytes, Place]] = {}
        fresh_B = np.ones(len(batch), bool)
        for row, name in enumerate(id_digests(batch)):
            if name is None:
                continue
            here = (file, number, row)
            before = new.get(name) or self._find(name)
            if before is None:
                new[name] = (contents[row], here)
            elif before[1] != here:
                fresh_B[row] = False
                self._note(batch.rollout_ids[row], contents[row] == before[0], place, here, before[1])
        rows = [(name, content, *at) for name, (content, at) in new.items()]
        with self._table:
            self._table.executemany("insert into responses values (?, ?, ?, ?, ?)", rows)
        return fresh_B

    def _find(self, name: bytes) -> tuple[bytes, Place] | None:
        found = self._table.execute("select content, file, batch, row from responses where id = ?", (name,)).fetchone()
        return None if found is None else (found[0], (found[1], found[2], found[3]))

    def _file_number(self, place: SpoolFile) -> int:
        key = (place.writer, place.seq)
        with self._table:
            self._table.execute("insert or ignore into files (writer, seq) values (?, ?)", key)
        (number,) = self._table.execute("select file from files where writer = ? and seq = ?", key).fetchone()
        return int(number)

    def _note(self, rollout_id: str, same: bool, place: SpoolFile, here: Place, before: Place) -> None:
        kind = FindingKind.DUPLICATE if same else FindingKind.CONFLICT
        self._counts[kind] += 1
        if len(self._shown[kind]) < _EXAMPLES:
            writer, seq = self._table.execute("select writer, seq from files where file = ?", before[:1]).fetchone()
            first, again = _told(writer, seq, before), _told(place.writer, place.seq, here)
            detail = f"{again}; {first} has {'the same' if same else 'other'} content and came first"
            self._shown[kind].append(Example(rollout_id=rollout_id, position=None, detail=detail))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """`conflict` and `duplicate`, as far as they occurred, with totals and the first examples."""
        return tuple(
            Finding(
                kind=kind,
                severity=SEVERITIES.get(kind, Severity.ERROR),
                count=self._counts[kind],
                responses=self._counts[kind],
                examples=tuple(shown),
            )
            for kind, shown in self._shown.items()
            if shown
        )


def _told(writer: str, seq: int, place: Place) -> str:
    return f"{writer}-{seq:08d} batch {place[1]} row {place[2]}"
