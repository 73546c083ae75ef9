"""Other engines' output, spoilt: what is let through keeps the contract, and holds no number that was not recorded."""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from contract import violations
from mutations import mutate_bytes, mutate_tree
from trial import Fault, Target

from keptset.schemas.adapters import Stated, adapt_files, adapter_for, from_transformers
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch

ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"


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

    name, suffix = "prime_rl", ".msgpack"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self.name)

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
