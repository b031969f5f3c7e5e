"""``python -m opsd.notify``: deliver one message by apprise. ``{"url": …, "text": …}`` comes on stdin."""

from __future__ import annotations

import json
import sys

from opsd.notify.receiver import NO_APPRISE
from opsd.words import unformatted


def main() -> int:
    """0 once it is delivered, NO_APPRISE without apprise, else 1."""
    try:
        import apprise
    except ImportError:
        return NO_APPRISE
    told = json.load(sys.stdin)
    text = unformatted(told["text"])
    receiver = apprise.Apprise()
    # The first words, "RUN restarted", are the subject of a mail.
    known = receiver.add(told["url"])
    return 0 if known and receiver.notify(body=text, title=text.partition(": ")[0][:120]) else 1


if __name__ == "__main__":
    sys.exit(main())
