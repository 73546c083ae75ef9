"""The readers that are tried: for each how an input is made from its number, and what may become of it.

An input may be refused with one of keptset's errors. What is let through must be what was written (files of keptset's
own) or keep the contract and come from the input (other engines' output). All else is a `Fault`.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from contract import violations
from mutations import mutate_bytes, mutate_tree

from keptset.schemas.adapters import Stated, adapt_files, adapter_for, from_transformers
from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, SchemaError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.archive import read_archive, write_archive
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, recover

REFUSALS = (SchemaError, StorageError, InvalidInput)
ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"


class Fault(Exception):
    """An input that had a consequence it must not have."""


class Target(ABC):
    """One reader."""

    name: str
    suffix: str

    def __init__(self, folder: Path) -> None:
        """Make the sound inputs. `folder` is this target's own, empty."""
        self.folder = folder

    @abstractmethod
    def make(self, random: Random) -> bytes:
        """An unsound input."""

    @abstractmethod
    def take(self, data: bytes) -> str:
        """Read it; what became of it in a word. Errors: those of REFUSALS, Fault."""


def sample_batches() -> list[RolloutBatch]:
    """Small batches with every column in use, whose bytes are mostly structure."""
    batches = []
    for first, count in ((0, 2), (2, 1), (3, 3)):
        builder = BatchBuilder(Identity(vocab_size=50, model_id="tiny", engine="soak", engine_version="1"))
        for number in range(first, first + count):
            builder.add(_response(number))
        batches.append(builder.build())
    return batches


def _response(number: int) -> Response:
    random = np.random.default_rng(number)
    tokens = 2 + number % 3
    sampled = np.array([t != 1 or number % 2 == 0 for t in range(tokens)])
    sets = [
        np.sort(random.choice(50, 1 + t % 3, replace=False)) if sampled[t] else np.zeros(0, int) for t in range(tokens)
    ]
    logprobs = [np.log(random.dirichlet(np.ones(len(ids)))) if len(ids) > 1 else np.zeros(len(ids)) for ids in sets]
    whole = number % 2 == 0
    return Response(
        rollout_id=f"rollout-{number}",
        prompt_id=f"prompt-{number}",
        group_id="group" if whole else None,
        prompt_token_ids=np.arange(1 + number % 2),
        token_ids=np.array([ids[0] if len(ids) else 0 for ids in sets]),
        sampled=sampled,
        behavior_logprobs=np.array([logp[0] if len(logp) else 0.0 for logp in logprobs]),
        log_kept_mass=np.full(tokens, -0.01),
        kept_entropy=np.full(tokens, 0.5),
        kept_logprob_var=np.full(tokens, 0.25),
        kept_offsets=np.cumsum([0, *map(len, sets)]),
        kept_ids=np.concatenate(sets),
        kept_logprobs=np.concatenate(logprobs) if whole else None,
        policy_versions=np.arange(tokens),
        finish_reason="stop",
        params=SamplingParams(temperature=0.8, top_p=0.95, logit_bias={3: 0.5}) if whole else None,
        seed=number,
        extra={"x_note": f"note {number}"} if whole else {},
    )


def require_sound(found: list[RolloutBatch], *files: list[RolloutBatch]) -> str:
    """Errors: Fault unless what was found is what one of the files holds, as far as it goes."""
    for written in files:
        pairs = zip(found, written, strict=False)
        if len(found) <= len(written) and all(a.arrow.equals(b.arrow, check_metadata=True) for a, b in pairs):
            return "whole" if len(found) == len(written) else "beginning"
    raise Fault(f"these batches were never written: {[batch.arrow.to_pylist() for batch in found]}")


