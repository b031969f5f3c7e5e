"""NCCL of the runs on this node: its RAS service, what it writes into rank logs, and flight recorder dumps.

Only the node with rank 0 of a run asks RAS and judges dumps. Both describe the whole run, and RAS contacts all its
processes for each answer.

Work on what users own, in a thread for each user: a file system that hangs stops the work for its user only.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import Field

from opsd.collectors.base import Collector, Context, Event, Metric, NoData, Plugin, Reading, Sample
from opsd.collectors.lib.host_pids import HostPids
from opsd.collectors.lib.nccl.ras import (
    ADDRESSES,
    KINDS,
    Problem,
    RasError,
    RasQuery,
    RasStatus,
    parse_status,
    restored,
)
from opsd.collectors.lib.nccl.run import LOG_BYTES, LOGS, MESSAGES, SAME_HANG_S, NcclRun, SharedLimits
from opsd.collectors.lib.run_slots import Chosen, RunSlots
from opsd.collectors.lib.run_watch import lives
from opsd.collectors.lib.sandbox import Sandbox, SandboxError
from opsd.collectors.lib.shares import Allowance, Room
from opsd.collectors.ranks import RanksCollector, RanksSettings
from opsd.settings.sections import Address, CollectorSettings

T = TypeVar("T")

MAX_THREADS = 24
MAX_OTHERS = 12
"""Threads in all, and for users who are not among the ``first``.

A user may have thousands of user ids, in a user namespace, and the service 128 threads in all.
"""


class UserThreads(Generic[T]):
    """``name`` is that of the threads. ``taken_s`` is the processor time of all work so far.

    ``failed`` has what the work of users raised that the last call of ``run`` waited for.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._under_way: dict[int, Future[tuple[T, float]]] = {}
        self.taken_s = 0.0
        self.failed: dict[int, BaseException] = {}

    @property
    def blocked(self) -> frozenset[int]:
        """The users whose work had not ended when it was last waited for."""
        return frozenset(self._under_way)

    def run(
        self, work: Mapping[int, Callable[[], T]], within_s: float, first: Collection[int] = frozenset()
    ) -> list[T]:
        """Begin the ``work`` of each user whose last work has ended; all results that come ``within_s``.

        A later result is among those of a later call. Above ``MAX_THREADS``, and above ``MAX_OTHERS`` for users who are
        not among the ``first``, no more is begun. Raises RuntimeError if the system has no thread left.
        """
        for user, one in work.items():
            if user not in self._under_way and self._has_room(user, first):
                future = Future[tuple[T, float]]()
                threading.Thread(target=_do, args=(one, future), name=f"{self._name}-{user}", daemon=True).start()
                self._under_way[user] = future
        wait(self._under_way.values(), within_s)
        ended = {user: future for user, future in self._under_way.items() if future.done()}
        self._under_way = {user: future for user, future in self._under_way.items() if user not in ended}
        self.failed = {user: error for user, future in ended.items() if (error := future.exception()) is not None}
        results = [future.result() for user, future in ended.items() if user not in self.failed]
        self.taken_s += sum(seconds for _, seconds in results)
        return [result for result, _ in results]

    def _has_room(self, user: int, first: Collection[int]) -> bool:
        if user in first:
            return len(self._under_way) < MAX_THREADS
        return sum(other not in first for other in self._under_way) < MAX_OTHERS


def _do(work: Callable[[], T], future: Future[tuple[T, float]]) -> None:
    try:
        result = work()
    except BaseException as error:
        # SystemExit, too, is an error of the work.
        future.set_exception(error)
    else:
        future.set_result((result, time.thread_time()))


RAS_UP = Metric("opsd_nccl_ras_up", "1 if NCCL's RAS service answered the last question.")
RAS_AGE = Metric("opsd_nccl_ras_answer_age_seconds", "Time since the last answer of RAS.", unit="seconds")
COMMUNICATORS = Metric("opsd_nccl_communicators", "NCCL communicators of the job, by RAS.")
PROBLEMS = Metric("opsd_nccl_problems", "Problems that RAS reports right now.", labels=("kind",))
BLOCKED = Metric(
    "opsd_nccl_blocked_users", "Users whose run folders do not respond: their file system hangs, or is very slow."
)
STALLED = Metric(
    "opsd_nccl_stalled_seconds",
    "How long some ranks have been the same number of operations behind others, by RAS; 0 while all move on.",
    unit="seconds",
)

