"""The numbers of a run in TensorBoard, Weights & Biases and Trackio: ``python -m opsd.trainer.tracking ORDER``.

A process beside the first rank reads ``metrics.jsonl`` and ``evaluations.jsonl`` as they grow and forwards them, so
that the training never waits for a tracker. It ends with its standard input. The position is stored in
``tracking/position.json``, from which the next start of the run continues.

Each tracker finds its credentials in its usual way (``wandb login``, ``WANDB_API_KEY`` …). Steps that are repeated
after a restart have the same numbers; the tracker ignores them.

A tracker that fails gets nothing more until the next start; the event is ``tracking_failed``. Trackers get only the
shape of the run, never its environment, paths or commands, which may contain secrets.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from opsd.client import Reporter, append_event
from opsd.evaluations.queue import RESULTS
from opsd.events import TrackingFailed
from opsd.files import write_text
from opsd.jsonl import METRICS, Line, new_lines, read_positions, write_positions
from opsd.trainer.config import Config, ConfigError
from opsd.trainer.settings import TrackingSettings

FOLDER, POSITION, PLACES, LOG = "tracking", "position.json", "places.json", "tracking.log"
POLL_S = 5.0
CLOSE_S = 30.0
"""How long a finished run waits for its trackers."""


class Tracking:
    """On the first rank: the forwarding process, if a tracker is configured."""

    def __init__(self, config: Config, folder: Path, reporter: Reporter) -> None:
        self._reporter = reporter
        self._process: subprocess.Popen[bytes] | None = None
        if not wanted(config.tracking):
            return
        order = {
            "folder": str(folder), "page": str(reporter.path or ""), "shape": shape(config),
            "run": os.environ.get("OPSD_RUN") or folder.name, "trackers": wanted(config.tracking),
        }  # fmt: skip
        with open(folder / LOG, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "opsd.trainer.tracking", json.dumps(order)],
                stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        reporter.add_worker(self._process.pid, "tracking")

    def close(self) -> None:
        """Forward the rest; what does not finish within ``CLOSE_S`` is forwarded by the next start."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reporter.remove_worker(self._process.pid)


def wanted(settings: TrackingSettings) -> dict[str, str]:
    """The configured trackers by name, each with its project."""
    return {name: str(value) for name, value in settings.model_dump().items() if value}


def demand_installed(settings: TrackingSettings, find: Callable[[str], object] = find_spec) -> None:
    """Raises ConfigError if a configured tracker is not installed."""
    for name in wanted(settings):
        if find(name) is None:
            raise ConfigError(f"tracking.{name} needs the package: pip install {name}, or remove the setting")


def shape(config: Config) -> dict[str, dict[str, Any]]:
    """The settings that trackers get."""
    whole = config.model_dump(mode="json", include={"model", "parallel", "optimizer", "schedule"})
    whole["data"] = config.data.model_dump(include={"sequence", "batch", "micro_batch"})
    whole["run"] = config.run.model_dump(include={"steps", "seed"})
    return whole


def main(order: Mapping[str, Any]) -> None:
    """Forward existing and new lines until the trainer closes standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    folder = Path(order["folder"])
    (folder / FOLDER).mkdir(exist_ok=True)
    with open(folder / FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # that of an earlier start may still be passing on its last numbers
        sinks = Sinks(order)
        write_text(folder / FOLDER / PLACES, json.dumps(sinks.places()))
        positions = read_positions(folder / FOLDER / POSITION)
        more = True
        while more:
            more = not select.select([0], [], [], POLL_S)[0]
            for name in (METRICS, RESULTS):
                for line in new_lines(folder / name, positions):
                    sinks.pass_on(name, line)
            write_positions(folder / FOLDER / POSITION, positions)
        sinks.close()


class Sinks:
    """The trackers that have not failed."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._page = order["page"]
        self._trackers: dict[str, Tracker] = {}
        for name, project in order["trackers"].items():
            try:
                self._trackers[name] = TRACKERS[name](
                    folder=Path(order["folder"], FOLDER), project=project, run=order["run"], shape=order["shape"]
                )
            except Exception as error:  # whatever a tracker's library raises
                self._failed(name, error)

    def places(self) -> dict[str, str]:
        """By tracker, where a person finds the run."""
        return {name: tracker.place for name, tracker in self._trackers.items() if tracker.place}

    def pass_on(self, file: str, line: Line) -> None:
        """Give a line of ``file`` to all of them."""
        for name, tracker in list(self._trackers.items()):
            try:
                if file == METRICS:
                    tracker.step(line["step"], line["t"], numbers(line))
                else:
                    tracker.evaluation(line["step"], line["t"], numbers(line["results"]))
            except Exception as error:  # as above
                self._failed(name, error)

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:  # as above
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        why = without_secrets(f"{type(error).__name__}: {error}", os.environ)
        print(f"opsd: {name} failed and gets no more numbers: {why}", file=sys.stderr, flush=True)
        if self._page:
            append_event(Path(self._page), "tracking_failed", **TrackingFailed(tracker=name, why=why))


