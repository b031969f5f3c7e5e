"""Takes the stacks of all ranks at once with py-spy, each within a deadline, without stopping the event loop."""

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
_HANDLER_S = 0.1
"""What a rank's faulthandler is given to write its stack; it runs in the signal handler, without the GIL."""


@dataclass(frozen=True, slots=True)
class Target:
    """A rank to look into. ``stopped``: its process cannot be traced, only read."""

    rank: int
    pid: int
    stopped: bool
    fallback: Path
    """Where the rank's own faulthandler writes when asked with ``STACK_SIGNAL``."""


@dataclass(slots=True)
class _Dump:
    target: Target
    child: Child
    output: int


@dataclass(slots=True)
class Capture:
    """Stacks in the making. First a look that does not pause the rank; after it one with native frames, which does.

    Each better look replaces the one before; ``stacks`` holds what there is so far. ``close()`` ends what still runs.
    """

    targets: tuple[Target, ...]
    loop: Loop
    py_spy: str | None
    stacks: dict[int, Stack] = field(default_factory=dict)
    _dumps: dict[int, _Dump] = field(default_factory=dict)

    def start(self) -> None:
        """Begin with all ranks in parallel."""
        for target in self.targets:
            self._dump(target, "--nonblocking", lambda target=target: self._look_closer(target))  # type: ignore[misc]

    @property
    def pids(self) -> frozenset[int]:
        """The py-spy processes that run."""
        return frozenset(dump.child.pid for dump in self._dumps.values())

    def close(self) -> None:
        """End the py-spy processes; a rank that one of them was tracing goes on."""
        deadline = time.monotonic() + GONE_S
        for dump in self._dumps.values():
            dump.child.kill_group()
        for dump in list(self._dumps.values()):
            self.loop.unwatch(dump.child.pidfd)
            self._collect(dump, max(0.0, deadline - time.monotonic()))

    def ask_ranks(self) -> None:
        """Make the ranks that py-spy could not read write their Python stack themselves, if they can."""
        unread = [target for target in self.targets if target.rank not in self.stacks and not target.stopped]
        able = [target for target in unread if _catches(target.pid, STACK_SIGNAL)]
        for target in able:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, STACK_SIGNAL)
        if able:
            time.sleep(_HANDLER_S)

    def text(self) -> str:
        """All stacks, for people to read."""
        parts = []
        for target in self.targets:
            stack = self.stacks.get(target.rank)
            text = str(stack) if stack is not None else f"  not readable; what the rank itself wrote: {target.fallback}"
            parts.append(f"rank {target.rank} (pid {target.pid}{', stopped' if target.stopped else ''})\n{text}\n")
        return "\n".join(parts)

    def _look_closer(self, target: Target) -> None:
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
        if stack is not None:
            self.stacks[dump.target.rank] = stack


def find_py_spy() -> str | None:
    """The py-spy that was installed with opsd, else the one on the path, None without."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _catches(pid: int, number: int, proc: str = "/proc") -> bool:
    """True if the process has a handler for the signal, which would otherwise kill it (proc(5), SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(proc, str(pid), "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
