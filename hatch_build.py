"""How the folders at the top of the repository become the package `keptset`.

A wheel maps each folder to `keptset/<folder>`, keptset.py to `keptset/__init__.py`. An editable install puts `.links`
on the path: it holds nothing but a `keptset` made of links to the same places. The repository itself on the path would
let our `schemas` and `scripts` win against a user's own folders of those names, and hatchling's static `force-include`
would be copied into an editable install, where edits do not reach it. Type checkers read `.links` as well.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACES = {
    "keptset.py": "__init__.py",
    "py.typed": "py.typed",
    "rollout": "rollout",
    "schemas": "schemas",
    "scripts": "scripts",
    "trainer_bridge": "trainer_bridge",
}


class KeptsetHook(BuildHookInterface):
    """Lays out a wheel (version `standard`) or an editable install (version `editable`)."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        if version == "editable":
            make_links(Path(self.root))
        else:
            build_data["force_include"].update({source: f"keptset/{target}" for source, target in PLACES.items()})


def make_links(root: Path) -> None:
    """Make `root/.links/keptset`; its links are relative, so that a checkout may be moved."""
    package = root / ".links" / "keptset"
    package.mkdir(parents=True, exist_ok=True)
    for source, target in PLACES.items():
        link = package / target
        if not link.is_symlink():
            link.symlink_to(Path("..", "..", source))
