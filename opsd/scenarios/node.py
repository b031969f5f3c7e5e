"""A simulated node: its series, its GPUs and its job, as readings of the collectors that would see them."""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from opsd.agent import collectors
from opsd.agent.gather import Health
from opsd.agent.metrics import COLLECTOR_STATE
from opsd.collectors import host
from opsd.collectors.base import Event, GpuFact, Metric, NoData, Reading, Sample
from opsd.collectors.infiniband import ACTIVE, ERRORS, FLAPS, RATE, STATE, LinkHistory, PortReading
from opsd.collectors.kmsg import KmsgCollector
from opsd.collectors.lib import rank_series
from opsd.collectors.lib.nvml import series as nvml
from opsd.config import Settings
from opsd.scenarios import healthy
from opsd.scenarios.healthy import Signal
from opsd.scenarios.job import SimulatedJob
from opsd.scenarios.model import Change, Scenario, ScenarioError, Value

NODE = "n01"
MONOTONIC_0 = 50_000.0
WALL_0 = 1_760_000_000.0
"""The clocks at second 0 of a scenario."""
BOOT_S = 1.0
"""The monotonic clock when the agent starts after a boot, which takes no time in a scenario."""

COLLECTORS = {one.name: one.metrics for one in collectors.build(Settings())}
"""Every collector with its metrics. If two of them have a metric, that of the later one is simulated."""

_ALWAYS_THERE = frozenset({"nvml", "kmsg", "infiniband", "ranks"})
"""Collectors that deliver even without series. Collectors without one have no data until a scenario sets it."""

_RANK_USES = {nvml.PROCESSES.name: 1.0, nvml.FB_USED.name: 70_000.0}
"""Processes, and MiB of memory."""
_ALIVE_WHEN_LOST = (nvml.UP, nvml.XID_ERRORS)
_SELECTOR = re.compile(r"(\w+)(?:\{(.*)\})?")


