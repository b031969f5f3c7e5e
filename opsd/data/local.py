"""Tasks in processes of their own, and a few of those on this machine, each with one task after the other."""

from __future__ import annotations

import heapq
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from opsd.data.pipeline import PipelineError, Stage
from opsd.data.records import FAILED, LOG, SUCCESSFUL, Attempt, StageFolder
from opsd.data.run import Tries, cores
from opsd.files import oom_kills
from opsd.progress import shown

_SETTLE_S: Final = 2.0
"""If Slurm ends the job, this process does not outlive that of its task for so long."""


class Process:
    """A process of its own that runs tasks of a stage, one after the other; it ends with this one."""

    def __init__(self, root: Path, stage: int, cpus: int = 1, log: IO[bytes] | None = None) -> None:
        """What the steps print goes to ``log``, or where this process writes its errors."""
        command = [sys.executable, "-m", "opsd.data.worker", str(root.absolute()), str(stage)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            env={"RAYON_NUM_THREADS": str(cpus), **os.environ},  # tokenizers take all cores otherwise
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asked, self.answers = self._process.stdin, self._process.stdout

    def ask(self, attempt: Attempt) -> None:
        """Let it make this attempt."""
        self._attempt, self._oom_kills = attempt, oom_kills()
        with suppress(BrokenPipeError):  # its end is seen when its answer is read
            self._asked.write(json.dumps(asdict(attempt)).encode() + b"\n")
            self._asked.flush()

    def answer(self, folder: StageFolder) -> Attempt:
        """How the attempt has ended, also if the process has. Raises PipelineError, OSError."""
        line = self.answers.readline()
        if line.endswith(b"\n"):
            answer = json.loads(line)
            if "refused" in answer:
                raise PipelineError(answer["refused"])
            return Attempt(**answer)
        attempt, code = self._attempt, self._process.wait()
        if attempt.array:
            time.sleep(_SETTLE_S)
        attempt.seen = time.time()
        if folder.record(attempt.rank).exists():
            attempt.outcome = SUCCESSFUL[0]
        else:
            explain(attempt, code, oom_kills() > self._oom_kills)
        folder.note(attempt)
        return attempt

    @property
    def lives(self) -> bool:
        """Whether it can be asked again."""
        return self._process.poll() is None

    def end(self, at_once: bool = False) -> None:
        """Let it end, once it has answered, or kill it."""
        if at_once:
            self._process.kill()
        with suppress(BrokenPipeError):
            self._asked.close()
        self._process.wait()


def explain(attempt: Attempt, code: int, short_of_memory: bool) -> None:
    """Say how the attempt has ended whose process has ended by itself, with ``code`` as subprocess gives it."""
    if code == -signal.SIGKILL and short_of_memory:
        attempt.why = "its process was killed when memory was short; the kernel log and `opsd incidents` have more"
        return
    attempt.error = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    attempt.outcome, attempt.why = FAILED, f"its process ended with {attempt.error}"


@dataclass
class Local:
    """As many processes as the executor has workers, but no more than cores, or ``workers``."""

    root: Path
    workers: int = 0

    def run(self, stage: Stage, folder: StageFolder, ranks: Sequence[int], tries: Tries) -> None:
        """See ``opsd.data.run.Engine``. Raises PipelineError, OSError."""
        waiting, later, running, done = deque(ranks), list[tuple[float, int]](), list[Process](), 0
        asked = getattr(stage.executor, "workers", -1)
        most = self.workers or min(cores(), asked if asked > 0 else stage.tasks)
        with (
            shown(f"stage {stage.number}", "tasks") as look,
            selectors.DefaultSelector() as selector,
            open(folder.folder / LOG / "tasks.log", "ab") as log,
        ):
            try:
                while waiting or later or running:
                    while later and later[0][0] <= time.monotonic():
                        waiting.append(heapq.heappop(later)[1])
                    while waiting and len(running) < most:
                        running.append(process := Process(self.root, stage.number, log=log))
                        selector.register(process.answers, selectors.EVENT_READ, process)
                        process.ask(Attempt(waiting.popleft()))
                    for key, _ in selector.select(1.0):
                        process, attempt = key.data, key.data.answer(folder)
                        if attempt.outcome in SUCCESSFUL:
                            done += 1
                        elif tries.ended(attempt):
                            heapq.heappush(later, (time.monotonic() + tries.pause(attempt.rank), attempt.rank))
                        if waiting and process.lives:
                            process.ask(Attempt(waiting.popleft()))
                        else:
                            selector.unregister(process.answers)
                            running.remove(process)
                            process.end()
                    look(done, len(ranks))
            finally:
                for process in running:
                    process.end(at_once=True)
