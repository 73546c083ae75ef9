"""Files that keptset wrote itself, damaged: what comes out of one is what went in, as far as it goes."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from mutations import mutate_bytes
from trial import Fault, Target

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.schemas.storage.archive import read_archive, write_archive
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, recover
from keptset.schemas.storage.spool.publish import publish
from keptset.schemas.storage.spool.stream import read_whole_batches

FIRST_RELEASE = Path(__file__).resolve().parents[1] / "data" / "schema_v1" / "spool" / "golden-00000000.arrow"
"""Without joined batches."""


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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with pa.ipc.open_file(str(FIRST_RELEASE)) as file:
            numbers = range(file.num_record_batches)
            self.first_release = [RolloutBatch.from_arrow(file.get_batch(number)) for number in numbers]

    def _sound_files(self) -> Iterator[bytes]:
        for compression in ("zstd", "none"):
            yield self._spool_files(self.batches, compression=compression)[1]
        opened, joined = self._spool_files(self.others)
        yield joined
        yield self._not_joined(opened)
        yield FIRST_RELEASE.read_bytes()

    def _not_joined(self, opened: bytes) -> bytes:
        """As a published file of large batches is."""
        path = self.folder / "sound"
        path.write_bytes(opened)
        with path.open("rb", buffering=0) as file:
            publish(read_whole_batches(file.fileno(), path), path, fsync=False, joined_bytes=0)
        published = path.read_bytes()
        path.unlink()
        return published

    def take(self, data: bytes) -> str:
        path = self.folder / "a-00000000.arrow"
        path.write_bytes(data)
        with SpoolReader(self.folder, duplicates="keep") as reader:
            return require_sound(list(reader), self.batches, self.others, self.first_release)


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
