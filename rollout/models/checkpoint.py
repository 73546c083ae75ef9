"""A Hugging Face checkpoint folder as named float32 arrays, checked against the shapes a decoder needs.

One file (`model.safetensors`) or several with an index (`model.safetensors.index.json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from keptset.rollout.models.json_fields import read_json_object
from keptset.rollout.models.safetensors_file import SafetensorsFile
from keptset.schemas.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

# Constants that older exporters stored beside the weights; they follow from config.json.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class Checkpoint:
    """Weights of one folder. Files are mapped, and each tensor is converted when it is read.

    Errors: CheckpointError names the file and the tensor where a file is absent or damaged, a shard lacks what the
    index promises, or names or shapes differ from `shapes`.
    """

    def __init__(self, folder: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Open the folder; `shapes` gives every tensor the decoder needs, by Hugging Face name."""
        self.folder = Path(folder)
        self._files = _locate(self.folder)
        self._check(shapes)

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32; it may be a read-only view of the file."""
        return self._files[name].read(name)

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in shapes if name not in self._files]
        if missing:
            hint = "; where the head is the embedding, config.json sets tie_word_embeddings" if HEAD in missing else ""
            raise CheckpointError(
                f"{self.folder}: {len(missing)} tensors are missing, first {missing[0]!r}; "
                f"config.json asks for {len(shapes)} in all{hint}"
            )
        for name, shape in shapes.items():
            file = self._files[name]
            if file.shape(name) != shape:
                found = list(file.shape(name))
                raise CheckpointError(
                    f"{file.path}: tensor {name!r} has shape {found}; config.json asks for {list(shape)}"
                )
        for name, file in self._files.items():
            if name in shapes or name.endswith(_DERIVED_SUFFIX):
                continue
            if name == HEAD and np.array_equal(self.read(HEAD), self.read(EMBEDDING)):
                continue  # tied, and stored twice
            why = "and config.json ties the head to the embedding, which differs" if name == HEAD else "of no known use"
            raise CheckpointError(f"{file.path}: unexpected tensor {name!r}, {why}")


def _locate(folder: Path) -> dict[str, SafetensorsFile]:
    """The file each tensor lies in."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        file = SafetensorsFile(folder / SINGLE_FILE)
        return dict.fromkeys(file.names, file)
    weight_map = read_json_object(index_path).nested("weight_map").values
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{index_path}: tensor {name!r} lies in {shard!r}; a file name of this folder is expected"
            )
    shards = {shard: SafetensorsFile(folder / shard) for shard in sorted(set(weight_map.values()))}
    names = {shard: set(file.names) for shard, file in shards.items()}
    for name, shard in weight_map.items():
        if name not in names[shard]:
            raise CheckpointError(f"{folder / shard}: tensor {name!r} is missing, which {INDEX_FILE} places there")
    for shard, held in names.items():
        for name in sorted(held):
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{folder / shard}: unexpected tensor {name!r}, which {INDEX_FILE} does not place there"
                )
    return {name: shards[shard] for name, shard in weight_map.items()}
