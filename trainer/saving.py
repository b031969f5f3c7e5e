"""When the state of a run is saved, at the same steps on all ranks, and the last save of a run.

Before it, shards that should differ are checked to differ, and copies that should be equal to be equal.
SmolLM3 was trained for a trillion tokens with tensor-parallel shards drawn from the same seed; nothing crashed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch.distributed as dist

from opsd.checkpoints.interval import daly
from opsd.checkpoints.manifest import folder_of, newest, prove
from opsd.checkpoints.remote import AWAITING, URL
from opsd.client import Reporter
from opsd.durable import make_folder
from opsd.events import ReplicasDiffer, TpShardsEqual
from opsd.trainer.checkpoint import Saver, State, kept, renew, writers
from opsd.trainer.checksums import checksum
from opsd.trainer.config import CHECKPOINTS, Config, ConfigError
from opsd.trainer.exchange import discard_foreign, pair
from opsd.trainer.model import Decoder
from opsd.trainer.parts import PersistPlan, with_retries
from opsd.trainer.persist import LIMIT_S
from opsd.trainer.regions import region_of
from opsd.trainer.settings import CheckpointSettings
from opsd.trainer.world import World

SETTLE_POLL_S = 0.01
QUICK_S = 10.0
"""A last save that fails in less time is tried again. A stop leaves half a minute and more."""
SEEN_WITHIN_S = 5.0
"""A network file system may show a new file on other nodes this late."""

Digest = Callable[[int], str]
"""Identifies model and data after a number of samples."""


FIRST_S = 60.0
"""When the first checkpoint of a start is due if the interval depends on a stall that has not been measured yet."""

LEAST_S = 10.0
REMEMBERED = 9


class Interval:
    """Decides at which steps to save, from ``settings`` and the measured stalls; seconds are monotonic."""

    def __init__(self, settings: CheckpointSettings, now: float) -> None:
        self._settings = settings
        self._since = now
        self._stalls: list[float] = []

    @property
    def seconds(self) -> float:
        """The present interval in seconds; not for an interval in steps."""
        if self._settings.minutes:
            return self._settings.minutes * 60
        if not self._stalls:
            return FIRST_S
        return max(LEAST_S, daly(median(self._stalls), self._settings.mttf_hours * 3600))

    def due(self, step: int, now: float) -> bool:
        """Whether a checkpoint is due after ``step``."""
        if self._settings.every:
            return step % self._settings.every == 0
        return now - self._since >= self.seconds

    def saved(self, began: float, stall_s: float) -> None:
        """A save began at ``began`` and stopped the training for ``stall_s``."""
        self._since = began
        self._stalls = [*self._stalls, stall_s][-REMEMBERED:]


class Saving:
    """The checkpoints of a run that continues after ``step``. Parameters are audited before a save."""

    def __init__(
        self, saver: Saver, world: World, reporter: Reporter, interval: Interval, audit: Callable[[int], None]
    ) -> None:
        self._saver, self._world, self._reporter = saver, world, reporter
        self._interval, self._audit = interval, audit
        self._due = False

    @classmethod
    def of(cls, config: Config, state: State, model: Decoder, world: World, reporter: Reporter, step: int) -> Saving:
        """The checkpoints of ``state``, the state of ``model`` after ``step``; its parameters are audited."""
        if reporter.path is not None:
            discard_foreign(reporter.path.parent, world)
        audit = Audit(model, world, reporter)
        audit(step)
        paired = config.checkpoint.replicas and world.nodes > 1
        saver = Saver(
            persist_plan(config, world, state),
            kept(state, model, world),
            reporter,
            committed=_newest_proved(Path(config.run.folder) / CHECKPOINTS, world),
            pairing=pair(world, os.environ.get("OPSD_JOB_SECRET", "")) if paired else None,
        )
        return cls(saver, world, reporter, Interval(config.checkpoint, time.monotonic()), audit)

    def votes(self, step: int) -> tuple[bool, bool, bool]:
        """The votes of the ranks: whether a save is in flight, has failed, or is due after ``step``."""
        is_due = self._world.rank == 0 and self._interval.due(step, time.monotonic())
        return self._saver.busy, self._saver.failed, is_due

    def save_if_due(self, votes: Sequence[float], step: int, sample: int, digest: Digest) -> bool:
        """Save the state after ``step`` if due; ``votes`` are the sums over all ranks."""
        busy, failed, due = votes
        if failed:
            self._saver.abandon()
        self._due = self._due or due > 0
        if not self._due or busy:
            return False
        self._audit(step)
        began = time.monotonic()
        self._saver.save(step, sample, digest(sample))
        self._interval.saved(began, time.monotonic() - began)
        self._due = False
        return True

    def take_stall(self) -> float:
        """Seconds that the training waited for staging since the last call."""
        return self._saver.take_stall()

    def take_committed(self) -> list[int]:
        """Steps whose checkpoints became durable since the last call; never waits."""
        self._saver.poll()
        return self._saver.take_committed()

    def finish(self, step: int, sample: int, digest: Digest) -> bool:
        """Complete the checkpoint of the last ``step`` on all ranks; False if that failed.

        A save that fails quickly is tried a second time: a file server that restarts fails a call now and then.
        """
        saved, again = self._settle(step), True
        while not saved:
            began = time.monotonic()
            self._saver.save(step, sample, digest(sample))
            saved = self._settle(step)
            if not saved and not (again and self._all(time.monotonic() - began < QUICK_S)):
                break
            again = False
        if not saved:
            why = self._saver.why or "another rank could not write its part"
            print(f"opsd: stopped, but the last state could not be saved: {why}", file=sys.stderr)
        self._saver.close()
        if saved:
            self._saver.release()
        return saved

    def _all(self, holds: bool) -> bool:
        return self._world.sum([holds])[0] == self._world.size

    def _settle(self, step: int) -> bool:
        """Wait until no rank has a checkpoint in flight; whether that of ``step`` is committed."""
        saver, began = self._saver, time.monotonic()
        while True:
            if time.monotonic() - began < LIMIT_S:
                renew(self._reporter)
            saver.poll()
            busy, failed, committed = self._world.sum([saver.busy, saver.failed, saver.committed == step])
            if failed:
                saver.abandon()
            elif not busy:
                return committed == self._world.size
            time.sleep(SETTLE_POLL_S)


def _newest_proved(root: Path, world: World) -> int:
    """The step of the newest checkpoint; 0 in the first rank if it may not outlive a power loss, so that it is saved.

    The start that made it may have ended for want of that proof.
    """
    step = with_retries(lambda: newest(root)) or 0
    if step and world.rank == 0:
        try:
            prove(folder_of(root, step))
        except OSError:
            return 0
    return step


def persist_plan(config: Config, world: World, state: State) -> PersistPlan:
    """The parameters of the persist process in this start of the run."""
    attempt = world.from_first(secrets.randbits(32))
    return PersistPlan(
        root=str(Path(config.run.folder) / CHECKPOINTS), rank=world.rank, world=world.size, attempt=f"{attempt:08x}",
        layout=world.layout, run=os.environ.get("OPSD_RUN", ""), keep=config.checkpoint.keep,
        every=config.checkpoint.keep_every, remote=config.checkpoint.remote, evaluated=config.evaluation.wanted,
        writers=writers(state, world),
    )  # fmt: skip


def finish_uploads(root: Path, url: str) -> None:
    """Copy to ``url`` the checkpoints that an earlier start could not copy. A failure is printed."""
    if url and any(root.glob(f"*/{AWAITING}")):
        command = [sys.executable, "-m", "opsd.checkpoints.remote", "upload", str(root)]
        subprocess.run(
            command, env=os.environ | {URL: url}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
        )


def checkpoint_folder(config: Config, world: World) -> Path:
    """The folder of the run's checkpoints, shared by all nodes. Raises ConfigError if it cannot be made or shared."""
    folder = Path(config.run.folder) / CHECKPOINTS
    try:
        make_folder(folder)
    except OSError as error:
        raise ConfigError(f"run.folder: {folder} cannot be made: {error.strerror}") from error
    if world.nodes > 1:
        _require_shared(folder, world)
    return folder


