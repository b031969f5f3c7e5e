"""``opsd bench recovery``: steps lost when a rank of the included trainer is killed, and on SIGTERM.

Afterwards the same run is repeated undisturbed, and all losses are compared bit by bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opsd import exitcodes
from opsd.bench import BenchError
from opsd.demo.scene import copy_text
from opsd.rank_page import PageError, RankPage, read_page

KILLS, STOPS = 50, 2
EVERY = 5
RANKS = 2
LIMIT_S = 120.0
TEXT_BYTES = 400_000
NEVER = 100_000


def run(kills: int = KILLS, stops: int = STOPS) -> dict[str, float | int | str]:
    """Kill a rank at ``kills`` random moments, then stop the run ``stops`` times by SIGTERM and restart it.

    Every second kill comes right after a save has begun; ``ours_kills_into_saves`` counts saves left unfinished.
    A step is lost if it has to be repeated. ``ours_losses_different`` counts the lines of metrics.jsonl, repeated steps
    included, whose loss differs from the undisturbed run in any bit. Nothing is compared: torchrun alone keeps no
    state. Raises BenchError.
    """
    with tempfile.TemporaryDirectory(prefix="opsd-bench-") as name:
        folder = Path(name)
        make_shards(folder)
        training = Training(folder, "disturbed")
        lost = [training.kill(into_save=number % 2 == 1) for number in range(kills)]
        stopped = [training.stop_and_resume() for _ in range(stops)]
        training.end()
        losses = training.losses()
        undisturbed = dict(Training(folder, "undisturbed", steps=max(step for step, _ in losses)).finish())
    return {
        "ours_checkpoint_every_steps": EVERY,
        "ours_kills_resumed": len(lost),
        "ours_kills_into_saves": training.into_saves,
        "ours_losses_compared": len(losses),
        "ours_losses_different": sum(undisturbed[step] != loss for step, loss in losses),
        "ours_kill_lost_steps_max": max(lost),
        "ours_kill_lost_steps_mean": sum(lost) / len(lost),
        "ours_sigterm_lost_steps_max": max(stopped),
        "kills": kills,
        "sigterms": stops,
    }


def make_shards(folder: Path) -> Path:
    """Token shards for the tiny preset, of the standard library's text. Raises BenchError."""
    copy_text(folder / "text", TEXT_BYTES)
    data = [sys.executable, "-m", "opsd.trainer.data", str(folder / "text"), "--out", str(folder / "shards")]
    made = subprocess.run(data, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise BenchError(f"no token shards: {made.stderr.strip()[-500:]}")
    return folder / "shards"


class Training:
    """The tiny preset on two ranks under ``opsd launch``, checkpointed every ``EVERY`` steps."""

    def __init__(self, folder: Path, name: str, steps: int = NEVER) -> None:
        self._folder, self._name, self._last = folder, name, steps
        self._events = folder / name / "events.jsonl"
        self._random = random.Random(1)
        self._process = self._launch()
        self.into_saves = 0
        """Number of kills after which a checkpoint that had been begun was missing."""

    def kill(self, *, into_save: bool) -> int:
        """SIGKILL a random rank at a random moment once a checkpoint is committed; the steps lost."""
        self._until(lambda: bool(self._seen("checkpoint_committed")))
        resumed = len(self._seen("resumed"))
        time.sleep(self._random.uniform(0.0, 1.5))
        if into_save:
            save = self._page(0).steps[-1].step // EVERY * EVERY + EVERY
            self._until(lambda: self._page(0).steps[-1].step >= save, poll_s=0.001)
        page = self._page(self._random.randrange(RANKS))
        os.kill(page.pid, signal.SIGKILL)
        self._until(lambda: len(self._seen("resumed")) > resumed)
        self.into_saves += page.steps[-1].step // EVERY * EVERY > (page.committed_step or 0)
        return int(self._seen("resumed")[-1]["lost_steps"])

    def stop_and_resume(self) -> int:
        """SIGTERM to the launcher, then the same command again; returns the number of repeated steps."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(timeout=LIMIT_S)
        if code != exitcodes.REQUEUE:
            raise BenchError(f"the run ended with {code} after SIGTERM, expected {exitcodes.REQUEUE}")
        before = len(self._steps())
        last = self._steps()[-1]
        self._process = self._launch()
        self._until(lambda: len(self._steps()) > before)
        return last + 1 - self._steps()[before]

    def end(self) -> None:
        """Stop the run."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=LIMIT_S)

    def finish(self) -> list[tuple[int, float]]:
        """Wait for the end of the run; returns its losses."""
        if code := self._process.wait():
            raise BenchError(f"the undisturbed run ended with {code}:\n{self._output()}")
        return self.losses()

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of every complete line of the metrics."""
        lines = (self._folder / self._name / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(int(line["step"]), float(line["loss"])) for line in found]

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = {
            "data.shards": self._folder / "shards",
            "run.steps": self._last,
            "data.sequence": 64,
            "schedule.decay_start": NEVER - 1,
            "schedule.decay_end": NEVER,
            "checkpoint.every": EVERY,
        }
        launch = [
            sys.executable,
            "-m",
            "opsd",
            "launch",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            "--max-same-failures=0",
            f"--max-restarts={NEVER}",
        ]
        where = [f"--run-id={self._name}", f"--run-dir={self._folder / self._name}", "-m", "opsd.trainer", "tiny"]
        with (self._folder / "output").open("ab") as output:
            return subprocess.Popen(
                [*launch, *where, *(f"--set={key}={value}" for key, value in settings.items())],
                env={**os.environ, "OPSD_SHM": str(self._folder / "shm")},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _seen(self, kind: str) -> list[dict[str, Any]]:
        if not self._events.exists():
            return []
        lines = self._events.read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def _steps(self) -> list[int]:
        return [step for step, _ in self.losses()]

    def _page(self, rank: int) -> RankPage:
        return read_page(self._folder / "shm" / self._name / f"rank-{rank:04d}.page")

    def _output(self) -> str:
        return (self._folder / "output").read_text(errors="replace")[-800:]

    def _until(self, condition: Callable[[], bool], poll_s: float = 0.05) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except (PageError, FileNotFoundError, IndexError):
                pass
            if self._process.poll() is not None:
                break
            time.sleep(poll_s)
        raise BenchError(f"the run did not continue:\n{self._output()}")
