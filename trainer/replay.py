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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn

from opsd.client import Reporter
from opsd.events import ReplayDiffers
from opsd.trainer.accumulate import Accumulate
from opsd.trainer.batches import Batches
from opsd.trainer.checksums import bit_sum, text_of
from opsd.trainer.config import Config
from opsd.trainer.data.loader import Batch
from opsd.trainer.model import Decoder
from opsd.trainer.regions import local_part
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


class Trace:
    """One pass. ``names`` and ``sums`` belong together; ``forward`` of them are of the forward pass."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sums: list[torch.Tensor] = []
        self.forward = 0
        self._counts: Counter[str] = Counter()

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add the bits of this rank's part of ``values``; without waiting for the device."""
        self._counts[name] += 1
        count = self._counts[name]
        self.names.append(name if count == 1 else f"{name}, time {count}")
        self.sums.append(bit_sum(local_part(values)))

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient; of a tensor hook, which may not return anything."""
        self.add(f"the gradient of {name}", gradient)

    def packed(self) -> torch.Tensor:
        """All sums, int64 [n]."""
        return torch.stack(self.sums)


@contextmanager
def recorded(model: Decoder, *, products: bool) -> Iterator[Trace]:
    """A trace of the one pass of ``model`` in the context.

    It has the results of the layers and the gradients of all parameters as this rank computes them, before they are
    reduced over ranks. With ``products`` it also has what goes in and out of every matrix and norm, before and after
    the communication between them, and the gradients of these.
    """
    trace = Trace()
    with ExitStack() as hooks:
        units = {"model": model, **{f"layer {number}": block for number, block in model.blocks.items()}}
        inner = {id(parameter) for block in model.blocks.values() for parameter in block.parameters()}
        for name, unit in units.items():
            names = [n for n, value in unit.named_parameters() if unit is not model or id(value) not in inner]
            prefix = "" if unit is model else f"blocks.{name.removeprefix('layer ')}."
            _enter(hooks, unit.register_forward_pre_hook(partial(_watch_parameters, trace, hooks, prefix, names)))
            if unit is not model:
                _enter(hooks, unit.register_forward_hook(partial(_watch_output, trace, name), prepend=True))
        _enter(hooks, model.register_forward_hook(partial(_end_forward, trace)))
        for name, module in model.named_modules() if products else ():
            if not list(module.children()):
                _enter(hooks, module.register_forward_pre_hook(partial(_watch_input, trace, name)))
                _enter(hooks, module.register_forward_hook(partial(_watch_output, trace, name), prepend=True))
        yield trace


def _enter(hooks: ExitStack, handle: Any) -> None:
    hooks.callback(handle.remove)


def _watch_parameters(
    trace: Trace, hooks: ExitStack, prefix: str, names: list[str], module: nn.Module, _inputs: object
) -> None:
    """FSDP has gathered them by now. Their gradients come here before it reduces them."""
    for name in names:
        _enter(hooks, _on_gradient(module.get_parameter(name), trace, f"{prefix}{name}"))


def _watch_input(trace: Trace, name: str, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    _watch(trace, f"the input of {name}", inputs[0])


def _watch_output(trace: Trace, name: str, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
    _watch(trace, f"the result of {name}", output)


def _watch(trace: Trace, name: str, values: torch.Tensor) -> None:
    trace.add(name, values)
    if values.requires_grad:
        _on_gradient(values, trace, name)


def _on_gradient(values: torch.Tensor, trace: Trace, name: str) -> Any:
    return values.register_hook(partial(trace.add_gradient, name))  # type: ignore[no-untyped-call]


def _end_forward(trace: Trace, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
    trace.add("the loss" if output.dim() == 0 else "what goes to the next stage", output)
    trace.forward = len(trace.names)
