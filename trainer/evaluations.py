"""Evaluations of a run's checkpoints: started when one is durable, reported as events when results exist."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opsd.checkpoints.manifest import folder_of, steps
from opsd.checkpoints.retention import AWAITED
from opsd.client import Reporter
from opsd.events import Evaluation
from opsd.trainer.background import Work, run_now
from opsd.trainer.config import CHECKPOINTS, Config
from opsd.trainer.data.shards import DataError
from opsd.trainer.data.texts import read_texts
from opsd.trainer.items import check_letters, read_items
from opsd.trainer.jsonl import new_lines, read_positions, write_positions
from opsd.trainer.settings import EvaluationSettings

RESULTS, SCORES = "evaluations.jsonl", "scores"
"""In the run folder: one line per evaluation, and a folder for each with the scores of single items."""

LOG, POSITION = "evaluations.log", "evaluations.position.json"
AWAITING = AWAITED[1]
SUBMITTED = "submitted"
POLL_S = 5.0
CLOSE_POLL_S = 0.2
PLACE = "{command}"
_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|OPSD_(RUN|RUN_DIR|JOB|NODE|GPU|AUDIT|RANK_PAGE|GENERATION)|TORCH_FR_DUMP_TEMP_FILE"
    r"|TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
)
"""Variables that sbatch would pass on: the evaluation would take itself for a rank and wait for the others."""


@dataclass(frozen=True, slots=True)
class RunningEvaluation:
    """A command that evaluates the checkpoint of ``step``, or submits its evaluation."""

    step: int
    process: subprocess.Popen[bytes]


def demand_sets(settings: EvaluationSettings) -> None:
    """Raises DataError if a set cannot be read, before a step is made.

    A set that is missing here may be there for the command of ``settings.queue``, unless that runs on this node.
    """
    here = settings.queue == EvaluationSettings().queue

    def present(sets: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
        return ((name, Path(path)) for name, path in sets.items() if here or Path(path).exists())

    for name, path in present(settings.perplexity):
        if next(read_texts([path]), None) is None:
            raise DataError(f"{path}: the evaluation set {name} has no text")
    for sets in (settings.cloze, settings.multiple_choice):
        for name, path in present(sets):
            items = read_items(path)
            if not items:
                raise DataError(f"{path}: the evaluation set {name} has no items")
            if sets is settings.multiple_choice:
                check_letters(items)


class Evaluations:
    """Runs on the first rank. One command runs at a time; one that only submits a job, like sbatch, ends quickly.

    A checkpoint that an earlier start of the run did not evaluate, or could not start to, is evaluated now. For that,
    ``awaiting-evaluation`` in its folder contains ``SUBMITTED`` once a queue has accepted it.
    """

    def __init__(
        self, config: Config, folder: Path, reporter: Reporter, background: Callable[[Work], None] = run_now
    ) -> None:
        """``background`` runs work that may have to wait for storage."""
        self._folder, self._reporter, self._background = folder, reporter, background
        self._queue = shlex.split(config.evaluation.queue)
        self._waiting = deque(step for step in steps(folder / CHECKPOINTS) if self._is_left(step))
        self._running: RunningEvaluation | None = None
        self._polled = 0.0
        results = folder / RESULTS
        told = results.stat().st_size if results.exists() else 0
        self._positions = read_positions(folder / POSITION) or {RESULTS: told}
        write_positions(folder / POSITION, self._positions)

    def add(self, committed: Iterable[int]) -> None:
        """The checkpoints of the steps ``committed`` have become durable."""
        self._waiting.extend(committed)

    def poll(self, now: float) -> None:
        """Start waiting evaluations, report new results; acts every few seconds only, never waits."""
        if now - self._polled < POLL_S:
            return
        self._polled = now
        self._background(self._advance)

    def close(self) -> None:
        """Wait for running and waiting evaluations; a stopping run aborts them."""
        while self._running is not None or self._waiting:
            if self._reporter.stop_requested:
                self._break_off()
                break
            before = self._running
            self._advance()
            if self._running is not before:
                with self._reporter.phase("evaluation"):  # the launcher's limit is that of one evaluation
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

    def _start(self, step: int) -> RunningEvaluation | None:
        command = [sys.executable, "-m", "opsd.trainer.evaluate", str(self._folder.resolve()), str(step)]
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
            self._failed(step, f": {error.strerror}")
            return None
        return RunningEvaluation(step, process)

    def _ended(self, started: RunningEvaluation) -> None:
        """A finished evaluation, successful or not, has removed its mark."""
        status = started.process.returncode
        with suppress(OSError), open(self._mark(started.step), "r+", encoding="utf-8") as mark:
            if status:
                self._failed(started.step, f" ended with status {status}, see {self._folder / LOG}")
            else:
                mark.write(SUBMITTED)

    def _failed(self, step: int, how: str) -> None:
        why = f"{self._queue[0].replace(PLACE, 'the evaluation')}{how}; the next start of the run tries it again"
        self._reporter.event("evaluation", **Evaluation(step=step, results={}, why=why))

    def _is_left(self, step: int) -> bool:
        with suppress(OSError):
            return self._mark(step).read_text(encoding="utf-8") != SUBMITTED
        return False

    def _mark(self, step: int) -> Path:
        return folder_of(self._folder / CHECKPOINTS, step) / AWAITING

    def _tell(self) -> None:
        before = dict(self._positions)
        for line in new_lines(self._folder / RESULTS, self._positions):
            event = {key: value for key, value in line.items() if key not in ("t", "positions")}
            self._reporter.event("evaluation", **event)
        if self._positions != before:
            write_positions(self._folder / POSITION, self._positions)


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the variables that make a process a rank."""
    return {name: value for name, value in environ.items() if not _OF_A_RANK.fullmatch(name)}
