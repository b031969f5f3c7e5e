"""Jobs that failed on a node and ran elsewhere, from Slurm's accounting: faults without a hardware event."""

from __future__ import annotations

import math
import os
import pwd
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Final, NamedTuple

from opsd.lemons import DAY_S, Fault
from opsd.slurm.candidates import JOB
from opsd.slurm.hostlist import HostlistError, expand
from opsd.slurm.output import epoch, failure
from opsd.slurm.port import SlurmDenied, SlurmRejected
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
) -> list[Fault]:
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


def _faults(job: Sequence[_Run], now: float) -> Iterator[tuple[Fault, str]]:
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
            yield Fault(next(iter(suspects)), JOB, failed.end, failed.end), failed.user


def _names(hostlist: str) -> frozenset[str]:
    try:
        return frozenset(expand(hostlist))
    except HostlistError as error:
        raise SlurmRejected(f"sacct's answer has a {error}") from error
