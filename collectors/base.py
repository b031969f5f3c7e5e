"""The contract of a collector: the values it yields, and how it is made from the settings.

A collector is one file: the class of its settings, a class with the metrics and one method, ``collect()``, and at the
end ``COLLECTOR = Plugin(...)``. It does no logging, timing, threading or judging; the agent does these for all
collectors alike. Reading (files, driver calls) and parsing (pure functions) are apart, and everything read from comes
in as a constructor argument.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from opsd.settings.sections import CollectorSettings, Section

if TYPE_CHECKING:
    from opsd.collectors.slurm import SlurmReport

T = TypeVar("T")
S = TypeVar("S", bound=CollectorSettings)
AnySection = TypeVar("AnySection", bound=Section)
C = TypeVar("C", bound="Collector")

MetricKind = Literal["gauge", "counter", "untyped", "info"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A series family. ``unit`` is a base unit (seconds, bytes, celsius, watts, ratio …) or "" for plain counts.

    A counter's name ends in ``_total``. ``untyped`` is for counters whose name is fixed by dcgm-exporter and has
    no such ending. One that is not ``kept`` is exported only: the agent has no past of it, no runbook may select it.
    """

    name: str
    help: str
    kind: MetricKind = "gauge"
    unit: str = ""
    labels: tuple[str, ...] = ()
    kept: bool = True


class Sample(NamedTuple):
    """One value of one series; ``labels`` are the values in the order of ``metric.labels``."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once: a rank exited, an Xid. ``at`` is wall-clock seconds; ``data`` is JSON-able.

    ``user`` is the id of the user who says so, None if it is not a user's word; ``size`` is in bytes, as it was read.
    """

    kind: str
    at: float
    message: str
    data: Mapping[str, object] = field(default_factory=dict)
    user: int | None = None
    size: int = 0


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

    def without(self, phases: Iterable[str]) -> float:
        """Its seconds that were not spent in ``phases``."""
        return self.duration_s - sum(self.phase_s.get(phase, 0.0) for phase in phases)


@dataclass(frozen=True, slots=True)
class RankFact:
    """The state of a rank on this node.

    ``process`` is the kernel's state letter, None once the process is gone. ``workers`` are its helper processes (pid,
    role), ``worker_process`` their state letters in the same order, empty where they were not read. ``job`` is ""
    unless the kernel or Slurm has the process in it. ``user`` is the id of the user whose process it is. ``source`` is
    who reports, as on the rank page: "client", "adapter" or "observed".
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
    user: int | None = None
    source: str = "client"
    planned: int | None = None
    """The step after which the run ends, as its program says."""
    inside: int | None = None
    """The number of the process in its own PID namespace, None where that is ``pid``."""

    @property
    def live(self) -> bool:
        """True while the rank's process exists and has not finished."""
        return self.process is not None and self.state == "running"


