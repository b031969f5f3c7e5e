"""Evaluations of a run's checkpoints: started when one is durable, told as events when they have results."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from opsd.client import Reporter
from trainer.config import Config

CONFIG, RESULTS = "config.json", "evaluations.jsonl"
"""In the run folder: the settings of the run, and a line for each evaluation."""

LOG = "evaluations.log"
POLL_S = 5.0
CLOSE_POLL_S = 0.2
PLACE = "{command}"
_OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|OPSD_(RUN|RUN_DIR|JOB|NODE|GPU|RANK_PAGE|GENERATION)"
)
"""What sbatch would hand on to a job that is no rank, and would wait for the others as one."""


class Evaluations:
    """On the first rank. One command runs at a time; one that only submits a job, like sbatch, is soon done."""

    def __init__(self, config: Config, folder: Path, reporter: Reporter) -> None:
        self._folder, self._reporter = folder, reporter
        self._queue = shlex.split(config.evaluation.queue)
        self._waiting: deque[int] = deque()
        self._running: subprocess.Popen[bytes] | None = None
        self._polled = 0.0
        (folder / CONFIG).write_text(config.model_dump_json(indent=1), encoding="utf-8")
        results = folder / RESULTS
        self._read = results.stat().st_size if results.exists() else 0

    def add(self, committed: Iterable[int]) -> None:
        """The checkpoints of the steps ``committed`` are durable."""
        self._waiting.extend(committed)

    def poll(self, now: float) -> None:
        """Start what waits, and tell new results; looks every few seconds only, never waits."""
        if now - self._polled < POLL_S:
            return
        self._polled = now
        self._advance()

    def close(self) -> None:
        """See what has been started or waits through; a run that is to stop breaks it off."""
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
                    self._running.wait(CLOSE_POLL_S)
        self._tell()

    def _break_off(self) -> None:
        self._waiting.clear()
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGTERM)

    def _advance(self) -> None:
        if self._running is not None and self._running.poll() is not None:
            self._running = None
        if self._running is None and self._waiting:
            self._running = self._start(self._waiting.popleft())
        self._tell()

    def _start(self, step: int) -> subprocess.Popen[bytes] | None:
        command = [sys.executable, "-m", "trainer.evaluate", str(self._folder.resolve()), str(step)]
        words: list[str] = []
        for word in self._queue:
            words += command if word == PLACE else [word.replace(PLACE, shlex.join(command))]
        try:
            with open(self._folder / LOG, "ab") as log:
                return subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=of_no_rank(os.environ),
                    start_new_session=True,
                )
        except OSError as error:
            self._reporter.event("evaluation", step=step, results={}, why=f"{words[0]}: {error.strerror}")
            return None

    def _tell(self) -> None:
        try:
            with open(self._folder / RESULTS, "rb") as file:
                file.seek(self._read)
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return
        for line in lines:
            if not line.endswith(b"\n"):  # being written
                return
            self._read += len(line)
            record = json.loads(line)
            del record["t"]
            self._reporter.event("evaluation", **record)


def of_no_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what makes a process a rank."""
    return {name: value for name, value in environ.items() if not _OF_A_RANK.fullmatch(name)}
