"""The table in docs/audit.md of what the audit sees of each kind of finding, made from what it says itself.

`python -m keptset.scripts.audit_docs docs/audit.md` brings the page up to date; a test holds that it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from keptset.schemas import describe
from keptset.trainer_bridge.audit.advice import ADVICE


def advice_table() -> str:
    """Every kind of finding: what is seen, what cannot be, how to act."""
    rows = [(f"`{kind.value}`", advice.sees, advice.cannot, advice.act) for kind, advice in ADVICE.items()]
    return describe.table(("kind", "what the audit sees", "what it cannot see", "what to do"), rows)


def up_to_date(page: str) -> str:
    """The page with its table as the code has it now."""
    return describe.up_to_date(page, {"advice": advice_table})


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(up_to_date(path.read_text(encoding="utf-8")), encoding="utf-8")
