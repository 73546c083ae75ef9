"""What README and docs say must be so: their example runs, their tree and their links exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def tree_entries(readme: str) -> list[str]:
    """Paths of the annotated tree; two spaces of indent are one folder deeper."""
    (tree,) = re.findall(r"## The tree\s+```\n(.*?)```", readme, re.DOTALL)
    entries: list[str] = []
    folder = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith("  "):
            entries.append(folder + name)
        else:
            folder = name if name.endswith("/") else ""
            entries.append(name)
    return entries


def test_the_example_of_the_readme_prints_what_the_readme_says() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    said = re.search(r"It prints `(\[[^`]*)`.*?and `(\[[^`]*)`", readme, re.DOTALL)
    assert said is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert printed.getvalue().split("\n") == [said[1], said[2], ""]


def test_every_entry_of_the_tree_exists_and_every_folder_of_the_package_has_one() -> None:
    entries = tree_entries((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    missing = [entry for entry in entries if not (REPOSITORY / entry).exists()]
    assert missing == []
    rooms = [REPOSITORY / room for room in ("schemas", "rollout", "trainer_bridge", "scripts")]
    subfolders = [path for room in rooms for path in room.iterdir() if path.is_dir() and path.name[0] not in "_."]
    folders = {f"{path.relative_to(REPOSITORY)}/" for path in (*rooms, *subfolders)}
    assert folders - set(entries) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in [anchor(heading) for heading in headings], f"{page.name}: {target}"


def test_every_module_that_the_architecture_lists_exists() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    for room in ("schemas", "rollout", "trainer_bridge"):
        section = re.search(rf"^### {room}$(.*?)^##", page, re.MULTILINE | re.DOTALL)
        assert section is not None
        cells = re.findall(r"^\| (`[^|]+) \|", section[1], re.MULTILINE)
        names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
        assert names
        assert [name for name in names if not (REPOSITORY / room / name).exists()] == []
