"""The folders at the top of the repository are the package `keptset` from a checkout, an editable install and a wheel.

A user's own `scripts` and `schemas`, as folders without `__init__.py` or as modules, stay theirs in each case.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.archive import read_archive
from keptset.schemas.storage.spool import SpoolWriter

ROOMS = ("rollout", "schemas", "scripts", "trainer_bridge")
Keptset = Callable[..., "subprocess.CompletedProcess[str]"]
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*")


@pytest.fixture(scope="module")
def checkout(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone holds, so that builds leave nothing in the repository."""
    copy = tmp_path_factory.mktemp("checkout") / "keptset-main"
    shutil.copytree(repository, copy, ignore=LEFT_OUT)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build(checkout, "wheel")


@pytest.fixture(scope="module")
def installed_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as site-packages is after `pip install keptset`."""
    target = tmp_path_factory.mktemp("site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    run([*pip, "--target", target, wheel], cwd=target)
    return target


@pytest.fixture(scope="module")
def editable_install(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as site-packages is after `pip install -e .`."""
    folder = tmp_path_factory.mktemp("editable")
    run(
        [sys.executable, "-c", f"import hatchling.build; hatchling.build.build_editable({str(folder)!r})"], cwd=checkout
    )
    (editable_wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(editable_wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


def build(source: Path, target: str) -> Path:
    """Build a wheel or sdist with hatchling, which the environment has; nothing is downloaded."""
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", source / "dist"], cwd=source)
    (made,) = (source / "dist").glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


def run(command: list[str | Path], *, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed; of PYTHON* variables it sees those given here alone."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expected_files(checkout: Path) -> set[str]:
    files = {"keptset/__init__.py", "keptset/py.typed"}
    for room in ROOMS:
        files |= {f"keptset/{path.relative_to(checkout)}" for path in (checkout / room).rglob("*") if path.is_file()}
    return files


def test_a_wheel_holds_the_rooms_and_nothing_else(wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == expected_files(checkout)
    assert {name.partition(".dist-info/")[2] for name in metadata} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "tarfile", "-e", build(checkout, "sdist"), tmp_path], cwd=checkout)
    (unpacked,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as direct, zipfile.ZipFile(build(unpacked, "wheel")) as by_sdist:
        assert {file.filename: file.CRC for file in by_sdist.infolist()} == {
            file.filename: file.CRC for file in direct.infolist()
        }


def test_a_checkout_on_the_path_is_the_package(checkout: Path, tmp_path: Path) -> None:
    program = "import keptset.schemas.errors as errors, keptset; print(keptset.__file__); print(errors.__file__)"
    where = run([sys.executable, "-c", program], cwd=tmp_path, PYTHONPATH=str(checkout)).split()
    assert where == [str(checkout / "keptset.py"), str(checkout / "schemas" / "errors.py")]


def test_the_installed_command_runs(installed_wheel: Path, repository: Path, tmp_path: Path) -> None:
    answer = run([installed_wheel / "bin" / "keptset", "--version"], cwd=tmp_path, PYTHONPATH=str(installed_wheel))
    version = run([sys.executable, "-c", "import keptset; print(keptset.__version__)"], cwd=repository).strip()
    assert answer == f"keptset {version}\n"


def test_edits_reach_an_editable_install(editable_install: Path, checkout: Path, tmp_path: Path) -> None:
    new = checkout / "schemas" / "written_later.py"
    new.write_text("WRITTEN = 'later'\n")
    try:
        program = f"import site; site.addsitedir({str(editable_install)!r})\n"
        program += "from keptset.schemas import written_later; print(written_later.WRITTEN)"
        assert run([sys.executable, "-S", "-c", program], cwd=tmp_path) == "later\n"
    finally:
        new.unlink()


def users_folder(folder: Path, kind: str) -> None:
    """A project of a user's, whose own code goes by our rooms' names."""
    for name in ROOMS:
        if kind == "folders":
            (folder / name).mkdir()
            (folder / name / "mine.py").write_text("OWNER = 'user'\n")
        else:
            (folder / f"{name}.py").write_text("OWNER = 'user'\n")
    checks = [
        f"import {name}{'.mine' if kind == 'folders' else ''} as own; assert own.OWNER == 'user'" for name in ROOMS
    ]
    ours = ["import keptset.schemas.errors", "assert issubclass(keptset.schemas.errors.InvalidInput, ValueError)"]
    (folder / "main.py").write_text("\n".join([*checks, *ours, "print('both')"]))


@pytest.mark.parametrize("kind", ["folders", "modules"])
@pytest.mark.parametrize("install", ["installed_wheel", "editable_install"])
def test_a_users_own_rooms_stay_theirs(install: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    users_folder(tmp_path, kind)
    # -S leaves out this interpreter's own site-packages, which hold keptset too.
    program = f"import site; site.addsitedir({str(request.getfixturevalue(install))!r}); import main"
    assert run([sys.executable, "-S", "-c", program], cwd=tmp_path) == "both\n"


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Keptset:
    """`keptset ARGUMENTS` of an environment that holds the wheel and what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python3*/site-packages")
    for distribution in required_by(importlib.metadata.requires("keptset") or []):
        tops = {Path(file.parts[0]) for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    # With --no-index pip refuses a wheel whose requirements are not there, and fetches none of them.
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    run([*pip, "--disable-pip-version-check", wheel], cwd=folder)

    def keptset(*arguments: object) -> "subprocess.CompletedProcess[str]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [folder / "bin" / "keptset", *map(str, arguments)],
            cwd=folder,
            env={**environment, "XDG_CACHE_HOME": str(folder / "cache")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return keptset


def required_by(requirements: list[str]) -> list[importlib.metadata.Distribution]:
    """The distributions that these requirements need here, extras left out, with all that they need in turn."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = list(requirements)
    while left:
        requirement = left.pop()
        (name,) = re.findall(r"^[\w.-]+", requirement)
        if name in found or "extra ==" in requirement:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another platform or Python; pip would miss it
            continue
        left += found[name].requires or []
    return list(found.values())


@pytest.mark.parametrize("rollouts", ["spool", "archive.parquet"])
def test_the_bare_wheel_audits(bare: Keptset, repository: Path, rollouts: str) -> None:
    done = bare("audit", repository / "tests" / "data" / "schema_v1" / rollouts)
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 responses, 11 tokens (9 sampled)" in done.stdout


def test_the_bare_wheel_finds_a_planted_fault(bare: Keptset, repository: Path, tmp_path: Path) -> None:
    (batch,) = read_archive(repository / "tests" / "data" / "schema_v1" / "archive.parquet")
    at = batch.arrow.schema.get_field_index("behavior_logprobs")
    field = batch.arrow.schema.field(at)
    logprobs: list[Any] = [row and [b and b + 9 for b in row] for row in batch.arrow.column(at).to_pylist()]
    with SpoolWriter(tmp_path / "spool") as writer:
        writer.append(RolloutBatch.from_arrow(batch.arrow.set_column(at, field, pa.array(logprobs, field.type))))
    done = bare("audit", tmp_path / "spool", "--json-file", tmp_path / "audit.json")
    assert (done.returncode, done.stderr) == (1, "")
    assert "logprob" in done.stdout and '"kind": "logprob"' in (tmp_path / "audit.json").read_text()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--html", "page.html", "keptset: --html needs Jinja: pip install 'keptset[report]'\n"),
        ("--model", ".", "keptset: an audit with --model runs the model: install keptset[cpu] or keptset[gpu], or "),
        ("--ray", "", "keptset: --ray needs the package ray: pip install 'keptset[ray]'\n"),
    ],
)
def test_what_the_bare_wheel_cannot_do_names_what_to_install(
    bare: Keptset, repository: Path, option: str, value: str, said: str
) -> None:
    done = bare("audit", repository / "tests" / "data" / "schema_v1" / "archive.parquet", f"{option}={value}")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(said)


def test_an_audit_loads_none_of_the_large_packages_that_are_there(repository: Path, tmp_path: Path) -> None:
    program = f"""
import sys
from keptset.scripts import main
sys.argv = ["keptset", "audit", {str(repository / "tests" / "data" / "schema_v1")!r} + "/spool"]
try:
    main.main()
finally:
    print("loaded:", [name for name in ("paddle", "ray", "torch", "transformers") if name in sys.modules])
"""
    answer = run([sys.executable, "-c", program], cwd=repository, XDG_CACHE_HOME=str(tmp_path))
    assert answer.splitlines()[-1] == "loaded: []"