@dataclass(frozen=True, slots=True)
class RunFact:
    """A run supervised by ``opsd launch`` on this node, from its ``run.json``. ``control`` is the launcher's socket.

    ``logs`` has one folder of rank logs per generation. ``job`` and ``user`` are as in ``RankFact``.
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
    user: int | None = None

    @property
    def takes_part(self) -> bool:
        """False on a spare: the launcher lives, and starts no rank here."""
        return self.state != "spare"


@dataclass(frozen=True, slots=True)
class RepairStep:
    """Something that a repair did: a remedy, a test, or the return; ``ok`` is None until it has ended.

    Epoch seconds; ``boot`` identifies the boot of the node in which it began, ``uptime_s`` after that. ``took_s`` is 0
    if that is not known: clocks are set after a boot, so that epoch seconds tell people, and decide nothing.
    """

    what: str
    at: float
    boot: str = ""
    ended_at: float | None = None
    ok: bool | None = None
    detail: str = ""
    uptime_s: float = 0.0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RepairFact:
    """A repair of this node, as its record tells it; ``end`` is None while it is under way. Times are epoch seconds."""

    id: str
    node: str
    kind: str
    reason: str
    opened_at: float
    attempts: tuple[RepairStep, ...] = ()
    end: str | None = None
    ended_at: float | None = None
    verdict: str = ""
    bundle: str = ""
    by_hand: bool = False
    paused: str = ""
    resumed_at: float = 0.0

    @property
    def state(self) -> str:
        """How it ended, what is being done, or that it waits."""
        if self.end is not None:
            return self.end
        if self.attempts and self.attempts[-1].ok is None:
            return self.attempts[-1].what
        return "paused" if self.paused else "waiting"


Fact = GpuFact | RankFact | RunFact | RepairFact


@dataclass(frozen=True, slots=True)
class Reading:
    """The outcome of one collection. ``limited`` says what a limit of the collector has left out, "" if nothing."""

    samples: tuple[Sample, ...] = ()
    events: tuple[Event, ...] = ()
    facts: tuple[Fact, ...] = ()
    limited: str = ""


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


@runtime_checkable
class Supplementary(Protocol):
    """A collector that adds to the readings of the collector ``yields_to`` about the same things."""

    @property
    def yields_to(self) -> str: ...

    def beside(self, own: Reading, other: Reading) -> tuple[Reading, str]:
        """What ``own`` adds to the ``other`` reading, and what is wrong with it, "" if nothing. Called in the loop."""
        ...


class Sections(Protocol):
    """The settings of the agent, by the class of a section."""

    def section(self, kind: type[AnySection]) -> AnySection: ...


@dataclass(frozen=True, slots=True)
class Context:
    """The context from which collectors are made.

    ``node`` is the name of this node, ``state`` a folder for what outlives the agent, None for nowhere.
    ``slurm_reports`` takes a node and seconds and returns what tells the newest report of Slurm, which is asked so
    often. ``made`` are the collectors of this agent.
    """

    settings: Sections
    node: str
    state: Path | None
    slurm_reports: Callable[[str, float], Callable[[], SlurmReport]]
    made: list[Collector] = field(default_factory=list)
    _shared: dict[type, Any] = field(default_factory=dict)

    def collector(self, kind: type[C]) -> C | None:
        """The collector of this class; None where it is disabled or has not been made yet."""
        return next((one for one in self.made if isinstance(one, kind)), None)

    def shared(self, kind: type[T]) -> T:
        """The one ``kind()`` that all collectors of this agent share."""
        found: T = self._shared.setdefault(kind, kind())
        return found


@dataclass(frozen=True, slots=True)
class Plugin(Generic[S]):
    """A collector for registration in ``opsd.collectors``. ``name`` is that of the collector and of its section.

    ``labels`` says for each label of its metrics what the values are and what bounds their number: no label takes
    whatever users make up. A ``witness`` reads the kernel or a driver, for which no user can speak: only on such a word
    does the agent change hardware or drain the node.
    """

    name: str
    settings: type[S]
    make: Callable[[S, Context], Collector]
    labels: Mapping[str, str] = field(default_factory=dict)
    witness: bool = False


class MonotonicCounter:
    """Adds up raw readings per key. A total begins with the first reading of its key.

    A reading below the one before is a wrap if the counter went from the last quarter of its ``bits`` to the first.
    Otherwise the counter has restarted at zero.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        self._total: dict[Hashable, int] = {}

    def add(self, key: Hashable, raw: int, *, bits: int = 64) -> int:
        """The total of ``key`` after the reading ``raw``."""
        last = self._last.get(key, 0)
        self._last[key] = raw
        self._total[key] = total = self._total.get(key, 0) + _growth(last, raw, 1 << bits)
        return total


def _growth(last: int, raw: int, size: int) -> int:
    if raw >= last:
        return raw - last
    wrapped = size * 3 // 4 <= last < size and raw < size // 4
    return raw + size - last if wrapped else raw
