"""A GPU becomes hotter than its peers at the same power: its fan or heat sink fails, and a throttle is on its way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Severity, View
from opsd.runbooks.gpu_throttle import unfit_gpus
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, job_evidence, newest, rank_on, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import Trend, blocks, thirds, trend

TEMPERATURE, POWER = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"
MARGIN = "opsd_gpu_temperature_margin_celsius"

WINDOW_S, BLOCK_S, LEAST_BLOCKS = 600.0, 20.0, 8
LOOK_EVERY_S = 10.0
THINNING = 2
"""One sample in two is enough for the median of a block."""

CELSIUS_PER_WATT = 0.05
"""About 35 K above the inlet air at 700 W: an air-cooled H100. Corrects for the rest of differences in power."""

LOADED_W, PEER_SHARE = 200.0, 0.6
"""A GPU that draws less is idle; a peer draws at least this share of what the GPU itself does."""

SAME_POWER, SAME_CELSIUS = 0.1, 2.0
SETTLED_BLOCKS = 4
"""Blocks are compared with the newest one only if power, and the peers' temperature, were the same, and had been for a
while: temperature follows power by a minute, and while a job warms its GPUs up the hotter ones leave the others behind
without any fault."""

LEAST_PEERS = 2
RISE_CELSIUS = 4.0
WANDER, STEADY = 4.0, 0.75
"""A failing fan stands out from what sensors and loads do anyway: the rise is this many times the range that the
offsets of the other GPUs wander through in the same blocks, and this share of the way that the own offset has gone,
back and forth included."""

OPEN_AFTER_S = 120.0
HORIZON_S = 3600.0
"""A throttle is predicted for the next hour; what is slower than that shows on the node's board first."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Medians over some seconds: of one GPU, and of its peers, which are the GPUs at about its power."""

    peers: frozenset[str]
    celsius: float
    watts: float
    peers_celsius: float
    peers_watts: float

    @property
    def offset(self) -> float:
        """By how much the GPU is hotter than its peers would be at its power."""
        return self.celsius - self.peers_celsius - CELSIUS_PER_WATT * (self.watts - self.peers_watts)

    def like(self, other: _Block) -> bool:
        """True if both show the same load and the same surroundings."""
        return (
            self.peers == other.peers
            and abs(self.watts - other.watts) <= SAME_POWER * other.watts
            and abs(self.peers_watts - other.peers_watts) <= SAME_POWER * other.peers_watts
            and abs(self.peers_celsius - other.peers_celsius) <= SAME_CELSIUS
        )


@dataclass(frozen=True, slots=True)
class _Rising:
    """A GPU whose offset grows. ``before`` is the offset at the beginning, ``limit_s`` seconds to its throttle."""

    uuid: str
    index: int
    before: float
    now: float
    trend: Trend
    limit_s: float | None


