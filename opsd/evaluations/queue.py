"""Evaluations of a run's checkpoints: started when one is durable, reported as events when results exist."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from opsd.checkpoints.retention import AWAITED
from opsd.client import Reporter
from opsd.events import Evaluation
from opsd.jsonl import new_lines, read_positions, write_positions
from opsd.threads import Work, run_now

RESULTS, SCORES = "evaluations.jsonl", "scores"
"""In the run folder: one line per evaluation, and a folder for each with the scores of single items."""

LOG, POSITION = "evaluations.log", "evaluations.position.json"
AWAITING = AWAITED[1]
"""The file in a checkpoint's folder that marks it until its evaluation has ended."""
SUBMITTED = "submitted"
POLL_S = 5.0
CLOSE_POLL_S = 0.2
PLACE = "{command}"
_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|OPSD_(RUN|RUN_DIR|JOB|NODE|GPU|AUDIT|RANK_PAGE|GENERATION|EVALUATION)|TORCH_FR_DUMP_TEMP_FILE"
    r"|TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
)
"""Variables that sbatch would pass on: the evaluation would take itself for a rank and wait for the others."""


class Saved(NamedTuple):
    """The checkpoint of ``step`` in ``folder``."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class RunningEvaluation:
    """A command that evaluates a checkpoint, or submits its evaluation."""

    checkpoint: Saved
    process: subprocess.Popen[bytes]


class Queue:
    """Runs on the first rank. One command runs at a time; one that only submits a job, like sbatch, ends quickly.

    A checkpoint waits for its evaluation as long as the file ``AWAITING`` is in its folder. The file contains
    ``SUBMITTED`` once a queue has accepted the evaluation. A checkpoint that an earlier start of the run did not
    evaluate, or could not start to, is evaluated by the next start: see ``left``.
    """

    def __init__(
        self,
        command: Callable[[Saved], Sequence[str]],
        queue: str,
        folder: Path,
        reporter: Reporter,
        background: Callable[[Work], None] = run_now,
    ) -> None:
        """``command`` evaluates a checkpoint of the run in ``folder``; ``queue`` says how it is started.

        ``background`` runs work that may have to wait for storage.
        """
        self.reporter = reporter
        self._command, self._queue = command, shlex.split(queue)
        self._folder, self._background = folder, background
        self._waiting: deque[Saved] = deque()
        self._running: RunningEvaluation | None = None
        self._polled = 0.0
        results = folder / RESULTS
        told = results.stat().st_size if results.exists() else 0
        self._positions = read_positions(folder / POSITION) or {RESULTS: told}
        write_positions(folder / POSITION, self._positions)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._running is None and not self._waiting

    def add(self, committed: Iterable[Saved]) -> None:
        """The checkpoints ``committed`` have become durable, and wait for their evaluation."""
        self._waiting.extend(committed)

    def poll(self, now: float) -> None:
        """Start waiting evaluations, report new results; acts every few seconds only, never waits."""
        if now - self._polled < POLL_S:
            return
        self._polled = now
        self._background(self._advance)

    def close(self) -> None:
        """Wait for running and waiting evaluations; a stopping run aborts them."""
        while not self.is_idle:
            if self.reporter.stop_requested:
                self._break_off()
                break
            before = self._running
            self._advance()
            if self._running is not before:
                with self.reporter.phase("evaluation"):  # the launcher's limit is that of one evaluation
                    pass
            if self._running is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._running.process.wait(CLOSE_POLL_S)
        self._tell()

    def _break_off(self) -> None:
        self._waiting.clear()
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running.process.pid, signal.SIGTERM)

    def _advance(self) -> None:
        if self._running is not None and self._running.process.poll() is not None:
            self._ended(self._running)
            self._running = None
        if self._running is None and self._waiting:
            self._running = self._start(self._waiting.popleft())
        self._tell()

    def _start(self, checkpoint: Saved) -> RunningEvaluation | None:
        command = self._command(checkpoint)
        words: list[str] = []
        for word in self._queue:
            words += command if word == PLACE else [word.replace(PLACE, shlex.join(command))]
        try:
            with open(self._folder / LOG, "ab") as log:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=without_rank_variables(os.environ),
                    start_new_session=True,
                )
        except OSError as error:
            self._failed(checkpoint.step, f": {error.strerror}")
            return None
        return RunningEvaluation(checkpoint, process)

    def _ended(self, started: RunningEvaluation) -> None:
        """A finished evaluation, successful or not, has removed its mark."""
        status, checkpoint = started.process.returncode, started.checkpoint
        with suppress(OSError), open(checkpoint.folder / AWAITING, "r+", encoding="utf-8") as mark:
            if status:
                self._failed(checkpoint.step, f" ended with status {status}, see {self._folder / LOG}")
            else:
                mark.write(SUBMITTED)

    def _failed(self, step: int, how: str) -> None:
        why = f"{self._queue[0].replace(PLACE, 'the evaluation')}{how}; the next start of the run tries it again"
        self.reporter.event("evaluation", **Evaluation(step=step, results={}, why=why))

    def _tell(self) -> None:
        before = dict(self._positions)
        for line in new_lines(self._folder / RESULTS, self._positions):
            event = {key: value for key, value in line.items() if key not in ("t", "positions")}
            self.reporter.event("evaluation", **event)
        if self._positions != before:
            write_positions(self._folder / POSITION, self._positions)


def left(checkpoints: Iterable[Saved]) -> list[Saved]:
    """Those of ``checkpoints`` that wait for an evaluation which no queue has accepted."""
    found = []
    for each in checkpoints:
        with suppress(OSError):
            if (each.folder / AWAITING).read_text(encoding="utf-8") != SUBMITTED:
                found.append(each)
    return found


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the variables that make a process a rank."""
    return {name: value for name, value in environ.items() if not _OF_A_RANK.fullmatch(name)}
