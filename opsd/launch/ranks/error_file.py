"""The file in which a rank leaves the exception it ended with."""

from __future__ import annotations

import json
from pathlib import Path

from opsd.launch.ranks.failure import RankError


def read_error(path: Path) -> tuple[RankError, float] | None:
    """The exception in a rank's error file and its wall second; None without one.

    The file is the one of ``worker.py``, or of a program that uses torch's ``@record`` itself.
    """
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(message, str):
            return RankError("Error", message, ""), path.stat().st_mtime
        extra = message["extraInfo"]
        name, _, text = str(message["message"]).partition(": ")
        t = float(extra.get("at") or extra["timestamp"])
        return RankError(str(extra.get("type") or name), text, str(extra.get("where", ""))), t
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
