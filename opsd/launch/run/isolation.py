"""How long a launcher goes on without the others, without a leader, or without the run's folder."""

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
"""How long the run's folder may be unusable in a way that does not go away by itself, and in any way."""


class IsolationTimeouts:
    """The limits of one launcher. ``stuck`` says whether the ranks here make no progress.

    Without a leader within reach it ends after ``join_s`` seconds at the beginning, and after ``isolated_s`` later.
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
        """Begin: the launcher looks for the others from now on."""
        self._node.loop.every(WATCH_S, self._watch_folder)
        self._node.loop.later(self._join_s, self._nobody_came)

    def _nobody_came(self) -> None:
        if self._change.plan is None and self._group.leader is None:
            why = f"fewer launchers than the run needs have come within {self._join_s:g} s"
            self._shutdown.leave(exitcodes.FAILED, why)

    def _watch_folder(self) -> None:
        """A run that goes on needs no folder; one that pauses delays a recovery, one that cannot be used ends it."""
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
        """Nobody leads; wait for somebody who does, once the run has begun."""
        if self._change.plan is not None and self._alone is None:
            self._since, self._alone_s = time.monotonic(), 0.0
            self._alone = self._node.loop.later(self._isolated_s, self._give_up)

    def leader_found(self) -> float:
        """There is a leader; for how many seconds the ranks here, if they are gone, were so for want of one."""
        if self._alone is None:
            return 0.0
        self._alone.cancel()
        self._alone = None
        return time.monotonic() - self._since

    def _give_up(self) -> None:
        """Leave, unless ranks go on here, or the folder pauses: nobody can lead then, and everybody waits."""
        self._alone_s += self._isolated_s
        if self._group.folder_silent_s > self._isolated_s / 2 or (not self._stuck() and self._alone_s < SILENT_S):
            self._alone = self._node.loop.later(self._isolated_s, self._give_up)
        else:
            why = f"no leader of the run within reach for {self._isolated_s:g} s"
            self._node.end(lambda: self._shutdown.leave(exitcodes.REQUEUE, why))
