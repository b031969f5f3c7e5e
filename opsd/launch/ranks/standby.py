"""Warm standby workers: interpreters that have the program's heavy imports behind them, one per rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.messages import say
from opsd.launch.ranks.imports import external_imports
from opsd.launch.ranks.process import Child
from opsd.launch.ranks.program import Program
from opsd.launch.ranks.worker_channel import Worker, open_log, order_import, start_worker

IMPORT_LIMIT_S = 600.0
_MAX_FAILURES = 3


@dataclass(slots=True)
class _Member:
    worker: Worker
    limit: Timer
    ready: bool = False


@dataclass(frozen=True, slots=True)
class StandbyWorker:
    """A worker taken from the pool; ``warm`` if its imports are done."""

    worker: Worker
    warm: bool


class StandbyPool:
    """Keeps one warm worker per local rank, started one at a time. A worker that dies is simply not used.

    ``environment`` gives the environment of a local rank, as far as it is the same in every generation;
    ``extra_modules`` are imported besides what the program's sources name. With ``size`` 0 there is no standby.
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
        self._modules: Mapping[str, list[str]] = {}
        self._log = log
        self._loop = loop
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

    def study(self) -> None:
        """Read the program's sources for what to import; milliseconds per file."""
        if self._size:
            self._modules = modules_to_import(self._program, self._extra)

    def refill(self) -> None:
        """Start the next missing worker, unless one is still importing or too many have failed."""
        missing = [local_rank for local_rank in range(self._size) if local_rank not in self._members]
        preparing = any(not member.ready for member in self._members.values())
        if preparing or not missing or self._failures >= _MAX_FAILURES:
            return
        try:
            self._start(missing[0])
        except OSError as error:
            self._failed(f"cannot be started: {error.strerror}")

    def take(self, local_rank: int) -> StandbyWorker | None:
        """The worker for ``local_rank``, now the caller's; None if there is none.

        One that is still importing is better than a new one: it carries out its next order once it is done.
        """
        member = self._members.get(local_rank)
        if member is None:
            return None
        self._release(local_rank)
        if member.worker.child.exit() is None:
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
        output = open_log(self._log)
        try:
            worker = start_worker(self._program, self._environment(local_rank), output, output)
        finally:
            os.close(output)
        limit = self._loop.later(IMPORT_LIMIT_S, lambda: self._lost(local_rank, "takes too long to import"))
        self._members[local_rank] = _Member(worker, limit)
        self._loop.watch(worker.channel.fileno(), lambda: self._answered(local_rank))
        try:
            order_import(worker, self._program, self._modules)
        except OSError:
            self._lost(local_rank, "ended at once")

    def _answered(self, local_rank: int) -> None:
        member = self._members[local_rank]
        try:
            answer = member.worker.channel.recv(64)
        except OSError:
            answer = b""
        if not answer or not json.loads(answer)["ready"]:
            self._lost(local_rank, "cannot import what the program imports" if answer else "ended")
            return
        member.ready = True
        member.limit.cancel()
        self.refill()

    def _lost(self, local_rank: int, why: str) -> None:
        member = self._members[local_rank]
        self._release(local_rank)
        self._kill(member.worker)
        self._failed(why)

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
            say(f"a standby worker {why}, see {self._log}; restarts will start cold")

    def _release(self, local_rank: int) -> None:
        member = self._members.pop(local_rank)
        member.limit.cancel()
        self._loop.unwatch(member.worker.channel.fileno())


def modules_to_import(program: Program, extra: Sequence[str]) -> dict[str, list[str]]:
    """What the standby workers of ``program`` import: what its sources name, and ``extra``."""
    path = [program.path, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    script = Path(program.name) if program.kind == "script" else None
    found = external_imports(script, program.name if program.kind == "module" else None, path)
    return found | {name: found.get(name, []) for name in extra}