class _FileTarget(Target):
    """Bytes of a file that keptset wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.batches = sample_batches()
        self.others = [batch.take([0]) for batch in self.batches[:2]]
        self.sound = list(self._sound_files())

    @abstractmethod
    def _sound_files(self) -> Iterator[bytes]: ...

    def make(self, random: Random) -> bytes:
        return mutate_bytes(random, random.choice(self.sound), self.sound)

    def _spool_files(self, batches: list[RolloutBatch], **settings: Any) -> tuple[bytes, bytes]:
        """An open and a published file."""
        folder = self.folder / "sound"
        with SpoolWriter(folder, "a", fsync="never", **settings) as writer:
            for batch in batches:
                writer.append(batch)
            opened = writer.path.read_bytes()
        published = (folder / "a-00000000.arrow").read_bytes()
        shutil.rmtree(folder)
        return opened, published


class PublishedFile(_FileTarget):
    name, suffix = "spool-published", ".arrow"

    def _sound_files(self) -> Iterator[bytes]:
        for compression in ("zstd", "none"):
            yield self._spool_files(self.batches, compression=compression)[1]
        yield self._spool_files(self.others)[1]

    def take(self, data: bytes) -> str:
        path = self.folder / "a-00000000.arrow"
        path.write_bytes(data)
        with SpoolReader(self.folder, duplicates="keep") as reader:
            return require_sound(list(reader), self.batches, self.others)


class OpenFile(_FileTarget):
    name, suffix = "spool-open", ".open"

    def _sound_files(self) -> Iterator[bytes]:
        yield self._spool_files(self.batches)[0]
        yield self._spool_files(self.others)[0]

    def take(self, data: bytes) -> str:
        path = self.folder / "a-00000000.open"
        path.write_bytes(data)
        with SpoolReader(self.folder, duplicates="keep", on_damaged="skip") as reader:
            told = require_sound(list(reader), self.batches, self.others)
        return f"{told}, the rest set aside" if reader.set_aside else told


class Recovery(OpenFile):
    name = "spool-recovery"

    def take(self, data: bytes) -> str:
        for path in self.folder.iterdir():
            path.unlink()
        (self.folder / "a-00000000.open").write_bytes(data)
        (recovered,) = recover(self.folder, fsync=False)
        with SpoolReader(self.folder, include_open=False, duplicates="keep") as reader:
            told = require_sound(list(reader), self.batches, self.others)
        if recovered.damage is None and recovered.set_aside is not None:
            raise Fault(f"set aside without a reason: {recovered}")
        return f"{told}, the rest set aside" if recovered.damage else told


class Archive(_FileTarget):
    name, suffix = "archive", ".parquet"

    def _sound_files(self) -> Iterator[bytes]:
        for count in (1, 3):
            path = self.folder / f"{count}.parquet"
            write_archive(self.batches[:count], path)
            yield path.read_bytes()

    def take(self, data: bytes) -> str:
        path = self.folder / "a.parquet"
        path.write_bytes(data)
        found = list(read_archive(path))
        rows = [row for batch in found for row in batch.arrow.to_pylist()]
        whole = [row for batch in self.batches for row in batch.arrow.to_pylist()]
        if any(one.arrow.schema.metadata != self.batches[0].arrow.schema.metadata for one in found):
            raise Fault("another identity came")
        if repr(rows) not in (repr(whole), repr(whole[: len(self.batches[0])])):
            raise Fault(f"other rows came: {rows}")
        return "whole"


class EngineOutput(Target):
    """An engine's recorded output: its tree changed, or the bytes of its file."""

    suffix = ".json"

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(folder)
        self.name = engine
        self.adapter = adapter_for(engine)
        self.stated = Stated(identity=Identity(vocab_size=24))
        manifest = json.loads((ENGINES / "manifest.json").read_text(encoding="utf-8"))
        files = [ENGINES / entry["file"] for entry in manifest if entry["format"] == engine]
        self.trees = [self._read(path) for path in files]

    def _read(self, path: Path) -> Any:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)

    def make(self, random: Random) -> bytes:
        tree = random.choice(self.trees)
        if random.random() < 0.85:
            tree = mutate_tree(random, tree, self.trees, bytes_too=False)
            return self._written(random, tree)
        return mutate_bytes(random, self._written(random, tree), [self._written(random, self.trees[0])])

    def _written(self, random: Random, tree: Any) -> bytes:
        """The file, behind one byte that says how it is called."""
        how = random.randrange(3)
        lines = tree if isinstance(tree, list) and how == 1 else [tree]
        text = "\n".join(json.dumps(line) for line in lines) if how == 1 else json.dumps(tree, indent=how or None)
        data = text.encode()
        return bytes([how]) + (gzip.compress(data, 1, mtime=0) if how == 2 else data)

    def take(self, data: bytes) -> str:
        how = data[0] if data else 0
        path = self.folder / ("a.json", "a.jsonl", "a.json.gz")[how if how < 3 else 0]
        path.write_bytes(data[1:])
        accepted = rejected = 0
        for adapted in adapt_files(self.adapter, [path], self.stated):
            for one in adapted.rejected:
                rejected += 1
                if not one.reason or not json.loads(one.to_json()):
                    raise Fault(f"rejected without a reason: {one}")
            for batch in adapted.batches:
                accepted += len(batch)
                if len(batch):
                    self._require_contract(batch, gzip.decompress(data[1:]) if how == 2 else data[1:])
        return f"{'some' if accepted else 'none'} taken, {'some' if rejected else 'none'} rejected"

    def _require_contract(self, batch: RolloutBatch, data: bytes) -> None:
        told = next(violations(batch), None)
        if told is not None:
            raise Fault(f"let through: {told}")
        recorded = set(self._numbers(data))
        for row in batch.arrow.to_pylist():
            ids = {*row["token_ids"], *(token for kept in row["kept_ids"] or [] for token in kept or [])}
            strange = ids - recorded
            logprobs = {np.float32(b) for b in row["behavior_logprobs"] or [] if b is not None}
            strange |= logprobs - {np.float32(number) for number in recorded if abs(number) < 1e30}
            if strange:
                raise Fault(f"{row['rollout_id']} holds {strange}, which the input does not")

    def _numbers(self, data: bytes) -> Iterator[float]:
        """Every number that the input holds, as such, within a text, or as base64 of numbers."""
        text = data.decode("utf-8", errors="replace")
        yield from (float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", text))
        for piece in re.findall(r'"([A-Za-z0-9+/]+={0,2})"', text):
            yield from _packed(piece)


def _packed(piece: str) -> Iterator[float]:
    try:
        data = base64.b64decode(piece, validate=True)
    except binascii.Error:
        return
    for form in ("<i4", "<f4"):
        if len(data) % 4 == 0:
            with np.errstate(invalid="ignore"):
                yield from np.frombuffer(data, form).astype(float).tolist()


class PrimeRl(EngineOutput):
    """Its files are msgpack."""

    suffix = ".msgpack"

    def _read(self, path: Path) -> Any:
        import msgpack

        return msgpack.unpackb(path.read_bytes(), strict_map_key=False)

    def make(self, random: Random) -> bytes:
        tree = random.choice(self.trees)
        if random.random() < 0.7:
            return self._written(random, mutate_tree(random, tree, self.trees, bytes_too=True))
        return mutate_bytes(random, self._written(random, tree), [self._written(random, self.trees[0])])

    def _written(self, random: Random, tree: Any) -> bytes:
        import msgpack

        def fits(value: Any) -> Any:
            """msgpack has no numbers beyond 64 bits and no lone surrogates."""
            if isinstance(value, dict):
                return {fits(key): fits(entry) for key, entry in value.items()}
            if isinstance(value, list):
                return [fits(entry) for entry in value]
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                return float(value)
            return value.encode(errors="replace").decode() if isinstance(value, str) else value

        return msgpack.packb(fits(tree))

    def take(self, data: bytes) -> str:
        path = self.folder / "a.msgpack"
        path.write_bytes(data)
        accepted = rejected = 0
        for adapted in adapt_files(self.adapter, [path], self.stated):
            rejected += len(adapted.rejected)
            for batch in adapted.batches:
                accepted += len(batch)
                told = next(violations(batch), None)
                if told is not None:
                    raise Fault(f"let through: {told}")
        return f"{'some' if accepted else 'none'} taken, {'some' if rejected else 'none'} rejected"


class Transformers(Target):
    """What `generate` returns, as arrays where its lists are regular."""

    name, suffix = "transformers", ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        random = np.random.default_rng(0)
        logits = np.round(random.normal(size=(3, 2, 24)), 3)
        scores = np.where(logits >= np.sort(logits)[..., -4:-3], logits, -np.inf)
        sequences = [[1, 5, *map(int, scores[:, row].argmax(axis=1))] for row in range(2)]
        config = {
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 4,
            "top_p": 1.0,
            "eos_token_id": 2,
            "max_new_tokens": 3,
        }
        output = {"sequences": sequences, "scores": scores.tolist(), "logits": logits.tolist()}
        self.tree = {"output": output, "config": config}

    def make(self, random: Random) -> bytes:
        part = random.choice(("output", "output", "config"))
        changed = {**self.tree, part: mutate_tree(random, self.tree[part], [self.tree], bytes_too=False)}
        return json.dumps(changed).encode()

    def take(self, data: bytes) -> str:
        tree = json.loads(data)
        output = tree["output"]
        if isinstance(output, dict):
            output = {name: self._arrays(name, value) for name, value in output.items()}
        adapted = from_transformers(output, tree["config"], Stated(identity=Identity(vocab_size=24)))
        told = next((told for batch in adapted.batches for told in violations(batch)), None)
        if told is not None:
            raise Fault(f"let through: {told}")
        return f"{len(adapted.batch)} taken, {len(adapted.rejected)} rejected"

    def _arrays(self, name: str, value: Any) -> Any:
        if name in ("scores", "logits") and isinstance(value, list):
            return tuple(self._arrays("step", step) for step in value)
        try:
            return np.array(value) if isinstance(value, list) else value
        except (ValueError, OverflowError):
            return value


class Broken(Target):
    """No reader of keptset's: one that does all that a reader must not, to try the trial itself."""

    name, suffix = "broken", ".bin"

    def make(self, random: Random) -> bytes:
        return random.choice((b"sound", b"sound", b"refused", b"abort", b"hang", b"foreign", b"let through"))

    def take(self, data: bytes) -> str:
        if data == b"refused":
            raise SchemaError("refused")
        if data == b"abort":
            os.abort()
        while data == b"hang":
            pass
        if data == b"foreign":
            raise KeyError("foreign")
        if data == b"let through":
            raise Fault("a violation was let through")
        return "taken"


def target(name: str, folder: Path) -> Target:
    """The reader of that name, at work in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {kind.name: kind for kind in (PublishedFile, OpenFile, Recovery, Archive, Transformers, Broken)}
    if name in files:
        return files[name](folder)
    return PrimeRl(folder, name) if name == "prime_rl" else EngineOutput(folder, name)


FILES = ("spool-published", "spool-open", "spool-recovery", "archive")
READERS = (*FILES, "vllm", "sglang", "fastdeploy", "slime", "prime_rl", "transformers")
"""All of them."""

pa.set_cpu_count(1)
pa.set_io_thread_count(1)
