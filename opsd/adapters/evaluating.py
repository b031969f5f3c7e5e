"""Evaluations of the checkpoints of a Hugging Face or TRL trainer, queued by the first rank after each save.

``opsd launch --evaluation`` names the command in ``OPSD_EVALUATION``. A program may have several trainers, one after
the other: all use one queue. What is left at the end of a training runs until the program ends, or after it: other
ranks may need this one before, such as for ``trainer.save_model()``.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from opsd.client import Reporter
from opsd.evaluations.queue import AWAITING, Queue, Saved, left

WANTED = "OPSD_EVALUATION"
"""The environment variable: a JSON object with the fields of ``Wanted``."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The ``command`` of a harness, how it is started, and the Python of the launcher, which has opsd."""

    command: str
    queue: str
    python: str


def wanted(environ: Mapping[str, str] = os.environ) -> Wanted | None:
    """What the launcher asks for; None without ``--evaluation``."""
    asked = environ.get(WANTED)
    return Wanted(**json.loads(asked)) if asked and environ.get("OPSD_RUN_DIR") else None


class SavedCheckpoints:
    """The evaluations of one trainer's checkpoints below ``output``."""

    def __init__(self, queue: Queue, output: str, reporter: Reporter) -> None:
        self._queue, self._output = queue, Path(output)
        self._queue.reporter = reporter
        queue.add(left(self._on_disk()))

    def _on_disk(self) -> list[Saved]:
        found = self._output.glob("checkpoint-*")
        numbers = {path.name.removeprefix("checkpoint-"): path for path in found}
        return [Saved(int(name), numbers[name].resolve()) for name in sorted(filter(str.isdecimal, numbers), key=int)]

    def saved(self, step: int) -> None:
        """The checkpoint of ``step`` is complete: it waits for its evaluation, and is not removed before."""
        folder = Path(self._output, f"checkpoint-{step}").resolve()
        (folder / AWAITING).touch()
        self._queue.add([Saved(step, folder)])
        self.poll()

    def poll(self) -> None:
        """Start waiting evaluations and report results; acts every few seconds only."""
        self._queue.poll(time.monotonic())

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._queue.is_idle


@cache
def _queue(wanted: Wanted, run: Path) -> Queue:
    """That of this process."""

    def command(checkpoint: Saved) -> list[str]:
        words = [wanted.python, "-P", "-m", "opsd.evaluations", str(run), str(checkpoint.step)]
        return [*words, str(checkpoint.folder), wanted.command]

    return Queue(command, wanted.queue, run, Reporter(None))


def evaluations_of(output: str, reporter: Reporter) -> SavedCheckpoints | None:
    """The evaluations of the trainer that begins and saves below ``output``, None if none are wanted."""
    asked = wanted()
    if asked is None:
        return None
    return SavedCheckpoints(_queue(asked, Path(os.environ["OPSD_RUN_DIR"]).resolve()), output, reporter)


def finish_at_exit(reporter: Reporter) -> None:
    """When the program ends, wait for evaluations, unless the run is being stopped; then close the page."""
    asked = wanted()
    assert asked is not None
    queue = _queue(asked, Path(os.environ["OPSD_RUN_DIR"]).resolve())

    def finish() -> None:
        if queue.reporter is reporter:
            queue.close()
        reporter.close()

    atexit.register(finish)


def keeping_awaited(sort: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Transformers' list of checkpoints by age, without those that wait for an evaluation: they are not removed yet."""

    def sort_and_keep(*args: Any, **kwargs: Any) -> list[str]:
        found = sort(*args, **kwargs)
        return [path for path in found if not Path(path, AWAITING).exists()] if wanted() else found

    return sort_and_keep
