"""Silent corruption: one micro-batch is computed twice with the same weights, and the bits are compared.

Every ``replay.every`` steps, after the update, each rank computes its last micro-batch twice more, forward and
backward, with deterministic kernels. Ranks whose two passes differ have computed at least one of them wrong, or the
program is not deterministic. To tell these apart, all ranks then compute the micro-batch of the next data-parallel
rank, twice. The gradients are dropped, and the training does not notice: no state, random number or position in the
data changes.

What differs first names the rank, also where ranks exchange activations and a wrong value spreads: a rank that received
it shows it later than the one that computed it.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.distributed as dist

from opsd.client import Reporter
from opsd.events import ReplayDiffers
from opsd.trainer.accumulate import Accumulate
from opsd.trainer.batches import Batches
from opsd.trainer.checksums import bit_sum, text_of
from opsd.trainer.config import Config
from opsd.trainer.data.loader import Batch
from opsd.trainer.model import Decoder
from opsd.trainer.trace import Trace, recorded
from opsd.trainer.world import World

_LAYER: Final = re.compile(r"(?:layer |blocks\.)(\d+)")
Verdict = Literal["gpu", "program", "unknown"]


class Repeatable:
    """Micro-batches of which the last one, or any other, can be had once more."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._inserted: Batch | None = None
        self.last: Batch | None = None

    def next(self) -> Batch:
        """The inserted one, or else the next."""
        if (batch := self._inserted) is not None:
            self._inserted = None
            return batch
        self.last = self._batches.next()
        return self.last

    def insert(self, batch: Batch) -> None:
        """Let the next call of ``next`` return ``batch``."""
        self._inserted = batch


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the two passes of a rank begin to differ: the place in its trace, in the forward pass or after it."""

    place: int
    forward: bool
    stage: int

    @property
    def when(self) -> tuple[bool, int, int]:
        """Sorts the differences of one micro-batch: it passes through the stages and back."""
        return not self.forward, self.stage if self.forward else -self.stage, self.place


def suspects(differences: Sequence[Difference | None], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each group of ranks that compute one micro-batch together, those that differ first.

    ``differences`` is by rank. Groups without any difference are left out.
    """
    found = []
    for ranks in groups:
        differing = {rank: difference for rank in ranks if (difference := differences[rank]) is not None}
        if differing:
            first = min(difference.when for difference in differing.values())
            found.append([rank for rank, difference in differing.items() if difference.when == first])
    return found


def judge(own: tuple[int, int], neighbour: tuple[int, int] | None) -> Verdict:
    """What is wrong with a rank whose two passes have the checksums ``own``, which differ.

    ``neighbour`` has those of another GPU that computed the same twice; None if there is none.
    """
    if neighbour is None:
        return "unknown"
    return "gpu" if neighbour[0] == neighbour[1] else "program"


class Replay:
    """The replays of one rank; all ranks call it together, after each step."""

    def __init__(
        self, model: Decoder, batches: Repeatable, gradients: Accumulate, config: Config, world: World,
        reporter: Reporter,
    ) -> None:  # fmt: skip
        self._model, self._batches, self._gradients, self._world = model, batches, gradients, world
        self._reporter = reporter
        self._every = config.replay.every
        parallel = config.parallel
        self._inner = parallel.tp * parallel.cp
        self._exchanging = parallel.tp * math.lcm(parallel.cp, parallel.ep)
        self._products = self._exchanging > 1 and not parallel.compile
        self._agreed: int | None = None

    def __call__(self, step: int) -> None:
        """Replay if it is due after ``step``. A difference becomes the event ``replay_differs``."""
        batch = self._batches.last
        if not self._every or step % self._every or batch is None:
            return
        with _deterministic(self._world.device):
            first, second = self._pass(batch), self._pass(batch)
            place = _first_difference(first, second)
            known = self._world.gather((place, place < first.forward, self._stage_at(first, place)))
            differences = [
                Difference(place, bool(forward), stage) if place >= 0 else None for place, forward, stage in known
            ]
            if not any(differences):
                self._agreed = step
                return
            self._compare(step, batch, (first, second), suspects(differences, self._groups()))

    def _compare(self, step: int, batch: Batch, own: tuple[Trace, Trace], suspected: list[list[int]]) -> None:
        """Let neighbours compute the same, and tell what it means; in the ranks' files of the suspects."""
        sums = [_total(trace) for trace in own]
        if self._world.data_size > 1:
            other = self._exchange(batch)
            sums += [_total(self._pass(other)) for _ in range(2)]
        gathered = self._world.gather(sums)
        for ranks in suspected:
            if self._world.rank != ranks[0]:
                continue
            neighbour = self._peer(-1)
            theirs = gathered[neighbour][2:]
            place = _first_difference(*own)
            fields = ReplayDiffers(
                step=step, ranks=ranks, where=own[0].names[place],
                verdict=judge((sums[0], sums[1]), (theirs[0], theirs[1]) if theirs else None),
                checksums=[text_of(total) for total in sums[:2]],
                neighbour=neighbour if theirs else None, neighbour_checksums=[text_of(total) for total in theirs],
                agreed=self._agreed,
            )  # fmt: skip
            self._reporter.event("replay_differs", **fields)

    def _pass(self, batch: Batch) -> Trace:
        """Compute ``batch`` forward and backward; the gradients are dropped."""
        self._batches.insert(batch)
        with recorded(self._model, products=self._products) as trace:
            self._gradients(1)
        for parameter in self._model.parameters():
            parameter.grad = None
        return trace

    def _exchange(self, batch: Batch) -> Batch:
        """The micro-batch of the next data-parallel rank in exchange for ``batch``."""
        mine = torch.stack([values.long() for values in batch[1:]])
        theirs = torch.empty_like(mine)
        operations = [dist.P2POp(dist.isend, mine, self._peer(-1)), dist.P2POp(dist.irecv, theirs, self._peer(1))]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return Batch(batch.sample, *(values.to(old.dtype) for values, old in zip(theirs, batch[1:], strict=True)))

    def _peer(self, distance: int) -> int:
        """The rank ``distance`` further among those that compute the same part of other micro-batches."""
        world = self._world
        moved = (world.data_rank + distance) % world.data_size
        return world.rank + (moved - world.data_rank) * self._inner

    def _stage_at(self, trace: Trace, place: int) -> int:
        """The stage that was computed at that place of a trace: that of the layer which was named last."""
        named = (match for name in reversed(trace.names[: place + 1]) if (match := _LAYER.search(name)))
        layer = int(match[1]) if (match := next(named, None)) else self._model.parts[0].start
        own = next(number for number, layers in enumerate(self._model.parts) if layer in layers)
        return self._world.stage + own * self._world.parallel.pp

    def _groups(self) -> list[list[int]]:
        """The ranks that exchange activations: those of a data-parallel rank, or of several that share experts."""
        size = self._world.size
        groups = size // self._world.parallel.pp // self._exchanging
        return [[rank for rank in range(size) if rank // self._exchanging % groups == group] for group in range(groups)]


def _first_difference(first: Trace, second: Trace) -> int:
    """The place of the first different sum, -1 if all are equal."""
    if first.names != second.names:
        places = [at for at, names in enumerate(zip(first.names, second.names, strict=False)) if names[0] != names[1]]
        return min(places, default=min(len(first.names), len(second.names)) - 1)
    different = (first.packed() != second.packed()).nonzero()
    return int(different[0].item()) if len(different) else -1


def _total(trace: Trace) -> int:
    return int(bit_sum(trace.packed()).item())


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic kernels where there are any, and the same random numbers before and after."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not before:
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)