def _medians(view: View, metric: str) -> dict[str, dict[int, float]]:
    """Block medians of each GPU, without the block that is not complete yet."""
    now = int(view.now // BLOCK_S)
    medians = {u: blocks(series[0].values(WINDOW_S)[::THINNING], BLOCK_S) for u, series in by_gpu(view, metric).items()}
    return {uuid: {number: value for number, value in of.items() if number < now} for uuid, of in medians.items()}


def _offsets(view: View) -> dict[str, dict[int, float]]:
    """Degrees by which each GPU under load is hotter than its peers at the same power, block by block."""
    celsius, watts = _medians(view, TEMPERATURE), _medians(view, POWER)
    latest = max((number for numbers in celsius.values() for number in numbers), default=0)
    found = {}
    for uuid in celsius.keys() & watts.keys():
        numbers = sorted(celsius[uuid].keys() & watts[uuid].keys())
        mine = {number: block for number in numbers if (block := _block(uuid, number, celsius, watts)) is not None}
        if latest in mine:
            found[uuid] = {number: block.offset for number, block in _settled(mine)}
    return found


def _settled(blocks: Mapping[int, _Block]) -> Iterator[tuple[int, _Block]]:
    """The blocks that are like the newest one and follow on several such, by their numbers."""
    alike = 0
    for number, block in blocks.items():
        alike = (alike + 1 if number - 1 in blocks else 1) if block.like(blocks[max(blocks)]) else 0
        if alike > SETTLED_BLOCKS:
            yield number, block


def _block(
    uuid: str,
    number: int,
    celsius: Mapping[str, Mapping[int, float]],
    watts: Mapping[str, Mapping[int, float]],
    least_peers: int = LEAST_PEERS,
) -> _Block | None:
    """One GPU beside its peers under load, None if it or too few of them are."""
    own = watts[uuid][number]
    peers = [
        peer
        for peer, power in watts.items()
        if peer != uuid and power.get(number, 0.0) >= PEER_SHARE * own and number in celsius.get(peer, {})
    ]
    if own < LOADED_W or len(peers) < least_peers:
        return None
    return _Block(
        frozenset(peers),
        celsius[uuid][number],
        own,
        median(celsius[peer][number] for peer in peers),
        median(watts[peer][number] for peer in peers),
    )


def _rising(view: View) -> list[_Rising]:
    """The GPUs whose offset grows so that they throttle within the hour."""
    margins, indexes = newest(view, MARGIN), {gpu.uuid: gpu.index for gpu in view.gpus if gpu.lost is None}
    courses = {uuid: course for uuid, course in _offsets(view).items() if uuid in indexes and _climbs(course)}
    found = []
    for uuid, course in courses.items():
        line, (before, _, _) = trend(course), thirds(list(course.values()))
        others = _wander(view, course, courses.keys())
        if others is None or line.rise < WANDER * others:
            continue
        left = margins.get(uuid)
        limit_s = None if left is None else max(left, 0.0) / line.slope * BLOCK_S
        if limit_s is None or limit_s <= HORIZON_S:
            found.append(_Rising(uuid, indexes[uuid], before, course[max(course)], line, limit_s))
    return found


def _climbs(offsets: Mapping[int, float]) -> bool:
    """True if the offset has clearly grown, by its own course."""
    course = list(offsets.values())
    if len(course) < LEAST_BLOCKS or not _steady(course):
        return False
    line, (before, _, late) = trend(offsets), thirds(course)
    return line.sure and line.rise >= RISE_CELSIUS and min(late, course[-1]) - before >= RISE_CELSIUS / 2


def _wander(view: View, numbers: Collection[int], climbing: Collection[str]) -> float | None:
    """The range through which the offsets of the other GPUs wander in blocks of these numbers; None if unknown.

    They are compared with each other: beside one that becomes hotter all of them seem to become cooler.
    """
    celsius, watts = (
        {uuid: of for uuid, of in _medians(view, metric).items() if uuid not in climbing}
        for metric in (TEMPERATURE, POWER)
    )
    ranges = []
    for uuid in celsius.keys() & watts.keys():
        seen = (number for number in numbers if number in celsius[uuid] and number in watts[uuid])
        found = (_block(uuid, number, celsius, watts, least_peers=1) for number in seen)
        course = [block.offset for block in found if block is not None]
        if len(course) >= LEAST_BLOCKS:
            ranges.append(_range(_smooth(course)))
    return median(ranges) if ranges else None


def _smooth(course: Sequence[float]) -> list[float]:
    """Means of three blocks each: sensors that tell whole degrees jump by one."""
    return [fmean(course[first : first + 3]) for first in range(len(course) % 3, len(course), 3)] or list(course)


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _steady(course: Sequence[float]) -> bool:
    """True if the offset rises nearly all the time."""
    means = _smooth(course)
    way = sum(abs(after - before) for before, after in pairwise(means))
    return means[-1] - means[0] >= STEADY * way


def _detect(view: View) -> Iterator[Finding]:
    rising = _rising(view) if view.select(TEMPERATURE) else []
    if rising and not unfit_gpus(view).issuperset(gpu.index for gpu in rising):
        yield _finding(view, sorted(rising, key=lambda gpu: -gpu.trend.rise))


def _finding(view: View, rising: Sequence[_Rising]) -> Finding:
    """One finding for all of them: GPUs that share a fan warm up together."""
    worst, names = rising[0], ", ".join(str(index) for index in sorted(gpu.index for gpu in rising))
    rank = rank_on(view, worst.index)
    culprit = Culprit("gpu", view.node, worst.index, rank.rank if rank else None, "cooling")
    if len(rising) > 1:
        culprit = Culprit("node", view.node, detail=f"cooling of GPUs {names}")
    facts = [_sentence(gpu) for gpu in rising[:4]]
    who = f"GPU {names} becomes" if len(rising) == 1 else f"GPUs {names} become"
    soon = f", at its limit in about {worst.limit_s / 60:.0f} minutes" if worst.limit_s is not None else ""
    return Finding(
        key=view.node,
        severity=Severity.WARNING,
        summary=f"{who} hotter at the same power{soon}",
        culprit=culprit,
        confidence=0.7,
        evidence=(*told(view, worst.uuid, TEMPERATURE, *facts), job_evidence(view, rank)),
        cost=Cost(text="nothing yet; a throttled GPU slows the whole job down"),
        job=rank.job if rank else "",
        data={"before": {gpu.uuid: gpu.before for gpu in rising}},
    )


def _sentence(gpu: _Rising) -> str:
    pace = gpu.trend.slope / BLOCK_S * 60
    soon = f", its limit in {gpu.limit_s / 60:.0f} minutes" if gpu.limit_s is not None else ""
    return (
        f"GPU {gpu.index} is {gpu.now:+.1f} °C off its peers at the same power, {gpu.before:+.1f} °C before: "
        f"{pace:.1f} °C a minute{soon}"
    )


def _healed(incident: Incident, view: View) -> bool | None:
    """True once each GPU is at most a quarter of the least rise above where it was, under load."""
    before, offsets = incident.data.get("before"), _offsets(view)
    if not isinstance(before, Mapping) or not all(offsets.get(uuid) for uuid in before):
        return None
    if any(gpu.uuid in before for gpu in _rising(view)):
        return False
    return all(offsets[uuid][max(offsets[uuid])] <= value + RISE_CELSIUS / 4 for uuid, value in before.items())


RUNBOOK = GpuRunbook(
    detect=_detect,
    remedy=notify_node(": have fans and heat sinks checked"),
    healed=_healed,
    look_every_s=LOOK_EVERY_S,
    open_after_s=OPEN_AFTER_S,
    clear_after_s=60.0,
    verify_s=3600.0,
    prediction=True,
)