def _require_shared(folder: Path, world: World) -> None:
    probe = folder / f".start.{world.from_first(secrets.randbits(62))}"
    if world.rank == 0:
        probe.touch()
    world.least(0)
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := probe.exists()) and time.monotonic() < deadline:
        time.sleep(SETTLE_POLL_S)
    blind = [str(rank) for rank, (sees,) in enumerate(world.gather([seen])) if not sees]
    if world.rank == 0:
        probe.unlink()
    if blind:
        raise ConfigError(
            f"run.folder {folder.parent} is not the same folder on all nodes: what rank 0 writes there is not seen by "
            f"rank{'s' * (len(blind) > 1)} {', '.join(blind)}; put it on storage that the nodes share"
        )


@dataclass(frozen=True, slots=True)
class RegionChecksum:
    """The offset of a rank's region in its tensor, and the checksum of its bits."""

    offset: tuple[int, ...]
    checksum: str


Checksums = Mapping[str, RegionChecksum]

_COMPARED = ("tp", "replicate")
"""Mesh dimensions whose ranks are compared; ranks along dp have different parts of everything."""


class Audit:
    """Compares checksums of the parameters between ranks that share tensors or hold copies; all ranks call it together.

    Differences become the events ``tp_shards_equal`` and ``replicas_differ``, sent by the first rank of each group.
    """

    def __init__(self, model: Decoder, world: World, reporter: Reporter) -> None:
        self._regions = {name: region_of(value) for name, value in model.saved()}
        self._drawn = {name for name, region in self._regions.items() if len(region.shape) > 1}
        self._groups = [world.mesh.get_group(name) for name in world.mesh.mesh_dim_names or () if name in _COMPARED]
        self._groups += [world.ends] if world.ends is not None and model.shared else []
        self._shared = model.shared
        self._ends = world.ends
        self._reporter = reporter
        self._agreed: int | None = None

    def __call__(self, step: int) -> None:
        """Compare the parameters after ``step``."""
        if not self._groups:
            return
        marks = {
            name: RegionChecksum(region.offset, checksum(region.local))
            for name, region in self._regions.items()
            if region.local.numel()
        }
        differed = False
        for group in self._groups:
            mine = {name: marks[name] for name in self._shared & marks.keys()} if group is self._ends else marks
            gathered: list[Checksums] = [{}] * group.size()
            dist.all_gather_object(gathered, mine, group)
            differed |= self._compare(gathered, dist.get_process_group_ranks(group), step, tell=group.rank() == 0)
        self._agreed = self._agreed if differed else step

    def _compare(self, gathered: Sequence[Checksums], ranks: Sequence[int], step: int, *, tell: bool) -> bool:
        differing = list(different_copies(gathered))
        if tell:
            for holders, tensors in equal_shards(gathered, self._drawn).items():
                equal = TpShardsEqual(tensors=tensors, ranks=[ranks[place] for place in holders])
                self._reporter.event("tp_shards_equal", **equal)
            for tensor, places in differing:
                checksums = [gathered[place][tensor].checksum for place in places]
                fields = ReplicasDiffer(
                    step=step, tensor=tensor, ranks=[ranks[place] for place in places],
                    checksums=checksums, agreed=self._agreed,
                )  # fmt: skip
                self._reporter.event("replicas_differ", **fields)
        return bool(differing)


def equal_shards(gathered: Sequence[Checksums], drawn: Collection[str]) -> dict[tuple[int, ...], list[str]]:
    """Tensors with the same bits in different places, by the ranks, as indices of ``gathered``, that hold them.

    Only tensors in ``drawn``, which are initialised at random; tensors of ones are always equal.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(drawn & gathered[0].keys()):
        by_checksum: dict[str, dict[tuple[int, ...], int]] = {}
        for place, marks in enumerate(gathered):
            if name in marks:
                by_checksum.setdefault(marks[name].checksum, {}).setdefault(marks[name].offset, place)
        for places in by_checksum.values():
            if len(places) > 1:
                found.setdefault(tuple(places.values()), []).append(name)
    return found


def different_copies(gathered: Sequence[Checksums]) -> Iterator[tuple[str, list[int]]]:
    """Tensors whose copies of the same region differ, with the holders, as indices of ``gathered``."""
    for name in sorted(set[str]().union(*gathered)):
        by_offset: dict[tuple[int, ...], list[int]] = {}
        for place, marks in enumerate(gathered):
            if name in marks:
                by_offset.setdefault(marks[name].offset, []).append(place)
        for places in by_offset.values():
            if len({gathered[place][name].checksum for place in places}) > 1:
                yield name, places
