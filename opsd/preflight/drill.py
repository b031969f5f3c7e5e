"""Real steps of the run under the launcher, in a separate folder and invisible to the agent of the node.

On one node they are part of a check. A drill over several nodes loses one, and has to go on by itself, on a spare or on
the remaining nodes. The same command runs on every node at once, and each starts its launcher. The first node watches,
chooses the victim once a checkpoint is durable, and judges. The victim kills everything of the run there, as
`opsd chaos kill-node` does.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opsd.control import ControlError, ask_launcher
from opsd.files import write_text
from opsd.preflight.base import Check, Context, Finding, Interrupted, Measure, Measurement, Outcome, Verdict
from opsd.slurm.hostlist import compress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opsd.trainer.config import Config

EVENTS: Final = "drill.jsonl"
SETTINGS: Final = (
    "checkpoint.every=10", "checkpoint.minutes=0", "checkpoint.mttf_hours=0", "checkpoint.keep=1",
    "evaluation.perplexity={}", "evaluation.cloze={}",
)  # fmt: skip
"""Evaluation has its own check."""


def start(
    context: Context, config: Config, ranks: int, folder: Path, steps: int, settings: Sequence[str]
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the launcher with the trainer; returns it with the file of their output.

    The global batch is reduced to one micro-batch per rank, or one per pipeline stage.
    """
    readers = max(1, ranks // (config.parallel.tp * config.parallel.pp * config.parallel.cp))
    batch = readers * config.data.shape_at(1).micro_batch * config.parallel.pp
    command = [
        sys.executable, "-P", "-m", "opsd", "launch", f"--nproc-per-node={ranks}", "--standalone", "--redirects=3",
        f"--run-id=drill-{os.getpid()}", f"--run-dir={folder}", f"--events={folder / EVENTS}",
        *program(context, config, folder, steps, batch, settings),
    ]  # fmt: skip
    output = folder / "output"
    with output.open("wb") as file:
        environment = {**os.environ, "OPSD_SHM": str(folder / "shm")}
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT), output


def program(
    context: Context, config: Config, folder: Path, steps: int, batch: int, settings: Sequence[str]
) -> list[str]:
    """The trainer with the run's configuration, except for ``steps`` of a ``batch`` of samples, in ``folder``.

    They are steps of the run's first stage.
    """
    first = config.data.shape_at(1)
    changed: dict[str, object] = {
        "data.sequence": first.sequence,
        "data.micro_batch": first.micro_batch,
        "data.batch": batch,
    }
    changed |= {f"model.{name}": value for name, value in first.rope}
    if config.data.stages:
        weights = ", ".join(f"{json.dumps(name)} = {weight}" for name, weight in config.data.stages[0].weights.items())
        changed |= {"data.mixture": "", "data.stages": f"[{{start = 1, weights = {{{weights}}}}}]"}
    all_settings = [
        *context.overrides, f"run.steps={steps}", f"run.folder={folder}", "data.batch_warmup=[]",
        *(f"{name}={value}" for name, value in changed.items()),
        f"schedule.decay_end={max(config.schedule.decay_end, steps)}", "checkpoint.remote=", *settings,
    ]  # fmt: skip
    return ["-m", "opsd.trainer", context.train, *(f"--set={setting}" for setting in all_settings)]


def storage_of(context: Context, config: Config) -> Path | None:
    """Where the run's checkpoints will be written, or the node's own storage if that is not writable."""
    folder = Path(config.run.folder).absolute()
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    if there is not None and os.access(there, os.W_OK):
        return there
    return Path(context.settings.local_dir) if context.settings.local_dir else None


def events(folder: Path) -> list[dict[str, Any]]:
    """The events of the launcher and the ranks so far."""
    return lines(folder / EVENTS)


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be growing."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line]


def last_line(path: Path) -> str:
    """The last line of a failed program's output."""
    printed = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(printed) if line.strip()), "it printed nothing")


RUN: Final = "preflight-drill"
STEPS: Final = 1_000_000
"""More than there is time for: the drill ends the run once it has seen enough."""
AFTER: Final = 5
"""Steps required after the loss."""
VICTIM: Final = "victim"
METRICS: Final = "metrics.jsonl"
_POLL_S: Final = 0.2
_STOP_S: Final = 60.0

CHECK: Final = Check(
    name="run_nodes",
    title="A node lost in the middle of the run",
    measures=(
        Measure("nodes", "", "nodes that trained"),
        Measure("resume", "seconds", "last sign of the node to the first new step", "lower", noise=1.0, required=False),
        Measure("lost_steps", "", "steps that had to be made again", required=False),
    ),
    needs=frozenset({"network", "exclusive"}),
    advice="read events.jsonl and the logs in the drill's folder",
    runbook="node_unreachable",
)


