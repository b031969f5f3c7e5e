"""Joins the judge of hangs with the world: reads process states, takes the stacks, writes the event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from opsd.client import RankPage, process_state
from opsd.launch.hangs.capture import Capture, Target
from opsd.launch.hangs.hang import Hang, HangJudge, HangLimits, Stall, Standing
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import say
from opsd.launch.ranks.ranks import Generation
from opsd.launch.ranks.rundir import RunFolders


class HangWatch:
    """Looks at the pages of a generation from time to time; stacks are ready when a hang's limit is reached.

    They are taken once for as long as nothing moves: the head of several nodes may let a hang last for an hour because
    of a slow rank elsewhere. ``suffix`` tells the files of stacks of several nodes apart.
    """

    def __init__(
        self, limits: HangLimits, folders: RunFolders, loop: Loop, py_spy: str | None, suffix: str = ""
    ) -> None:
        self._judge = HangJudge(limits)
        self._folders = folders
        self._suffix = suffix
        self._loop = loop
        self._py_spy = py_spy
        self._capture: Capture | None = None
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
        self.relax()
        self._judge.new_generation()

    def relax(self) -> None:
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
            self.relax()
        if stall is None:
            return None
        if self._capture is None:
            self._capture, self._begun = self._begin(generation, stall), time.monotonic()
        if not stall.due:
            return None
        hang = self._judge.verdict(stall, self._capture.stacks)
        if hang is None:
            self.relax()
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

    def standings(self, generation: Generation) -> tuple[Standing, ...]:
        """Where the ranks stand now."""
        pages, processes = self._read(generation, {rank.rank: rank.page() for rank in generation.running})
        return self._judge.standings(pages, processes, time.monotonic())

    def accept(self, phase: str, score: int) -> None:
        """The ranks will be killed for a hang in ``phase`` for which so much spoke."""
        self._judge.accept(phase, score)

    def _begin(self, generation: Generation, stall: Stall) -> Capture:
        states = {standing.rank: standing.process for standing in stall.ranks}
        targets = tuple(
            Target(rank.rank, rank.child.pid, states.get(rank.rank) in ("T", "t"), rank.log)
            for rank in generation.running
        )
        capture = Capture(targets, self._loop, self._py_spy)
        capture.start()
        return capture

    def _write(self, generation: int, capture: Capture) -> str:
        """Where the stacks will be: a file server that hangs does not hold up the launcher."""
        capture.ask_ranks()
        path, text = self._folders.stacks / f"gen-{generation:04d}{self._suffix}.txt", capture.text()
        self._loop.run_in_thread(
            lambda: path.write_text(text, encoding="utf-8"), lambda written: _unwritten(path, written)
        )
        return str(path)


def _unwritten(path: Path, written: int | OSError) -> None:
    if isinstance(written, OSError):
        say(f"the stacks of a hang are not written to {path}: {written.strerror}")


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