def numbers(line: Line) -> dict[str, float]:
    """The numeric values of ``line``."""
    left_out = ("t", "step", "generation")
    return {
        name: float(value) for name, value in line.items() if name not in left_out and isinstance(value, int | float)
    }


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """``text`` without the values of variables whose names look like secrets."""
    for name, value in environ.items():
        if len(value) > 3 and any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD")):
            text = text.replace(value, f"${name}")
    return text


Numbers = Mapping[str, float]


class Tracker(Protocol):
    """Takes the numbers of one run. ``t`` is in wall-clock seconds. Every method may raise any exception.

    ``place`` is where a person finds the run: an address or a folder, "" if there is none.
    """

    place: str

    def step(self, step: int, t: float, numbers: Numbers) -> None: ...
    def evaluation(self, step: int, t: float, numbers: Numbers) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``folder``/tensorboard, written without TensorFlow or torch."""

    def __init__(self, *, folder: Path, project: str, run: str, shape: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.place = str(folder / "tensorboard")
        self._writer = EventFileWriter(self.place)

    def step(self, step: int, t: float, numbers: Numbers) -> None:
        """Tags train/NAME."""
        self._add(step, t, "train", numbers)

    def evaluation(self, step: int, t: float, numbers: Numbers) -> None:
        """Tags evaluation/NAME, at the step of the checkpoint."""
        self._add(step, t, "evaluation", numbers)

    def close(self) -> None:
        """Flush."""
        self._writer.close()

    def _add(self, step: int, t: float, group: str, numbers: Numbers) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=t, step=step, summary=Summary(value=values)))
        self._writer.flush()


class WandB:
    """A run of Weights & Biases in ``project``, resumed under the same name; WANDB_MODE=offline keeps it local."""

    def __init__(self, *, folder: Path, project: str, run: str, shape: Mapping[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(console="off", x_disable_stats=True, disable_git=True, save_code=False)
        self._run = wandb.init(
            project=project, id=run, name=run, resume="allow", dir=folder, config=dict(shape), settings=settings
        )
        self.place = self._run.url or ""  # none offline
        self._run.define_metric("evaluation/*", step_metric="evaluation/step")

    def step(self, step: int, t: float, numbers: Numbers) -> None:
        """Names train/NAME at the step."""
        self._run.log({f"train/{name}": value for name, value in numbers.items()}, step=step)

    def evaluation(self, step: int, t: float, numbers: Numbers) -> None:
        """Names evaluation/NAME over evaluation/step: W&B accepts no step earlier than its last."""
        self._run.log({f"evaluation/{name}": value for name, value in numbers.items()} | {"evaluation/step": step})

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


class Trackio:
    """A run of Trackio in ``project``, resumed under the same name."""

    def __init__(self, *, folder: Path, project: str, run: str, shape: Mapping[str, Any]) -> None:
        import trackio

        self.place = ""
        self._trackio = trackio
        trackio.init(
            project=project, name=run, resume="allow", config=dict(shape), embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def step(self, step: int, t: float, numbers: Numbers) -> None:
        """Names train/NAME at the step."""
        self._trackio.log({f"train/{name}": value for name, value in numbers.items()}, step=step)

    def evaluation(self, step: int, t: float, numbers: Numbers) -> None:
        """Names evaluation/NAME at the step of the checkpoint."""
        self._trackio.log({f"evaluation/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        """Send the rest."""
        self._trackio.finish()


TRACKERS: Mapping[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
"""By the name of their setting, which is that of their package."""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