@dataclass(frozen=True, slots=True)
class Drill:
    """The run ``config`` over the nodes ``names``, with ``spares`` spares, seen from node number ``node``.

    ``folder`` is shared by all nodes, ``memory`` is this node's; ``ranks`` run on each node.
    """

    context: Context
    config: Config
    names: tuple[str, ...]
    node: int
    spares: int
    ranks: int
    folder: Path
    memory: Path
    port: int

    @property
    def own(self) -> str:
        """The name of this node."""
        return self.names[self.node]

    @property
    def active(self) -> int:
        """Number of nodes that train."""
        return len(self.names) - self.spares

    def batch(self) -> int:
        """The smallest global batch that divides among all nodes, and among one fewer without a spare."""
        parallel, first = self.config.parallel, self.config.data.shape_at(1)
        split = parallel.tp * parallel.pp * parallel.cp
        counts = [self.active] if self.spares else [self.active, self.active - 1]
        readers = math.lcm(*(max(1, count * self.ranks // split) for count in counts))
        return readers * first.micro_batch * parallel.pp

    def command(self) -> list[str]:
        """The launcher of this node."""
        nodes = f"{self.active}" if self.spares else f"{self.active - 1}:{self.active}"
        return [
            sys.executable, "-P", "-m", "opsd", "launch", f"--nnodes={nodes}", f"--spares={self.spares}",
            f"--nproc-per-node={self.ranks}", f"--nodes={compress(self.names)}", f"--node-name={self.own}",
            f"--port={self.port}", f"--run-id={RUN}", f"--run-dir={self.folder}", "--redirects=3",
            *program(self.context, self.config, self.folder, STEPS, self.batch(), SETTINGS),
        ]  # fmt: skip


@contextmanager
def launched(this: Drill) -> Iterator[subprocess.Popen[bytes]]:
    """This node's launcher. It is not told of a Slurm job, so that it neither requeues nor ends the enclosing one."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    with (this.folder / f"launcher-{this.own}.log").open("wb") as log:
        process = subprocess.Popen(
            this.command(), env={**environment, "OPSD_SHM": str(this.memory)}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def take_part(this: Drill, within_s: float, stopped: Callable[[], bool]) -> None:
    """Train until the launcher ends; as the victim, kill everything of the run on this node.

    The first node ends the run within ``within_s``. If it does not, because it may be gone, this node does.
    """
    deadline = time.monotonic() + within_s + _STOP_S
    with launched(this) as process:
        while process.poll() is None and not stopped() and time.monotonic() < deadline:
            if _victim(this.folder) == this.own:
                _kill(this)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_STOP_S)
            time.sleep(_POLL_S)
        _stop(this, process)


def lead(this: Drill, within_s: float, stopped: Callable[[], bool], say: Callable[[str], None]) -> Outcome:
    """Train on this node too, have another one killed, and judge. Raises Interrupted."""
    with launched(this) as process, _ending(this, process):
        deadline = time.monotonic() + within_s

        def wait(what: str, happened: Callable[[], Any]) -> Any:
            say(what)
            while not (found := happened()):
                if stopped():
                    raise Interrupted
                if time.monotonic() > deadline or process.poll() is not None:
                    return None
                time.sleep(_POLL_S)
            return found

        if not wait("training until a checkpoint is durable", lambda: _committed(this.folder)):
            last = last_line(this.folder / f"launcher-{this.own}.log")
            return _failed(this, f"no checkpoint was durable within {within_s:.0f} s: {last}", Verdict.COULD_NOT_RUN)
        places = _events(this.folder, "generation_started")[-1]["nodes"]
        victim = next((name for name in reversed(places) if name != this.own), None)
        if victim is None:
            return _failed(this, f"only {this.own} trained; the others came too late", Verdict.COULD_NOT_RUN)
        before = {kind: len(_events(this.folder, kind)) for kind in ("node_lost", "resumed")}
        write_text(this.folder / VICTIM, victim)
        lost = wait(f"killing {victim}", lambda: _events(this.folder, "node_lost")[before["node_lost"] :])
        resumed = wait("waiting for a new step", lambda: _events(this.folder, "resumed")[before["resumed"] :])
        enough = resumed and wait(
            "training on", lambda: _steps(this.folder) and _steps(this.folder)[-1] >= resumed[-1]["step"] + AFTER
        )
    if not lost or not resumed or not enough:
        last = last_line(this.folder / f"launcher-{this.own}.log")
        return _failed(this, f"after {victim} was lost the run did not go on: {last}", Verdict.FAIL)
    gone = lost[-1]["t"] - lost[-1]["silent_s"]
    return _went_on(this, victim, resumed[-1], resumed[-1]["t"] - gone)


def _went_on(this: Drill, victim: str, resumed: dict[str, Any], seconds: float) -> Outcome:
    measured = (
        Measurement("nodes", this.active),
        Measurement("resume", seconds),
        Measurement("lost_steps", resumed["lost_steps"]),
    )
    places = _events(this.folder, "generation_started")[-1]["nodes"]
    findings = []
    if this.spares and len(places) < this.active:
        summary = f"a spare stood by and did not take the place of {victim}"
        findings.append(Finding(Verdict.FAIL, summary, "read the spare's log"))
    return Outcome(measured, tuple(findings), {"lost": victim, "went on with": compress(places)})


def _failed(this: Drill, summary: str, verdict: Verdict) -> Outcome:
    advice = f"read {this.folder}/events.jsonl and the logs beside it"
    return Outcome((Measurement("nodes", this.active),), (Finding(verdict, summary, advice),))


def _kill(this: Drill) -> None:
    command = [sys.executable, "-P", "-m", "opsd", "chaos", "kill-node", "--run", RUN, "--yes"]
    subprocess.run(command, env={**os.environ, "OPSD_SHM": str(this.memory)}, check=False, capture_output=True)


@contextmanager
def _ending(this: Drill, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the launcher in any case: without this node the others would keep training."""
    try:
        yield
    finally:
        _stop(this, process)


def _stop(this: Drill, process: subprocess.Popen[bytes]) -> None:
    """Stop the run on all nodes."""
    with suppress(ControlError, subprocess.TimeoutExpired):
        ask_launcher(this.memory / RUN / "control.sock", {"cmd": "stop"})
        process.wait(timeout=_STOP_S)


def _victim(folder: Path) -> str:
    with suppress(OSError):
        return (folder / VICTIM).read_text(encoding="utf-8")
    return ""


def _events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(folder / "events.jsonl") if event["event"] == kind]


def _committed(folder: Path) -> bool:
    return bool(_events(folder, "checkpoint_committed") and _events(folder, "generation_started"))


def _steps(folder: Path) -> Sequence[int]:
    return [line["step"] for line in lines(folder / METRICS)]
