"""The ledgers of the runs of this node, for the page of a job.

A ledger is computed from the files of the run, which may be long and may lie on a file system that hangs. A separate
process does it on demand, and requests do not wait: they get the last result. Where the files are says the run's user,
so they are opened with that user's rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from opsd.agent.lanes import start_thread
from opsd.collectors.base import RunFact

FRESH_S: Final = 60.0
REST: Final = 50.0
"""A ledger is not computed again before this many times its duration, which limits the cost to 2 % of a core."""
DEADLINE_S: Final = 30.0
END_S: Final = 1.0
MAX_MEMORY: Final = 160 << 20
"""Memory limit in bytes, as the process is in the agent's control group of 256 MiB. Allows 16 MiB of metrics.jsonl."""
KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class LedgerResult:
    """A ledger as ``opsd ledger --json`` prints it, with the ``curves`` of the run; or None and the reason."""

    ledger: Mapping[str, Any] | None
    problem: str = ""


class Ledgers:
    """The last ledgers. Thread-safe."""

    def __init__(
        self,
        make: Callable[[Path, int], LedgerResult] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._clock = make or make_ledger, clock
        self._made: dict[tuple[str, int], tuple[LedgerResult, float]] = {}
        self._busy = False
        self._guard = threading.Lock()

    def of(self, run: RunFact) -> LedgerResult:
        """The ledger of ``run``, at most about a minute old; the first call says that it is being computed."""
        if run.user is None:
            return LedgerResult(None, "it is not known whose run this is")
        which = run.folder, run.user
        with self._guard:
            made, stale_at = self._made.get(which, (LedgerResult(None, "it is being made: load the page again"), 0.0))
            if self._clock() >= stale_at and not self._busy:
                self._busy = start_thread("ledger", partial(self._renew, *which))
        return made

    def _renew(self, folder: str, user: int) -> None:
        began, made = self._clock(), LedgerResult(None, "it could not be made: the agent's log has why")
        try:
            made = self._make(Path(folder), user)
        finally:
            self._keep((folder, user), made, began)

    def _keep(self, which: tuple[str, int], made: LedgerResult, began: float) -> None:
        with self._guard:
            self._busy = False
            ended = self._clock()
            self._made.pop(which, None)
            self._made[which] = made, ended + max(FRESH_S, REST * (ended - began))
            while len(self._made) > KEPT:
                del self._made[next(iter(self._made))]


def make_ledger(folder: Path, user: int) -> LedgerResult:
    """The ledger of the run of ``user`` in ``folder``, made by a process of the lowest priority and within limits."""
    try:
        maker = subprocess.Popen(
            [sys.executable, "-P", "-m", "opsd.ledger.for_user", str(user), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        return LedgerResult(None, f"opsd ledger cannot be started: {error.strerror}")
    try:
        # The service's system call filter forbids it; its unit already has a lower priority than training.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, maker.pid, 19)
        resource.prlimit(maker.pid, resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
        out, err = maker.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return LedgerResult(None, f"{folder} does not answer")
    except OSError as error:
        return LedgerResult(None, f"opsd ledger cannot be kept within its limits: {error.strerror}")
    finally:
        _end(maker)
    if maker.returncode:
        said = err.strip().rpartition("\n")[2]
        too_long = f"the run is too long for the agent: opsd ledger {folder} has it"
        return LedgerResult(None, too_long if said.startswith("MemoryError") else said or "opsd ledger was killed")
    return LedgerResult(json.loads(out))


def _end(maker: subprocess.Popen[str]) -> None:
    """End ``maker`` without waiting; one that a hanging file system blocks ends when the file system responds."""
    if maker.poll() is None:
        maker.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            maker.wait(END_S)
