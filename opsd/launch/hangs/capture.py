"""The stacks of all ranks, taken with py-spy in parallel, each with a deadline, without blocking the event loop."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opsd.launch.hangs.stacks import Stack, parse_stack
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import GONE_S, Child, spawn
from opsd.launch.ranks.worker import STACK_SIGNAL

_OUTPUT_LIMIT = 4 << 20
STACKS_S = 10.0
"""How long a verdict waits for the first stack of each rank: on a busy node py-spy takes seconds to start."""
_HANDLER_S = 0.1
"""Time for a rank's faulthandler to write its stack; it runs in the signal handler, without the GIL."""


@dataclass(frozen=True, slots=True)
class Target:
    """A rank to examine. ``stopped``: its process cannot be traced, only read."""

    rank: int
    pid: int
    stopped: bool
    fallback: Path
    """Where the rank's own faulthandler writes on ``STACK_SIGNAL``."""


@dataclass(slots=True)
class _Dump:
    target: Target
    child: Child
    output: int


@dataclass(slots=True)
class StackCapture:
    """Takes stacks: first without pausing the rank, then with native frames, which pauses it.

    A later, more detailed stack replaces an earlier one; ``stacks`` holds those taken so far. ``close()`` stops the
    rest.
    """

    targets: tuple[Target, ...]
    loop: Loop
    py_spy: str | None
    stacks: dict[int, Stack] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    """Ranks whose main thread was elsewhere when its stack was taken a second time."""
    _dumps: dict[int, _Dump] = field(default_factory=dict)
    _first: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Start with all ranks in parallel."""
        for target in self.targets:
            self._dump(target, "--nonblocking", lambda target=target: self._look_closer(target))  # type: ignore[misc]
        self._first = {*self._dumps}

    def awaited(self, seconds: float) -> bool:
        """Whether, ``seconds`` after the start, the first stack of a rank is still worth waiting for."""
        return bool(self._first) and seconds < STACKS_S

    @property
    def pids(self) -> frozenset[int]:
        """The running py-spy processes."""
        return frozenset(dump.child.pid for dump in self._dumps.values())

    def close(self) -> None:
        """Kill the py-spy processes; a rank that was traced goes on."""
        deadline = time.monotonic() + GONE_S
        for dump in self._dumps.values():
            dump.child.kill_group()
        for dump in list(self._dumps.values()):
            self.loop.unwatch(dump.child.pidfd)
            self._collect(dump, max(0.0, deadline - time.monotonic()))

    def ask_ranks(self) -> None:
        """Make ranks that py-spy could not read write their Python stack themselves."""
        unread = [target for target in self.targets if target.rank not in self.stacks and not target.stopped]
        able = [target for target in unread if _catches(target.pid, STACK_SIGNAL)]
        for target in able:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, STACK_SIGNAL)
        if able:
            time.sleep(_HANDLER_S)

    def text(self) -> str:
        """All stacks as text."""
        parts = []
        for target in self.targets:
            stack = self.stacks.get(target.rank)
            text = str(stack) if stack is not None else f"  not readable; what the rank itself wrote: {target.fallback}"
            parts.append(f"rank {target.rank} (pid {target.pid}{', stopped' if target.stopped else ''})\n{text}\n")
        return "\n".join(parts)

    def _look_closer(self, target: Target) -> None:
        self._first.discard(target.rank)
        if not target.stopped:
            self._dump(target, "--native", lambda: None)

    def _dump(self, target: Target, how: str, then: Callable[[], None]) -> None:
        if self.py_spy is None:
            return
        output = os.memfd_create("stack")
        command = (self.py_spy, "dump", "--json", how, "--pid", str(target.pid))
        try:
            child = spawn(command, env=os.environ, cwd=Path("/"), output=output, error_output=subprocess.DEVNULL)
        except OSError:
            os.close(output)
            return
        dump = self._dumps[target.rank] = _Dump(target, child, output)

        def ended() -> None:
            self.loop.unwatch(child.pidfd)
            self._collect(dump, GONE_S)
            then()

        self.loop.watch(child.pidfd, ended)

    def _collect(self, dump: _Dump, limit_s: float) -> None:
        del self._dumps[dump.target.rank]
        dump.child.kill_group()
        dump.child.reap(limit_s)
        with open(dump.output, "rb") as file:
            file.seek(0)
            stack = parse_stack(file.read(_OUTPUT_LIMIT).decode(errors="replace"))
        if stack is None:
            return
        before = self.stacks.get(dump.target.rank)
        if before is not None and before.python != stack.python:
            self.moved.add(dump.target.rank)
        self.stacks[dump.target.rank] = stack


def find_py_spy() -> str | None:
    """The py-spy installed with opsd, else the one on the path, None without."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _catches(pid: int, number: int, proc: str = "/proc") -> bool:
    """Whether the process handles the signal, which would otherwise kill it (proc(5), SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(proc, str(pid), "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
