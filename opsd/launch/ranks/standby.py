"""Warm standby workers: interpreters that have the program's imports behind them, one per rank, in its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.messages import say
from opsd.launch.ranks.environment import OF_A_GENERATION, VARYING
from opsd.launch.ranks.process import Child
from opsd.launch.ranks.program import Program
from opsd.launch.ranks.worker_channel import Worker, changes, order_import, start_worker

IMPORT_LIMIT_S = 600.0
_MAX_FAILURES = 3


@dataclass(slots=True)
class _Member:
    """A worker of the pool. ``varying``: what may change before it is used; ``read``: what its imports have read."""

    worker: Worker
    limit: Timer
    varying: frozenset[str]
    ready: bool = False
    read: frozenset[str] = frozenset()

    def can_become(self, env: Mapping[str, str]) -> bool:
        """Whether it is as a process would be that is started with ``env``; while it imports, it sees to that."""
        changed = changes(self.worker.env, env).keys()
        return changed <= self.varying and changed.isdisjoint(self.read)


@dataclass(frozen=True, slots=True)
class StandbyWorker:
    """A worker taken from the pool; ``warm`` if its imports are done."""

    worker: Worker
    warm: bool


class StandbyPool:
    """Keeps one warm worker per local rank, started one at a time. A worker that dies is simply not used.

    A worker has the environment of the rank that it stands for (``stand_for``); on a spare node (``stand_by``) that of
    ``environment``, in which the place among the nodes is missing. ``extra_modules`` are imported besides what the
    program imports. With ``size`` 0 there is no standby. What a worker says goes to a file beside ``log``.
    """

    def __init__(
        self,
        program: Program,
        environment: Callable[[int], Mapping[str, str]],
        *,
        size: int,
        extra_modules: Sequence[str] = (),
        log: Path,
        loop: Loop,
    ) -> None:
        self._program = program
        self._environment = environment
        self._size = size
        self._extra = extra_modules
        self._log = log
        self._loop = loop
        self._places: dict[int, Mapping[str, str]] = {}
        self._is_spare = False
        self._members: dict[int, _Member] = {}
        self._killed: dict[int, Child] = {}
        self._failures = 0

    @property
    def pids(self) -> frozenset[int]:
        """The processes of the pool, those that were killed and have not ended yet among them."""
        return frozenset(member.worker.child.pid for member in self._members.values()) | self._killed.keys()

    @property
    def ready(self) -> int:
        """How many workers are warm."""
        return sum(member.ready for member in self._members.values())

    def stand_for(self, local_rank: int, env: Mapping[str, str]) -> None:
        """Workers for ``local_rank`` get ``env`` from now on: that of its next start, ``VARYING`` as it may be then."""
        self._places[local_rank] = env
        self._is_spare = False

    def stand_by(self) -> None:
        """This node is a spare: which ranks it will have is not known."""
        self._places.clear()
        self._is_spare = True

    def refill(self) -> None:
        """Start the next worker that is wanted, unless one is still importing or too many have failed."""
        known = [local_rank for local_rank in range(self._size) if self._is_spare or local_rank in self._places]
        missing = [local_rank for local_rank in known if local_rank not in self._members]
        preparing = any(not member.ready for member in self._members.values())
        if preparing or not missing or self._failures >= _MAX_FAILURES:
            return
        try:
            self._start(missing[0])
        except OSError as error:
            self._failed(f"cannot be started: {error.strerror}")

    def take(self, local_rank: int, env: Mapping[str, str]) -> StandbyWorker | None:
        """The worker for ``local_rank`` with the environment ``env``, now the caller's; None if there is none.

        One that is still importing is better than a new one: it carries out its next order once it is done.
        """
        member = self._members.get(local_rank)
        if member is None:
            return None
        self._release(local_rank)
        if member.worker.child.exit() is None and member.can_become(env):
            return StandbyWorker(member.worker, member.ready)
        member.worker.discard()
        return None

    def close(self) -> None:
        """Kill all workers."""
        for local_rank in list(self._members):
            member = self._members[local_rank]
            self._release(local_rank)
            member.worker.discard()

    def _start(self, local_rank: int) -> None:
        env = self._places.get(local_rank)
        varying = OF_A_GENERATION if env is None else VARYING
        output = _fresh_log(self._log_of(local_rank))
        try:
            worker = start_worker(self._program, env or self._environment(local_rank), output, output)
        finally:
            os.close(output)
        limit = self._loop.later(IMPORT_LIMIT_S, lambda: self._lost(local_rank, "takes too long to import"))
        self._members[local_rank] = _Member(worker, limit, varying)
        self._loop.watch(worker.channel.fileno(), lambda: self._answered(local_rank))
        try:
            order_import(worker, self._program, self._extra, varying)
        except OSError:
            self._lost(local_rank, "ended at once")

    def _log_of(self, local_rank: int) -> Path:
        return self._log.with_stem(f"{self._log.stem}-{local_rank}")

    def _answered(self, local_rank: int) -> None:
        member = self._members[local_rank]
        try:
            said = member.worker.channel.recv(65_536)
        except OSError:
            said = b""
        answer = json.loads(said) if said else {}
        if not answer.get("ready"):
            self._lost(local_rank, "cannot import what the program imports" if answer else "ended")
            return
        member.ready, member.read = True, frozenset(answer["read"])
        member.limit.cancel()
        self.refill()

    def _lost(self, local_rank: int, why: str) -> None:
        member = self._members[local_rank]
        self._release(local_rank)
        self._kill(member.worker)
        self._failed(f"{why}, see {self._log_of(local_rank)}")

    def _kill(self, worker: Worker) -> None:
        """Kill ``worker`` without waiting for its end: one that hangs in an import may hang in the kernel."""
        child = worker.child
        worker.kill()
        self._killed[child.pid] = child

        def ended() -> None:
            self._loop.unwatch(child.pidfd)
            self._killed.pop(child.pid).reap()

        self._loop.watch(child.pidfd, ended)

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures == _MAX_FAILURES:
            say(f"a standby worker {why}; restarts will start cold")

    def _release(self, local_rank: int) -> None:
        member = self._members.pop(local_rank)
        member.limit.cancel()
        self._loop.unwatch(member.worker.channel.fileno())


def _fresh_log(path: Path) -> int:
    """A descriptor of ``path``, emptied; what it gets becomes the beginning of the rank's log. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o644)
