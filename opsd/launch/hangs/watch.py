"""The I/O of hang detection: reads process states, has the stacks of all ranks taken, writes the event."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from opsd.attribution import STOPPED
from opsd.collectors.lib.nccl.desync import DumpError, shortened
from opsd.events import HangDetected
from opsd.launch.hangs.activity import Activity, ActivityTracker
from opsd.launch.hangs.capture import StackCapture, Target
from opsd.launch.hangs.gpus import GpuProbe, GpuState
from opsd.launch.hangs.hang import Hang, HangDetector, Observation, RankStatus, Stall
from opsd.launch.hangs.limits import HangLimits
from opsd.launch.hangs.recorder import MAX_DUMP, dump_path, short_path
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

    def companion_works(self, at: float) -> None:
        """See ``HangDetector.companion_works``."""
        self._judge.companion_works(at)

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


CHANNEL_S = 0.5
"""After this time a rank that has not answered on its channel is asked by its socket."""
ANSWER_S = 3.0
"""Time for a rank to write its recorder."""
COPY_S = 3.0
"""Time for a file server after that."""
KEPT = "torch"
"""Below the dumps: torch's own files of ranks whose dumps the launcher has written."""
HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
"""Of torch's server: NCCL has a recorder of its own, all other backends share one."""
_POLL_S = 0.05


class Asked(Protocol):
    """A rank that can be asked for its recorder."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def socket_path(self) -> Path:
        """Where torch's server listens."""

    def ask_for_dump(self, path: Path) -> bool:
        """Whether it has been asked by its channel to write to ``path``."""


@dataclass(slots=True)
class Dumps:
    """Has ``ranks`` write torch's flight recorders, once per hang, and puts them into the run's folder.

    A rank is asked by its worker's channel, which needs the interpreter lock, then by the socket of torch's own server,
    which does not. A stopped rank leaves no dump; each answer is awaited in a thread, and not for long.
    """

    ranks: Iterable[Asked]
    folders: RunFolders
    generation: int
    loop: Loop
    answer_s: float = ANSWER_S
    _awaited: set[int] = field(default_factory=set)
    _begun: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Ask, and begin to wait."""
        for rank in self.ranks:
            if rank.ask_for_dump(self.folders.dump(rank.rank)):
                self._awaited.add(rank.rank)
                self.loop.run_in_thread(partial(self.collect, rank), partial(self._collected, rank.rank))

    def settled(self) -> bool:
        """Whether the dumps are in the run's folder, or have had their time."""
        return not self._awaited or time.monotonic() > self._begun + self.answer_s + COPY_S

    def _collected(self, rank: int, outcome: bool | OSError) -> None:
        self._awaited.discard(rank)

    def collect(self, rank: Asked) -> bool:
        """Wait for the dump of a rank that has been asked, and keep it; whether there is one. Raises OSError."""
        answer, end = self.folders.dump(rank.rank), time.monotonic() + self.answer_s
        if _appears(answer, CHANNEL_S):
            self._keep(rank.rank, answer.read_bytes())
            return True
        contents = [ask_server(rank.socket_path, handler, end - time.monotonic()) for handler in HANDLERS]
        found = next((content for content in contents if b'"record_id"' in content), b"")
        if not any(contents) and _appears(answer, end - time.monotonic()):
            found = answer.read_bytes()
        if found:
            self._keep(rank.rank, found)
        return bool(found)

    def _keep(self, rank: int, content: bytes) -> None:
        """Put a dump into the run's folder, with the generation at its end; a folder has one dump a rank."""
        path, short = dump_path(self.folders.folder, rank), short_path(self.folders.folder, rank)
        with contextlib.suppress(DumpError):
            short.parent.mkdir(exist_ok=True)
            self._write(short, shortened(content))
        self._write(path, content)
        of_torch = path.with_name(f"rank_{rank}")
        if of_torch.exists():
            path.with_name(KEPT).mkdir(exist_ok=True)
            of_torch.replace(path.with_name(KEPT) / of_torch.name)

    def _write(self, path: Path, content: bytes) -> None:
        draft = path.with_name(f".{path.name}")
        draft.write_bytes(content.rstrip()[:-1] + f', "opsd_generation": {self.generation}}}'.encode())
        draft.replace(path)


def _appears(path: Path, seconds: float) -> bool:
    """Whether a file is there within so many seconds."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def ask_server(path: Path, handler: str, seconds: float) -> bytes:
    """What a handler of torch's server answers within so many seconds; nothing without an answer."""
    end, answer = time.monotonic() + seconds, bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(max(0.01, seconds))
            server.connect(str(path))
            server.sendall(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
            while part := server.recv(1 << 16):
                answer += part
                if len(answer) > MAX_DUMP:
                    return b""
                server.settimeout(max(0.01, end - time.monotonic()))
    except OSError:
        return b""
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return body if b" 200 " in head.partition(b"\r\n")[0] else b""
