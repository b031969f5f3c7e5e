"""Requeue a job without the nodes that it lost, and have it start at once.

Slurm alone takes minutes: it notices a dead node after SlurmdTimeout, waits for that node before the job is back in the
queue, and then delays the job by two more minutes. So a user who may update nodes sets the dead ones down. An ordinary
user shrinks the job to its living nodes, which its owner may do while the batch host lives, and excludes the dead ones.
The start time is set once the job is pending, because Slurm overwrites any earlier value.

All state is in Slurm, so any number of processes may work on the same requeue, also after a restart of slurmctld, and
it happens once: the restart count tells. A dry run finds out what would happen, and which permission is missing.
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
"""Pause after a request that the controller did not answer."""
SETTLE_S = 5.0
"""How long the scheduler has to start the job or to give a reason why not."""
RESTART_GAP_S = 2.1
"""Least time between the stop of a job and its next start.

If a start comes within the same second as the stop, slurmd takes it for one of the old job ("already killed, do not
launch batch job"). Slurm then gives the job up.
"""
UNFIT_S = 3600.0
"""For so long a job is kept off an unfit node that stays in service, even if it cannot start without it.

If it is as bad as the run has found it, somebody has taken it out by then.
"""
REASON = "opsd:requeue node_lost"


@dataclass(frozen=True, slots=True)
class ExcludedNodes:
    """The nodes that the job must not return to.

    ``lost`` nodes do not answer; they are also set down, with ``reason``, where that is allowed. ``unfit`` nodes are
    only excluded; draining them is up to the agent.
    """

    lost: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    reason: str = REASON

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.lost, *self.unfit)


@dataclass(frozen=True, slots=True)
class Helper:
    """The job ``job`` that this process is, with a node that the requeued job may need.

    So that job starts only after this one has ended, which then cannot see whether it does. ``look_again`` has
    somebody else look later.
    """

    job: int
    look_again: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Requeued:
    """The state of the job: pending and free to start, running again, or stopping while another process goes on.

    ``avoided`` are nodes that the job must avoid. ``handed_over``: the rest is up to another process. ``held``
    is why someone else has put the job on hold; then the job was only stopped if it ran.
    """

    job: int
    state: str
    restarts: int
    avoided: tuple[str, ...] = ()
    handed_over: bool = False
    held: str = ""


def requeue_now(
    slurm: Slurm,
    job: int,
    excluded: ExcludedNodes = ExcludedNodes(),
    *,
    restarts: int | None = None,
    defer_s: float = 0.0,
    only_stop: bool = False,
    helper: Helper | None = None,
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
    has stopped. A ``helper`` has to end after this, and the job starts then. A hold that someone else has set is never
    released, that of Slurm after a start that failed is once. While the controller is down, requests are repeated.

    Raises SlurmError: the job belongs to another user, is unknown or has ended, a node is not one of the job's, or
    ``limit_s`` seconds have passed and the job does not just wait for its nodes.
    """
    began = clock()
    attempt = _Attempt(slurm, job, excluded, restarts, only_stop, helper, clock, now, say)
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
        sleep(RETRY_S if attempt.waits else pause)


@dataclass(slots=True)
class _Attempt:
    """One process's part in a requeue. Its state only saves requests to Slurm; losing it does no harm."""

    slurm: Slurm
    job: int
    excluded: ExcludedNodes
    restarts: int | None
    only_stop: bool
    helper: Helper | None
    clock: Callable[[], float]
    now: Callable[[], float]
    say: Callable[[str], object]
    waits: bool = False
    """The job is back in the queue and cannot start before Slurm knows the state of its excluded nodes."""
    _told: str = ""
    _may: bool | None = None
    _is_down: bool = False
    _avoided: tuple[str, ...] = ()
    _is_watched: bool = False
    _released_at: float | None = None
    _look_at: float = float("-inf")
    _stopped_at: float | None = None
    _has_unheld: bool = False

    def tell(self, sentence: str) -> None:
        if sentence != self._told:
            self._told = sentence
            self.say(sentence)

    def step(self, *, may_requeue: bool) -> Requeued | None:
        """Do the next step; returns the result once there is nothing more to do."""
        found = self.slurm.jobs([self.job])
        if not found:
            raise SlurmRejected(f"there is no job {self.job} that waits or runs and that this user may see")
        job = found[0]
        if self.restarts is None:
            self.restarts = job.restarts
        step = next_step(job, self.restarts)
        if step in ("wait", "start") and self._stopped_at is None:
            self._stopped_at = self.clock()
        if step == "done":
            return Requeued(job.id, job.state, job.restarts, self._avoided)
        if step == "start":
            try:
                return self._start(job)
            except SlurmRejected:  # another process may have started it meanwhile
                if next_step(self.slurm.jobs([job.id])[0], self.restarts) == "start":
                    raise
                return None
        if step == "held":
            if failed_to_launch(job) and not self._has_unheld:
                self._has_unheld = True
                self.tell(f"job {job.id} is on hold because its start failed; it is tried once more")
                self.slurm.release(job.id)
                return None
            return Requeued(job.id, job.state, job.restarts, held=job.reason or job.state)
        if step == "requeue":
            if may_requeue or self._has_no_living_steps(job):
                self._requeue(job)
        elif step == "wait":
            self._take_down()
            if self.only_stop:
                return Requeued(job.id, job.state, job.restarts, handed_over=True)
        return None

    def _has_no_living_steps(self, job: Job) -> bool:
        """Whether the job has no step on a living node any more: it then returns to the queue at once."""
        return bool(self.excluded.lost) and set().union(*self.slurm.steps(job.id).values()) <= set(self.excluded.lost)

    def _requeue(self, job: Job) -> None:
        """Take the lost nodes from the job, then requeue it.

        Slurm hears of a node without steps only together with all others, and for a dead one that takes 12 s.
        """
        if self._may_update():
            if foreign := sorted(set(self._in_service(self.excluded.lost)) - set(job.nodes)):
                raise SlurmRejected(f"job {job.id} does not run on {compress(foreign)}; nothing was done")
            self._take_down()
        elif living := [name for name in job.nodes if name not in self.excluded.lost]:
            self._shrink(job, living)
        self.tell(f"requeueing job {job.id}")
        try:
            self.slurm.requeue(job.id)
        except SlurmRejected:
            if next_step(self.slurm.jobs([job.id])[0], job.restarts) == "requeue":
                raise

    def _in_service(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of ``names`` on which Slurm would still start jobs."""
        return tuple(node.name for node in self.slurm.nodes(names) if node.usable) if names else ()

    def _may_update(self) -> bool:
        if self._may is None:
            self._may = may_update_nodes(self.slurm)
        return self._may

    def _shrink(self, job: Job, living: Sequence[str]) -> None:
        if len(living) == len(job.nodes) or job.batch_host not in living:
            return
        try:
            self.slurm.shrink(job.id, living)
        except SlurmRejected as error:
            self.tell(f"the lost nodes stay with job {job.id} until Slurm notices their death: {error}")

    def _take_down(self) -> None:
        if self._is_down or not self.excluded.lost or not self._may_update():
            return
        for name in self.excluded.lost:
            try:
                take_down(self.slurm, name, self.excluded.reason)
            except (SlurmRejected, SlurmDenied) as error:
                self.tell(str(error))
        self._is_down = True

    def _start(self, job: Job) -> Requeued | None:
        """Let the pending job start, then check whether the scheduler can start it."""
        assert self._stopped_at is not None
        if self.clock() - self._stopped_at < RESTART_GAP_S:
            return None
        if self._released_at is None:
            self._take_down()
            self._avoid(job)
            leaves = self.helper is not None and self._starts_after(job, self.helper)
            if job.reason == "BadConstraints":
                self.slurm.release(job.id)
            self.slurm.set_start_time(job.id)
            if leaves:
                return Requeued(job.id, job.state, job.restarts, self._avoided)
            self._released_at = self.clock()
        elif job.reason == "BadConstraints" and self._poll_due():
            if not (own := self.slurm.excluded(job.id)):
                return Requeued(job.id, job.state, job.restarts)
            self._allow_again(job, own)
        elif job.reason == "BadConstraints":
            return None
        elif job.reason not in ("", "BeginTime") or self.clock() - self._released_at > SETTLE_S:
            return Requeued(job.id, job.state, job.restarts, self._avoided)
        return None

    def _starts_after(self, job: Job, helper: Helper) -> bool:
        """Whether ``helper`` may end before the job starts; if not, it goes on as any other process does.

        Slurm may hold a job that has excluded nodes once it tries to start it.
        """
        try:
            if not self._is_watched and self.slurm.excluded(job.id):
                helper.look_again()
                self._is_watched = True
            self.slurm.start_after(job.id, helper.job)
        except (SlurmRejected, SlurmDenied) as error:
            self.tell(f"job {job.id} may start without the node of job {helper.job}: {error}")
            return False
        return True

    def _poll_due(self) -> bool:
        """Whether a held job is to be looked at again; it may be held for minutes."""
        assert self._released_at is not None
        if self.clock() < self._look_at:
            return False
        self._look_at = self.clock() + RETRY_S
        return True

    def _allow_again(self, job: Job, own: Mapping[str, float]) -> None:
        """Slurm holds the job because it cannot run without the nodes of ``own``: include those whose state is known.

        That of a node that was just lost is not known until Slurm has noticed, that of an unfit one until it is taken
        out of service. Then the job waits in the queue for it or for another node; included earlier, it would start on
        the bad node at once.
        """
        back = self._state_known(own)
        if not back:
            self.waits = True
            self.tell(
                f"job {job.id} cannot run without {compress(sorted(own))}: it waits, and holds no nodes, until Slurm "
                f"has noticed how that is, or somebody drains what is broken; opsd requeue {job.id} has it tried again"
            )
            return
        self.tell(f"job {job.id} cannot run without {compress(back)}: it may come back there")
        self.slurm.include(job.id, back)
        self.slurm.release(job.id)
        self.slurm.set_start_time(job.id)
        self._avoided = tuple(name for name in self._avoided if name not in back)

    def _avoid(self, job: Job) -> None:
        if back := self._no_longer_lost(job.id):
            self.tell(f"job {job.id} may come back on {compress(back)}, which an earlier requeue kept it off")
            self.slurm.include(job.id, back)
        avoided = self._in_service(self.excluded.names)
        if not avoided:
            return
        try:
            for names, at in ((self.excluded.lost, self.now()), (self.excluded.unfit, self.now() + UNFIT_S)):
                if names := tuple(name for name in names if name in avoided):
                    self.slurm.exclude(job.id, names, at)
            self._avoided = avoided
        except SlurmRejected as error:
            self.tell(f"job {job.id} may come back on {compress(avoided)}: {error}")

    def _no_longer_lost(self, job: int) -> tuple[str, ...]:
        """Nodes that an earlier requeue excluded and that are not lost now."""
        own = self.slurm.excluded(job)
        return self._state_known({name: at for name, at in own.items() if name not in self.excluded.names})

    def _state_known(self, excluded: Mapping[str, float]) -> tuple[str, ...]:
        """Those of ``excluded`` (nodes with the time from which Slurm can tell) whose present state Slurm knows.

        A dead node that it has noticed is not offered to the job, and a node that is in service after so long has
        answered.
        """
        if not excluded:
            return ()
        usable, asleep_s = self._in_service(list(excluded)), longest_until_noticed(self.slurm.configuration())
        known = self.now() - (LIMIT_S if asleep_s is None else asleep_s)
        return tuple(sorted(name for name, at in excluded.items() if name not in usable or at < known))


NEEDED = "root, SlurmUser or an operator (sacctmgr)"


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be done, in one or two sentences; ``possible`` if this user may do it."""

    possible: bool
    text: str


def preview(slurm: Slurm, number: int, excluded: ExcludedNodes, user: str) -> Preview:
    """The actions of ``requeue_now`` for ``user``. Raises SlurmError, also for a job that cannot be requeued."""
    found = slurm.jobs([number])
    if not found:
        raise SlurmRejected(f"there is no job {number} that waits or runs and that this user may see")
    job, operator = found[0], may_update_nodes(slurm)
    step = next_step(job, job.restarts)
    if not operator and job.user != user:
        return Preview(False, f"job {number} is {job.user}'s: {user} may not requeue it, that needs {NEEDED}")
    if step == "held" and failed_to_launch(job):
        return Preview(True, f"job {number} is on hold because its start failed: would release it once")
    if step == "held":
        return Preview(False, f"job {number} is on hold ({job.reason or job.state}): would leave it so")
    if step != "requeue":
        return Preview(True, f"job {number} is {job.state}: would {_WOULD[step]}")
    return Preview(True, f"would {_nodes(job, excluded, operator)}requeue job {number} and have it start at once")


_WOULD = {
    "wait": "wait until it has stopped and have it start at once",
    "start": "have it start at once",
    "done": "leave it alone",
}


def _nodes(job: Job, excluded: ExcludedNodes, operator: bool) -> str:
    lost = [name for name in excluded.lost if name in job.nodes]
    if not lost:
        return ""
    if operator:
        return f"take {', '.join(lost)} down, "
    if job.batch_host in lost:
        return (
            f"wait until Slurm notices that {job.batch_host}, the node of the batch script, is dead (SlurmdTimeout): "
            f"taking it down needs {NEEDED}; before that "
        )
    return f"shrink the job to its other nodes, since taking {', '.join(lost)} down needs {NEEDED}, "


_ALIVE = ("running", "configuring", "suspended", "stopped", "resizing", "signaling", "stage_out")
_STOPPING = ("completing", "requeued", "requeue_fed")
_HELD_STATES = ("requeue_hold", "special_exit")
_HOLD = re.compile(r"h[eo]ld", re.IGNORECASE)
"""In the reasons of pending jobs: JobHeldUser, JobHoldMaxRequeue, "job requeued in held state" …

BadConstraints does not match: Slurm itself holds such a job, because of its excluded nodes.
"""

_HOLDS = (
    ("launch", "Slurm has set, because the start of the job failed (a prolog for instance)"),
    ("maxrequeue", "Slurm has set, because the job was requeued too often (MaxBatchRequeue)"),
    ("requeued", "somebody has set (scontrol requeuehold)"),
    ("requeue_hold", "somebody has set (scontrol requeuehold)"),
    ("heldadmin", "an administrator has set"),
)
"""In reasons and states of held jobs, and whose hold it is."""

_NEVER = re.compile(
    r"(QOS|Assoc)(\w*PerJob|Min|\w*Wall|NotAllowed)|Partition(NodeLimit|TimeLimit|Config|Down|Inactive)|BadConstraints"
    r"|DependencyNeverSatisfied|JobHeld|Invalid|Job.s.QOS.not.permitted|AccountNotAllowed|DeadLine|MaxMemPerLimit|ReservationDeleted"
)
"""Not a limit on what several jobs have together: the end of one of them makes room."""

NextStep = Literal["requeue", "wait", "held", "start", "done"]


def next_step(job: Job, restarts: int) -> NextStep:
    """The next step of a requeue that was decided when the job had been restarted ``restarts`` times.

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


def whose_hold(reason: str) -> str:
    """Who has set a hold that Slurm gives ``reason`` for, as the end of "a hold that …"."""
    known = reason.lower()
    return next((whose for word, whose in _HOLDS if word in known), "somebody has set")


def failed_to_launch(job: Job) -> bool:
    """Whether the hold is Slurm's own, after a start that failed: no person has asked for it."""
    return job.state == "pending" and "launch" in job.reason.lower() and _HOLD.search(job.reason) is not None


def never_starts(job: Job) -> bool:
    """Whether a pending job waits for what no other job's end brings: a limit, or nodes that there are not."""
    return job.state == "pending" and _NEVER.match(job.reason) is not None


def is_alive(job: Job) -> bool:
    """Whether the job runs or is about to, and is not being stopped."""
    return job.state in _ALIVE


def is_stopping(job: Job) -> bool:
    """Whether Slurm is stopping the job, for good or for a requeue."""
    return job.state in _STOPPING
