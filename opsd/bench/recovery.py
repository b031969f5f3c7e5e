"""``opsd bench recovery``: steps lost when a rank of the included trainer is killed, and on SIGTERM."""

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
from opsd.bench.restart import BenchError
from opsd.client import PageError, read_page
from opsd.demo.text import copy_text

KILLS, STOPS = 6, 2
EVERY = 10
RANKS = 2
LIMIT_S = 120.0
TEXT_BYTES = 400_000
NEVER = 100_000


def run(kills: int = KILLS, stops: int = STOPS) -> dict[str, float | int | str]:
    """Kill a rank at ``kills`` random moments, then stop the run ``stops`` times by SIGTERM and start it again.

    A step is lost if it has to be done once more. There is no peer: torchrun alone keeps no state. Raises BenchError.
    """
    with tempfile.TemporaryDirectory(prefix="opsd-bench-") as name:
        folder = Path(name)
        copy_text(folder / "text", TEXT_BYTES)
        data = [sys.executable, "-m", "trainer.data", str(folder / "text"), "--out", str(folder / "shards")]
        made = subprocess.run(data, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise BenchError(f"no token shards: {made.stderr.strip()[-500:]}")
        training = Training(folder)
        lost = [training.kill() for _ in range(kills)]
        stopped = [training.stop_and_resume() for _ in range(stops)]
        training.end()
    return {
        "ours_checkpoint_every_steps": EVERY,
        "ours_kill_lost_steps_max": max(lost),
        "ours_kill_lost_steps_mean": sum(lost) / len(lost),
        "ours_sigterm_lost_steps_max": max(stopped),
        "kills": kills,
        "sigterms": stops,
    }


class Training:
    """The tiny preset on two ranks under ``opsd launch``, checkpointed every ``EVERY`` steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events = folder / "run" / "events.jsonl"
        self._random = random.Random(1)
        self._process = self._launch()

    def kill(self) -> int:
        """SIGKILL a random rank at a random moment once a checkpoint is committed; the steps lost."""
        self._until(lambda: bool(self._seen("checkpoint_committed")))
        resumed = len(self._seen("resumed"))
        time.sleep(self._random.uniform(1.0, 3.0))
        rank = self._random.randrange(RANKS)
        os.kill(self._pid(rank), signal.SIGKILL)
        self._until(lambda: len(self._seen("resumed")) > resumed)
        return int(self._seen("resumed")[-1]["lost_steps"])

    def stop_and_resume(self) -> int:
        """SIGTERM to the launcher, then the same command again; steps done twice."""
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

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = {
            "data.shards": self._folder / "shards",
            "run.steps": NEVER,
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
            "--same-failures=0",
        ]
        where = ["--run-id=recovery", f"--run-dir={self._folder / 'run'}", "-m", "trainer", "tiny"]
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
        lines = (self._folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        return [int(json.loads(line)["step"]) for line in lines if line.endswith("\n")]

    def _pid(self, rank: int) -> int:
        return read_page(self._folder / "shm" / "recovery" / f"rank-{rank:04d}.page").pid

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except (PageError, FileNotFoundError):
                pass
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise BenchError(f"the run did not go on:\n{(self._folder / 'output').read_text(errors='replace')[-800:]}")
