"""The exit of a launcher: at once, or as the leader, after the others and the job have been told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from opsd import exitcodes
from opsd.launch.claims.group import Group
from opsd.launch.io.loop import Timer
from opsd.launch.io.reporting import print_message
from opsd.launch.run.supervisor import Supervisor

LEADER_LINGER_S = 1.0
"""How long the leader stays for the others after the end."""
CLAIM_S = 20.0
"""How long the folder may take to accept the end of the run."""


class BatchJob(Protocol):
    """The batch job of the run. Methods may block and are called in a thread."""

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> bool:
        """The run has ended with ``code``, without the nodes ``lost``; ``unfit`` ones are to be avoided.

        May not return, because it ends the job. False if that was left to the batch script.
        """


class Shutdown:
    """The exit of this launcher. ``ending`` is called first, when the end is certain."""

    def __init__(self, node: Supervisor, group: Group, job: BatchJob, ending: Callable[[], None]) -> None:
        self.begun = False
        self._node = node
        self._group = group
        self._job = job
        self._ending = ending
        self._ended: tuple[int, str] | None = None
        self._bad_nodes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._unclaimed: Timer | None = None
        self._pending_exit: tuple[int, str] | None = None
        self._has_ended_job = False

    def over(self, code: int, reason: str, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
        """This launcher, the leader, is about to claim the end of the run."""
        self._ended, self._bad_nodes = (code, reason), (lost, unfit)
        self._unclaimed = self._node.loop.later(CLAIM_S, lambda: self._end_unclaimed(code, reason))

    def leader_changed(self) -> None:
        """Another launcher leads, or this one again: the run may go on."""
        if self._unclaimed is not None:
            self._unclaimed.cancel()
            self._unclaimed = None

    def _end_unclaimed(self, code: int, reason: str) -> None:
        if self._group.holds and not self.begun:
            print_message(f"the run's folder does not take the end of the run within {CLAIM_S:g} s; ending without")
            self.finish(code, reason)

    def finish(self, code: int, reason: str) -> None:
        """End the ranks here, then exit."""
        if not self.begun:
            self.begun = True
            self._ending()
            self._node.end(lambda: self.leave(code, reason), gracefully=code == exitcodes.OK)

    def interrupt(self) -> None:
        """Let SIGINT end the ranks, then exit."""
        if not self.begun:
            self._ending()
        self.begun = True
        self._group.leave()
        self._node.interrupt(lambda: self.leave(exitcodes.INTERRUPTED, "interrupted by SIGINT"))

    def leave(self, code: int, reason: str) -> None:
        """Exit, once the ranks have ended. The leader exits last, after the job knows of the end.

        This applies to the end of the run that this launcher has claimed itself: after another leader took over, the
        run may go on.
        """
        self.begun = True
        if self._ended != (code, reason):
            self._node.finish(code, reason)
        elif self._pending_exit is None:
            self._pending_exit = (code, reason)
            self._wait_for_others(time.monotonic() + LEADER_LINGER_S)

    def _wait_for_others(self, limit: float) -> None:
        if len(self._group.alive) <= 1 or time.monotonic() > limit:
            self._tell_job()
        else:
            self._node.loop.later(0.05, lambda: self._wait_for_others(limit))

    def _tell_job(self) -> None:
        assert self._pending_exit is not None
        (lost, unfit), (code, reason) = self._bad_nodes, self._pending_exit

        def told(has_ended_job: bool | OSError) -> None:
            self._has_ended_job = has_ended_job is True
            self._node.finish(code, reason)

        self._node.loop.run_in_thread(lambda: self._job.end(code, lost, unfit), told)

    def last_look(self) -> None:
        """The batch host may have died since the job learnt of the end."""
        if self._pending_exit is not None and not self._has_ended_job:
            self._job.end(self._pending_exit[0], *self._bad_nodes)

    def exit_now(self) -> None:
        """Exit now if the end has come: Slurm is ending the job, as this launcher has requested."""
        if self._pending_exit is not None:
            self._node.finish(*self._pending_exit)
