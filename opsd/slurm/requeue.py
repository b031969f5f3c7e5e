"""Putting a job back into the queue without the nodes that it lost, and having it start at once.

Slurm by itself takes minutes: it notices a dead node after SlurmdTimeout, waits for that node before the job is back in
the queue, and then lets it wait two minutes more. So whoever may update nodes takes the dead ones down; an ordinary
user shrinks the job to the living ones, which its owner may do as long as the batch host lives, and keeps it off the
dead ones. Then the start time is set as soon as the job is pending, because Slurm overwrites what was set before.

All that is done is seen in Slurm itself, so any number of processes may attend to the same requeue, also after a
restart of slurmctld, and it happens once: the number of restarts tells.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from opsd.slurm.check import longest_until_noticed, may_update_nodes
from opsd.slurm.drain import take_down
from opsd.slurm.hostlist import compress
from opsd.slurm.port import Job, Slurm, SlurmDenied, SlurmRejected, SlurmUnavailable

LIMIT_S = 900.0
"""Longer than Slurm itself takes with its default settings (about 9 minutes)."""
POLL_S = 0.1
RETRY_S = 2.0
"""How long a controller that does not answer is left alone."""
SETTLE_S = 5.0
"""How long the scheduler has to say what it makes of the job."""
RESTART_GAP_S = 2.1
"""So long lies between the stop of a job and its next start at least.

A slurmd takes a start for one of the old job if it comes within the second, by its own clock, in which that was stopped
("already killed, do not launch batch job"), and Slurm then gives the job up.
"""
REASON = "opsd:requeue node_lost"
_ALIVE = ("running", "configuring", "suspended", "stopped", "resizing", "signaling", "stage_out")
_STOPPING = ("completing", "requeued", "requeue_fed")
_HELD_STATES = ("requeue_hold", "special_exit")
_HOLD = re.compile(r"h[eo]ld", re.IGNORECASE)
"""In the reasons of pending jobs: JobHeldUser, JobHoldMaxRequeue, "job requeued in held state" …

