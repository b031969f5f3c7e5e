"""Step times of ranks that train in lockstep, and which of them stand out.

Step times of the ranks of a job, and what was concluded from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

FORWARD, BACKWARD, COMPUTE, DATA, TRANSFER, GPU, STEP = (
    "forward", "backward", "compute", "data", "transfer", "gpu", "step",
)  # fmt: skip
SLOW_WORKER, SLOW_GPU, SLOW_HOST = "slow worker", "slow GPU", "slow host"
HOST_PAUSES, SLOW_DATA, SLOW_LINK = "pauses of the host", "slow data", "slow link"
STAGES, LENGTHS = "unbalanced pipeline stages", "unequal sequence lengths"
CAUSES = (SLOW_WORKER, SLOW_GPU, SLOW_HOST, HOST_PAUSES, SLOW_DATA, SLOW_LINK, STAGES, LENGTHS)

Rows = Mapping[int, Sequence[float]]
"""Rank -> seconds in each step of the trace."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs, and its coordinates in the layout; ``node`` is "" if it is unknown."""

    node: str = ""
    gpu: int | None = None
    dp: int = 0
    pp: int = 0
    tp: int = 0
    cp: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Seconds of each phase, rank and step; all rows have a value for each of ``steps``.

    Phases: ``forward`` and ``backward``, or ``compute`` where they are not told apart: what the rank itself worked,
    without waiting. ``gpu`` is the same by CUDA events. ``data`` is waiting for the loader, ``transfer`` is
    communication without the waiting for others, ``step`` the whole step. ``microbatches`` is their number in a step
    of a pipeline, None if it is unknown. ``left_out`` are ranks with too few of the steps to be compared.
    """

    places: Mapping[int, Place]
    steps: Sequence[int]
    seconds: Mapping[str, Rows] = field(repr=False)
    microbatches: int | None = None
    left_out: Sequence[int] = ()

    def rows(self, phase: str) -> Rows | None:
        """The rows of ``phase``, None unless every rank has one."""
        rows = self.seconds.get(phase)
        return rows if rows is not None and rows.keys() >= self.places.keys() else None

    @property
    def source(self) -> str:
        """``gpu`` if the work of every rank was timed by CUDA events, else ``host``."""
        gpu = self.rows(GPU)
        return GPU if gpu is not None and all(any(row) for row in gpu.values()) else "host"

    def host_work(self) -> Rows:
        """Seconds that each rank worked in each step, by the host's clock; by the GPU's if nothing else is known."""
        parts = [rows for phase in (FORWARD, BACKWARD, COMPUTE) if (rows := self.rows(phase)) is not None]
        if not parts:
            parts = [rows for phase in (STEP, GPU) if (rows := self.rows(phase)) is not None][:1]
        return {
            rank: [sum(values) for values in zip(*(rows[rank] for rows in parts), strict=True)] for rank in self.places
        }

    def work(self) -> Rows:
        """Seconds that each rank worked in each step, by the better source."""
        return self.seconds[GPU] if self.source == GPU else self.host_work()

    def groups(self) -> list[list[int]]:
        """The ranks that do equal work: the same pipeline stage and, if enough of them have it, the same tensor place.

        Ranks of one tensor group wait for each other within a step, so that only other groups show their delay.
        """
        narrow = _grouped(self.places, lambda place: (place.pp, place.tp))
        if min(map(len, narrow)) >= LEAST_PEERS:
            return narrow
        return _grouped(self.places, lambda place: (place.pp,))

    def last(self, count: int) -> Trace:
        """The last ``count`` steps."""
        cut = {phase: {rank: row[-count:] for rank, row in rows.items()} for phase, rows in self.seconds.items()}
        return Trace(self.places, self.steps[-count:], cut, self.microbatches, self.left_out)


LEAST_PEERS = 3


def _grouped(places: Mapping[int, Place], key: object) -> list[list[int]]:
    found: dict[object, list[int]] = {}
    for rank in sorted(places):
        found.setdefault(key(places[rank]), []).append(rank)  # type: ignore[operator]
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Slowdown:
    """What slows the job down. ``culprits`` are ranks, none if the work itself is uneven.

    ``slowdown``: duration of a step in proportion to that without the cause, 1.0 if it costs nothing. ``source`` is
    ``gpu`` if the times are those of CUDA events, else ``host``. ``stage`` is the pipeline stage that takes longest,
    for ``STAGES``.
    """

    cause: str
    culprits: tuple[int, ...]
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    slowdown: float
    confidence: float
    evidence: tuple[str, ...]
    source: str = "host"
    stage: int | None = None
    advice: str = ""


def middles(rows: Rows, ranks: Iterable[int]) -> list[float]:
    """Of each step the median over ``ranks``."""
    return [median(values) for values in zip(*(rows[rank] for rank in ranks), strict=True)]


# Which ranks or nodes take longer than their peers, step after step.


_Name = TypeVar("_Name", int, str)

SLOW = 0.07
"""A rank this much above the median of its peers is slow: a GPU that is 10 % slow must be caught for sure."""
OUTLIER = 4.0
"""... and this many robust standard deviations, more if there are many ranks …"""
OUTLIER_BASE = 2.5
CONSISTENT = 0.8
"""... in this share of the steps: a single pause moves no median, a bad minute is not a bad GPU."""
MOST_SHARE = 0.25
"""If more than this share of the nodes or ranks are slow, the work is uneven by nature and nobody is a culprit."""
FLOOR = 0.01
NOISY_ROWS = 256
"""The noise of so many ranks is that of all."""
SMALL_GROUP = 8
"""Of fewer ranks a rank is compared with the others only: it would move the median that it is compared with."""
MAD_TO_SIGMA = 1.4826
MEDIAN_ERROR = 1.2533
"""Standard error of a median in that of a mean, for normal noise."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A rank, or the ranks of a node. ``excess`` is the share by which it takes longer than its peers."""

    ranks: tuple[int, ...]
    node: str
    excess: float
    sigmas: float
    peers: int


