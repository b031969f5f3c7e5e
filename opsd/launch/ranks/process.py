"""Processes of the launcher: starting them, noticing their end, and cleaning up all descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opsd.client import process_start
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.leftovers import LAUNCHER

GONE_S = 0.5
"""How long the loop waits for a killed process to end."""
_TRACED_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make orphans below this process its children, so that daemons started by ranks are found (prctl(2))."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def has_own_proc(proc: str = "/proc") -> bool:
    """Whether ``proc`` is mounted for this PID namespace: in any other the numbers of its processes mean others."""
    try:
        return os.readlink(f"{proc}/self") == str(os.getpid())  # noqa: PTH115
    except OSError:
        return False


@cache
def launcher_mark() -> str:
    """The value of ``OPSD_LAUNCHER`` below this process, unique for this boot."""
    return f"{os.getpid()}-{process_start(os.getpid())}"


class ForeignChildren:
    """Children of this process that no rank has started, which are left alone; to be created before any rank.

    A shell that became the launcher by ``exec`` leaves it its background jobs and their orphans. In a container the
    launcher may be the init process, which gets all orphans. Otherwise it has no foreign children; where they are
    possible, only processes with the launcher's mark in their environment are a rank's.
    """

    def __init__(self) -> None:
        self._first = {(pid, process_start(pid)) for pid in _loop_children()}
        self._possible = bool(self._first) or os.getpid() == 1

    def __contains__(self, child: int) -> bool:
        if not self._possible:
            return False
        return (child, process_start(child)) in self._first or not _carries_mark(child)


def _carries_mark(pid: int) -> bool:
    try:
        return f"{LAUNCHER}={launcher_mark()}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: by the signal ``signal``, or with ``code`` if that is None."""

    code: int
    signal: signal.Signals | None = None

    @property
    def ok(self) -> bool:
        """True for exit code 0."""
        return self.signal is None and self.code == 0

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else f"signal {self.signal.name}"


class Child:
    """A process in its own session, whose end wakes the event loop.

    Its exit can be read without collecting it until ``reap()``: until then neither its pid nor its process group can be
    reused, so ``kill_group()`` cannot hit another process.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self._pidfd = os.pidfd_open(popen.pid)
        self._stop_watching: Callable[[], None] | None = None

    def watch(self, loop: Loop, ended: Callable[[], None]) -> None:
        """Call ``ended`` once, when the process has ended and ``exit()`` knows how.

        Its descriptor is readable as soon as it has ended. But while a debugger is attached, as py-spy is for a moment,
        its exit is the debugger's alone (``wait_consider_task`` in Linux' kernel/exit.c).
        """

        def readable() -> None:
            self.unwatch()
            if self.exit() is not None:
                ended()
            else:
                self._stop_watching = loop.later(_TRACED_S, lambda: self.watch(loop, ended)).cancel

        loop.watch(self._pidfd, readable)
        self._stop_watching = lambda: loop.unwatch(self._pidfd)

    def unwatch(self) -> None:
        """Tell nobody of its end."""
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None

    def exit(self) -> Exit | None:
        """How it ended, None while it runs or a debugger keeps its exit."""
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        if info.si_code == os.CLD_EXITED:
            return Exit(info.si_status)
        return Exit(128 + info.si_status, signal.Signals(info.si_status))

    def kill_group(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the process and its children that are still in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process alone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def reap(self, limit_s: float | None = None) -> None:
        """Collect the exit (waiting for it) and free the pid.

        A process that has not ended after ``limit_s`` seconds is left to ``collect_orphans``: the kernel may hold a
        killed process for as long as a file system hangs.
        """
        self.unwatch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(limit_s)
        os.close(self._pidfd)


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    output: int,
    keep: Sequence[int] = (),
    error_output: int = subprocess.STDOUT,
    stdin: int | None = subprocess.DEVNULL,
) -> Child:
    """Start ``command`` in its own session with ``output`` as stdout and stderr. Raises OSError.

    ``stdin`` None inherits the launcher's, as under torchrun.
    """
    return Child(
        subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=output,
            stderr=error_output,
            start_new_session=True,
            pass_fds=keep,
        )
    )


def descendants(pid: int, skip: Callable[[int], bool] = lambda _: False, proc: str = "/proc") -> Iterator[int]:
    """Pids of all processes below ``pid``, zombies included, parents first, without the trees that ``skip`` accepts."""
    for child in _children(pid, proc):
        if not skip(child):
            yield child
            yield from descendants(child, skip, proc)


def _children(pid: int, proc: str) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(proc, str(pid), "task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


def _loop_children() -> list[int]:
    """Children of this process's main thread, orphans included; those of other threads are left out."""
    pid = os.getpid()
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def sweep(
    protected: Callable[[int], bool], number: signal.Signals = signal.SIGKILL, told: set[int] | None = None
) -> int:
    """Signal all processes below this one's main thread outside the ``protected`` trees; returns how many remain.

    Direct children that have ended are collected. Call again until it returns 0. Processes in ``told`` get no further
    signal, and those signalled are added: many programs treat a second SIGTERM as "at once".
    """
    remaining = 0
    trees = [child for child in _loop_children() if not protected(child)]
    below = [pid for tree in trees for pid in (tree, *descendants(tree, protected))]
    for pid in below:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                continue
        if told is None or pid not in told:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if told is not None:
            told.add(pid)
        remaining += 1
    return remaining


def collect_orphans(known: Callable[[int], bool]) -> None:
    """Collect ended children that were reparented to this process and that nobody else waits for."""
    for pid in _loop_children():
        if not known(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
