"""The supported trackers; their libraries are imported on use.

Each finds its credentials in its usual way (``wandb login``, ``WANDB_API_KEY`` …); opsd neither reads nor passes them.
Steps repeated after a restart have the same numbers; ignoring them is left to the tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

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
