"""What the launcher says to people, on stderr."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """One line or paragraph; nobody listening any more is no reason to end a run."""
    with contextlib.suppress(OSError, ValueError):
        print(f"opsd launch: {text}", file=sys.stderr, flush=True)
