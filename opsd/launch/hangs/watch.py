"""The I/O of hang detection: reads process states, has the stacks of all ranks taken, writes the event."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from opsd.attribution import STOPPED
from opsd.events import HangDetected
from opsd.launch.hangs.activity import Activity, ActivityTracker
from opsd.launch.hangs.capture import StackCapture, Target
from opsd.launch.hangs.culprit import Hang, RankStatus
from opsd.launch.hangs.dumps import Dumps
from opsd.launch.hangs.gpus import GpuProbe, GpuState
from opsd.launch.hangs.hang import HangDetector, Observation, Stall
from opsd.launch.hangs.limits import HangLimits
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import print_message
from opsd.launch.ranks.ranks import Generation, Rank, usable_pages
from opsd.rank_page import RankPage, process_state, state_of
from opsd.rundir import RunFolders

MOVING_S = 1.0
"""A rank whose page has changed within this time is at work, and its processes are not looked at."""


class HangWatch:
    """Checks the pages of a generation periodically; the stacks are ready when a limit is reached.

    They are taken once per stall: the leader of several nodes may let a hang last for an hour because of a slow rank
    elsewhere. ``suffix`` distinguishes the stack files of several nodes. ``examining`` is True while stacks and GPUs of
    ranks that stand still are being read.
    """

    examining = False

    def __init__(
        self,
        limits: HangLimits,
        folders: RunFolders,
        loop: Loop,
        py_spy: str | None,
        suffix: str = "",
        gpu_probe: Sequence[str] | None = None,
    ) -> None:
        self._judge = HangDetector(limits)
        self._activity = ActivityTracker()
        self._folders = folders
        self._suffix = suffix
        self._loop = loop
        self._py_spy = py_spy
        self._gpu_probe = gpu_probe
        self._capture: StackCapture | None = None
        self._gpus = GpuProbe(None, {}, loop)
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
        """The processes that read stacks and GPUs."""
        return self._gpus.running | (self._capture.pids if self._capture is not None else frozenset())

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
        self._gpus.close()
        self.examining = False
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
        self.examining = self._capture.awaited(time.monotonic() - self._begun) or (
            self._gpus.awaited and stall.longest.process not in STOPPED
        )
        if not stall.due or self.examining:
            return None
        hang = self._judge.verdict(stall, self._capture.stacks, self._gpus.uses)
        if hang is None or self._moves(generation, stall, self._capture):
            self.reset()
            return None
        if self._dumps is None:
            self._dumps = self._ask_for_dumps(generation)
        if not self._dumps.settled():
            return None
        if not self._written:
            self._written, self._file = True, self._write(generation.number, self._capture)
        return replace(hang, stacks=self._file)

    def _moves(self, generation: Generation, stall: Stall, capture: StackCapture) -> bool:
        """Whether ranks that seemed idle are not, which is noted: the longest one's stack has changed, or GPUs work."""
        moving = {rank for rank, use in self._gpus.uses.items() if use.state is GpuState.WORKS} | (
            capture.moved & {stall.longest.rank}
        )
        moving &= {rank.rank for rank in stall.ranks if rank.judged_as == "idle" and rank.overdue}
        for each in generation.running:
            if each.rank in moving:
                self._activity.note_activity(each.child.pid, time.monotonic())
        return bool(moving)

    def write_dumps(self, generation: Generation) -> None:
        """Have the ranks of this node write their flight recorders, unless they have: the leader sees a hang."""
        if self._dumps is None:
            self._dumps = self._ask_for_dumps(generation)

    def _ask_for_dumps(self, generation: Generation) -> Dumps:
        able = [rank for rank in generation.running if state_of(rank.child.pid) != "T"]
        dumps = Dumps(able, self._folders, generation.number, self._loop)
        dumps.start()
        return dumps

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
        if process == "t" and self._capture is not None and self._capture.pids:
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
        self._gpus = GpuProbe(self._gpu_probe, {rank.rank: rank.child.pid for rank in generation.running}, self._loop)
        self._gpus.start()
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


def hang_fields(hang: Hang) -> HangDetected:
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