METRICS: Final = (RAS_UP, RAS_AGE, COMMUNICATORS, PROBLEMS, STALLED, BLOCKED, LOGS, MESSAGES)
LABELS: Final = {
    "run": "runs on the node, 64 at most",
    "rank": "ranks on the node, 64 of a run at most",
    "kind": "kinds of NCCL's messages and problems",
}

DUMP_BYTES: Final = 32 << 20
"""Bytes of flight recorder dumps read at once, and again in the time for which dumps are kept."""
KEPT_BYTES: Final = 24 << 20
"""Bytes that what is kept of dumps takes."""
MAX_LEFT_OUT: Final = 512
"""Characters that name the users whose run folders cannot be read."""
_LEAST_BYTES: Final = 32 << 10
_PARSER: Final = f"{parse_status.__module__}:{parse_status.__name__}"
_WITHIN_S: Final = 1.0
"""How long a collection waits for the run folders, which may be on a network file system."""


class NcclSettings(CollectorSettings):
    """NCCL of the runs on this node: its RAS service, rank logs and flight recorder dumps."""

    ras: tuple[Address, ...] = Field(
        default=("127.0.0.1:28028", "[::1]:28028"),
        min_length=1,
        strict=False,
        description="Addresses where RAS may listen; NCCL_RAS_ADDR of the runs.",
    )
    interval_s: float = Field(default=10.0, ge=1, le=3600, description="Seconds between two questions to RAS.")


class NcclCollector:
    """The runs under ``root``, the folder of rank pages. RAS is asked at ``addresses`` every ``ras_period_s``.

    ``slots`` are the run folders to look at, shared with the collector of ranks, and so is ``host``.
    """

    name = "nccl"
    metrics = METRICS
    interval_s = 2.0

    def __init__(
        self,
        root: Path,
        *,
        addresses: Sequence[tuple[str, int]] = ADDRESSES,
        ras_period_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        slots: RunSlots | None = None,
        host: HostPids | None = None,
        apart: Sandbox | None = None,
    ) -> None:
        self._host = found = host or HostPids()
        self._slots = slots or RunSlots(
            root, lambda folder, owner: lives(folder, owner, wall(), 0.0, found), clock=clock
        )
        self._apart = apart or Sandbox(first=self._slots.first_users)
        self._limits = SharedLimits(Allowance(DUMP_BYTES, DUMP_BYTES / SAME_HANG_S), self._apart, Room(KEPT_BYTES))
        self._addresses = addresses
        self._ras_period_s = ras_period_s
        self._clock = clock
        self._wall = wall
        self._runs: dict[Chosen, NcclRun] | None = None
        self._ras: RasWatch | None = None
        self._threads: UserThreads[Reading] = UserThreads("nccl")

    @property
    def taken_s(self) -> float:
        """Processor time in threads of its own, see ``Gatherer``."""
        return self._threads.taken_s

    def collect(self) -> Reading | NoData:
        """Read what is new in logs and dumps and go on with the question to RAS. Never waits for an answer."""
        try:
            chosen = self._slots.look(within_s=0.5)
        except FileNotFoundError:
            chosen = ()
        # Lines that a log has when the agent starts are old. A run that appears later is new from its first line.
        known, skip_old = self._runs or {}, self._runs is None
        self._runs = {
            one: known.get(one) or NcclRun(*one, skip_old=skip_old, limits=self._limits, host=self._host)
            for one in chosen
        }
        self._limits.allowance.begin(frozenset(owner for _, owner in chosen))
        wall, of_owner = self._wall(), defaultdict[int, list[NcclRun]](list)
        for run in self._runs.values():
            of_owner[run.owner].append(run)
        work = {owner: partial(_read, runs, wall) for owner, runs in of_owner.items()}
        scarce = len({*work, *self._threads.blocked}) > MAX_OTHERS
        readings = self._threads.run(work, _WITHIN_S, self._slots.first_users() if scarce else ())
        if leaders := frozenset(run.owner for run in self._runs.values() if run.leads):
            self._ras = self._ras or RasWatch(self._addresses, self._ras_period_s, self._apart)
            readings.append(self._ras.look(self._clock(), wall, leaders))
        elif self._ras is not None:
            self._ras.close()
            self._ras = None
        if not chosen:
            return NoData("no run has been started on this node")
        together = _together([*readings, Reading((Sample(BLOCKED, len(self._threads.blocked)),))])
        return replace(together, limited=_left_out(self._threads.failed))


