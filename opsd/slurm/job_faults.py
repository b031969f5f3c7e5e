"""Jobs that failed on a node and ran elsewhere, from Slurm's accounting: faults without a hardware event.

The comments of the nodes keep them, so that all who score nodes count these. Any agent may be the one that asks Slurm's
accounting: ``FailedJobs`` looks at all comments every six hours, and asks if none has a reading from that time.
"""

from __future__ import annotations

import math
import os
import pwd
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Final, NamedTuple

from opsd import lemons
from opsd.collectors.slurm import NodeRecord
from opsd.lemons import DAY_S, NodeFailure
from opsd.slurm import node_comment
from opsd.slurm.candidates import JOB, accounting, faults
from opsd.slurm.hostlist import HostlistError, expand
from opsd.slurm.node_comment import Accounting
from opsd.slurm.output import epoch, failure
from opsd.slurm.port import SlurmDenied, SlurmNodes, SlurmRejected
from opsd.slurm.runner import Runner, run_command

DAYS: Final = 90
DEADLINE_S: Final = 60.0
MOST: Final = 50_000
"""Jobs with a failed start that are kept at once, the newest: 30 MiB."""
FIELDS: Final = ("JobIDRaw", "State", "ExitCode", "End", "NodeList", "User")
_FAILED: Final = "FAILED"
_REQUEUED: Final = "REQUEUED"
_BAD: Final = frozenset({"NODE_FAIL", _FAILED, "BOOT_FAIL", _REQUEUED})
_WELL: Final = frozenset({"COMPLETED", "COMPLETING", "RUNNING", "SUSPENDED", "TIMEOUT"})
"""A start that was cancelled or ran out of memory shows nothing of the node that it was without.

RESIZING does not say why a job has fewer nodes either. With ``--no-kill`` it may have lost a node, or its user may have
shrunk it (22.05.8, 26.05.3).
"""
_PROVEN_S: Final = DAY_S
"""Seconds from a failure after which a start that still runs is taken to go well: a program that fails again and again
does so within hours."""


class _Run(NamedTuple):
    """One start of a job of ``user`` on the hostlist ``nodes``. ``end`` in epoch seconds, None while it runs.

    A start that failed before its requeue counts as FAILED. Its state is REQUEUED in 22.05, and after an exit code of
    ``RequeueExit`` also in 26.05, but its exit code is its own. That of one which was requeued while it ran is 0:0.
    """

    state: str
    end: float | None
    nodes: str
    user: str


def read(
    run: Runner = run_command, now: float | None = None, days: float = DAYS, user: str | None = None
) -> list[NodeFailure]:
    """The faults of the last ``days``, asked for one by one. Raises SlurmError, as where there is no accounting.

    A start that failed is a node's fault if the job's next start went well without that node, and without that one
    only. A requeue, which may be anybody's, counts for jobs of several nodes alone. A user's failures on a node count
    once a day: a thousand tasks with one error would make a lemon of every node that they were on.

    ``user`` is who asks, "" for root. With PrivateData=jobs in slurmdbd.conf sacct shows an ordinary user no job of
    others and does not say why; nor does ``sacctmgr show config`` of 26.05.3. Such an answer is SlurmDenied.
    """
    now = time.time() if now is None else now
    asker, users, restarted = _asker() if user is None else user, set[str](), _Restarted()
    for day in reversed(range(math.ceil(days) + 1)):
        text = _day(run, now - day * DAY_S, last=not day)
        restarted.take(text)
        users.update(line.rpartition("|")[2].lower() for line in _lines(text))
    if asker and users <= {asker.lower()}:
        raise SlurmDenied(
            f"sacct shows {asker} no job of another user (PrivateData=jobs in slurmdbd.conf?), so failed jobs cannot "
            "be counted; this needs root or an operator"
        )
    found = sorted((each for job in restarted.jobs() for each in _faults(job, now)), key=lambda each: each[0].at)
    first = {(fault.node, user, time.localtime(fault.at)[:3]): fault for fault, user in reversed(found)}
    return sorted(first.values(), key=lambda fault: fault.at)


def _asker() -> str:
    """The name of the user who asks, "" for root; an id without a name is a name too.

    slurmdbd writes names in lower case unless told otherwise (PreserveCaseUser).
    """
    user = os.geteuid()
    try:
        return pwd.getpwuid(user).pw_name if user else ""
    except KeyError:
        return str(user)


