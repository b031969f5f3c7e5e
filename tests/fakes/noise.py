"""Noise as sensors and loads have it: series of a healthy node that no prediction may take for a trend."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from opsd.collectors.base import Event, GpuFact, RankFact, RunFact
from opsd.runbooks.base import Series

GPUS = 8
KELVIN_PER_WATT = 0.05
THERMAL_S = 60.0
"""A heat sink follows the power with this time constant."""


@dataclass(frozen=True)
class Noise:
    """How the GPUs of a node vary. ``ar_*`` is noise of the temperature (AR(1)), ``load_*`` of the power in watts.

    ``walk_w`` is a random walk of each GPU's power (watts per root of a second), ``day_k`` the room's swing over
    ``day_s``, ``duty_s`` the period of a load that comes and goes, ``step`` the sensor's resolution, ``missing`` the
    share of samples that are not there, ``spikes`` of those that are wild.
    """

    ar_sd: float = 0.6
    ar_s: float = 0.0
    load_sd: float = 4.0
    load_s: float = 0.0
    walk_w: float = 0.0
    day_k: float = 0.0
    day_s: float = 3600.0
    duty_s: float = 0.0
    step: float = 0.0
    missing: float = 0.0
    spikes: float = 0.0
    peers: int = GPUS
    only: int | None = None


MODELS: tuple[Noise, ...] = (
    *(Noise(ar_sd=sd, ar_s=s) for sd in (0.5, 1.0, 1.3, 2.0) for s in (5.0, 30.0, 100.0, 300.0)),
    *(Noise(ar_sd=1.3, ar_s=s, load_sd=35.0, load_s=load) for s in (10.0, 100.0) for load in (0.0, 30.0, 120.0)),
    *(Noise(ar_sd=0.6, walk_w=walk, step=1.0) for walk in (0.5, 2.0, 4.0)),
    *(Noise(ar_sd=0.8, day_k=day, day_s=period) for day in (2.0, 6.0) for period in (1800.0, 3600.0, 14_400.0)),
    *(Noise(ar_sd=sd, ar_s=60.0, step=1.0) for sd in (0.3, 1.0, 1.5)),
    *(Noise(ar_sd=1.0, ar_s=60.0, missing=share) for share in (0.1, 0.5, 0.9)),
    *(Noise(ar_sd=0.6, spikes=share) for share in (0.01, 0.05)),
    *(Noise(ar_sd=0.8, ar_s=60.0, duty_s=period) for period in (90.0, 300.0, 900.0)),
    *(Noise(ar_sd=sd, ar_s=100.0, only=3) for sd in (1.3, 3.0)),
    *(Noise(ar_sd=1.3, ar_s=100.0, peers=peers) for peers in (3, 4)),
    Noise(ar_sd=1.3, ar_s=100.0, load_sd=35.0, load_s=30.0, step=1.0, missing=0.2),
    Noise(ar_sd=1.3, ar_s=300.0, day_k=4.0, walk_w=2.0),
    Noise(ar_sd=2.0, ar_s=150.0, load_sd=60.0, load_s=60.0, step=1.0),
    Noise(ar_sd=1.0, ar_s=1000.0),
)
"""Fifty healthy nodes."""


@dataclass
class Track:
    """A series with the samples of its last ten minutes; one look is a slice."""

    labels: dict[str, str]
    source: str = "nvml"
    points: list[tuple[float, float]] = field(default_factory=list)
    now: float = 0.0

    @property
    def last(self) -> float | None:
        return self.points[-1][1] if self.points and self.points[-1][0] == self.now else None

    def add(self, at: float, value: float | None) -> None:
        """The sample of a tick, None if it has none."""
        self.now = at
        if value is not None:
            self.points.append((at, value))
        if len(self.points) > 1300:
            del self.points[: len(self.points) - 601]

    def values(self, seconds: float) -> Sequence[tuple[float, float]]:
        oldest, last = self.now - seconds, len(self.points)
        first = max(0, last - math.ceil(seconds) - 1)
        while first < last and self.points[first][0] < oldest:
            first += 1
        return self.points[first:last]

    def unchanged(self, seconds: float) -> bool:
        return False

    def increase(self, seconds: float) -> float | None:
        points = self.values(seconds)
        return points[-1][1] - points[0][1] if len(points) > 1 else None


class Tracks:
    """A view of tracks: GPUs, and ranks if a test adds them; no events."""

    node = "n01"
    runs: Sequence[RunFact] = ()

    def __init__(self, gpus: int = GPUS) -> None:
        self.now = 0.0
        self.ranks: list[RankFact] = []
        self.gpus = [GpuFact(index, f"GPU-{index}", f"{index}", "H100") for index in range(gpus)]
        self.families: dict[str, list[Track]] = {}

    @property
    def wall(self) -> float:
        return 1.7e9 + self.now

    def track(self, metric: str, **labels: str) -> Track:
        """A new series."""
        made = Track(labels)
        self.families.setdefault(metric, []).append(made)
        return made

    def select(self, metric: str, **labels: str) -> Sequence[Series]:
        family = self.families.get(metric, [])
        return [one for one in family if all(one.labels.get(k) == v for k, v in labels.items())]

    def events(self, kind: str, seconds: float) -> Sequence[Event]:
        return ()

    def known(self, collector: str) -> bool:
        return True


def ar1(rng: random.Random, sd: float, seconds: float) -> Iterator[float]:
    """An AR(1) process at 1 Hz with this standard deviation and correlation time; white if that is 0."""
    keep = math.exp(-1.0 / seconds) if seconds else 0.0
    value = rng.gauss(0.0, sd)
    while True:
        yield value
        value = keep * value + rng.gauss(0.0, sd * math.sqrt(1.0 - keep * keep))


Fault = Callable[[int, float], float]
"""Degrees that a fault adds, by GPU and second."""


def gpu_node(noise: Noise, seed: int, fault: Fault = lambda _gpu, _second: 0.0) -> Iterator[Tracks]:
    """The node at each second: temperature, power and margin of its GPUs."""
    rng = random.Random(seed)
    view = Tracks(noise.peers)
    quiet = replace(noise, ar_sd=0.3)
    own = [quiet if noise.only is not None and gpu != noise.only else noise for gpu in range(noise.peers)]
    ids = [{"gpu": str(gpu), "UUID": f"GPU-{gpu}"} for gpu in range(noise.peers)]
    celsius = [view.track("DCGM_FI_DEV_GPU_TEMP", **one) for one in ids]
    watts = [view.track("DCGM_FI_DEV_POWER_USAGE", **one) for one in ids]
    margins = [view.track("opsd_gpu_temperature_margin_celsius", **one) for one in ids]
    temperature = [ar1(rng, one.ar_sd, one.ar_s) for one in own]
    load = [ar1(rng, one.load_sd, one.load_s) for one in own]
    walk, heat = [0.0] * noise.peers, [650.0] * noise.peers
    base = [rng.uniform(-3.0, 3.0) for _ in ids]
    while True:
        view.now += 1.0
        room = noise.day_k * math.sin(2 * math.pi * view.now / noise.day_s)
        idle = noise.duty_s and view.now % noise.duty_s > 0.7 * noise.duty_s
        for gpu in range(noise.peers):
            walk[gpu] = min(max(walk[gpu] + rng.gauss(0.0, noise.walk_w), -150.0), 40.0)
            power = (120.0 if idle else 650.0 + walk[gpu]) + next(load[gpu])
            heat[gpu] += (power - heat[gpu]) / THERMAL_S
            hot = 30.0 + base[gpu] + room + KELVIN_PER_WATT * heat[gpu] + fault(gpu, view.now)
            hot += next(temperature[gpu]) + (rng.uniform(20.0, 60.0) if rng.random() < noise.spikes else 0.0)
            hot = round(hot / noise.step) * noise.step if noise.step else hot
            there = rng.random() >= noise.missing
            celsius[gpu].add(view.now, hot if there else None)
            watts[gpu].add(view.now, power if there else None)
            margins[gpu].add(view.now, max(0.0, 87.0 - hot))
        yield view