class SimulatedKernel:
    """A kernel log in memory. ``clock`` is in seconds since boot, ``wall`` since the epoch."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._records: deque[bytes] = deque()
        self._written = 0
        self._collector = KmsgCollector(open_device=lambda _path: self, clock=clock, wall=wall)

    def say(self, line: str) -> None:
        """Log ``line`` now."""
        self._records.append(f"6,{self._written},{int(self._clock() * 1e6)},-;{line}\n".encode())
        self._written += 1

    def read(self) -> bytes:
        """The next record, as reading /dev/kmsg gives it. Raises BlockingIOError if there is none yet."""
        if not self._records:
            raise BlockingIOError("nothing more to read")
        return self._records.popleft()

    def collect(self) -> Reading | NoData:
        """What the collector reads from the new records."""
        return self._collector.collect()


class SimulatedPorts:
    """Turns the values of port series into the events and flap counts that the collector would deliver with them."""

    def __init__(self) -> None:
        self._links: defaultdict[tuple[str, ...], LinkHistory] = defaultdict(LinkHistory)

    def read(self, samples: Sequence[Sample], now: float, wall: float) -> Reading:
        """The reading of ``samples`` at monotonic second ``now`` and epoch second ``wall``."""
        rates = {sample.labels: sample.value for sample in samples if sample.metric is RATE}
        downed = {s.labels[:2]: int(s.value) for s in samples if s.metric is ERRORS and s.labels[2] == "link_downed"}
        linked = {sample.labels for sample in samples if sample.metric is STATE and sample.value == ACTIVE}
        flaps, events = list[Sample](), list[Event]()
        for port, state in ((sample.labels, int(sample.value)) for sample in samples if sample.metric is STATE):
            link = self._links[port]
            looked = PortReading(state, None, rates.get(port), {})
            happened = link.update(looked, downed.get(port), now) if state else link.gone(now)
            flaps.append(Sample(FLAPS, link.flaps, port))
            about = {"device": port[0], "port": port[1], "link_layer": "InfiniBand"}
            events += [Event(kind, wall, f"port {port[1]} of {port[0]} {what}", {**about, **data})
                       for kind, what, data in happened]  # fmt: skip
        valid = (sample for sample in samples if sample.metric is not RATE or sample.labels in linked)
        return Reading((*valid, *flaps), tuple(events))


class SimulatedNode:
    """The node of one scenario. Seconds are those of the scenario; ``now`` and ``wall`` are the agent's clocks."""

    def __init__(self, scenario: Scenario) -> None:
        self._rng = random.Random(scenario.seed)
        self._clock_offset = self._booted = 0.0
        self.boot = 0
        self.second = 0.0
        self._metrics = {metric.name: metric for metrics in COLLECTORS.values() for metric in metrics}
        self._owner = {metric.name: name for name, metrics in COLLECTORS.items() for metric in metrics}
        self._identities = [_identity(index) for index in range(scenario.gpus)]
        self._lost: dict[int, str] = {}
        self._series: dict[str, dict[str, dict[tuple[str, ...], Signal]]] = {name: {} for name in COLLECTORS}
        for identity in self._identities:
            for metric, extra, signal in healthy.gpu(loaded=identity.index < scenario.job.ranks):
                self._family(metric)[identity.labels(metric, NODE, *extra)] = signal
        for metric, labels, signal in (
            *healthy.host(),
            *healthy.fabric(scenario.gpus),
            *healthy.storage(),
            *healthy.drive(),
            *healthy.slurm(scenario.job.job),
        ):
            self._family(metric)[labels] = signal
        self._states = {
            name: Health.OK if name in _ALWAYS_THERE or self._series[name] else Health.NO_DATA for name in COLLECTORS
        }
        settings = scenario.job
        warm_s = settings.setup_s + settings.first_step_s + settings.warm_steps * settings.step_s
        began = -warm_s if settings.warm_steps else 0.0
        self.job = SimulatedJob(settings, NODE, self._rng, MONOTONIC_0 + began, self._wall_of)
        self._kernel = SimulatedKernel(lambda: self.now, lambda: self.wall)
        self._ports = SimulatedPorts()

    @property
    def now(self) -> float:
        """The monotonic clock."""
        return self.second - self._booted + (BOOT_S if self.boot else MONOTONIC_0)

    @property
    def wall(self) -> float:
        """The wall clock."""
        return self._wall_of(self._course)

    @property
    def _course(self) -> float:
        """The clock of signals and of the job, which no boot sets back."""
        return MONOTONIC_0 + self.second

    def _wall_of(self, monotonic: float) -> float:
        return WALL_0 + self._clock_offset + monotonic - MONOTONIC_0

    def advance(self, second: float) -> None:
        """Move the time on to ``second`` of the scenario."""
        self.second = second
        self.job.advance(self._course)

    def apply(self, change: Change) -> None:
        """Apply ``change`` now. Raises ScenarioError for an unknown series or collector."""
        if unknown := {*change.blind, *change.hung, *change.sighted} - COLLECTORS.keys():
            raise ScenarioError(f"{', '.join(sorted(unknown))}: no such collector")
        self._clock_offset += change.clock
        if change.read_again:
            self.job.read_again()
        self._states |= dict.fromkeys(change.blind, Health.ERROR) | dict.fromkeys(change.hung, Health.HUNG)
        self._states |= dict.fromkeys(change.sighted, Health.OK)
        for line in change.kernel:
            self._kernel.say(line)
        if change.lost is not None and change.gpu is not None:
            self._lost[change.gpu] = change.lost
        for selector, value in change.set.items():
            self._set(selector, value, change.gpu)
        self.job.apply(change, self._course)
        if change.reboot:
            self._reboot()

    def _reboot(self) -> None:
        """Boot the node: no processes, no kernel log, counters at 0, but for drives and boards; damage stays."""
        self.boot, self._booted = self.boot + 1, self.second
        self.job.lose_node(self._course)
        self._kernel = SimulatedKernel(lambda: self.now, lambda: self.wall)
        self._ports = SimulatedPorts()
        for families in (families for owner, families in self._series.items() if owner != "nvme"):
            for name, family in families.items():
                for labels, signal in family.items() if name.endswith("_total") else ():
                    if "aggregate" not in labels:
                        signal.value, signal.at = 0.0, self._course

    def read(self, collector: str) -> Reading | NoData:
        """What ``collector`` delivers now."""
        if self._states[collector] is not Health.OK:
            return NoData(self._states[collector])
        if collector == "kmsg":
            return self._kernel.collect()
        if collector == "ranks" and self.job.forgotten(self._course):
            return Reading(tuple(self._samples(collector)), self.job.take_events(self._course))
        if collector == "ranks":
            samples = (*self._rank_samples(), *self._samples(collector))
            return Reading(samples, self.job.take_events(self._course), tuple(self.job.facts()))
        samples = tuple(self._samples(collector))
        if collector == "infiniband":
            return self._ports.read(samples, self.now, self.wall)
        if collector == "host":
            return Reading((*samples, Sample(host.BOOT_TIME, round(self.wall - self.now))))
        return Reading(samples, (), self._gpu_facts()) if collector == "nvml" else Reading(samples)

    def health(self) -> Reading:
        """The states of the collectors, as the agent itself reports them."""
        return Reading(
            tuple(
                Sample(COLLECTOR_STATE, float(state is health), (name, state.value))
                for name, health in self._states.items()
                for state in Health
            )
        )

    def _family(self, metric: Metric) -> dict[tuple[str, ...], Signal]:
        """The series of ``metric`` by their labels."""
        return self._series[self._owner[metric.name]].setdefault(metric.name, {})

    def _samples(self, collector: str) -> Iterator[Sample]:
        now, rng, lost = self._course, self._rng, self._lost if collector == "nvml" else {}
        for name, family in self._series[collector].items():
            metric, use = self._metrics[name], _RANK_USES.get(name, 0.0)
            for labels, signal in family.items():
                if lost and lost.get(int(labels[0])):
                    if metric in _ALIVE_WHEN_LOST:
                        yield Sample(metric, 0.0 if metric is nvml.UP else signal.exact(now), labels)
                elif (value := signal.read(now, rng)) is not None:
                    if metric is nvml.GPU_UTIL and self._rests(labels[0]):
                        value = 0.0
                    yield Sample(metric, value + use * self._ranks_on(labels[0]) if use else value, labels)

    def _ranks_on(self, gpu: str) -> int:
        """How many ranks have a living process on the GPU."""
        return sum(str(rank.number) == gpu and rank.process is not None for rank in self.job.ranks)

    def _rests(self, gpu: str) -> bool:
        """True if the GPU is the job's, and no rank of the job has a process on it."""
        return int(gpu) < self.job.settings.ranks and not self._ranks_on(gpu)

    def _rank_samples(self) -> Iterator[Sample]:
        for rank in self.job.ranks:
            labels = (self.job.settings.run, str(rank.number))
            yield Sample(rank_series.UP, float(rank.process is not None and rank.state == "running"), labels)
            for phase, seconds in rank.totals.items():
                yield Sample(rank_series.PHASE_SECONDS, seconds, (*labels, phase))
            if rank.steps:
                last = rank.steps[-1]
                recent = list(rank.steps)[-rank_series.RATE_STEPS :]
                elapsed = max(last.end, self._course - last.duration_s) - (recent[0].end - recent[0].duration_s)
                yield Sample(rank_series.STEP, last.step, labels)
                yield Sample(rank_series.STEP_SECONDS, last.duration_s, labels)
                yield Sample(rank_series.TOKENS_RATE, sum(step.tokens for step in recent) / elapsed, labels)
                if math.isfinite(last.loss):
                    yield Sample(rank_series.LOSS, last.loss, labels)
                if math.isfinite(last.grad_norm):
                    yield Sample(rank_series.GRAD_NORM, last.grad_norm, labels)

    def _gpu_facts(self) -> tuple[GpuFact, ...]:
        return tuple(
            GpuFact(i.index, i.uuid, i.pci_bus_id, i.model, lost=self._lost.get(i.index) or None)
            for i in self._identities
        )

    def _set(self, selector: str, value: Value, gpu: int | None) -> None:
        """Give every series that matches ``selector`` a new course; a missing series is created."""
        match = _SELECTOR.fullmatch(selector)
        metric = self._metrics.get(match[1]) if match else None
        if match is None or metric is None:
            raise ScenarioError(f"{selector}: no collector exports this series")
        wanted = dict(pair.split("=", 1) for pair in (match[2] or "").split(",") if pair)
        if gpu is not None:
            wanted["gpu"] = str(gpu)
        family = self._family(metric)
        fitting = [
            signal
            for labels, signal in family.items()
            if wanted.items() <= set(zip(metric.labels, labels, strict=True))
        ]
        if not fitting:
            family[self._labels(metric, wanted)] = signal = Signal(0.0, self._course)
            fitting = [signal]
            owner = self._owner[metric.name]
            self._states[owner] = Health.OK if self._states[owner] is Health.NO_DATA else self._states[owner]
        for signal in fitting:
            signal.become(value, self._course)

    def _labels(self, metric: Metric, wanted: dict[str, str]) -> tuple[str, ...]:
        if "gpu" in metric.labels and "gpu" in wanted:
            identity = self._identities[int(wanted["gpu"])]
            own = dict(zip(metric.labels, identity.labels(metric, NODE, *([""] * 9)), strict=False))
            wanted = {**own, **wanted}
        missing = [name for name in metric.labels if name not in wanted]
        if missing:
            raise ScenarioError(f"{metric.name} needs the labels {', '.join(missing)}")
        return tuple(wanted[name] for name in metric.labels)


def _identity(index: int) -> nvml.Identity:
    return nvml.Identity(index, f"GPU-{index:04d}", f"00000000:{0x1A + 0x10 * index:02X}:00.0", "NVIDIA H100 80GB HBM3")
