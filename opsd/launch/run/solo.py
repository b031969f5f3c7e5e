"""Decides about a run on one node: generations of ranks, one after the other, until it is done or must stop."""

from __future__ import annotations

import time
from collections.abc import Sequence

from opsd import exitcodes
from opsd.checkpoints.lease import Fenced
from opsd.launch.claims.outside import WatchedFence
from opsd.launch.hangs.hang import Hang
from opsd.launch.hangs.hang_watch import hang_fields
from opsd.launch.io.aside import aside
from opsd.launch.io.control import Request
from opsd.launch.io.messages import say
from opsd.launch.ranks.failure import Failure, RestartPolicy, first_cause
from opsd.launch.ranks.membership import SingleNode
from opsd.launch.ranks.postmortem import PROGRAM_NOT_FOUND, explain, report_exit
from opsd.launch.ranks.ranks import Rank
from opsd.launch.ranks.watch import Recovery
from opsd.launch.run.run_control import Failed
from opsd.launch.run.supervisor import Supervisor

FENCE_S = 5.0
"""How often is looked whether another copy of the run has begun."""


class Solo:
    """The ``RunControl`` of a launcher without fellows; its first generation is ``first_number``."""

    def __init__(
        self,
        node: Supervisor,
        membership: SingleNode,
        policy: RestartPolicy,
        fence: WatchedFence,
        first_number: int,
        *,
        fence_s: float = FENCE_S,
    ) -> None:
        self._node = node
        self._membership = membership
        self._policy = policy
        self._fence = fence
        self._next = first_number
        self._claiming = False
        self._over = False
        self._fence_s = fence_s
        self._restarts = 0

    def start_run(self) -> None:
        """Start the first generation."""
        self._start()
        self._watch_fence()

    def _start(self) -> None:
        self._claiming = True
        number = self._next
        aside(self._node.loop, lambda: self._fence.claim(number), self._claimed)

    def _claimed(self, mine: bool | OSError) -> None:
        self._claiming = False
        if self._over or self._node.stopping:
            return
        if isinstance(mine, OSError):
            self._end_run(exitcodes.FAILED, f"the run's folder cannot be written: {mine.strerror or mine}")
        elif mine:
            self._next += 1
            self._begin(self._next - 1)
        else:
            self._overtaken()

    def _begin(self, number: int) -> None:
        try:
            place = self._membership.assign()
        except OSError as error:
            self.cannot_start(f"the ranks cannot be started: {error}")
        else:
            self._node.start(number, place, self._restarts)

    def _watch_fence(self) -> None:
        self._node.loop.later(self._fence_s, self._look)

    def _look(self) -> None:
        number = self._node.generation.number
        if self._claiming:
            self._watch_fence()
        else:
            aside(self._node.loop, lambda: self._fence.check(number), self._watched)

    def _watched(self, found: OSError | None) -> None:
        if isinstance(found, Fenced) and not self._over:
            self._overtaken()
        else:
            self._watch_fence()

    def _overtaken(self) -> None:
        """Only the newer copy may write: what the ranks here did from now on would be lost."""
        folder = self._node.folders.folder
        self._end_run(exitcodes.FENCED, f"another copy of this run has begun in {folder}; this one stops")

    def cannot_start(self, reason: str) -> None:
        """Give up: what hinders one process now will hinder the next."""
        self._end_run(exitcodes.FAILED, reason)

    def failed(self, found: Sequence[Failed]) -> None:
        """Restart all ranks, unless the first cause of the failures will not go away by that."""
        cause = first_cause([failure for failure, _ in found])
        culprit = next(rank for failure, rank in found if failure is cause)
        for failure, rank in sorted(found, key=lambda pair: pair[0] is not cause):
            report_exit(self._node.events, rank, failure, culprit=failure is cause)
        if cause.error is not None and cause.error.type == PROGRAM_NOT_FOUND:
            self._end_run(exitcodes.NOT_FOUND, cause.error.message)
        else:
            self._recover(cause, culprit, culprit.ended or time.monotonic())

    def hung(self, hang: Hang) -> None:
        """Restart all ranks, unless the same hang has come too often."""
        self._node.events.emit("hang_detected", **hang_fields(hang))
        self._node.accept_hang(hang.phase, hang.score)
        ranks = self._node.generation.ranks
        rank = next((rank for rank in ranks if rank.rank == hang.rank), ranks[0])
        cause = Failure(
            rank.rank, f"a hang in {hang.phase}", "hang", time.time(), hang.step, hang.phase, detail=hang.reason
        )
        self._recover(cause, rank, time.monotonic())

    def _recover(self, cause: Failure, culprit: Rank, noticed: float) -> None:
        node = self._node
        if node.stopping:
            self._end_run(exitcodes.FAILED, f"rank {cause.rank} failed while the run was stopping: {cause.cause}")
            return
        verdict = self._policy.judge(cause, furthest=node.progress.furthest, committed=node.progress.committed)
        if verdict is not None:
            text = explain(verdict, cause, node.settings.node, str(culprit.log), culprit.log_tail())
            self._end_run(verdict.code, text)
            return
        say(f"rank {cause.rank} failed with {cause.cause}; restarting all ranks")
        self._restart(noticed)

    def _restart(self, noticed: float) -> None:
        progress = self._node.progress
        self._node.set_state("restarting")
        self._restarts += 1
        previous = progress.recovery.previous_step if progress.recovery else progress.furthest
        progress.recovery = Recovery(noticed, previous)
        self._node.end(self._start)

    def ended(self) -> None:
        """The run is over, or has stopped as it was told to."""
        if self._node.stopping:
            self._requeue()
        else:
            self._node.finish(exitcodes.OK, "all ranks finished")

    def asked_to_stop(self, by: str) -> None:
        """Checkpoint, stop, and leave the rest to the next launcher of the run."""
        between = self._claiming or self._node.state == "restarting"
        self._node.stop(by)
        if between:
            self._node.end(self._requeue)

    def _requeue(self) -> None:
        by = self._node.stopping
        self._node.events.emit("requeued", signal=by, step=self._node.progress.furthest)
        self._node.finish(exitcodes.REQUEUE, f"stopped in good order after {by}")

    def stop_too_slow(self, reason: str) -> None:
        """Fail: the newest checkpoint may be missing."""
        self._end_run(exitcodes.FAILED, reason)

    def interrupted(self) -> None:
        """Let the ranks end of it, and exit."""
        self._over = True
        self._node.interrupt(lambda: self._node.finish(exitcodes.INTERRUPTED, "interrupted by SIGINT"))

    def request(self, request: Request) -> Request:
        """Answer ``status`` (with nothing to add) and ``restart``."""
        command = request.get("cmd")
        if command == "status":
            return {}
        if command == "swap":
            return {"ok": False, "error": "this run has one node and no spare; start it with opsd launch --nnodes"}
        if command != "restart":
            return {"ok": False, "error": f"unknown command {command!r}; known are status, restart, stop, swap"}
        if self._claiming or self._node.ending or self._node.stopping:
            return {"ok": False, "error": f"the run is {self._node.state}"}
        self._node.events.emit("restart_requested", reason=str(request.get("reason", "")))
        self._restart(time.monotonic())
        return {"ok": True}

    def close(self) -> None:
        """Nobody has to be told."""

    def _end_run(self, code: int, reason: str) -> None:
        self._over = True
        self._node.end(lambda: self._node.finish(code, reason))
