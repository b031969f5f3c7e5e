"""Small checkpoints, damage to them, and the shipped saving without a training.

Small checkpoints, and damage to them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from click.testing import CliRunner, Result

from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import MANIFEST, FileEntry, Manifest, folder_of
from opsd.checkpoints.sealed import seal
from opsd.client import Reporter
from opsd.commands.checkpoint import checkpoint
from opsd.trainer.checkpoint import Saver
from opsd.trainer.parts import PersistPlan
from opsd.trainer.regions import Region
from opsd.trainer.saving import Interval, Saving
from opsd.trainer.settings import CheckpointSettings


def make(root: Path, step: int, *, files: int = 2) -> Path:
    folder = manifest.folder_of(root, step)
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for rank in range(files):
        path = folder / f"rank-{rank:04d}.safetensors"
        path.write_bytes(f"{step} {rank} ".encode() * 50)
        entries.append(FileEntry(path.name, path.stat().st_size, manifest.checksum(path)))
    manifest.commit(folder, Manifest(step, step * 4, {"dp": files}, "digest", tuple(entries), "local", 1.7e9, "run"))
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def swap_for_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def edit(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / MANIFEST).read_text())
    del raw["checksum"]
    (folder / MANIFEST).write_text(json.dumps(seal(raw | changes)))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint, [str(a) for a in arguments], standalone_mode=False)


# A run's checkpoints without its training: the shipped ``Saving`` of some ranks, each in a thread of the test.


EVERY, STEPS = 4, 12
WAIT_S = 120


class Ranks:
    """What the threads of ``size`` ranks share: their values, to be summed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Sequence[float]] = [()] * size
        self._barrier = threading.Barrier(size)

    def sum(self, rank: int, values: Sequence[float]) -> list[float]:
        """The sums over all ranks."""
        self._values[rank] = list(values)
        self._barrier.wait(WAIT_S)
        sums = [float(sum(column)) for column in zip(*self._values, strict=True)]
        self._barrier.wait(WAIT_S)
        return sums


@dataclass(frozen=True, slots=True)
class RankWorld:
    """One rank's view of ``ranks``, as far as saving needs a ``World``."""

    ranks: Ranks
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks."""
        return self.ranks.sum(self.rank, values)


def digest(sample: int) -> str:
    """Identifies model and data."""
    return "model"


def _value(step: int, rank: int) -> float:
    return 1000.0 * rank + step


@dataclass
class SavedRun:
    """A run of ``size`` ranks in ``folder`` that saves every ``EVERY`` of ``STEPS`` steps."""

    folder: Path
    size: int = 2
    keep: int = 2
    attempt: int = 0

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def go(self, first: int = 1, last: int = STEPS) -> list[bool]:
        """Do the steps from ``first`` to ``last``; what ``Saving.finish`` says on each rank."""
        self.attempt += 1
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        ranks = Ranks(self.size)
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: self._rank(RankWorld(ranks, rank), first, last), range(self.size)))

    def _rank(self, world: RankWorld, first: int, last: int) -> bool:
        memory = self.folder / "memory"
        memory.mkdir(exist_ok=True)
        reporter = Reporter(memory / f"rank-{world.rank:04d}.page")
        values = torch.zeros(3000)
        state = {"model.weight": Region(values, (self.size * 3000,), (world.rank * 3000,))}
        plan = PersistPlan(
            str(self.checkpoints), world.rank, self.size, f"{self.attempt:08x}", {"dp": self.size}, "run", self.keep,
            patience_s=1.0,
        )  # fmt: skip
        saver = Saver(plan, state, reporter, committed=0)
        interval = Interval(CheckpointSettings(every=EVERY), time.monotonic())
        saving = Saving(saver, cast(Any, world), reporter, interval, lambda step: None)
        for step in range(first, last + 1):
            values.fill_(_value(step, world.rank))
            while True:  # so that the same calls follow each other in each run
                busy, failed = world.sum([saver.busy, saver.failed])
                if not busy or failed:  # then the vote below has the others give up
                    break
                saver.poll()
                time.sleep(0.002)
            saving.save_if_due(world.sum(saving.votes(step)), step, 10 * step, digest)
        saved = saving.finish(last, 10 * last, digest)
        reporter.close()
        return saved

    def state(self, step: int) -> list[float]:
        """The value that each rank has saved after ``step``, from the manifest's files."""
        from opsd.checkpoints.manifest import verify
        from opsd.trainer.checkpoint import StateFile

        values = {}
        for entry in verify(folder_of(self.checkpoints, step)).files:
            with StateFile(folder_of(self.checkpoints, step) / entry.name) as file:
                values[file.regions["model.weight"][0] // 3000] = file.tensor("model.weight").clone()
        assert all(bool((value == value[0]).all()) for value in values.values())
        return [float(values[rank][0]) for rank in range(self.size)]

    def expected(self, step: int) -> list[float]:
        """What ``state`` is to be."""
        return [_value(step, rank) for rank in range(self.size)]
