"""Worker processes: interpreters that become ranks, started cold or kept warm with the program's imports done.

They run ``worker.py``, which documents the protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsd.launch.io.console import Console, RankOutput
from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.reporting import print_message
from opsd.launch.ranks.process import GONE_S, Child, spawn
from opsd.launch.ranks.ranks import Generation, Rank
from opsd.launch.ranks.settings import GENERATION_VARIABLES, RESTART_VARIABLES, Assignment, Program, Settings
from opsd.rundir import RunFolders

WORKER = Path(__file__).with_name("worker.py")
IMPORT_LIMIT_S = 600.0
_MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process that waits for orders on ``channel``, in the environment ``env``."""

    program: Program
    child: Child
    channel: socket.socket
    env: Mapping[str, str]

    @classmethod
    def start(cls, program: Program, env: Mapping[str, str], output: int, error_output: int) -> Worker:
        """Start a process that waits for orders. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = (program.python, "-u", str(WORKER), str(theirs.fileno()), *program.words)
            child = spawn(
                command, env=env, cwd=program.cwd, output=output, error_output=error_output, keep=(theirs.fileno(),),
                stdin=None,
            )  # fmt: skip
        return cls(program, child, ours, env)

    def import_ahead(self, extra: Sequence[str], watch: Collection[str]) -> None:
        """Have it import what the program will, and ``extra``. Raises OSError if it is gone.

        When done it answers with one line, which of the variables ``watch`` the imports have read.
        """
        self._order("import", {"extra": list(extra), "watch": sorted(watch)})

    def run(self, env: Mapping[str, str], outputs: tuple[int, int]) -> None:
        """Make it the rank, with ``outputs`` as stdout and stderr. Raises OSError if it is gone.

        The channel becomes readable when the program has failed, at the latest when it has ended.
        """
        self._order("run", {"changes": changes(self.env, env)}, outputs)

    def discard(self) -> None:
        """Kill the worker and collect it, unless the kernel holds it."""
        self.kill()
        self.child.reap(GONE_S)

    def kill(self) -> None:
        """Kill the worker; it still has to be collected."""
        self.channel.close()
        self.child.kill_group()

    def _order(self, do: str, details: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
        program = self.program
        argv0 = program.given if program.kind == "script" and program.given else program.name
        described = {
            "kind": program.kind, "name": program.name, "argv0": argv0, "args": program.args, "path": program.path,
            "observe": program.observe,
        }  # fmt: skip
        payload = json.dumps({"do": do, **described, **details}).encode()
        socket.send_fds(self.channel, [len(payload).to_bytes(4, "little")], list(descriptors))
        self.channel.sendall(payload)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that differ, with their new values, None for removed ones."""
    return {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@dataclass(slots=True)
class _StandbyWorker:
    """A worker of the pool. ``varying``: variables that may still change; ``read``: those that its imports read."""

    worker: Worker
    limit: Timer
    varying: frozenset[str]
    ready: bool = False
    read: frozenset[str] = frozenset()

    def can_become(self, env: Mapping[str, str]) -> bool:
        """Whether it equals a process newly started with ``env``; while it imports, it checks that itself."""
        changed = changes(self.worker.env, env).keys()
        return changed <= self.varying and changed.isdisjoint(self.read)


class StandbyPool:
    """Keeps one warm worker per local rank, started one at a time. A worker that dies is not used.

    A worker has the environment of the rank that it replaces (``stand_for``). On a spare node (``stand_by``) it lacks
    the place among the nodes. Its output goes to a file beside the ranks' logs.
    """

    def __init__(self, settings: Settings, folders: RunFolders, loop: Loop) -> None:
        self._settings = settings
        self._folders = folders
        self._loop = loop
        self._places: dict[int, Mapping[str, str]] = {}
        self._is_spare = False
        self._standbys: dict[int, _StandbyWorker] = {}
        self._killed: dict[int, Child] = {}
        self._failures = 0

    @property
    def pids(self) -> frozenset[int]:
        """The processes of the pool, including killed ones that have not ended yet."""
        return frozenset(member.worker.child.pid for member in self._standbys.values()) | self._killed.keys()

    @property
    def ready(self) -> int:
        """How many workers are warm."""
        return sum(member.ready for member in self._standbys.values())

    def stand_for(self, local_rank: int, env: Mapping[str, str]) -> None:
        """Workers for ``local_rank`` get ``env``, that of its next start; ``RESTART_VARIABLES`` may still change."""
        self._places[local_rank] = env
        self._is_spare = False

    def stand_by(self) -> None:
        """This node is a spare: its ranks are not known."""
        self._places.clear()
        self._is_spare = True

    def refill(self) -> None:
        """Start the next missing worker, unless one is still importing or too many have failed."""
        size = self._settings.local_size if self._settings.standby else 0
        known = [local_rank for local_rank in range(size) if self._is_spare or local_rank in self._places]
        missing = [local_rank for local_rank in known if local_rank not in self._standbys]
        preparing = any(not member.ready for member in self._standbys.values())
        if preparing or not missing or self._failures >= _MAX_FAILURES:
            return
        try:
            self._start(missing[0])
        except OSError as error:
            self._failed(f"cannot be started: {error.strerror}")

    def run(self, local_rank: int, env: Mapping[str, str], outputs: tuple[int, int]) -> tuple[Worker, bool]:
        """Run the program as ``local_rank`` with the environment ``env``; returns its process, and whether it was warm.

        A standby that is still importing is better than a new process: it executes its next order when it is done.
        Raises OSError if no process can be started.
        """
        member = self._standbys.get(local_rank)
        if member is not None:
            self._release(local_rank)
            if member.worker.child.exit() is None and member.can_become(env):
                try:
                    member.worker.run(env, outputs)
                    return member.worker, member.ready
                except OSError as error:
                    print_message(f"a standby worker died when needed ({error}); starting cold")
            member.worker.discard()
        cold = Worker.start(self._settings.program, env, *outputs)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: its exit says more
            cold.run(env, outputs)
        return cold, False

    def close(self) -> None:
        """Kill all workers."""
        for local_rank in list(self._standbys):
            member = self._standbys[local_rank]
            self._release(local_rank)
            member.worker.discard()

    def _start(self, local_rank: int) -> None:
        env, varying = self._places.get(local_rank), RESTART_VARIABLES
        if env is None:
            env, varying = self._settings.environment(local_rank, self._folders.folder), GENERATION_VARIABLES
        output = _fresh_log(self._log_of(local_rank))
        try:
            worker = Worker.start(self._settings.program, env, output, output)
        finally:
            os.close(output)
        limit = self._loop.later(IMPORT_LIMIT_S, lambda: self._lost(local_rank, "takes too long to import"))
        self._standbys[local_rank] = _StandbyWorker(worker, limit, varying)
        self._loop.watch(worker.channel.fileno(), lambda: self._answered(local_rank))
        try:
            worker.import_ahead(self._settings.standby_imports, varying)
        except OSError:
            self._lost(local_rank, "ended at once")

    def _log_of(self, local_rank: int) -> Path:
        return self._folders.logs / f"standby-{local_rank}.log"

    def _answered(self, local_rank: int) -> None:
        member = self._standbys[local_rank]
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
        member = self._standbys[local_rank]
        self._release(local_rank)
        self._kill(member.worker)
        self._failed(f"{why}, see {self._log_of(local_rank)}")

    def _kill(self, worker: Worker) -> None:
        """Kill ``worker`` without waiting: one that hangs in an import may hang in the kernel."""
        child = worker.child
        worker.kill()
        self._killed[child.pid] = child
        child.watch(self._loop, lambda: self._killed.pop(child.pid).reap())

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures == _MAX_FAILURES:
            print_message(f"a standby worker {why}; restarts will start cold")

    def _release(self, local_rank: int) -> None:
        member = self._standbys.pop(local_rank)
        member.limit.cancel()
        self._loop.unwatch(member.worker.channel.fileno())


def _fresh_log(path: Path) -> int:
    """A descriptor of ``path``, truncated; its content becomes the beginning of the rank's log. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o644)


class RankStarter:
    """Starts the ranks of a generation, from warm standbys if possible."""

    def __init__(self, settings: Settings, folders: RunFolders, loop: Loop, console: Console) -> None:
        self.standby = StandbyPool(settings, folders, loop)
        self._settings = settings
        self._folders = folders
        self._console = console

    def start(self, generation: Generation, place: Assignment, restarts: int) -> None:
        """Add this node's ranks to ``generation``. Raises OSError; ``generation`` has those started before."""
        self._folders.forget_pages()
        for local_rank in range(place.local_size):
            generation.ranks.append(self._start_rank(generation.number, place, local_rank, restarts))

    def _start_rank(self, generation: int, place: Assignment, local_rank: int, restarts: int) -> Rank:
        rank = place.rank_offset + local_rank
        log = self._folders.generation_logs(generation) / f"rank-{rank:04d}.log"
        env = self._environment(generation, place, local_rank, restarts)
        expected = self._environment(generation + 1, place, local_rank, restarts + 1)
        not_the_living = {"OPSD_RANK_PAGE": f"{expected['OPSD_RANK_PAGE']}.standby"}
        self.standby.stand_for(local_rank, expected | not_the_living)
        output = RankOutput(rank)
        self._console.follow(output, log, self._settings.shows(rank, local_rank))
        worker, warm = self.standby.run(local_rank, env, output.descriptors)
        error_file, page = Path(env["TORCHELASTIC_ERROR_FILE"]), Path(env["OPSD_RANK_PAGE"])
        return Rank(rank, local_rank, worker.child, worker.channel, output, log, error_file, page, warm)

    def _environment(self, generation: int, place: Assignment, local_rank: int, restarts: int) -> dict[str, str]:
        rank = place.rank_offset + local_rank
        return self._settings.environment(local_rank, self._folders.folder) | self._settings.generation_environment(
            place,
            local_rank,
            generation=generation,
            restarts=restarts,
            error_file=self._folders.error_file(rank),
            page=self._folders.page(rank),
        )
