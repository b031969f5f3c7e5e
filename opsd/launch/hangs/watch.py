"""Joins the judge of hangs with the world: reads process states, takes the stacks of all ranks, writes the event.

Stacks are taken with py-spy, of all ranks at once, each within a deadline, without stopping the event loop.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from opsd.client import RankPage, process_state
from opsd.launch.hangs.hang import Hang, HangDetector, HangLimits, RankStatus, Stall
from opsd.launch.hangs.stacks import Stack, parse_stack
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import print_message
from opsd.launch.ranks.process import GONE_S, Child, spawn
from opsd.launch.ranks.ranks import Generation
from opsd.launch.ranks.worker import STACK_SIGNAL
from opsd.rundir import RunFolders

_OUTPUT_LIMIT = 4 << 20
_HANDLER_S = 0.1
"""What a rank's faulthandler is given to write its stack; it runs in the signal handler, without the GIL."""


class HangWatch:
    """Looks at the pages of a generation from time to time; stacks are ready when a hang's limit is reached.

    They are taken once for as long as nothing moves: the leader of several nodes may let a hang last for an hour
    because of a slow rank elsewhere. ``suffix`` tells the files of stacks of several nodes apart.
    """

    def __init__(
        self, limits: HangLimits, folders: RunFolders, loop: Loop, py_spy: str | None, suffix: str = ""
    ) -> None:
        self._judge = HangDetector(limits)
        self._folders = folders
        self._suffix = suffix
        self._loop = loop
        self._py_spy = py_spy
        self._capture: StackCapture | None = None
        self._begun = 0.0
        self._written = False
        self._file: str | None = None

    @property
    def suspicious(self) -> bool:
        """True while a stall is being looked into: worth looking often."""
        return self._capture is not None and not self._written

    @property
    def pids(self) -> frozenset[int]:
        """Processes of ours that take stacks."""
        return self._capture.pids if self._capture is not None else frozenset()

    def new_generation(self) -> None:
        """Start afresh with new ranks."""
        self.reset()
        self._judge.new_generation()

    def reset(self) -> None:
        """Drop what is being looked into."""
        if self._capture is not None:
            self._capture.close()
            self._capture = None
        self._written, self._file = False, None

    def look(self, generation: Generation, pages: Mapping[int, RankPage]) -> Hang | None:
        """The hang that has been established, with the stacks written to a file; None while there is none."""
        running, processes = self._read(generation, pages)
        stall = self._judge.check(running, processes, time.monotonic())
        if stall is None or stall.longest.changed > self._begun:
            self.reset()
        if stall is None:
            return None
        if self._capture is None:
            self._capture, self._begun = self._begin(generation, stall), time.monotonic()
        if not stall.due:
            return None
        hang = self._judge.verdict(stall, self._capture.stacks)
        if hang is None:
            self.reset()
            return None
        if not self._written:
            self._written, self._file = True, self._write(generation.number, self._capture)
        return replace(hang, stacks=self._file)

    def write_stacks(self, generation: Generation) -> str | None:
        """Write what stacks there are so far of a stall that is being looked into; the file, None without one."""
        if self._capture is None or self._written:
            return self._file
        return self._write(generation.number, self._capture)

    def _read(
        self, generation: Generation, pages: Mapping[int, RankPage | None]
    ) -> tuple[dict[int, RankPage], dict[int, str | None]]:
        running = {rank.rank: page for rank in generation.running if (page := pages.get(rank.rank)) is not None}
        return running, {number: process_state(page) for number, page in running.items()}

    def rank_statuses(self, generation: Generation) -> tuple[RankStatus, ...]:
        """Where the ranks stand now."""
        pages, processes = self._read(generation, {rank.rank: rank.page() for rank in generation.running})
        return self._judge.rank_statuses(pages, processes, time.monotonic())

    def accept(self, phase: str, score: int) -> None:
        """The ranks will be killed for a hang in ``phase`` for which so much spoke."""
        self._judge.accept(phase, score)

    def _begin(self, generation: Generation, stall: Stall) -> StackCapture:
        states = {standing.rank: standing.process for standing in stall.ranks}
        targets = tuple(
            Target(rank.rank, rank.child.pid, states.get(rank.rank) in ("T", "t"), rank.log)
            for rank in generation.running
        )
        capture = StackCapture(targets, self._loop, self._py_spy)
        capture.start()
        return capture

    def _write(self, generation: int, capture: StackCapture) -> str:
        """Where the stacks will be: a file server that hangs does not hold up the launcher."""
        capture.ask_ranks()
        path, text = self._folders.stacks / f"gen-{generation:04d}{self._suffix}.txt", capture.text()
        self._loop.run_in_thread(
            lambda: path.write_text(text, encoding="utf-8"), lambda written: _unwritten(path, written)
        )
        return str(path)


def _unwritten(path: Path, written: int | OSError) -> None:
    if isinstance(written, OSError):
        print_message(f"the stacks of a hang are not written to {path}: {written.strerror}")


def hang_fields(hang: Hang) -> dict[str, object]:
    """The fields of a ``hang_detected`` event."""
    return {
        "rank": hang.rank,
        "phase": hang.phase,
        "step": hang.step,
        "stuck_s": round(hang.stuck_s, 3),
        "limit_s": round(hang.limit_s, 3),
        "reason": hang.reason,
        "evidence": list(hang.evidence),
        "stacks": hang.stacks,
        "ranks": [
            {
                "rank": rank.rank,
                "phase": rank.phase,
                "stuck_s": round(rank.stuck_s, 3),
                "process": rank.process,
                "step": rank.step,
            }
            for rank in hang.ranks
        ],
    }


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
class StackCapture:
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
