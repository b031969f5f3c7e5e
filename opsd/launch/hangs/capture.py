"""The stacks of all ranks, taken with py-spy in parallel, each with a deadline, without blocking the event loop."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opsd.launch.hangs.stacks import Stack, parse_stack
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import GONE_S, spawn
from opsd.launch.ranks.worker import STACK_SIGNAL

_OUTPUT_LIMIT = 4 << 20


class ChildOutput:
    """Runs ``command`` and calls ``ended`` with its standard output, at most 4 MiB of it. Raises OSError."""

    def __init__(self, command: Sequence[str], loop: Loop, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._output = os.memfd_create("output")
        try:
            self._child = spawn(
                command, env=os.environ, cwd=Path("/"), output=self._output, error_output=subprocess.DEVNULL
            )
        except OSError:
            os.close(self._output)
            raise
        self._child.watch(loop, self._collect)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def kill(self) -> None:
        """Kill it and what it has started."""
        self._child.kill_group()

    def close(self, limit_s: float) -> None:
        """Kill it and wait for its end for at most ``limit_s`` seconds; ``ended`` is not called."""
        self._child.kill_group()
        self._child.reap(limit_s)
        os.close(self._output)

    def _collect(self) -> None:
        with open(os.dup(self._output), "rb") as file:
            file.seek(0)
            text = file.read(_OUTPUT_LIMIT).decode(errors="replace")
        self.close(GONE_S)
        self._ended(text)


STACKS_S = 10.0
"""How long a verdict waits for the stacks of each rank: on a busy node py-spy takes seconds to start."""
LOOKS = 8
"""How often a rank is looked at: one at work may be seen in the same line several times in a row."""
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
class StackCapture:
    """Takes stacks: first without pausing the rank, then with native frames, which pauses it, then some more without.

    The most detailed stack is kept; ``stacks`` holds those taken so far. A rank that has been seen to move, or waits in
    a collective, is not looked at again. ``close()`` stops the rest.
    """

    targets: tuple[Target, ...]
    loop: Loop
    py_spy: str | None
    stacks: dict[int, Stack] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    """Ranks that were at work between two of their stacks, see ``Stack.moved_since``."""
    _dumps: dict[int, ChildOutput] = field(default_factory=dict)
    _awaited: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Start with all ranks in parallel."""
        for target in self.targets:
            self._look(target, 1)
        self._awaited = {*self._dumps}

    def awaited(self, seconds: float) -> bool:
        """Whether, ``seconds`` after the start, further stacks of a rank are still worth waiting for."""
        return bool(self._awaited) and seconds < STACKS_S

    @property
    def pids(self) -> frozenset[int]:
        """The running py-spy processes."""
        return frozenset(dump.pid for dump in self._dumps.values())

    def close(self) -> None:
        """Kill the py-spy processes; a rank that was traced goes on."""
        deadline = time.monotonic() + GONE_S
        for dump in self._dumps.values():
            dump.kill()
        for dump in self._dumps.values():
            dump.close(max(0.0, deadline - time.monotonic()))
        self._dumps.clear()

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
        parts = []
        for target in self.targets:
            stack = self.stacks.get(target.rank)
            text = str(stack) if stack is not None else f"  not readable; what the rank itself wrote: {target.fallback}"
            parts.append(f"rank {target.rank} (pid {target.pid}{', stopped' if target.stopped else ''})\n{text}\n")
        return "\n".join(parts)

    def _look(self, target: Target, number: int) -> None:
        """The look ``number`` at a rank, and those after it."""
        self._dump(target, "--native" if number == 2 else "--nonblocking", lambda: self._look_again(target, number))

    def _look_again(self, target: Target, number: int) -> None:
        stack = self.stacks.get(target.rank)
        settled = stack is None or target.rank in self.moved or stack.in_collective is not None
        if target.stopped or number == LOOKS or (number > 1 and settled):
            self._awaited.discard(target.rank)
        else:
            self._look(target, number + 1)

    def _dump(self, target: Target, how: str, then: Callable[[], None]) -> None:
        if self.py_spy is None:
            return
        command = (self.py_spy, "dump", "--json", how, "--pid", str(target.pid))

        def ended(text: str) -> None:
            del self._dumps[target.rank]
            self._collect(target.rank, text)
            then()

        with contextlib.suppress(OSError):
            self._dumps[target.rank] = ChildOutput(command, self.loop, ended)

    def _collect(self, rank: int, text: str) -> None:
        stack = parse_stack(text)
        if stack is None:
            return
        before = self.stacks.get(rank)
        if before is not None and stack.moved_since(before):
            self.moved.add(rank)
        if before is None or not before.native:
            before = stack
        self.stacks[rank] = replace(before, moved=rank in self.moved)


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