def _read(runs: Sequence[NcclRun], wall: float) -> Reading:
    """All runs of one user."""
    return _together([run.read(wall, max(_LEAST_BYTES, LOG_BYTES // len(runs))) for run in runs])


def _together(readings: Sequence[Reading]) -> Reading:
    samples = tuple(sample for reading in readings for sample in reading.samples)
    return Reading(samples, tuple(event for reading in readings for event in reading.events))


def _left_out(failed: Mapping[int, BaseException]) -> str:
    said = (f"user {user}: {type(error).__name__}: {error}" for user, error in sorted(failed.items()))
    return f"run folders left out: {', '.join(said)}"[:MAX_LEFT_OUT] if failed else ""


class RasWatch:
    """Asks RAS again and again without ever waiting for it, and remembers what it said last."""

    def __init__(self, addresses: Sequence[tuple[str, int]], period_s: float, apart: Sandbox) -> None:
        self._addresses = list(addresses)
        self._apart = apart
        self._period_s = period_s
        self._query: RasQuery | None = None
        self._reading: tuple[int | None, Future[Any]] | None = None
        self._asked: float | None = None
        self._answered: float | None = None
        self._status: RasStatus | None = None
        self._stalled_since: float | None = None
        self._told: frozenset[Problem] = frozenset()

    def look(self, now: float, wall: float, users: Collection[int]) -> Reading:
        """Ask if it is time to, take the answer if it has come, and tell what is known at the second ``now``.

        ``users`` are those with a run that this node leads: RAS runs in the ranks, so it must be one of theirs.
        """
        events: tuple[Event, ...] = ()
        try:
            idle = self._query is None and self._reading is None
            if idle and (self._asked is None or now - self._asked >= self._period_s):
                self._asked = now
                self._query = RasQuery(self._addresses[0], now, users)
            if self._query is not None and (answer := self._query.poll(now)) is not None:
                user, self._query = self._query.user, None
                self._reading = user, self._apart.parse(-1 if user is None else user, _PARSER, answer)
            if self._reading is not None and self._reading[1].done():
                (user, answered), self._reading = self._reading, None
                status = restored(answered.result())
                events = tuple(replace(told, user=user) for told in self._take(status, now, wall))
        except (RasError, SandboxError):
            self._query = self._reading = self._status = self._stalled_since = None
            # localhost has two addresses, and NCCL listens on one of them.
            self._addresses.append(self._addresses.pop(0))
        return Reading(tuple(self._samples(now)), events)

    def close(self) -> None:
        """Give up the question under way."""
        if self._query is not None:
            self._query.close()
        if self._reading is not None:
            self._reading[1].cancel()

    def _take(self, status: RasStatus, now: float, wall: float) -> Iterator[Event]:
        """Events for new problems. Counts may differ for a moment: a mismatch is reported once it lasts."""
        before, self._status = self._status, status
        lasting = set(before.problems) if before else set()
        told = {problem for problem in status.problems if problem.kind != "mismatch" or problem in lasting}
        for problem in status.problems:
            if problem in told and problem not in self._told:
                yield _event(problem, wall)
        self._told = frozenset(told)
        if before is None or not status.mismatches or status.mismatches != before.mismatches:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self._answered
        self._answered = now

    def _samples(self, now: float) -> Iterator[Sample]:
        yield Sample(RAS_UP, float(self._status is not None))
        if self._answered is not None:
            yield Sample(RAS_AGE, now - self._answered)
        if self._status is None:
            return
        yield Sample(COMMUNICATORS, self._status.communicators)
        for kind in KINDS:
            yield Sample(PROBLEMS, sum(problem.kind == kind for problem in self._status.problems), (kind,))
        yield Sample(STALLED, 0.0 if self._stalled_since is None else now - self._stalled_since)


def _event(problem: Problem, wall: float) -> Event:
    data = {**asdict(problem), "ranks": [asdict(rank) for rank in problem.ranks]}
    return Event("nccl_ras", wall, f"NCCL communicator {problem.communicator or 'unknown'}: {problem.text}"[:256], data)


def _make(settings: NcclSettings, context: Context) -> Collector:
    hosts = [(host.strip("[]"), int(port)) for host, _, port in (ras.rpartition(":") for ras in settings.ras)]
    root, host = context.settings.section(RanksSettings).root, context.shared(HostPids)
    ranks = context.collector(RanksCollector)
    slots = ranks.slots if ranks else None
    return NcclCollector(root, addresses=hosts, ras_period_s=settings.interval_s, slots=slots, host=host)


COLLECTOR = Plugin("nccl", NcclSettings, _make, LABELS)
