"""``opsd bench restart``: SIGKILL of one of two ranks to the first new step, beside torchrun on the same script."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from opsd import pip_install
from opsd.bench import BenchError
from opsd.client import process_start
from opsd.control import ask_launcher

TRIALS = 5
STEADY_STEPS = 100
RANKS = 2
LIMIT_S = 45.0
PEER_ATTEMPTS = 3

SCRIPT = '''
"""Data-parallel training in miniature: a matrix, its gradient, one all-reduce a step; every step is written down."""
import os
import sys
import time

import torch
import torch.distributed as dist
from opsd.client import Reporter

reporter = Reporter.from_env()
dist.init_process_group("gloo")
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
weight = torch.zeros(256, 256, requires_grad=True)
while True:
    with reporter.phase("forward"):
        loss = ((torch.randn(64, 256) @ weight) ** 2).mean()
    with reporter.phase("backward"):
        loss.backward()
    with reporter.phase("collective"):
        dist.all_reduce(weight.grad)
    with reporter.phase("optimizer"), torch.no_grad():
        weight -= 0.1 * weight.grad
        weight.grad = None
    time.sleep(0.02)
    reporter.step()
    os.write(log, f"{os.getpid()} {time.time()}\\n".encode())
'''


class Step(NamedTuple):
    """One completed step: process id and epoch second."""

    pid: int
    t: float


def run(trials: int = TRIALS) -> dict[str, float | int | str]:
    """Alternate ours and torchrun over ``trials`` kills each; then one stopped rank.

    ``ours_restart`` is with standby interpreters ready, as a run usually has them; ``at_once_again`` is a second kill
    right after that, before new ones are ready. ``torchrun_failed`` counts restarts that torchrun did not complete;
    they are repeated and not timed, and if all failed its figures are missing. Times in seconds. Raises BenchError.
    """
    if find_spec("torch") is None:
        raise BenchError(f"the script of this benchmark needs torch: {pip_install('train')}")
    ours, noticed, cold, memory = [], [], [], []
    peer: list[float] = []
    with tempfile.TemporaryDirectory(prefix="opsd-bench-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for number in range(trials):
            with _opsd(folder / f"ours-{number}") as measured:
                measured.warm()
                memory.append(measured.memory_mib())
                killed, first = measured.kill_and_wait()
                ours.append(first - killed)
                noticed.append(measured.event("rank_exited")["t"] - killed)
                killed, first = measured.kill_and_wait()
                cold.append(first - killed)
            peer += _peer_restart(folder / f"torchrun-{number}")
        with _opsd(folder / "hang") as measured:
            named, limit = measured.stop_and_wait()
    figures: dict[str, float | int | str] = {"torchrun_failed": peer.count(math.inf)}
    if done := [seconds for seconds in peer if seconds < math.inf]:
        figures["torchrun_restart_p50_s"] = statistics.median(done)
        figures["torchrun_restart_max_s"] = max(done)
        figures["ratio_restart"] = statistics.median(ours) / statistics.median(done)
    return figures | {
        "ours_restart_p50_s": statistics.median(ours),
        "ours_restart_max_s": max(ours),
        "ours_restart_at_once_again_p50_s": statistics.median(cold),
        "ours_noticed_p50_s": statistics.median(noticed),
        "ours_noticed_max_s": max(noticed),
        "ours_hang_named_s": named,
        "ours_hang_limit_s": limit,
        "ours_rss_mib": max(memory),
        "trials": trials,
    }


def _peer_restart(folder: Path) -> Iterator[float]:
    """Seconds that torchrun took, infinite for each restart before that it did not complete."""
    for attempt in range(PEER_ATTEMPTS):
        try:
            with _torchrun(folder.with_name(f"{folder.name}-{attempt}")) as measured:
                measured.steady()
                killed, first = measured.kill_and_wait()
                yield first - killed
                return
        except BenchError:
            yield math.inf


class MeasuredRun:
    """A running launcher with the script under it. ``folder`` holds its logs, ``steps`` what its ranks wrote."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder = folder
        self.steps_file = folder / "steps"
        script = str(folder.parent / "train.py")
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, script, str(self.steps_file)],
                env={**os.environ, "OPSD_SHM": str(folder.parent / "shm"), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def steps(self) -> list[Step]:
        if not self.steps_file.exists():
            return []
        pairs = (line.split() for line in self.steps_file.read_text().splitlines())
        return [Step(int(pid), float(t)) for pid, t in pairs]

    def steady(self) -> list[int]:
        """Wait until the same ranks have done ``STEADY_STEPS`` steps; their pids."""

        def ranks() -> list[int]:
            counts = Counter(step.pid for step in self.steps())
            return [pid for pid, count in counts.items() if count >= STEADY_STEPS and process_start(pid)]

        self._until(lambda: len(ranks()) == RANKS)
        return ranks()

    def warm(self) -> None:
        """Wait until the run is steady and the launcher has its standby interpreters."""
        self.steady()
        control = self.folder.parent / "shm" / self.folder.name / "control.sock"
        self._until(lambda: ask_launcher(control, {"cmd": "status"})["standby"] == RANKS)

    def kill_and_wait(self) -> tuple[float, float]:
        """SIGKILL one rank; returns the epoch seconds of the kill and of the first step that new ranks complete."""
        old = self.steady()
        known = {step.pid for step in self.steps()}
        self._until(lambda: self.steps()[-1].t > time.time() - 0.2)
        killed = time.time()
        os.kill(old[-1], signal.SIGKILL)

        def fresh() -> list[float]:
            return [step.t for step in self.steps() if step.pid not in known]

        self._until(lambda: bool(fresh()))
        return killed, min(fresh())

    def stop_and_wait(self) -> tuple[float, float]:
        """SIGSTOP one rank; returns the seconds from the last step to the hang's detection, and the current limit."""
        pids = self.steady()
        os.kill(pids[-1], signal.SIGSTOP)
        event = self.event("hang_detected")
        last = max(step.t for step in self.steps() if step.t < event["t"])
        return event["t"] - last, event["limit_s"]

    def event(self, kind: str) -> dict[str, Any]:
        """Wait for the first launcher event of a kind."""
        path = self.folder / "events.jsonl"

        def found() -> list[dict[str, Any]]:
            events = [json.loads(line) for line in path.read_text().splitlines()]
            return [event for event in events if event["event"] == kind]

        self._until(lambda: path.exists() and bool(found()))
        return found()[0]

    def memory_mib(self) -> float:
        """Resident memory of the launcher."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise BenchError("the launcher has no resident memory; is it gone?")

    def close(self) -> None:
        """End the launcher and its ranks, also those that it has left behind."""
        ranks = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = (self.folder / "output").read_text(errors="replace")[-2000:]
                raise BenchError(f"{self.process.args!r} did not get there:\n{tail}")
            time.sleep(0.01)


@contextmanager
def _opsd(folder: Path) -> Iterator[MeasuredRun]:
    options = [f"--nproc-per-node={RANKS}", "--redirects=3", f"--run-id={folder.name}", f"--run-dir={folder}"]
    with _measured(folder, [sys.executable, "-m", "opsd", "launch", "--max-restarts=9", *options]) as measured:
        yield measured


@contextmanager
def _torchrun(folder: Path) -> Iterator[MeasuredRun]:
    options = ["--standalone", f"--nproc-per-node={RANKS}", "--monitor-interval=0.1", "--max-restarts=9"]
    with _measured(folder, [sys.executable, "-m", "torch.distributed.run", *options]) as measured:
        yield measured


@contextmanager
def _measured(folder: Path, command: Sequence[str]) -> Iterator[MeasuredRun]:
    folder.mkdir()
    measured = MeasuredRun(folder, command)
    try:
        yield measured
    finally:
        measured.close()
