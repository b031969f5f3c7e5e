"""``opsd demo``."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import click
from rich.console import Console
from rich.live import Live

from opsd import exitcodes, pip_install
from opsd.commands.ledger import ledger_table
from opsd.commands.options import option
from opsd.demo import report
from opsd.demo.faults import FAULTS, Director, FaultTargets
from opsd.demo.scene import TEXT_BYTES, DemoError, Gpus, Scene, open_scene, prepare_gpus
from opsd.demo.text import copy_text
from opsd.demo.view import View
from opsd.demo.world import RunObserver, RunSnapshot
from opsd.ledger.ledger import read_ledger

TICK_S = 0.2
SETTLE_S = 45.0
MIN_STEPS, MAX_STEPS, TARGET_RUN_S = 280, 3000, 46.0
CALIBRATION_STEPS = 16
PICTURE_WIDTH = 118
NEEDED = ("numpy", "safetensors", "tokenizers", "torch")


@click.command()
@option("--dir", "folder", type=click.Path(path_type=Path), default=Path(".demo"), help="Workspace.")
@option("--steps", type=click.IntRange(min=100), help="Length of the run; measured to last about 40 s if not given.")
@option("--json", "target", type=click.File("w", encoding="utf-8", lazy=False), help="Write the results to FILE.")
@option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw the last screen and the results as an SVG."
)
def demo(folder: Path, steps: int | None, target: TextIO | None, picture: Path | None) -> None:
    """Train a small model on this machine, break it six ways, watch it recover.

    Exit code 0 only if every fault was detected, attributed to the right culprit and repaired, and every loss equals
    that of an undisturbed run to the last bit. Without GPUs it simulates eight, labelled as simulated.
    """
    console = Console()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise click.UsageError(f"the demo trains, which needs {', '.join(missing)}: {pip_install('train')}")
    try:
        scene = open_scene((folder / datetime.now().strftime("%Y%m%d-%H%M%S")).absolute())
    except DemoError as error:
        console.print(f"opsd: {error}", style="red")
        sys.exit(exitcodes.FAILED)
    try:
        passed = Demo(scene, console, picture).play(steps, target)
    except DemoError as error:
        console.print(f"opsd: {error}", style="red", markup=False)
        passed = False
    except KeyboardInterrupt:
        console.print("opsd: interrupted; stopping what it started")
        sys.exit(exitcodes.INTERRUPTED)
    finally:
        scene.close()
    sys.exit(exitcodes.OK if passed else exitcodes.FAILED)


class Demo:
    """The parts of the demo, in order."""

    def __init__(self, scene: Scene, console: Console, picture: Path | None) -> None:
        self.scene = scene
        self.console = console
        self.picture = picture
        self.recorder = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
        self.began = time.time()

    def play(self, steps: int | None, target: TextIO | None) -> bool:
        """The whole demo; True if it passed."""
        gpus = self._prepare()
        steps = steps or self._measured_steps()
        view = View(simulated_gpus=gpus.simulated is not None)
        self._agent = self.scene.start_agent()

        view.stage = f"1 of 2: {steps} steps undisturbed, for comparison"
        quiet = self._run("undisturbed", steps, gpus, view, director=None)
        false_alarms = [incident["kind"] for incident in quiet.incidents or ()]

        faults = tuple(fault for fault in FAULTS if gpus.simulated or not fault.simulated)
        breakable = dict(enumerate(gpus.simulated)) if gpus.simulated else None
        checkpoints = self.scene.folder / "disturbed" / "checkpoints"
        director = Director(FaultTargets(checkpoints, self.scene.shm / "disturbed", breakable), faults)
        view = View(simulated_gpus=gpus.simulated is not None)
        view.stage = f"2 of 2: the same {steps} steps, {len(faults)} faults"
        last = self._run("disturbed", steps, gpus, view, director)
        self.recorder.print(view.render(last, last.wall - self.began))
        return self._report(director, steps, gpus, false_alarms, target)

    def _prepare(self) -> Gpus:
        scene = self.scene
        self.console.print(f"workspace {scene.folder}")
        gpus = prepare_gpus(scene)
        label = "8 simulated GPUs (no real ones here)" if gpus.simulated else gpus.why
        self.console.print(f"GPUs      {label}")
        size = copy_text(scene.folder / "text", TEXT_BYTES)
        self.console.print(f"text      {size / 1e6:.1f} MB: Python's own sources and documentation")
        with self.console.status("training a tokenizer, making token shards"):
            scene.call(
                ["opsd.trainer.data", str(scene.folder / "text"), "--out", str(scene.folder / "data")], "data.log"
            )
        return gpus

    def _program(self, steps: int) -> list[str]:
        settings = {
            "data.shards": self.scene.folder / "data",
            "run.steps": steps,
            "schedule.decay_start": max(steps, MIN_STEPS) * 4 // 5,
            "schedule.decay_end": max(steps, MIN_STEPS),
        }
        return ["-m", "opsd.trainer", "tiny", *(f"--set={key}={value}" for key, value in settings.items())]

    def _measured_steps(self) -> int:
        """The number of steps that the faults and their repairs need on this machine."""
        with self.console.status("measuring the step time of this machine"):
            run = self.scene.start_run("calibration", self._program(CALIBRATION_STEPS))
            if run.wait() != 0:
                raise DemoError(
                    f"the trainer does not run here ({run.returncode}):\n{self.scene.tail('calibration.log')}"
                )
        with open(self.scene.folder / "calibration" / "metrics.jsonl", encoding="utf-8") as file:
            times = sorted(json.loads(line)["step_s"] for line in file)
        step_s = float(times[len(times) // 2])
        steps = min(MAX_STEPS, max(MIN_STEPS, 20 * math.ceil(TARGET_RUN_S / step_s / 20)))
        self.console.print(f"run       {steps} steps of {step_s * 1e3:.0f} ms on 2 ranks")
        return steps

    def _run(self, name: str, steps: int, gpus: Gpus, view: View, director: Director | None) -> RunSnapshot:
        """One supervised run from start to end; returns its last snapshot."""
        process = self.scene.start_run(name, self._program(steps))
        observer = RunObserver(self.scene.shm / name, self.scene.folder / name / "events.jsonl", self.scene.agent_url)
        live = Live(console=self.console, refresh_per_second=5, transient=False) if self.console.is_terminal else None
        with live or nullcontext():
            now = self._watch(process, observer, gpus, view, director, live)
        if process.wait() != 0:
            raise DemoError(f"the run ended with exit code {process.returncode}:\n{self.scene.tail(f'{name}.log')}")
        return now

    def _watch(
        self, process: subprocess.Popen[bytes], observer: RunObserver, gpus: Gpus, view: View,
        director: Director | None, live: Live | None,
    ) -> RunSnapshot:  # fmt: skip
        ended: float | None = None
        while True:
            now = observer.look(time.time())
            gpus.follow(now)
            injected = director.tick(now) if director else None
            elapsed = now.wall - self.began
            lines = [view.note(f"fault  {injected}", elapsed)] if injected else []
            lines += view.update(now, elapsed)
            if live:
                live.update(view.render(now, elapsed))
            else:
                for line in lines:
                    self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            if self._agent.poll() is not None:
                raise DemoError(f"the agent ended ({self._agent.returncode}):\n{self.scene.tail('agent.log')}")
            if ended is None and process.poll() is not None:
                ended = now.wall
            if ended is not None and (director is None or director.done or now.wall - ended > SETTLE_S):
                return now
            time.sleep(TICK_S)

    def _report(
        self, director: Director, steps: int, gpus: Gpus, false_alarms: list[str], target: TextIO | None
    ) -> bool:
        scene, console = self.scene, self.console
        undisturbed = report.losses(scene.folder / "undisturbed" / "metrics.jsonl")
        disturbed = report.losses(scene.folder / "disturbed" / "metrics.jsonl")
        differing = report.differing_steps(undisturbed, disturbed)
        complete = len(disturbed) == steps
        ledger = read_ledger(scene.folder / "disturbed")
        for output in (console, self.recorder):
            output.print()
            output.print(report.faults_table(director.trials))
            output.print(ledger_table(ledger))
        missing = [fault.title for fault in director.faults[len(director.trials) :]]
        if gpus.simulated is None:
            console.print(f"left out: failing and overheating GPUs ({gpus.why})")
        for line in report.verdict(director.trials, missing, differing, undisturbed, disturbed, false_alarms):
            console.print(line)
            self.recorder.print(line)
        passed = (
            complete and not differing and not missing and not false_alarms and all(t.passed for t in director.trials)
        )
        console.print("[green]every fault detected, named and repaired[/]" if passed else "[red]the demo failed[/]")
        console.print(f"everything is in {scene.folder}", style="dim")
        if self.picture is not None:
            self.recorder.save_svg(str(self.picture), title="opsd demo")
        if target is not None:
            result = report.as_json(
                director.trials, equal=complete and not differing, steps=steps, ledger=ledger.as_dict(),
                simulated=gpus.simulated is not None,
            )  # fmt: skip
            target.write(json.dumps(result, indent=1) + "\n")
        return passed