Not in BadConstraints: that hold is Slurm's own, for the nodes that the job is to avoid.
"""

NextStep = Literal["requeue", "wait", "held", "start", "done"]


@dataclass(frozen=True, slots=True)
class ExcludedNodes:
    """The nodes that the job is not to come back on.

    ``lost`` ones do not answer: they are also taken down, with ``reason``, where that is allowed. ``unfit`` ones are
    only avoided; draining them is for the agent to decide.
    """

    lost: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    reason: str = REASON

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.lost, *self.unfit)


@dataclass(frozen=True, slots=True)
class Requeued:
    """The state of the job: pending and free to start, running again, or stopping while another process goes on.

    ``avoided`` are nodes that the job was told to avoid. ``handed_over``: the rest is up to another process. ``held``
    is why someone else has put the job on hold; then the job was only stopped if it ran.
    """

    job: int
    state: str
    restarts: int
    avoided: tuple[str, ...] = ()
    handed_over: bool = False
    held: str = ""


def next_step(job: Job, restarts: int) -> NextStep:
    """What is to be done with a job that had been restarted ``restarts`` times when the requeue was decided. Pure.

    Raises SlurmRejected if the job has ended.
    """
    if job.state in _STOPPING:
        return "wait"
    if job.state in _HELD_STATES or (job.state == "pending" and _HOLD.search(job.reason)):
        return "held"
    if job.state == "pending":
        return "start"
    if job.state in _ALIVE:
        return "requeue" if job.restarts <= restarts else "done"
    raise SlurmRejected(f"job {job.id} has ended ({job.state}) and cannot be put back into the queue; submit it again")


def is_alive(job: Job) -> bool:
    """Whether the job runs, or is about to, and nobody ends it."""
    return job.state in _ALIVE


def is_stopping(job: Job) -> bool:
    """Whether Slurm is ending the job, for good or to run it again."""
    return job.state in _STOPPING


def requeue_now(
    slurm: Slurm,
    job: int,
    without: ExcludedNodes = ExcludedNodes(),
    *,
    restarts: int | None = None,
    defer_s: float = 0.0,
    only_stop: bool = False,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = print,
) -> Requeued:
    """Requeue ``job`` and have it start as soon as it can; returns when nothing is left to do for it.

    ``restarts`` is the job's restart count when the requeue was decided (SLURM_RESTART_COUNT): a job that was requeued
    since then is left alone. None is the present count. For ``defer_s`` seconds the requeue itself is left to another
    process, unless the job has no steps any more. With ``only_stop``, that process also does what comes after the job
    has stopped. A hold that someone else has set is never released. While the controller is down, requests are
    repeated.

    Raises SlurmError: the job belongs to another user, is unknown or has ended, a node is not one of the job's, or
    ``limit_s`` seconds have passed and the job does not just wait for its nodes.
    """
    began = clock()
    attempt = _Attempt(slurm, job, without, restarts, only_stop, clock, now, say)
    while True:
        pause = POLL_S
        try:
            requeued = attempt.step(may_requeue=clock() - began >= defer_s)
            if requeued is not None:
                return requeued
        except SlurmUnavailable as error:
            attempt.tell(f"Slurm does not answer and will be asked again: {error}")
            pause = RETRY_S
        if clock() - began > limit_s and not attempt.waits:
            raise SlurmUnavailable(
                f"job {job} is not back in the queue after {limit_s:g} s; see scontrol show job {job}"
            )
        sleep(pause)


class _Attempt:
    """One process's part in a requeue. What it remembers saves questions; nothing is wrong if it is forgotten."""

    def __init__(
        self,
        slurm: Slurm,
        job: int,
        without: ExcludedNodes,
        restarts: int | None,
        only_stop: bool,
        clock: Callable[[], float],
        now: Callable[[], float],
        say: Callable[[str], object],
    ) -> None:
        self._slurm = slurm
        self._job = job
        self._without = without
        self._restarts = restarts
        self._brief = only_stop
        self._clock = clock
        self._now = now
        self._say = say
        self._told = ""
        self.waits = False
        """Whether the job came back into the queue and could not run before Slurm had noticed how its nodes are."""
        self._may: bool | None = None
        self._down = not without.lost
        self._avoided: tuple[str, ...] = ()
        self._settling: float | None = None
        self._look_at = float("-inf")
        self._stopped: float | None = None

    def tell(self, sentence: str) -> None:
        if sentence != self._told:
            self._told = sentence
            self._say(sentence)

    def step(self, *, may_requeue: bool) -> Requeued | None:
        """Look, and do the next thing; the outcome once there is nothing more to do."""
        found = self._slurm.jobs([self._job])
        if not found:
            raise SlurmRejected(f"there is no job {self._job} that waits or runs and that this user may see")
        job = found[0]
        if self._restarts is None:
            self._restarts = job.restarts
        move = next_step(job, self._restarts)
        if move in ("wait", "start") and self._stopped is None:
            self._stopped = self._clock()
        if move == "done":
            return Requeued(job.id, job.state, job.restarts, self._avoided)
        if move == "start":
            return self._start(job)
        if move == "held":
            return Requeued(job.id, job.state, job.restarts, held=job.reason or job.state)
        if move == "requeue":
            if may_requeue or self._has_no_living_steps(job):
                self._requeue(job)
        elif move == "wait":
            self._take_down()
            if self._brief:
                return Requeued(job.id, job.state, job.restarts, handed_over=True)
        return None

    def _has_no_living_steps(self, job: Job) -> bool:
        """True if no step of the job is on a living node any more: it is then back in the queue at once."""
        return bool(self._without.lost) and self._slurm.step_nodes(job.id) <= set(self._without.lost)

    def _requeue(self, job: Job) -> None:
        """Take the lost nodes from the job first.

        A node on which nothing runs any more has its word reach Slurm together with those of all others, and for a dead
        one that takes 12 s.
        """
        if self._may_update():
            if strangers := sorted(set(self._in_service(self._without.lost)) - set(job.nodes)):
                raise SlurmRejected(f"job {job.id} does not run on {compress(strangers)}; nothing was done")
            self._take_down()
        elif living := [name for name in job.nodes if name not in self._without.lost]:
            self._shrink(job, living)
        self.tell(f"requeueing job {job.id}")
        try:
            self._slurm.requeue(job.id)
        except SlurmRejected:
            if next_step(self._slurm.jobs([job.id])[0], job.restarts) == "requeue":
                raise

    def _in_service(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of ``names`` on which Slurm would still start jobs."""
        return tuple(node.name for node in self._slurm.nodes(names) if node.usable) if names else ()

    def _may_update(self) -> bool:
        if self._may is None:
            self._may = may_update_nodes(self._slurm)
        return self._may

    def _shrink(self, job: Job, living: Sequence[str]) -> None:
        if len(living) == len(job.nodes) or job.batch_host not in living:
            return
        try:
            self._slurm.shrink(job.id, living)
        except SlurmRejected as error:
            self.tell(f"the lost nodes stay with job {job.id} until Slurm notices their death: {error}")

    def _take_down(self) -> None:
        if self._down or not self._may_update():
            return
        for name in self._without.lost:
            try:
                take_down(self._slurm, name, self._without.reason)
            except (SlurmRejected, SlurmDenied) as error:
                self.tell(str(error))
        self._down = True

    def _start(self, job: Job) -> Requeued | None:
        """Let the pending job start, then look whether the scheduler can do it."""
        assert self._stopped is not None
        if self._clock() - self._stopped < RESTART_GAP_S:
            return None
        if self._settling is None:
            self._take_down()
            self._avoid(job)
            if job.reason == "BadConstraints":
                self._slurm.release(job.id)
            self._slurm.set_start_time(job.id)
            self._settling = self._clock()
        elif job.reason == "BadConstraints" and self._poll_due():
            if not (own := self._slurm.excluded(job.id)):
                return Requeued(job.id, job.state, job.restarts)
            self._allow_again(job, own)
        elif job.reason == "BadConstraints":
            return None
        elif job.reason not in ("", "BeginTime") or self._clock() - self._settling > SETTLE_S:
            return Requeued(job.id, job.state, job.restarts, self._avoided)
        return None

    def _poll_due(self) -> bool:
        """Not more often than every few seconds while the job is held: it may be for minutes."""
        assert self._settling is not None
        if self._clock() < self._look_at:
            return False
        self._look_at = self._clock() + RETRY_S
        return True

    def _allow_again(self, job: Job, own: Mapping[str, float]) -> None:
        """Slurm holds the job, which cannot run without the nodes of ``own``: it may have those that are not dead.

        Of one that was lost just now Slurm has to say first how it is. If it has taken that out the job waits in the
        queue for it, or for any other one; before that it would start on the dead node at once.
        """
        back = tuple(sorted({*self._state_known(own), *(name for name in own if name in self._without.unfit)}))
        if not back:
            self.waits = True
            self.tell(
                f"job {job.id} cannot run without {compress(sorted(own))}: it waits, and holds no nodes, until Slurm "
                f"has noticed how that is; opsd requeue {job.id} has it tried again"
            )
            return
        self.tell(f"job {job.id} cannot run without {compress(back)}: it may come back there")
        self._slurm.include(job.id, back)
        self._slurm.release(job.id)
        self._slurm.set_start_time(job.id)
        self._avoided = tuple(name for name in self._avoided if name not in back)

    def _avoid(self, job: Job) -> None:
        if back := self._no_longer_lost(job.id):
            self.tell(f"job {job.id} may come back on {compress(back)}, which an earlier requeue kept it off")
            self._slurm.include(job.id, back)
        avoided = self._in_service(self._without.names)
        if not avoided:
            return
        try:
            self._slurm.exclude(job.id, avoided, self._now())
            self._avoided = avoided
        except SlurmRejected as error:
            self.tell(f"job {job.id} may come back on {compress(avoided)}: {error}")

    def _no_longer_lost(self, job: int) -> tuple[str, ...]:
        """Nodes that an earlier requeue kept the job off and that are not lost now."""
        own = self._slurm.excluded(job)
        return self._state_known({name: at for name, at in own.items() if name not in self._without.names})

    def _state_known(self, excluded: Mapping[str, float]) -> tuple[str, ...]:
        """Those of the nodes, with the time of their exclusion, of which Slurm knows by now how they are.

        One that it took for dead is not offered to the job, and one that it has in service so long after has answered.
        """
        if not excluded:
            return ()
        usable, asleep_s = self._in_service(list(excluded)), longest_until_noticed(self._slurm.configuration())
        known = self._now() - (LIMIT_S if asleep_s is None else asleep_s)
        return tuple(sorted(name for name, at in excluded.items() if name not in usable or at < known))
