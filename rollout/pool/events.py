"""What happens to a pool, as log records that people read and programs can take apart.

Every record of the logger `keptset.rollout` has one event: its message is `event name=value ...`, its attributes
`event` and `fields` hold the same as data.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone

LOGGER = logging.getLogger("keptset.rollout")


def log_event(level: int, event: str, **fields: object) -> None:
    """One event. Values are those that JSON has."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s", _message(event, fields), extra={"event": event, "fields": fields})


def _message(event: str, fields: dict[str, object]) -> str:
    """
    >>> _message("actor_lost", {"actor": 1, "reason": "it is dead"})
    'actor_lost actor=1 reason="it is dead"'
    """
    return " ".join([event, *(f"{name}={json.dumps(value, default=str)}" for name, value in fields.items())])


class JsonLines(logging.Formatter):
    """One JSON object per record: time, level, event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.getMessage()),
            **getattr(record, "fields", {}),
        }
        return json.dumps(told, default=str, ensure_ascii=False)
