"""Judges torch's flight recorders in a hang; the launchers of the run have put them into its folder (``dumps.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from opsd.collectors.lib.nccl.desync import BETWEEN, MISMATCHED, Desync, Dump, DumpError, evidence, judge, parse_dump
from opsd.launch.hangs.hang import CERTAIN, Hang, RankStatus
from opsd.launch.io.loop import Timers
from opsd.rundir import RECORDER

OTHERS_S = 4.0
"""Time for the dumps of other nodes to appear in the run's folder."""
JUDGE_S = 3.0
"""After this time the culprit is named without the recorders."""
MAX_DUMP = 64 << 20
NAMES_FROM = 0.5
"""Confidence from which on a verdict may name a rank."""
_POLL_S = 0.05


class RecorderJudge:
    """Judges the dumps that the launchers of a run have put into its ``folder``, once for each hang."""

    def __init__(self, folder: Path, loop: Timers) -> None:
        self._folder = folder
        self._loop = loop
        self._question: object = None
        """That which is being judged."""

    def judge(self, generation: int, world: int, *, alone: bool, then: Callable[[Desync | None], None]) -> bool:
        """Call ``then`` once, with None if the dumps say nothing or are not to be had in time.

        ``alone``: all ranks are on this node, so that no further dump will come. False if it is asked already.
        """
        if self._question is not None:
            return False
        question = self._question = object()

        def done(verdict: Desync | None) -> None:
            if self._question is question:
                self._question = None
                then(verdict)

        wait_s = 0.0 if alone else OTHERS_S
        self._loop.later(JUDGE_S + wait_s, lambda: done(None))
        self._loop.run_in_thread(
            lambda: judge_folder(self._folder, generation, world, wait_s),
            lambda found: done(found if isinstance(found, Desync) else None),
        )
        return True

    def forget(self) -> None:
        """The hang is over: its verdict is not waited for."""
        self._question = None


def judge_folder(folder: Path, generation: int, world: int, wait_s: float = 0.0) -> Desync | None:
    """The verdict of the dumps of this generation; waits for those of all ranks, ``wait_s`` seconds at most."""
    deadline = time.monotonic() + wait_s
    dumps = dict[int, Dump]()
    while True:
        for rank in set(range(world)) - dumps.keys():
            dump = _read(short_path(folder, rank), generation) or _read(dump_path(folder, rank), generation)
            if dump is not None:
                dumps[rank] = dump
            if time.monotonic() > deadline + JUDGE_S:
                return None
        if len(dumps) == world or time.monotonic() >= deadline:
            return judge(dumps, frozenset(range(world))) if dumps else None
        time.sleep(_POLL_S)


def dump_path(folder: Path, rank: int) -> Path:
    """The file of the dump of ``rank``; the agent and ``opsd diagnose`` read it there."""
    return folder / RECORDER / f"rank-{rank:04d}.json"


def short_path(folder: Path, rank: int) -> Path:
    """Where what the judge needs of a dump is: a full ring takes a hundred times as long to read."""
    return folder / RECORDER / "short" / f"rank-{rank:04d}.json"


def _read(path: Path, generation: int) -> Dump | None:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DUMP)
        current = content.endswith(b'"opsd_generation": %d}' % generation)
        return parse_dump(content) if current else None
    except (OSError, DumpError):
        return None


def with_verdict(hang: Hang, verdict: Desync | None) -> Hang:
    """``hang`` with what the recorders say; they name the rank unless a process is stopped, dead or in the kernel."""
    if verdict is None:
        return hang
    said = tuple(f"flight recorder: {sentence}" for sentence in evidence(verdict))
    hang = replace(hang, evidence=(*hang.evidence, *said), recorder=verdict)
    named = next(iter(verdict.culprits), None)
    if hang.score >= CERTAIN or named is None or verdict.cause == BETWEEN or verdict.confidence < NAMES_FROM:
        return hang
    if hang.rank in verdict.culprits:
        status = next((rank for rank in hang.ranks if rank.rank == hang.rank), None)
        reason = _reason(hang.rank, verdict, status) if verdict.cause == MISMATCHED else hang.reason
        return replace(hang, reason=reason, score=CERTAIN)
    culprit = next((rank for rank in hang.ranks if rank.rank == named), None)
    hang = replace(hang, rank=named, reason=_reason(named, verdict, culprit), score=CERTAIN, evidence=said)
    return hang if culprit is None else replace(
        hang, phase=culprit.phase, step=culprit.step, stuck_s=culprit.stuck_s, limit_s=culprit.limit_s
    )  # fmt: skip


def _reason(rank: int, verdict: Desync, status: RankStatus | None) -> str:
    """Why the recorders blame ``rank``, with the line of the program where it stands."""
    what = f"{verdict.operation} {verdict.sequence} of group {verdict.group}"
    if verdict.cause == MISMATCHED:
        what = f"{verdict.called} (number {verdict.sequence} of group {verdict.group})"
    else:
        what = f"{verdict.cause} {what}"
    return f"rank {rank}: {what}" + (f", in {status.where}" if status is not None and status.where else "")
