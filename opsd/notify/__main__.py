"""``python -m opsd.notify``: deliver one message by apprise.

stdin has ``{"url", "title", "text", "type"}``; without ``text`` it is only checked whether apprise knows the URL.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

from opsd.notify.receiver import NO_APPRISE, UNKNOWN
from opsd.words import unformatted

EASY_VICTIM = "500"
"""Of the OOM killer: this process shares the memory limit of the agent, and the agent is the one to keep."""


def main() -> int:
    """0 once it is delivered, NO_APPRISE without apprise, UNKNOWN if apprise does not know the URL, else 1."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(EASY_VICTIM, encoding="ascii")
    try:
        import apprise
    except ImportError:
        return NO_APPRISE
    told = json.load(sys.stdin)
    receiver = apprise.Apprise()
    if not receiver.add(_closing(told["url"])):
        return UNKNOWN
    if told.get("text") is None:
        return 0
    text, title = unformatted(told["text"]), unformatted(told["title"], 120)
    return 0 if receiver.notify(body=text, title=title, notify_type=told["type"]) else 1


def _closing(url: str) -> str:
    """``url``, where one of PagerDuty closes an incident with the message that it is over, unless it says otherwise."""
    path, mark, query = url.partition("?")
    if not path.lower().startswith("pagerduty:") or "action=" in query:
        return url
    return f"{url}{'&' if query else '' if mark else '?'}action=map"


if __name__ == "__main__":
    sys.exit(main())
