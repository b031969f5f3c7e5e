"""The check of an adapter before each checkpoint: whether this generation of the run may still write.

Ranks of a node that was cut off or frozen may go on after the run has begun a later generation without them. Their
writes would interfere with it, so they exit instead, with a sentence and exit code 76.
"""

from __future__ import annotations

import os
import sys
import time

from opsd.checkpoints.claims import EXIT_FENCED, ClaimError, Fence, Fenced
from opsd.client import Reporter

LIMIT_S = 600.0
"""How long to wait for a shared folder that cannot be read."""
POLL_S = 1.0


class Gate:
    """Guards the checkpoints of this rank; without effect if ``opsd launch`` did not start it."""

    def __init__(self, reporter: Reporter, fence: Fence | None = None, limit_s: float = LIMIT_S) -> None:
        self._reporter, self._limit_s = reporter, limit_s
        self._fence = fence or Fence.of(os.environ)

    def pass_through(self) -> None:
        """Return if a checkpoint may be written.

        Raises SystemExit if a later generation was claimed, and ClaimError if that was unknown for ``limit_s`` seconds,
        after which the run should be restarted.
        """
        deadline = time.monotonic() + self._limit_s
        while self._fence is not None:
            try:
                self._fence.check()
                break
            except Fenced as error:
                print(f"opsd: {error.strerror}", file=sys.stderr, flush=True)
                sys.exit(EXIT_FENCED)
            except ClaimError:
                if time.monotonic() >= deadline:
                    raise
            with self._reporter.phase("checkpoint"):  # the wait is bounded here; the launcher need take it for no hang
                time.sleep(POLL_S)
