"""``opsd demo``."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.live import Live

from opsd import exitcodes, pip_install
from opsd.commands.ledger import ledger_table
from opsd.commands.options import option
from opsd.demo.faults import FAULTS, Director, FaultTargets
from opsd.demo.scene import (
    TEXT_BYTES,
    DemoError,
    Gpus,
    RunObserver,
    RunSnapshot,
    Scene,
    copy_text,
    open_scene,
    prepare_gpus,
    waited_s,
)
from opsd.demo.view import View, alarms, as_json, differing_steps, faults_table, losses, stories, verdict
from opsd.ledger.ledger import read_ledger

TICK_S = 0.2
QUIET_S = 10.0
"""Seconds without a line after which a line says what is awaited."""
ENDLESS = 1_000_000
"""Steps of the run that is broken: more than it ever does, since it is stopped once all is repaired."""
STOPPED = (exitcodes.OK, exitcodes.REQUEUE)
PICTURE_WIDTH = 118
NEEDED = ("numpy", "safetensors", "tokenizers", "torch")


@click.command()
@option("--dir", "folder", type=click.Path(path_type=Path), default=Path(".demo"), help="Workspace.")
@option("--open", "browse", is_flag=True, help="Open the agent's page in a browser.")
@option("--json", "target", type=click.File("w", encoding="utf-8", lazy=False), help="Write the results to FILE.")
@option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw the last screen and the results as an SVG."
)
def demo(folder: Path, browse: bool, target: TextIO | None, picture: Path | None) -> None:
    """Train a small model on this machine, break it six ways, watch it recover.

    The run goes on until every fault is repaired. Then it is repeated undisturbed. The exit code is 0 only if every
    fault was detected, attributed to the right culprit and repaired. Every loss must also equal that of the undisturbed
    run to the last bit. Without GPUs it simulates eight, labelled as simulated; that needs a C compiler.
    """
    console = Console()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise click.UsageError(f"the demo trains, which needs {', '.join(missing)}: {pip_install('train')}")
    try:
        scene = open_scene((folder / datetime.now().strftime("%Y%m%d-%H%M%S")).absolute())
    except DemoError as error:
        console.print(f"opsd: {error}", style="red", markup=False)
        sys.exit(exitcodes.FAILED)
    try:
        passed = Demo(scene, console, picture).play(target, browse=browse)
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
        self.began = self._said_at = time.time()
        self._waited = 0.0

    def play(self, target: TextIO | None, *, browse: bool) -> bool:
        """The whole demo; True if it passed."""
        why = self._prepare()
        faults = tuple(fault for fault in FAULTS if not (why and fault.simulated))

        self.scene.begin("disturbed")
        gpus = Gpus.create(self.scene)
        agent = self.scene.start_agent()
        self.console.print(f"page      {self.scene.agent_url}")
        if browse:
            webbrowser.open(self.scene.agent_url)
        breakable = dict(enumerate(gpus.simulated)) if gpus.simulated else None
        checkpoints = self.scene.folder / "disturbed" / "checkpoints"
        director = Director(FaultTargets(checkpoints, self.scene.shm / "disturbed", breakable), faults)
        view = View(simulated_gpus=not why)
        view.stage = f"1 of 2: {len(faults)} faults, one after the other"
        last = self._run("disturbed", ENDLESS, gpus, view, agent, director)
        self.recorder.print(view.render(last, last.wall - self.began))
        disturbed = losses(self.scene.folder / "disturbed" / "metrics.jsonl")

        self.scene.begin("undisturbed")
        gpus, agent = Gpus.create(self.scene), self.scene.start_agent()
        view = View(simulated_gpus=not why)
        view.stage = f"2 of 2: the same {len(disturbed)} steps undisturbed, for comparison"
        if not self.console.is_terminal:
            self.console.print(view.stage)
        waited, began = waited_s(), time.monotonic()
        quiet = self._run("undisturbed", max(disturbed), gpus, view, agent, None)
        self._waited = (waited_s() - waited) / (time.monotonic() - began)
        return self._report(director, disturbed, quiet.incidents or (), why, target)

    def _prepare(self) -> str:
        """Text and shards; returns why GPUs are not simulated, "" if they are."""
        scene = self.scene
        self.console.print(f"workspace {scene.folder}")
        why = prepare_gpus(scene)
        self.console.print(f"GPUs      {why or '8 simulated GPUs (no real ones here)'}", markup=False)
        size = copy_text(scene.folder / "text", TEXT_BYTES)
        self.console.print(f"text      {size / 1e6:.1f} MB: Python's own sources and documentation")
        with self.console.status("training a tokenizer, making token shards"):
            scene.call(
                ["opsd.trainer.data", str(scene.folder / "text"), "--out", str(scene.folder / "data")], "data.log"
            )
        return why

    def _program(self, steps: int) -> list[str]:
        settings = {
            "data.shards": self.scene.folder / "data",
            "run.steps": steps,
            "schedule.decay_start": ENDLESS - 1,
            "schedule.decay_end": ENDLESS,
        }
        return ["-m", "opsd.trainer", "tiny", *(f"--set={key}={value}" for key, value in settings.items())]

    def _run(
        self, name: str, steps: int, gpus: Gpus, view: View, agent: subprocess.Popen[bytes], director: Director | None
    ) -> RunSnapshot:
        """One supervised run, until all is repaired or its steps are done; returns its last snapshot."""
        process = self.scene.start_run(name, self._program(steps))
        observer = RunObserver(self.scene.shm / name, self.scene.folder / name / "events.jsonl", self.scene.agent_url)
        live = Live(console=self.console, refresh_per_second=5, transient=False) if self.console.is_terminal else None
        stopping = False
        with live or nullcontext():
            while process.poll() is None:
                now = observer.look(time.time())
                gpus.follow(now)
                self._show(now, view, director, live)
                if agent.poll() is not None:
                    raise DemoError(f"the agent ended ({agent.returncode}):\n{self.scene.tail(f'agent-{name}.log')}")
                if director is not None and director.done and not stopping:
                    stopping = True
                    process.terminate()
                time.sleep(TICK_S)
        if process.returncode not in (STOPPED if stopping else (exitcodes.OK,)):
            raise DemoError(f"the run ended with exit code {process.returncode}:\n{self.scene.tail(f'{name}.log')}")
        return now

    def _show(self, now: RunSnapshot, view: View, director: Director | None, live: Live | None) -> None:
        """What has happened, and what is awaited if that takes long."""
        injected = director.tick(now) if director else None
        elapsed = now.wall - self.began
        lines = [view.note(f"fault  {injected}", elapsed)] if injected else []
        lines += view.update(now, elapsed)
        if lines:
            self._said_at = now.wall
        awaited = f"step {now.step + 1}" if director is None else director.waits_for
        waiting = f"waiting for {awaited}, {now.wall - self._said_at:.0f} s"
        if live:
            view.waiting = waiting if now.wall - self._said_at > 2 else ""
            live.update(view.render(now, elapsed))
            return
        if not lines and (now.wall - self._said_at) // QUIET_S > (now.wall - TICK_S - self._said_at) // QUIET_S:
            lines.append(f"{elapsed:6.1f} s  {waiting}")
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _report(
        self, director: Director, disturbed: Mapping[int, Sequence[str]], found: Sequence[Mapping[str, Any]], why: str,
        target: TextIO | None,
    ) -> bool:  # fmt: skip
        scene, console = self.scene, self.console
        undisturbed = losses(scene.folder / "undisturbed" / "metrics.jsonl")
        differing = differing_steps(undisturbed, disturbed)
        ledger = read_ledger(scene.folder / "disturbed")
        missing = [fault.title for fault in director.faults[len(director.trials) :]]
        seen = alarms(found, self._waited)
        for output in (console, self.recorder):
            output.print()
            output.print(faults_table(director.trials))
            output.print(ledger_table(ledger))
            for line in stories(director.trials):
                output.print(line, highlight=False)
        if why:
            left_out = ", ".join(fault.title for fault in FAULTS if fault.simulated)
            console.print(f"left out: {left_out}, as {why}", markup=False)
        if seen.starved:
            waited = f"tasks waited for a processor in {self._waited:.0%} of the undisturbed run"
            console.print(f"opsd noticed: {seen.starved}; {waited}", markup=False)
        if seen.elsewhere:
            console.print(f"opsd noticed, of this machine and not of the run: {seen.elsewhere}", markup=False)
        for line in verdict(director.trials, missing, differing, undisturbed, disturbed, seen.false):
            console.print(line)
            self.recorder.print(line)
        passed = not differing and not missing and not seen.false and all(t.passed for t in director.trials)
        count = len(director.trials)
        console.print(
            f"[green]all {count} faults detected, named and repaired[/]" if passed else "[red]the demo failed[/]"
        )
        console.print(f"everything is in {scene.folder}", style="dim")
        if self.picture is not None:
            self.recorder.save_svg(str(self.picture), title="opsd demo")
        if target is not None:
            result = as_json(
                director.trials, equal=not differing, steps=len(disturbed), ledger=ledger.as_dict(), simulated=not why
            )
            target.write(json.dumps(result, indent=1) + "\n")
        return passed
