"""A run of the included trainer on this machine, of which one rank is killed: pictures of launch and report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from opsd.demo.scene import copy_text
from opsd.rank_page import read_page
from tests.pictures.browser import PictureError
from tests.pictures.terminal import draw, run

STEPS, KILL_AT = 60, 35
TEXT_BYTES: Final = 400_000
LIMIT_S: Final = 300.0


def pictures(folder: Path, target: Path) -> None:
    """Write launch.svg and report.svg to ``target``; the run is made in ``folder``. Raises PictureError."""
    (folder / "text").mkdir()
    copy_text(folder / "text", TEXT_BYTES)
    prepare = [sys.executable, "-m", "opsd.trainer.data", str(folder / "text"), "--out", str(folder / "data")]
    done = subprocess.run(prepare, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PictureError(f"no data for the run: {done.stderr[-1000:]}")
    settings = {"data.shards": "data", "run.steps": STEPS, "schedule.decay_start": 40, "schedule.decay_end": STEPS}
    program = ["-m", "opsd.trainer", "tiny", *(f"--set={key}={value}" for key, value in settings.items())]
    launch = ["launch", "--standalone", "--nproc-per-node=2", "--run-id=train", "--run-dir=runs/train", *program]
    shm = folder / "shm"
    shm.mkdir()
    killer = _Killer(folder / "runs/train/metrics.jsonl", shm / "train" / "rank-0001.page")
    told = run(launch, folder, {"OPSD_SHM": str(shm), "CUDA_VISIBLE_DEVICES": ""}, LIMIT_S, killer)
    if not killer.killed:
        raise PictureError(f"no rank was killed:\n{told[-2000:]}")
    draw("opsd launch --nproc-per-node=2 -m opsd.trainer tiny", told, target / "launch.svg", folder)
    told = run(["report", "runs/train", "--text"], folder, {}, 60)
    draw("opsd report runs/train --text", told, target / "report.svg", folder)


class _Killer:
    """Kills the rank of ``page`` once the run has done ``KILL_AT`` steps."""

    def __init__(self, metrics: Path, page: Path) -> None:
        self._metrics, self._page, self.killed = metrics, page, False

    def __call__(self) -> None:
        if self.killed or not self._metrics.exists() or self._metrics.read_bytes().count(b"\n") < KILL_AT:
            return
        os.kill(read_page(self._page).pid, signal.SIGKILL)
        self.killed = True
