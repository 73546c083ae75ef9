"""`keptset archive`: a spool into one Parquet file, or an archive back into a spool."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from keptset.schemas.errors import InvalidInput, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.archive import read_archive, write_archive
from keptset.schemas.storage.archive.layout import COMPRESSION_LEVEL
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter


def command(
    source: Annotated[str, typer.Argument(help="A spool; with --restore an archive. Paths or URIs, here and below.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The Parquet file; with --restore the spool, a folder.")],
    restore: Annotated[bool, typer.Option("--restore", help="The other way: an archive back into a spool.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an archive of that name.")] = False,
    level: Annotated[
        int, typer.Option(help="Compression level of zstd: more is smaller and slower.", min=1, max=22)
    ] = COMPRESSION_LEVEL,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Take each response as often as it is there, not the first only.")
    ] = False,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Go on without damaged files of the spool, and end with 1.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Write a spool as one Parquet file, which pyarrow, DuckDB and pandas read too, or bring it back.

    The spool is left as it is; what a live writer has appended so far is taken too.
    """
    told: list[str] = []
    aside: list[str] = []
    if restore:
        counts = _Counts()
        with SpoolWriter(out) as writer:
            for batch in counts.counted(read_archive(source)):
                writer.append(batch)
    else:
        if Path(source).is_file():
            raise StorageError(f"{source} is a file, and a spool is a folder; to bring an archive back add --restore")
        with SpoolReader(
            source,
            on_damaged="skip" if skip_damaged else "raise",
            duplicates="keep" if keep_duplicates else "skip",
        ) as reader:
            counts = _Counts()
            batches = counts.counted(_some(reader, source))
            counts.size = write_archive(batches, out, overwrite=overwrite, compression_level=level).size
            told = [str(finding) for finding in reader.findings]
            aside = [entry.reason for entry in reader.set_aside]
    if as_json:
        size = {} if counts.size is None else {"bytes": counts.size}
        summary = {"out": out, "responses": counts.responses, "tokens": counts.tokens, **size}
        print(json.dumps({**summary, "findings": told, "set_aside": aside}, indent=2))
    else:
        for line in (*told, *(f"set aside: {reason}" for reason in aside)):
            print(line)
        print(f"{counts.text()} in {out}")
    if aside:
        raise typer.Exit(1)


@dataclass
class _Counts:
    """What went through."""

    responses: int = 0
    tokens: int = 0
    size: int | None = None
    """Bytes of the archive."""

    def counted(self, batches: Iterable[RolloutBatch]) -> Iterator[RolloutBatch]:
        for batch in batches:
            self.responses += len(batch)
            self.tokens += batch.num_tokens
            yield batch

    def text(self) -> str:
        size = "" if self.size is None else f", {self.size / max(self.tokens, 1):.1f} bytes a token,"
        return f"{self.responses} responses, {self.tokens} tokens{size}"


def _some(reader: SpoolReader, source: str) -> Iterator[RolloutBatch]:
    """All batches. Errors: InvalidInput where there is none."""
    batches = iter(reader)
    first = next(batches, None)
    if first is None:
        raise InvalidInput(f"spool {source} holds no batch to archive")
    yield first
    yield from batches
