"""What a collector is, and the values it yields.

A collector is one file with one class: it names its metrics and has one method, ``collect()``. It does no
logging, timing, threading or judging; the agent does these for all collectors alike. Reading (files, driver
calls) and parsing (pure functions) are apart, and everything read from comes in as a constructor argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

MetricKind = Literal["gauge", "counter", "untyped", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A series family. ``unit`` is a base unit (seconds, bytes, celsius, watts, ratio …) or "" for plain counts.

    A counter's name ends in ``_total``. ``untyped`` is for counters whose name is fixed by dcgm-exporter and has
    no such ending.
    """

    name: str
    help: str
    kind: MetricKind = "gauge"
    unit: str = ""
    labels: tuple[str, ...] = ()


class Sample(NamedTuple):
    """One value of one series; ``labels`` are the values in the order of ``metric.labels``."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once: a rank exited, an Xid. ``at`` is wall-clock seconds; ``data`` is JSON-able."""

    kind: str
    at: float
    message: str
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuFact:
    """Identity of a GPU of this node.

    ``lost`` is the driver's reason if the GPU no longer answers, ``orphans`` are processes that hold it though dead.
    """

    index: int
    uuid: str
    pci_bus_id: str
    model: str
    simulated: bool = False
    lost: str | None = None
    orphans: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFact:
    """One completed step of a rank; seconds, ``end`` on the monotonic clock."""

    step: int
    end: float
    duration_s: float
    tokens: int
    loss: float
    grad_norm: float
    phase_s: Mapping[str, float]
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class RankFact:
    """What a rank on this node is doing.

    ``process`` is the kernel's state letter, None once the process is gone. ``workers`` are its helper processes (pid,
    role), ``worker_process`` their state letters in the same order, empty where they were not read.
    """

    run: str
    job: str
    rank: int
    local_rank: int
    world_size: int
    generation: int
    gpu: int | None
    pid: int
    state: str
    process: str | None
    phase: str
    phase_since: float
    changed: float
    steps_reported: int
    committed_step: int | None
    workers: tuple[tuple[int, str], ...]
    steps: tuple[StepFact, ...] = field(repr=False)
    worker_process: tuple[str | None, ...] = ()

    @property
    def live(self) -> bool:
        """True while the rank's process exists and has not finished in good order."""
        return self.process is not None and self.state == "running"


@dataclass(frozen=True, slots=True)
class RunFact:
    """A run supervised by ``opsd launch`` on this node, from its ``run.json``. ``control`` is the launcher's socket.

    ``logs`` has one folder of rank logs per generation.
    """

    run: str
    job: str
    node: str
    state: str
    generation: int
    launcher_pid: int
    alive: bool
    world_size: int
    control: str
    folder: str
    logs: str

    @property
    def takes_part(self) -> bool:
        """False on a spare: the launcher lives, and starts no rank here."""
        return self.state != "spare"


Fact = GpuFact | RankFact | RunFact


@dataclass(frozen=True, slots=True)
class Reading:
    """The outcome of one collection."""

    samples: tuple[Sample, ...] = ()
    events: tuple[Event, ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class NoData:
    """An expected absence ("no NVIDIA driver on this node"): neither healthy nor an error."""

    reason: str


class Collector(Protocol):
    """The plug-in interface. ``collect`` may raise: the agent counts it as an error of this collector.

    A collector that asks too much of its source to do so in every tick has an attribute ``interval_s``, the seconds
    between two collections at least. What it returned last holds meanwhile.
    """

    @property
    def name(self) -> str: ...
    @property
    def metrics(self) -> tuple[Metric, ...]: ...

    def collect(self) -> Reading | NoData:
        """Read the source once. Called from one thread, never concurrently with itself."""
        ...
