"""The I/O of hang detection: reads process states, takes the stacks of all ranks, writes the event.

Stacks are taken with py-spy, of all ranks in parallel, each with a deadline, without blocking the event loop.
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

from opsd.launch.hangs.activity import Activity, ActivityTracker
from opsd.launch.hangs.culprit import Hang, RankStatus
from opsd.launch.hangs.hang import HangDetector, Observation, Stall
from opsd.launch.hangs.limits import HangLimits
from opsd.launch.hangs.recorder import Dumps
from opsd.launch.hangs.stacks import Stack, parse_stack
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import print_message
from opsd.launch.ranks.process import GONE_S, Child, spawn
from opsd.launch.ranks.ranks import Generation, Rank, usable_pages
from opsd.launch.ranks.worker import STACK_SIGNAL
from opsd.rank_page import RankPage, process_state, state_of
from opsd.rundir import RunFolders

_OUTPUT_LIMIT = 4 << 20
MOVING_S = 1.0
"""A rank whose page has changed within this time is at work, and its processes are not looked at."""
DUMPS_S = 0.05
_HANDLER_S = 0.1
"""Time for a rank's faulthandler to write its stack; it runs in the signal handler, without the GIL."""


class HangWatch:
    """Checks the pages of a generation periodically; the stacks are ready when a limit is reached.

    They are taken once per stall: the leader of several nodes may let a hang last for an hour because of a slow rank
    elsewhere. ``suffix`` distinguishes the stack files of several nodes.
    """

    def __init__(
        self, limits: HangLimits, folders: RunFolders, loop: Loop, py_spy: str | None, suffix: str = ""
    ) -> None:
        self._judge = HangDetector(limits)
        self._activity = ActivityTracker()
        self._folders = folders
        self._suffix = suffix
        self._loop = loop
        self._py_spy = py_spy
        self._capture: StackCapture | None = None
        self._begun = 0.0
        self._written = False
        self._file: str | None = None
        self._dumps: Dumps | None = None

    @property
    def suspicious(self) -> bool:
        """True while a stall is examined: worth frequent checks."""
        return self._capture is not None and not self._written

    @property
    def pids(self) -> frozenset[int]:
        """The py-spy processes."""
        return self._capture.pids if self._capture is not None else frozenset()

    def new_generation(self) -> None:
        """Start again with new ranks."""
        self.reset()
        self._judge.new_generation()
        self._activity.forget()

    def reset(self) -> None:
        """Drop the stall that is examined."""
        if self._capture is not None:
            self._capture.close()
            self._capture = None
        self._written, self._file, self._dumps = False, None, None

    def look(self, generation: Generation, pages: Mapping[int, RankPage]) -> Hang | None:
        """The hang that has been established, with the stacks written to a file; None without one."""
        now = time.monotonic()
        stall = self._judge.check(self._read(generation, pages, now), now)
        if stall is None or stall.longest.changed > self._begun:
            self.reset()
        if stall is None:
            return None
        if self._capture is None:
            self._capture, self._begun = self._begin(generation, stall), time.monotonic()
        if not stall.due:
            return None
        hang = self._judge.verdict(stall, self._capture.stacks)
        if hang is None or self._moves(generation, stall.longest, self._capture):
            self.reset()
            return None
        if self._dumps is None:
            self._dumps = self._ask_for_dumps(generation)
        if not self._dumps.settled(self._loop):
            return None
        if not self._written:
            self._written, self._file = True, self._write(generation.number, self._capture)
        return replace(hang, stacks=self._file)

    def _moves(self, generation: Generation, rank: RankStatus, capture: StackCapture) -> bool:
        """Whether the stack of a rank that seemed idle has changed, which is noted."""
        if rank.judged_as != "idle" or rank.rank not in capture.moved:
            return False
        for each in generation.running:
            if each.rank == rank.rank:
                self._activity.note_activity(each.child.pid, time.monotonic())
        return True

    def write_dumps(self, generation: Generation) -> None:
        """Have the ranks of this node write their flight recorders, unless they have: the leader sees a hang."""
        if self._dumps is None:
            self._dumps = self._ask_for_dumps(generation)
            self._follow(self._dumps)

    def _follow(self, dumps: Dumps) -> None:
        if not dumps.settled(self._loop):
            self._loop.later(DUMPS_S, lambda: self._follow(dumps))

    def _ask_for_dumps(self, generation: Generation) -> Dumps:
        stopped = frozenset(rank.rank for rank in generation.running if state_of(rank.child.pid) == "T")
        return Dumps(generation.running, stopped, self._folders, generation.number)

    def write_stacks(self, generation: Generation) -> str | None:
        """Write the stacks taken so far of a stall that is examined; returns the file, None without one."""
        if self._capture is None or self._written:
            return self._file
        return self._write(generation.number, self._capture)

    def _read(self, generation: Generation, pages: Mapping[int, RankPage | None], now: float) -> list[Observation]:
        return [self._observe(rank, pages.get(rank.rank), now) for rank in generation.running]

    def _observe(self, rank: Rank, page: RankPage | None, now: float) -> Observation:
        pid = rank.child.pid
        process = process_state(page) if page is not None else state_of(pid)
        if process == "t" and self.pids:
            process = "S"  # by our own py-spy
        if page is not None and now - page.changed < MOVING_S:
            return Observation(rank.rank, page, process, now, now)
        activity: Activity = self._activity.look(pid, now)
        if page is None and activity.stopped_child is not None:
            process = "T"
        return Observation(rank.rank, page, process, activity.active, activity.seen, activity.writing)

    def rank_statuses(self, generation: Generation) -> tuple[RankStatus, ...]:
        """The current status of the ranks."""
        now, pages = time.monotonic(), usable_pages(generation.running)
        return self._judge.rank_statuses(self._read(generation, pages, now), now)

    def accept(self, phase: str, score: int) -> None:
        """The ranks are killed for a hang in ``phase``; ``score`` is the weight of the evidence."""
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
        """Returns the path at once and writes in a thread, since a file server may hang."""
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
        "flight_recorder": None
        if (found := hang.recorder) is None
        else {"culprits": list(found.culprits), "cause": found.cause, "confidence": found.confidence},
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

    def start(self) -> None:
        """Start with all ranks in parallel."""
        for target in self.targets:
            self._dump(target, "--nonblocking", lambda target=target: self._look_closer(target))  # type: ignore[misc]

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
