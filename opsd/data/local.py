"""Tasks on this machine: a few processes, each with one task after the other."""

from __future__ import annotations

import heapq
import json
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from opsd.data.pipeline import PipelineError, Stage
from opsd.data.records import FAILED, LOG, Attempt, StageFolder
from opsd.data.run import Tries, cores
from opsd.progress import shown

_CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that a program brings upon itself; nobody sends them."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    rank: int | None = None
    began: float = 0.0

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def ask(self, rank: int) -> None:
        assert self.process.stdin is not None
        self.rank, self.began = rank, time.time()
        with suppress(BrokenPipeError):  # its end is seen when its answer is read
            self.process.stdin.write(b"%d\n" % rank)
            self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


@dataclass
class Local:
    """As many processes as the executor has workers, but no more than cores, or ``workers``."""

    root: Path
    workers: int = 0
    _running: list[_Worker] = field(default_factory=list)

    def run(self, stage: Stage, folder: StageFolder, ranks: Sequence[int], tries: Tries) -> None:
        """See ``opsd.data.run.Engine``. Raises PipelineError, OSError."""
        waiting, later, done = deque(ranks), list[tuple[float, int]](), 0
        asked = getattr(stage.executor, "workers", -1)
        most = self.workers or min(cores(), asked if asked > 0 else stage.tasks)
        with shown(f"stage {stage.number}", "tasks") as look, selectors.DefaultSelector() as selector:
            try:
                while waiting or later or self._running:
                    while later and later[0][0] <= time.monotonic():
                        waiting.append(heapq.heappop(later)[1])
                    while waiting and len(self._running) < most:
                        worker = self._start(folder)
                        selector.register(worker.answers, selectors.EVENT_READ, worker)
                        worker.ask(waiting.popleft())
                    for key, _ in selector.select(1.0):
                        worker, attempt = key.data, self._answer(key.data, folder)
                        if attempt.outcome in ("done", "superseded"):
                            done += 1
                        elif tries.ended(attempt):
                            heapq.heappush(later, (time.monotonic() + tries.pause(attempt.rank), attempt.rank))
                        if waiting and worker.process.poll() is None:
                            worker.ask(waiting.popleft())
                        else:
                            selector.unregister(worker.answers)
                            self._running.remove(worker)
                            worker.end()
                    look(done, len(ranks))
            finally:
                for worker in self._running:
                    worker.process.kill()
                    worker.process.wait()
                self._running.clear()

    def _start(self, folder: StageFolder) -> _Worker:
        command = [sys.executable, "-m", "opsd.data.worker", str(self.root.absolute()), str(folder.number)]
        with open(folder.folder / LOG / "tasks.log", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        self._running.append(_Worker(process))
        return self._running[-1]

    @staticmethod
    def _answer(worker: _Worker, folder: StageFolder) -> Attempt:
        """How the task of a worker has ended, also if the worker has died. Raises PipelineError."""
        line = worker.answers.readline()
        if line.endswith(b"\n"):
            answer = json.loads(line)
            if "refused" in answer:
                raise PipelineError(answer["refused"])
            return Attempt(**answer)
        code, rank = worker.process.wait(), worker.rank
        assert rank is not None
        own = [each for each in folder.attempts() if each.rank == rank and each.began >= worker.began - 1]
        attempt = own[-1] if own else Attempt(rank, "")
        attempt.seen = time.time()
        if folder.record(rank).exists():
            attempt.outcome = "done"
            return attempt
        what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        memory = "; if memory was short, the kernel log and `opsd incidents` say so" if code == -signal.SIGKILL else ""
        attempt.outcome = "" if code < 0 and -code not in _CRASHES else FAILED
        attempt.why, attempt.error = f"its process ended with {what}{memory}", what if code >= 0 else ""
        folder.note(attempt)
        return attempt
