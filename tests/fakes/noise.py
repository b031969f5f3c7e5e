"""Series of healthy nodes that no prediction may take for a trend.

Noise as sensors and loads have it: series of a healthy node that no prediction may take for a trend.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from opsd.collectors.base import Event, GpuFact, RankFact, RunFact
from opsd.runbooks.base import Runbook, Series

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


# Series of healthy nodes by detector: counters, free space and write rates with the noise that they really have.


TICK_S = 10.0
"""Seconds from one sample to the next."""
DRAWS = 50
HOURS = 72.0

Ticks = Iterator[Tracks]
Healthy = Callable[[int], Ticks]
"""The course of a healthy node of this number, which is also its seed; it never ends."""


def opened(book: Runbook, node: Ticks, seconds: float, look_s: float = TICK_S) -> float | None:
    """The second in which ``book`` opens an incident, None if it opens none: found without a break for long enough."""
    since: dict[str, float] = {}
    every = max(1, round(look_s / TICK_S))
    for tick, view in enumerate(takewhile(lambda view: view.now <= seconds, node)):
        if tick % every:
            continue
        found = {finding.key: finding for finding in book.detect(view)}
        since = {key: since.get(key, view.now) for key in found}
        for key, finding in found.items():
            if view.now - since[key] >= max(book.open_after_s, finding.lasting_s):
                return view.now
    return None


def walk(rng: random.Random, spread: float, hours: float) -> Iterator[float]:
    """A factor around 1 that wanders: its logarithm is AR(1) with this standard deviation and correlation time."""
    keep = math.exp(-TICK_S / (3600.0 * hours))
    value = rng.gauss(0.0, spread)
    while True:
        yield math.exp(value - spread * spread / 2)
        value = keep * value + rng.gauss(0.0, spread * math.sqrt(1 - keep * keep))


def poisson(rng: random.Random, mean: float) -> int:
    """A number of events (Knuth's method; the normal distribution for many)."""
    if mean > 30.0:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def counter(rng: random.Random, a_minute: float, spread: float, hours: float, cluster: float) -> Iterator[float]:
    """Errors that come at random, in clusters of ``cluster`` on average, with a rate that wanders."""
    total, rate = 0.0, walk(rng, spread, hours)
    while True:
        for _ in range(poisson(rng, a_minute / cluster * next(rate) * TICK_S / 60.0)):
            total += 1 + poisson(rng, cluster - 1)
        yield total


def memory_errors(number: int) -> Ticks:
    """A GPU that corrects up to 30 errors a minute, in clusters, more by day than by night."""
    rng = random.Random(number)
    values = counter(
        rng, rng.choice((0.01, 0.2, 1.0, 4.0, 8.0, 30.0)), rng.choice((0.0, 0.2, 0.4)), rng.choice((4.0, 24.0)),
        rng.choice((1.0, 1.5, 3.0)),
    )  # fmt: skip
    labels = {"UUID": "GPU-0", "gpu": "0", "type": "corrected", "counter": "volatile"}
    return _one("opsd_gpu_ecc_errors_total", labels, values)


def link_errors(number: int) -> Ticks:
    """A port with up to one bit error in five minutes, and once a day a burst, as when somebody touches a cable."""
    rng = random.Random(number)
    quiet = counter(rng, rng.choice((0.01, 0.05, 0.2)), rng.choice((0.0, 0.5)), 6.0, 1.0)
    burst, total = rng.choice((0.0, 20.0, 80.0)), 0.0

    def values() -> Iterator[float]:
        nonlocal total
        for value in quiet:
            total += burst * (rng.random() < TICK_S / 86_400.0)
            yield value + total

    return _one("opsd_ib_errors_total", {"device": "mlx5_0", "port": "1", "error": "symbol_error"}, values())


def drive(number: int) -> Ticks:
    """An NVMe drive in the middle of a life of five years, with checkpoints every hour or so, and caches between."""
    rng = random.Random(number)
    size = rng.choice((1.92e12, 3.84e12, 7.68e12))
    wear, life = rng.uniform(0.2, 0.85), 5 * size * 365
    every_s, checkpoint = rng.choice((1200.0, 3600.0, 10_800.0)), rng.choice((0.0, 1e11, 5e11))
    checkpoint = min(checkpoint, (1 - wear) * life / 90 * every_s / 86_400)
    pace = 5e9
    background = walk(rng, 0.8, 0.2)
    usual = (1 - wear) * life / 180 / 86_400 * rng.choice((0.1, 1.0))
    return _drive(
        wear,
        life,
        (usual * next(background) + (pace if now % every_s < checkpoint / pace else 0.0) for now in _seconds()),
    )


def drive_written_to_death(a_second: float) -> Ticks:
    """A drive that somebody writes to without a pause from the tenth minute on."""
    return _drive(0.6, 7e15, (a_second if now >= 600.0 else 1e6 for now in _seconds()))


def _drive(wear: float, life: float, rates: Iterator[float]) -> Ticks:
    view = Tracks()
    drive = {"controller": "nvme0"}
    view.track("opsd_storage_nvme_info", **drive, model="X", serial="1")
    tracks = [
        view.track(f"opsd_storage_nvme_{name}", **drive)
        for name in ("wear_ratio", "power_on_seconds_total", "written_bytes_total")
    ]
    written, powered = wear * life, wear * 5 * 365 * 86_400
    (info,) = view.families["opsd_storage_nvme_info"]
    for rate in rates:
        written, powered = written + rate * TICK_S, powered + TICK_S
        view.now += TICK_S
        if view.now % 60.0:
            continue
        info.add(view.now, 1.0)
        for track, value in zip(tracks, (math.floor(100 * written / life) / 100, powered, written), strict=True):
            track.add(view.now, value)
        yield view


def disk(number: int) -> Ticks:
    """A file system that is more than half full, with files that come and go: shards, checkpoints, caches."""
    rng = random.Random(number)
    size, free = 27e12, rng.uniform(0.15, 0.5)
    period_s, share = rng.choice((600.0, 1800.0, 7200.0)), rng.choice((0.0, 0.02, 0.05))
    fill = rng.choice((0.02, 0.2, 0.5))
    shards, at = walk(rng, 0.02, rng.choice((0.05, 1.0))), rng.random() * period_s

    def values() -> Iterator[float]:
        for now in _seconds():
            place = (now + at) % period_s / period_s
            yield size * (free - share * min(1.0, place / fill)) * min(1.5, next(shards))

    return _filesystem(size, values())


def disk_filling(share_an_hour: float) -> Ticks:
    """A file system that fills up steadily from 40 % left on."""
    return _filesystem(27e12, (27e12 * (0.4 - share_an_hour * now / 3600.0) for now in _seconds()))


def _filesystem(size: float, values: Iterator[float]) -> Ticks:
    view = Tracks()
    whole, left = (view.track(f"opsd_storage_{name}_bytes", mount="/scratch") for name in ("size", "available"))
    for value in values:
        view.now += TICK_S
        whole.add(view.now, size)
        left.add(view.now, value)
        yield view


def latencies(number: int) -> Ticks:
    """Reads of a disk or a file server, log-normal, with a load that wanders."""
    rng = random.Random(number)
    usual, spread = rng.choice((0.0002, 0.001, 0.004)), rng.choice((0.1, 0.3, 0.5))
    slow, fast = walk(rng, spread, rng.choice((0.01, 0.1, 1.0))), walk(rng, spread, 0.0001)
    values = (usual * next(slow) * next(fast) for _ in _seconds())
    return _one("opsd_storage_io_latency_seconds", {"device": "nvme0n1", "op": "read"}, values)


def growing_counter(metric: str, labels: dict[str, str], quiet_s: float, growth: float, number: int) -> Ticks:
    """Errors whose number a minute grows by ``growth`` each minute from ``quiet_s`` on."""
    rng, total = random.Random(number), 0.0

    def values() -> Iterator[float]:
        nonlocal total
        for now in _seconds():
            total += poisson(rng, max(0.0, now - quiet_s) / 60.0 * growth * TICK_S / 60.0)
            yield total

    return _one(metric, labels, values())


def _seconds() -> Iterator[float]:
    now = 0.0
    while True:
        now += TICK_S
        yield now


def _one(metric: str, labels: dict[str, str], values: Iterator[float]) -> Ticks:
    view = Tracks()
    track = view.track(metric, **labels)
    for value in values:
        view.now += TICK_S
        track.add(view.now, value)
        yield view
