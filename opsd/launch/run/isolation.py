"""Timeouts of a launcher without the others, without a leader, or without the run's folder."""

from __future__ import annotations

import time
from collections.abc import Callable

from opsd import exitcodes
from opsd.launch.claims.group import Group
from opsd.launch.claims.tcp_group import LASTING
from opsd.launch.io.loop import Timer
from opsd.launch.run.generation_change import GenerationChange
from opsd.launch.run.shutdown import Shutdown
from opsd.launch.run.supervisor import Supervisor

WATCH_S = 0.25
LASTING_S, SILENT_S = 30.0, 1800.0
"""How long the run's folder may fail with a lasting error, and with any."""


class IsolationTimeouts:
    """``stuck`` returns whether the ranks here make no progress.

    Without a reachable leader the launcher exits after ``join_s`` seconds at the start, and after ``isolated_s`` later.
    """

    def __init__(
        self,
        node: Supervisor,
        group: Group,
        change: GenerationChange,
        shutdown: Shutdown,
        stuck: Callable[[], bool],
        *,
        join_s: float,
        isolated_s: float,
    ) -> None:
        self._node = node
        self._group = group
        self._change = change
        self._shutdown = shutdown
        self._stuck = stuck
        self._join_s = join_s
        self._isolated_s = isolated_s
        self._alone: Timer | None = None
        self._since = self._alone_s = self._unwell_s = 0.0

    def watch(self) -> None:
        """Start the timers."""
        self._node.loop.every(WATCH_S, self._watch_folder)
        self._node.loop.later(self._join_s, self._nobody_came)

    def _nobody_came(self) -> None:
        if self._change.plan is None and self._group.leader is None:
            why = f"fewer launchers than the run needs have come within {self._join_s:g} s"
            self._shutdown.leave(exitcodes.FAILED, why)

    def _watch_folder(self) -> None:
        """Running ranks need no folder; a pause delays a recovery, a lasting error ends the launcher."""
        led = self._group.leader not in (None, self._group.own.name)
        well = not self._group.replacing and (self._node.generation.running or (led and not self._change.between))
        self._unwell_s = 0.0 if well else self._unwell_s + WATCH_S
        error = self._group.folder_error
        lasting = error is not None and error.errno in LASTING
        unbegun = self._change.plan is None and not self._change.between
        limit_s = 0.0 if lasting and unbegun else LASTING_S if lasting else SILENT_S
        if min(self._group.folder_silent_s, self._unwell_s) > limit_s:
            why = (error.strerror or str(error)) if error is not None else f"no answer for {SILENT_S:g} s"
            self._shutdown.finish(exitcodes.FAILED, f"the run's folder cannot be used: {why}")

    def leader_lost(self) -> None:
        """There is no leader; wait for another one, once the run has begun."""
        if self._change.plan is not None and self._alone is None:
            self._since, self._alone_s = time.monotonic(), 0.0
            self._alone = self._node.loop.later(self._isolated_s, self._give_up)

    def leader_found(self) -> float:
        """There is a leader; returns for how many seconds there was none."""
        if self._alone is None:
            return 0.0
        self._alone.cancel()
        self._alone = None
        return time.monotonic() - self._since

    def _give_up(self) -> None:
        """Exit, unless ranks make progress here, or the folder pauses: then nobody can lead, and all wait."""
        self._alone_s += self._isolated_s
        if self._group.folder_silent_s > self._isolated_s / 2 or (not self._stuck() and self._alone_s < SILENT_S):
            self._alone = self._node.loop.later(self._isolated_s, self._give_up)
        else:
            why = f"no leader of the run within reach for {self._isolated_s:g} s"
            self._node.end(lambda: self._shutdown.leave(exitcodes.REQUEUE, why))