def _day(run: Runner, at: float, *, last: bool) -> str:
    """What sacct says of the jobs of the day of ``at``, or of those since: it keeps all that it says in memory."""
    until = () if last else (f"--endtime={_date(at + DAY_S)}",)
    argv = (
        "sacct", "--allusers", "--local", "--duplicates", "--allocations", "--noheader", "--parsable2",
        f"--starttime={_date(at)}", *until, f"--format={','.join(FIELDS)}",
    )  # fmt: skip
    output = run(argv, DEADLINE_S)
    if "accounting storage is disabled" in (output.stdout + output.stderr).lower():
        raise SlurmRejected("sacct: this cluster keeps no accounting (AccountingStorageType)")
    if output.code:
        raise failure(argv, output)
    return output.stdout


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at))


class _Restarted:
    """The jobs with a failed start among what sacct says, day after day; of all others nothing is kept."""

    def __init__(self) -> None:
        self._starts: dict[str, dict[_Run, None]] = {}

    def take(self, text: str) -> None:
        """Add the starts in sacct's output; one that is known already is the same. Raises SlurmRejected."""
        for job, state in map(_job_and_state, _lines(text)):
            if state in _BAD:
                self._starts.setdefault(job, {})
        for line in _lines(text):
            if (job := line.partition("|")[0]) in self._starts and (run := _start(line)).nodes:
                self._starts[job][run] = None
        for job in [*islice(self._starts, max(0, len(self._starts) - MOST))]:
            del self._starts[job]

    def jobs(self) -> Iterator[list[_Run]]:
        """The starts of each job in their order.

        A number that two users have had is that of two jobs: Slurm begins again at the last one, or once its state is
        lost.
        """
        for starts in self._starts.values():
            for user in {start.user for start in starts}:
                own = (start for start in starts if start.user == user)
                yield sorted(own, key=lambda start: (start.end is None, start.end or 0.0))


def _lines(text: str) -> Iterator[str]:
    """The lines of ``text`` without a list of them: of a day there may be a hundred thousand."""
    return (match[0] for match in re.finditer(".+", text))


def _job_and_state(line: str) -> tuple[str, str]:
    if line.count("|") != len(FIELDS) - 1:
        raise SlurmRejected(f"sacct's answer has a line of another form: {line[:80]!r}")
    job, told, _ = line.split("|", 2)
    return job, told.split(maxsplit=1)[0].rstrip("+") if told.strip() else ""


def _start(line: str) -> _Run:
    _, state = _job_and_state(line)
    _, _, code, end, nodes, user = line.split("|")
    if state == _REQUEUED and code != "0:0":
        state = _FAILED
    return _Run(state, epoch(end), "" if nodes.strip() in ("None assigned", "(null)") else nodes.strip(), user)


def _faults(job: Sequence[_Run], now: float) -> Iterator[tuple[NodeFailure, str]]:
    """The faults in the starts of one job, each with its user."""
    for failed, after in pairwise(job):
        if failed.end is None or failed.state not in _BAD or after.state not in _WELL:
            continue
        if after.end is None and now - failed.end < _PROVEN_S:
            continue
        before, then = _names(failed.nodes), _names(after.nodes)
        suspects = before - then
        by_chance = failed.state == _REQUEUED and not before & then
        if len(suspects) == 1 and not by_chance:
            yield NodeFailure(next(iter(suspects)), JOB, failed.end, failed.end), failed.user


def _names(hostlist: str) -> frozenset[str]:
    try:
        return frozenset(expand(hostlist))
    except HostlistError as error:
        raise SlurmRejected(f"sacct's answer has a {error}") from error


OWN_S: Final = 600.0
"""Seconds between two looks at the node's own comment."""
FLEET_S: Final = 6 * 3600.0
"""Seconds between two looks at all comments."""
SUSPECT: Final = 2
"""Faults from which on a node asks for those of all others: few nodes of a cluster have so many in a month."""


