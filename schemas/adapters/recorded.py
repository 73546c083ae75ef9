"""Recorded output, streamed from files: JSON, JSON lines, either of them with gzip, and msgpack."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from keptset.schemas.adapters.base import Adapter, Place, Tree
from keptset.schemas.adapters.collect import Adapted, Collector
from keptset.schemas.adapters.settings import Stated
from keptset.schemas.errors import (
    DamagedFile,
    InvalidInput,
    KeptsetError,
    MissingDependency,
    SchemaError,
    StorageError,
)

BLOCK = 1 << 25
"""Bytes of records read, good or bad, before they become batches: what bounds the memory of an import. What is made of
them takes five to ten times as much."""
_JSON, _LINES, _MSGPACK = (".json",), (".jsonl", ".ndjson"), (".msgpack", ".bin")
_DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError)


def adapt_files(adapter: Adapter, paths: Sequence[str | Path], stated: Stated | None = None) -> Iterator[Adapted]:
    """What became of the files' records, block by block, in order.

    Errors: SchemaError where a file's first record is not the engine's; StorageError (DamagedFile) where a file cannot
    be read; InvalidInput for a name that says no format; MissingDependency for msgpack. What came before was given.
    """
    collector = Collector(adapter, stated or Stated())
    failure: KeptsetError | None = None
    try:
        for path in [Path(path) for path in paths]:
            first = True
            for tree in adapter.whole(read_trees(path, msgpack=adapter.msgpack)):
                collector.take_tree(tree, first=first)
                first = False
                if collector.held >= BLOCK:
                    yield collector.flush()
    except KeptsetError as error:
        failure = error
    yield collector.flush()
    if failure is not None:
        raise failure


def is_readable(path: Path, *, msgpack: bool) -> bool:
    """Whether the name says a format that is read."""
    return _suffix(path) in (_MSGPACK if msgpack else _JSON + _LINES)


def read_trees(path: Path, *, msgpack: bool = False) -> Iterator[Tree]:
    """The trees of one file: the whole of it or the entries of its list (JSON, msgpack), or each of its lines."""
    if not is_readable(path, msgpack=msgpack):
        known = "/".join(_MSGPACK if msgpack else _JSON + _LINES)
        raise InvalidInput(f"{path}: the name says no format that is read here; rename it to end in {known} (or .gz)")
    read = _msgpack if msgpack else _lines if _suffix(path) in _LINES else _document
    try:
        with _open(path) as file:
            yield from read(file, path)
    except _DAMAGE as error:
        raise DamagedFile(f"{path} is cut off or not what gzip wrote: {error}") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _short(path: Path) -> str:
    """Folder and name without suffixes: names of files repeat from step to step."""
    name = path.name.removesuffix(".gz")
    return f"{path.absolute().parent.name}/{name.removesuffix(Path(name).suffix)}"


def _lines(file: Iterable[bytes], path: Path) -> Iterator[Tree]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        place = Place(text=f"{path} line {number}", file=_short(path), number=number)
        try:
            yield Tree(value=_parsed(line), place=place, size=len(line))
        except SchemaError as error:
            yield Tree(value=line.decode(errors="replace"), place=place, error=str(error), size=len(line))


def _document(file: IO[bytes], path: Path) -> Iterator[Tree]:
    text = file.read()
    try:
        value = _parsed(text)
    except SchemaError as error:
        raise SchemaError(f"{path}: {error} (one value per line needs a name that ends in .jsonl)") from error
    yield from _entries(value, path, len(text))


def _entries(value: object, path: Path, size: int) -> Iterator[Tree]:
    several = isinstance(value, list)
    entries = value if isinstance(value, list) else [value]
    for number, entry in enumerate(entries):
        text = f"{path} entry {number}" if several else str(path)
        place = Place(text=text, file=_short(path), number=number)
        yield Tree(value=entry, place=place, size=size // len(entries))


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise SchemaError("nested too deeply; no engine's output is") from None
    except ValueError as error:  # also what is no UTF-8, and numbers of thousands of digits
        raise SchemaError(f"not JSON: {error}") from error


def _msgpack(file: IO[bytes], path: Path) -> Iterator[Tree]:
    """The entries of the list that the file holds, one at a time."""
    try:
        import msgpack
    except ImportError as error:
        raise MissingDependency(
            f"{path} is msgpack, which needs the package msgpack: pip install 'keptset[prime-rl]'"
        ) from error
    unpacker = msgpack.Unpacker(file, strict_map_key=False)
    number = 0
    try:
        for number in range(unpacker.read_array_header()):
            place = Place(text=f"{path} micro-batch {number}", file=_short(path), number=number)
            before = unpacker.tell()
            value = unpacker.unpack()
            yield Tree(value=value, place=place, size=unpacker.tell() - before)
        rest = file.read(1) or unpacker.read_bytes(1)
    # TypeError: a list or map stands as a key.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        told = str(error) or type(error).__name__
        raise DamagedFile(f"{path} micro-batch {number}: not a msgpack list of micro-batches: {told}") from error
    if rest:
        raise DamagedFile(f"{path}: there is more behind the list of micro-batches")