def ratios(trace: Trace, rows: Rows) -> dict[int, list[float]]:
    """Of each rank and step the logarithm of its time in proportion to the median of its peers; 0.0 without peers."""
    found: dict[int, list[float]] = {}
    for group in trace.groups():
        typical = middles(rows, group)
        for rank in group:
            if 1 < len(group) < SMALL_GROUP:
                typical = middles(rows, (peer for peer in group if peer != rank))
            found[rank] = [
                math.log(own) - math.log(usual) if own > 0 and usual > 0 else 0.0
                for own, usual in zip(rows[rank], typical, strict=True)
            ]
    return found


def outliers(trace: Trace, rows: Rows) -> list[Outlier]:
    """The slow ranks and nodes, the slowest first; none if so many are slow that it is their nature."""
    logs = ratios(trace, rows)
    peerless = {group[0] for group in trace.groups() if len(group) == 1}
    nodes: dict[str, list[int]] = {}
    for rank in sorted(trace.places.keys() - peerless):
        nodes.setdefault(trace.places[rank].node, []).append(rank)
    nodes.pop("", None)
    found = [
        Outlier(tuple(rank for rank in nodes[node] if median(logs[rank]) > SLOW / 2), node, *rest)
        for node, rest in _extreme({node: middles(logs, ranks) for node, ranks in nodes.items()}).items()
    ]
    taken = {rank for outlier in found for rank in outlier.ranks}
    single = _extreme({rank: log for rank, log in logs.items() if rank not in peerless})
    found += [Outlier((rank,), trace.places[rank].node, *rest) for rank, rest in single.items() if rank not in taken]
    slow, units = (
        (len({outlier.node for outlier in found}), len(nodes))
        if len(nodes) > 1
        else (sum(len(outlier.ranks) for outlier in found), len(logs) - len(peerless))
    )
    return [] if slow > max(1.0, MOST_SHARE * units) else sorted(found, key=lambda outlier: -outlier.excess)


def _extreme(logs: Mapping[_Name, Sequence[float]]) -> dict[_Name, tuple[float, float, int]]:
    """Of each name that is extreme: excess, robust standard deviations, and the number of its peers."""
    if len(logs) < 2:
        return {}
    own = {name: median(row) for name, row in logs.items()}
    steps = len(next(iter(logs.values())))
    some = list(logs.values())[:: 1 + len(logs) // NOISY_ROWS]
    noise = median(spread(row) for row in some) * MEDIAN_ERROR / math.sqrt(steps)
    least = max(OUTLIER, OUTLIER_BASE + math.sqrt(2 * math.log(len(logs))))
    everyone = spread(list(own.values()))
    found = {}
    for name, value in own.items():
        if math.expm1(value) < SLOW or value < least * max(noise, FLOOR):
            continue
        others = [other for key, other in own.items() if key != name]
        usual = everyone if len(others) >= SMALL_GROUP else spread(others)
        sigmas = value / max(usual, noise, FLOOR)
        steady = sum(log > SLOW / 2 for log in logs[name]) >= CONSISTENT * steps
        if sigmas >= least and steady:
            found[name] = (math.expm1(value), sigmas, len(others))
    return found


def spread(values: Sequence[float]) -> float:
    """The scaled median absolute deviation, which one outlier does not move. Raises StatisticsError."""
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in values)
