"""The evaluations of a run of this trainer: the sets must be readable, and each checkpoint is queued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from opsd.checkpoints.manifest import folder_of, steps
from opsd.client import Reporter
from opsd.evaluations.queue import Queue, Saved, left
from opsd.threads import Work, run_now
from opsd.trainer.config import CHECKPOINTS, Config
from opsd.trainer.data.shards import DataError
from opsd.trainer.data.texts import read_texts
from opsd.trainer.items import check_letters, read_items
from opsd.trainer.settings import EvaluationSettings


def queue_of(config: Config, folder: Path, reporter: Reporter, background: Callable[[Work], None] = run_now) -> Queue:
    """The queue of the run in ``folder``, with what an earlier start has left."""

    def command(checkpoint: Saved) -> list[str]:
        return [sys.executable, "-m", "opsd.trainer.evaluate", str(folder.resolve()), str(checkpoint.step)]

    queue = Queue(command, config.evaluation.queue, folder, reporter, background)
    queue.add(left(saved(folder, steps(folder / CHECKPOINTS))))
    return queue


def saved(folder: Path, numbers: Iterable[int]) -> list[Saved]:
    """The checkpoints of the steps ``numbers`` of the run in ``folder``."""
    return [Saved(step, folder_of(folder / CHECKPOINTS, step)) for step in numbers]


def demand_sets(settings: EvaluationSettings) -> None:
    """Raises DataError if a set cannot be read, before a step is made.

    A set that is missing here may be there for the command of ``settings.queue``, unless that runs on this node.
    """
    here = settings.queue == EvaluationSettings().queue

    def present(sets: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
        return ((name, Path(path)) for name, path in sets.items() if here or Path(path).exists())

    for name, path in present(settings.perplexity):
        if next(read_texts([path]), None) is None:
            raise DataError(f"{path}: the evaluation set {name} has no text")
    for sets in (settings.cloze, settings.multiple_choice):
        for name, path in present(sets):
            items = read_items(path)
            if not items:
                raise DataError(f"{path}: the evaluation set {name} has no items")
            if sets is settings.multiple_choice:
                check_letters(items)
