"""The time of a step in a layout, and the search for the best layout.

How long a step takes, by part: arithmetic, traffic to memory, communication that nothing hides, stragglers.

Products run at the rate that large ones sustain, less what their shape wastes; elementwise operations at the bandwidth
of the memory; collectives take a latency and a share of the bandwidth (alpha-beta). Pure.

The speed of FlashAttention-2, which the trainer calls, by the size of a head and the length of a sequence. Pure.

Measured on an H100 80GB SXM5 in bf16 with 16k tokens: forward with a causal mask (arXiv 2407.08608, figure 5), backward
(figure 6). Other GPUs are taken to lose as much with short sequences and small heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from opsd.plan.hardware import Hardware, Parts
from opsd.plan.layout import RECOMPUTE, Layout, micro_batches_of, problem, schedules, spreads, stages_of
from opsd.plan.memory import (
    FLOAT_BYTES,
    GIB,
    Memory,
    half_bytes,
    memory_of,
    stage_parameters,
    state_bytes,
    state_products,
)
from opsd.trainer import counts
from opsd.trainer.config import Config
from opsd.trainer.model_settings import STATE_PRODUCTS, ModelSettings

_LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384)
_FLASH_FORWARD: Final = {64: (180, 229, 262, 284, 295, 299), 128: (191, 260, 298, 319, 333, 335)}
_FLASH_BACKWARD: Final = {64: (198, 238, 264, 279, 287, 291), 128: (214, 260, 291, 310, 318, 322)}
"""TFLOP/s by channels of a head, for each of ``_LENGTHS``; the backward pass is counted as 2.5 times the forward."""
CHANNELS: Final = 128
LENGTH: Final = 8192
"""The shape for which ``Hardware.attention`` is given."""


def share_of_best(channels: int, length: int) -> float:
    """The rate for heads of ``channels`` and sequences of ``length``, as a share of that for 128 and 8,192.

    Between the shapes that were measured it is interpolated, beyond them it is that of the nearest.
    """
    return _rate(channels, length) / _rate(CHANNELS, LENGTH)


def _rate(channels: int, length: int) -> float:
    """TFLOP/s of both passes, the backward one counted as twice the forward, as in ``opsd.trainer.counts``."""
    small, large = (_both(size, length) for size in _FLASH_FORWARD)
    return small + (large - small) * min(max(channels / 64 - 1, 0.0), 1.0)


def _both(channels: int, length: int) -> float:
    forward, backward = _at(_FLASH_FORWARD[channels], length), _at(_FLASH_BACKWARD[channels], length)
    return 3 / (1 / forward + 2.5 / backward)


def _at(rates: Sequence[int], length: int) -> float:
    """Interpolated over the logarithm of ``length``."""
    place = min(max(math.log2(max(length, 1) / _LENGTHS[0]), 0.0), len(_LENGTHS) - 1.0)
    low = min(int(place), len(_LENGTHS) - 2)
    return rates[low] + (rates[low + 1] - rates[low]) * (place - low)


_TILE: Final = 256
"""Rows of a product that a GPU needs to have at least for its tiles (CUTLASS's largest on Hopper are 256 x 128)."""
_OPTIMIZER_BYTES: Final = 36
"""Traffic of AdamW per parameter: weight, gradient, two moments read, three written, and the gradient's norm."""
_FORWARD: Final = 1 / 3
"""Share of the forward pass in the FLOP of a step."""
_STATE_PASSES: Final = 5
"""Over each value that a layer with a state keeps, see ``_state_seconds``."""
_SELECTIVE: Final = 0.5
"""Of the elementwise traffic of the forward pass is repeated with selective recomputation, at least."""


@dataclass(frozen=True, slots=True)
class StepTime(Parts):
    """Seconds of a step on the busiest GPU. ``loop`` is what is lost between kernels, see ``Hardware.loop``."""

    products: float
    attention: float
    states: float
    elementwise: float
    recomputation: float
    loop: float
    tensor: float
    sharding: float
    context: float
    experts: float
    pipeline: float
    bubble: float
    optimizer: float
    stragglers: float

    @property
    def communication(self) -> float:
        """What nothing hides of all communication."""
        return self.tensor + self.sharding + self.context + self.experts + self.pipeline


def step_time(config: Config, layout: Layout, gpus: int, hardware: Hardware) -> StepTime:
    """The time of a step of ``config`` in ``layout`` on ``gpus`` GPUs."""
    model, count = config.model, layout.micro_batches(gpus, config.data.batch)
    tokens = layout.micro_batch * config.data.sequence * count
    stages = stages_of(config, layout)
    share = tokens / (layout.tp * layout.cp) * stages.slowest
    products = share * product_flops(model) / (hardware.peak.value * _product_share(config, layout, hardware))
    attention = share * _attention_seconds(model, config.data.sequence, hardware)
    states = share * _state_seconds(model, hardware)
    elementwise = share * _traffic(config) / (hardware.bandwidth.value * hardware.elementwise.value)
    again = {"none": 0.0, "selective": (_SELECTIVE * elementwise + states) * _FORWARD,
             "full": (products + attention + states + elementwise) * _FORWARD}[layout.recompute]  # fmt: skip
    kernels = products + attention + states + elementwise + again
    loop = kernels * (1 / hardware.loop.value - 1)
    busy = kernels + loop
    optimizer = stage_parameters(config, layout) / layout.shards(gpus) * _OPTIMIZER_BYTES / hardware.bandwidth.value
    network = _Network(hardware)
    tensor = _tensor(config, layout, count, network)
    context = _context(config, layout, count, network)
    experts = _experts(config, layout, count, network)
    sharding = _sharding(config, layout, gpus, count, busy, network)
    pipeline = _pipeline(config, layout, count, network)
    worked = busy + tensor + context + experts
    bubble = worked * (layout.pp - 1) / count * stages.longest / stages.slowest * waiting(layout)
    return StepTime(
        products, attention, states, elementwise, again, loop, tensor, sharding, context, experts, pipeline, bubble,
        optimizer,
        stragglers=hardware.spread.value * (busy + bubble) if gpus > 1 else 0.0,
    )  # fmt: skip


def waiting(layout: Layout) -> float:
    """Of both passes through the longest stage, for which 1F1B waits pp - 1 times a step (arXiv 2104.04473, 2.2).

    Zero bubble waits (pp - 1) (F + B - W) in place of (pp - 1) (F + B + W) (ZB-H1, arXiv 2401.10241, table 2), where
    the passes are taken to be equally long.
    """
    return 1 / 3 if layout.schedule == "zero-bubble" else 1.0


def product_flops(model: ModelSettings) -> float:
    """Forward and backward FLOP per token of all matrices; looking up an embedding costs none."""
    rows = model.positions + (0 if model.tied else model.vocab)
    return 6.0 * (counts.active_parameters(model) - rows * model.width)


def _product_share(config: Config, layout: Layout, hardware: Hardware) -> float:
    """Of the peak in this model's products: small ones fill neither the tiles nor the GPU.

    The smaller dimension of the layers' matrices, split over ranks, wastes what it lacks to a multiple of a tile, and a
    product of k terms spends as long as 256 of them on its ends (NVIDIA, matrix multiplication background guide).
    """
    model = config.model
    ffn = model.expert_channels if model.expert_layers else model.ffn
    rows = layout.micro_batch * config.data.sequence / layout.cp
    if model.expert_layers:
        rows *= model.experts_per_token * layout.ep / model.experts
    narrow = min(ffn / layout.tp, model.width)
    filled = narrow / (math.ceil(narrow / _TILE) * _TILE) * rows / (math.ceil(rows / _TILE) * _TILE)
    depth = narrow / (narrow + _TILE)
    return hardware.gemm.value * filled * depth


def _attention_seconds(model: ModelSettings, sequence: int, hardware: Hardware) -> float:
    """Of a token, in all layers: causal attention computes what is seen, on average half of a whole sequence."""
    each = 6.0 * (model.attention_width + model.value_width) / (hardware.peak.value * hardware.attention.value)
    seconds = 0.0
    for kind, layers in Counter(model.kinds).items():
        if kind not in STATE_PRODUCTS:
            seen = counts.tokens_seen(model, kind, sequence)
            mean = seen / 2 if kind == "chunk" else seen * (1 - seen / sequence / 2)
            seconds += layers * each * mean / share_of_best(model.head_channels, seen)
    return seconds


def _state_seconds(model: ModelSettings, hardware: Hardware) -> float:
    """Of a token, in all layers with a state: their products in float32, and what they move.

    Each value that is kept is written and read in the forward pass, read in the backward pass, and its gradient written
    and read.
    """
    seconds = 0.0
    for kind, layers in Counter(model.kinds).items():
        if kind in STATE_PRODUCTS:
            flops = 3 * state_products(model, kind) / hardware.single.value
            seconds += layers * (flops + _STATE_PASSES * state_bytes(model, kind) / hardware.bandwidth.value)
    return seconds


def _traffic(config: Config) -> float:
    """Bytes per token that elementwise operations move, forward and backward: one, compiled, where eager has several.

    Counted from the trainer's own operations: norms, residuals and rotations of a layer, its gate, and the loss.
    """
    model, compiled = config.model, config.parallel.compile
    norms = 2 if model.norms == "both" else 1
    queries = model.attention_width + model.kv_heads * model.head_channels
    channels = (model.experts_per_token + model.shared_experts) * model.expert_channels
    sparse = model.expert_layers / model.layers
    ffn = (1 - sparse) * model.ffn + sparse * channels
    stream, rotary, gate = (6, 4, 3) if compiled else (10, 8, 5)
    attending = sum(kind not in STATE_PRODUCTS for kind in model.kinds) / model.layers
    layer = stream * norms * model.width + attending * rotary * queries + gate * ffn
    layer += sparse * 6 * model.experts_per_token * model.width
    loss = model.vocab * (16 if compiled else 48)
    return 3 * half_bytes(model) * layer * model.layers + loss


class _Network:
    """Collectives over a number of GPUs; those with the smallest ``stride`` between them share a domain."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.domain = int(hardware.nvlink_gpus.value)

    def time(self, size: int, moved: float, stride: int = 1) -> float:
        """Seconds in which ``size`` GPUs, each ``stride`` after the last, gather or scatter ``moved`` bytes in all."""
        if size <= 1:
            return 0.0
        inside = max(1, min(size, self.domain // stride))
        nodes = math.ceil(size / inside)
        hardware = self._hardware
        rate = hardware.nvlink.value if nodes == 1 else min(hardware.nvlink.value, hardware.network.value * inside)
        latency = hardware.node_latency.value + hardware.network_latency.value * math.log2(nodes)
        return latency + (size - 1) / size * moved / rate

    def exchange(self, size: int, moved: float, stride: int) -> float:
        """Seconds of an all-to-all in which each GPU sends ``moved`` bytes; over domains a port carries them alone."""
        if size <= 1:
            return 0.0
        inside = max(1, min(size, self.domain // stride))
        nodes = math.ceil(size / inside)
        rate = self._hardware.nvlink.value if nodes == 1 else self._hardware.network.value * nodes / (nodes - 1)
        latency = self._hardware.node_latency.value + self._hardware.network_latency.value * math.log2(nodes)
        return latency + (size - 1) / size * moved / rate


def _tensor(config: Config, layout: Layout, count: int, network: _Network) -> float:
    """Four gathers and four scatters of activations in each layer (arXiv 2205.05198); more if recomputed."""
    model = config.model
    moved = layout.micro_batch * config.data.sequence / layout.cp * model.width * half_bytes(model)
    times = 8 + (2 if layout.recompute == "full" else 0)
    return times * count * model.layers * stages_of(config, layout).slowest * network.time(layout.tp, moved)


def _context(config: Config, layout: Layout, count: int, network: _Network) -> float:
    """Keys and values are gathered forward, their gradients scattered backward."""
    model = config.model
    channels = 2 * (model.heads if model.kv_rank else model.kv_heads) * model.head_channels / layout.tp
    moved = layout.micro_batch * config.data.sequence * channels * half_bytes(model)
    times = 3 if layout.recompute == "full" else 2
    attending = sum(kind not in STATE_PRODUCTS for kind in model.kinds)
    return times * count * attending / layout.pp * network.time(layout.cp, moved, stride=layout.tp)


def _experts(config: Config, layout: Layout, count: int, network: _Network) -> float:
    """Tokens go to their experts and back, forward and backward."""
    model = config.model
    rows = layout.micro_batch * config.data.sequence / layout.cp * model.experts_per_token
    times = 6 if layout.recompute == "full" else 4
    one = network.exchange(layout.ep, rows * model.width * half_bytes(model), layout.tp)
    return times * count * model.expert_layers / layout.pp * one


def _sharding(config: Config, layout: Layout, gpus: int, count: int, busy: float, network: _Network) -> float:
    """The part of FSDP's gathers (twice a micro-batch) and reduction (once a step) that the computation does not hide.

    Gathers of one layer run beside the computation of another; the first and the last of a step have nothing beside.
    """
    model, shards = config.model, layout.shards(gpus)
    stage = stage_parameters(config, layout)
    routed = counts.routed_parameters(model) / layout.tp / layout.pp
    dense = stage - routed
    layers = model.layers / layout.pp
    stride = layout.tp

    def all_of(half: float) -> float:
        each = network.time(shards, dense * half / layers, stride)
        if routed:
            each += network.time(shards // layout.ep, routed / layout.ep * half / layers, stride * layout.ep)
        return each * layers

    gathers = all_of(half_bytes(model)) * (1 if layout.pp > 1 or shards == 1 else 2 * count)
    reduction = all_of(FLOAT_BYTES)
    replicas = 2 * network.time(layout.replicas, stage / shards * FLOAT_BYTES, stride * shards)
    exposed = (gathers + reduction) / layers / 2
    return max(exposed, gathers + reduction - busy) + replicas


def _pipeline(config: Config, layout: Layout, count: int, network: _Network) -> float:
    """Activations to the next stage and their gradients back, once for each slot of the schedule."""
    if layout.pp == 1:
        return 0.0
    moved = layout.micro_batch * config.data.sequence / layout.cp * config.model.width * half_bytes(config.model)
    return 2 * (count * layout.stages_per_rank + layout.pp - 1) * network.exchange(2, 2 * moved, network.domain)


# All layouts of a run on a number of GPUs: which fit and how fast they are, and why the others are out. Pure.
#
# Also the speed over the number of GPUs at the same batch, and what keeps it from growing with them.


_MOST_TOKENS: Final = 1 << 17
"""Of a micro-batch on a GPU: larger ones gain nothing, and take memory."""


class CannotPlan(ValueError):
    """There is no plan; the message is one sentence that says why and what to change."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that runs, with its memory and time."""

    layout: Layout
    memory: Memory
    step: StepTime


@dataclass(frozen=True, slots=True)
class Excluded:
    """A layout that does not run, with the reason; ``lacks`` are bytes, if memory is all that it lacks."""

    layout: Layout
    reason: str
    lacks: float | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """Layouts from the fastest on, one for each spread over the GPUs, and those that do not run."""

    fitting: tuple[Candidate, ...]
    out: tuple[Excluded, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many layouts each kind of reason has ruled out, the most frequent first."""
        return dict(Counter(each.reason.partition(":")[0] for each in self.out).most_common())


def search(config: Config, gpus: int, hardware: Hardware) -> Search:
    """Every layout worth a look. Raises CannotPlan if none runs."""
    found = list(_all(config, gpus, hardware))
    fitting = [each for each in found if isinstance(each, Candidate)]
    out = tuple(each for each in found if isinstance(each, Excluded))
    if not fitting:
        raise CannotPlan(f"no layout runs on {gpus:,} GPUs: {_hopeless(out)}")
    return Search(tuple(sorted(fitting, key=_rank)), out)


def fastest(config: Config, gpus: int, hardware: Hardware) -> Candidate | None:
    """The fastest layout, None if none runs."""
    return min((each for each in _all(config, gpus, hardware) if isinstance(each, Candidate)), key=_rank, default=None)


def _rank(candidate: Candidate) -> tuple[float, float]:
    return candidate.step.total, candidate.memory.total


def _all(config: Config, gpus: int, hardware: Hardware) -> Iterator[Candidate | Excluded]:
    for spread in spreads(config, gpus, int(hardware.nvlink_gpus.value)):
        tried = [_best(config, layout, gpus, hardware) for layout in schedules(config, spread)]
        yield min((each for each in tried if isinstance(each, Candidate)), key=_rank, default=tried[0])


def _best(config: Config, spread: Layout, gpus: int, hardware: Hardware) -> Candidate | Excluded:
    """The fastest micro-batch and recomputation of a spread that fit, or why none does."""
    room, least, why = hardware.memory.value, math.inf, ""
    fitting = []
    for micro_batch in micro_batches_of(config, spread, gpus):
        if micro_batch > 1 and micro_batch * config.data.sequence / spread.cp > _MOST_TOKENS:
            break
        for recompute in RECOMPUTE:
            layout = replace(spread, micro_batch=micro_batch, recompute=recompute)
            if found := problem(config, layout, gpus):
                why = why or found
                if recompute == "none":
                    break  # the others have no fewer demands
                continue
            memory = memory_of(config, layout, gpus)
            least = min(least, memory.total)
            if memory.total <= room:
                fitting.append(Candidate(layout, memory, step_time(config, layout, gpus, hardware)))
                break  # more recomputation is slower
    if fitting:
        return min(fitting, key=_rank)
    if least == math.inf:
        return Excluded(spread, why)
    return Excluded(
        spread, f"memory: a GPU needs {least / GIB:,.1f} GiB at least and has {room / GIB:.1f}", least - room
    )


def _hopeless(out: Sequence[Excluded]) -> str:
    """The reason of the layout that is nearest to one that runs, and what to do."""
    if tight := [(each.lacks, each.reason) for each in out if each.lacks is not None]:
        return f"{min(tight)[1].removeprefix('memory: ')}; take more GPUs, or larger ones"
    batch = (each.reason for each in out if each.reason.startswith("data.batch"))
    why = next(batch, out[0].reason if out else "the layers do not divide")
    return f"{why}; take another number of them, or another data.batch"


_FEWER: Final = (0.125, 0.25, 0.5, 1.0)
_MORE: Final = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Of the plan's GPUs; what slows a run down shows from here on, and few layouts are left to search."""


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest step on a number of GPUs."""

    gpus: int
    tokens_per_s: float
    step: StepTime

    @property
    def communication(self) -> float:
        """Share of the step that nothing hides."""
        return self.step.communication / self.step.total

    @property
    def bubble(self) -> float:
        """Share of the step."""
        return self.step.bubble / self.step.total

    def lost(self, first: Point) -> dict[str, float]:
        """By part of the step, the share of the GPUs' time that it takes beyond what it took on those of ``first``.

        The shares sum to what is missing to a speed in proportion to the GPUs; a part that takes less is negative.
        """
        whole, before = self.gpus * self.step.total, first.step.parts
        return {name: (self.gpus * s - first.gpus * before[name]) / whole for name, s in self.step.parts.items()}


@dataclass(frozen=True, slots=True)
class Peak:
    """The number of GPUs beyond which nothing is gained, and the part of the step that is to blame.

    ``slower`` is the next number that was tried, None if no layout runs on more.
    """

    gpus: int
    blame: str
    slower: int | None


def curve(config: Config, gpus: int, hardware: Hardware) -> Iterator[Point]:
    """From an eighth of ``gpus`` on, where any layout runs, until more of them are slower or 16 times as many."""
    best = 0.0
    for factor in (*_FEWER, *_MORE):
        count = gpus * factor
        if count < 1 or count != int(count) or (found := fastest(config, int(count), hardware)) is None:
            continue
        speed = config.data.batch * config.data.sequence / found.step.total
        yield Point(int(count), speed, found.step)
        if speed < best:
            return
        best = speed


def peak(points: Sequence[Point]) -> Peak:
    """The highest of ``points``, and the part of the step that has grown most from the first to there, or beyond."""
    top = next((here for here, more in pairwise(points) if more.tokens_per_s < here.tokens_per_s), None)
    last = points[-1]
    lost = last.lost(points[0])
    blame = max(lost, key=lambda name: lost[name])
    return Peak(top.gpus, blame, last.gpus) if top is not None else Peak(last.gpus, blame, None)