class NodeFaults:
    """The record of ``node``, from the comments that Slurm keeps."""

    def __init__(
        self,
        slurm: SlurmNodes,
        node: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._slurm, self._node, self._clock, self._wall = slurm, node, clock, wall
        self._record: NodeRecord | None = None
        self._own_at = self._fleet_at = float("-inf")
        self._judged: lemons.Judgement | None = None

    def refresh(self) -> NodeRecord:
        """The record, at most as old as ``OWN_S``; the judgement in it as old as ``FLEET_S``. Raises SlurmError."""
        now = self._clock()
        if self._record is None or now - self._own_at >= OWN_S:
            self._record = self._look(now)
            self._own_at = now
        return self._record

    def _look(self, now: float) -> NodeRecord:
        own = lemons.judge([self._node], faults(self._slurm.comments([self._node])), self._wall())
        score = next(iter(own.scores), lemons.Score(self._node, 0, 0, 0.0))
        if score.faults < SUSPECT:
            self._judged = None
            return NodeRecord(score.faults, score.weight)
        if self._judged is None or now - self._fleet_at >= FLEET_S:
            names = [node.name for node in self._slurm.nodes()]
            self._judged = lemons.judge(names, faults(self._slurm.comments()), self._wall())
            self._fleet_at = now
        confidence = next((s.confidence for s in self._judged.scores if s.node == self._node), 0.0)
        called = any(lemon.node == self._node for lemon in self._judged.lemons)
        return NodeRecord(score.faults, score.weight, confidence, called)


PERIOD_S: Final = 6 * 3600.0
"""Seconds between two readings of the accounting, and between two looks of an agent at all comments."""
FIRST_S: Final = 3600.0
"""The first look of an agent comes within this time after its start, at a moment that its node's name decides."""
AGAIN_DAYS: Final = 7
"""What a later reading goes back: a job that waits longer for its next start is missed."""


class FailedJobs:
    """The part of the agent of ``node``, which asks and writes only while it ``may_ask``.

    ``read`` returns the faults of so many days before an epoch second.
    """

    may_ask = False

    def __init__(
        self,
        slurm: SlurmNodes,
        node: str,
        *,
        read: Callable[[float, float], list[NodeFailure]] = lambda now, days: read(now=now, days=days),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._slurm, self._node, self._read, self._clock, self._wall = slurm, node, read, clock, wall
        self._due = clock() + FIRST_S * (zlib.crc32(node.encode()) / 2**32)
        self._known: Accounting | None = None
        self._looked = False

    @property
    def counted(self) -> bool | None:
        """Whether the failures of jobs of the last hours are in the comments; None before the first look."""
        if not self._looked:
            return None
        return self._known is not None and self._known.answered and self._wall() - self._known.at < 2 * PERIOD_S

    def refresh(self) -> None:
        """Look at all comments if it is time, and ask if nobody has. Takes as long as Slurm does; raises SlurmError."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + PERIOD_S
        comments = self._slurm.comments()
        self._known, self._looked = accounting(comments), True
        if (
            self.may_ask
            and self._node in comments
            and (self._known is None or self._wall() - self._known.at >= PERIOD_S)
        ):
            self._ask(comments)

    def _ask(self, comments: Mapping[str, str]) -> None:
        at = self._wall()
        before = [one for text in comments.values() if (one := node_comment.read(text).accounting) and one.answered]
        days = DAYS if not before else AGAIN_DAYS + (at - max(one.at for one in before)) / 86_400
        self._note(Accounting(at, answered=False))
        found = self._read(at, min(days, DAYS))
        for name in {fault.node for fault in found} & comments.keys():
            self._blame(name, found, at)
        self._note(Accounting(at, answered=True))

    def _note(self, done: Accounting) -> None:
        comment = self._slurm.comments([self._node]).get(self._node, "")
        record = replace(node_comment.read(comment), accounting=done)
        self._slurm.set_comment(self._node, node_comment.write(comment, record))
        self._known = done

    def _blame(self, name: str, found: Iterable[NodeFailure], at: float) -> None:
        """Keep the failures on a node that its stays do not explain, unless they are known."""
        comment = self._slurm.comments([name]).get(name, "")
        record = node_comment.read(comment)
        counted = faults({name: comment}, (fault for fault in found if fault.node == name))
        after = record.blamed((fault.at for fault in counted if fault.kind == JOB), at)
        if after != record:
            self._slurm.set_comment(name, node_comment.write(comment, after))
