"""The contract of a runbook: pure functions that detect, diagnose and remedy. Its guide is ``docs/runbooks/KIND.md``.

A runbook is one file that ends in ``RUNBOOK = Runbook(...)``. Its functions see the last minutes of samples
(``View``) and the latest facts, and nothing else: no clock, no files, no processes. They return the actions
that they want as ``Action`` values, which the agent's policy admits or refuses and one module executes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from opsd.collectors.base import Event, GpuFact, RankFact, RunFact


class Severity(StrEnum):
    """``critical`` costs training time now, ``warning`` will if ignored, ``info`` is for the record."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class State(StrEnum):
    """The state of an incident; see ``opsd.agent.lifecycle`` for the transitions."""

    OPEN = "open"
    ACTING = "acting"
    VERIFYING = "verifying"
    RESOLVED = "resolved"
    UNPROVEN = "unproven"
    ESCALATED = "escalated"


SHARED_MOUNT = "shared_mount"
"""Field of an incident's data: where the network file system is mounted that it is about, if it is about one."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The cause. ``component`` is one of: rank, gpu, node, data, storage, network, user code, unknown."""

    component: str
    node: str | None = None
    gpu: int | None = None
    rank: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = [
            *([f"rank {self.rank}"] if self.rank is not None else []),
            *([f"GPU {self.gpu}"] if self.gpu is not None else []),
            *([self.node] if self.node else []),
        ]
        name = self.component if not where or self.component not in ("rank", "gpu", "node") else ""
        return " ".join(filter(None, [name, " on ".join(where), f"({self.detail})" if self.detail else ""]))


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact that supports the finding: a sentence with its number, where it came from, and when (wall seconds).

    ``last`` is when the same was read again, None if it was not.
    """

    text: str
    source: str
    at: float
    last: float | None = None

    @property
    def newest(self) -> float:
        """When it was last read."""
        return self.at if self.last is None else self.last


@dataclass(frozen=True, slots=True)
class Cost:
    """What the incident costs the job: share of its throughput lost while it lasts, and GPU-seconds lost so far.

    ``gpus`` is how many GPUs lose that share; if it is given the agent adds the loss up beyond what a finding can see.
    ``whose`` throughput it is, and its tokens per second ``before`` the fault and ``now`` where they are known: see
    ``lib.losses``, which makes ``text`` of them.
    """

    throughput_ratio: float = 0.0
    gpu_seconds: float = 0.0
    text: str = ""
    gpus: int = 0
    whose: str = ""
    before: float | None = None
    now: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a detector saw at one tick.

    ``key`` is what makes it the same incident next tick (GPU UUID, run and rank). ``run`` is the run that it concerns;
    the agent fills it in where a runbook leaves it empty. An incident opens once it has been
    found for ``lasting_s``, if that is longer than the runbook's ``open_after_s``. ``struck_at`` is the epoch second of
    the newest event that the finding rests on, None if it rests on a condition that lasts. ``gravity`` orders what is
    to be done about it, from 1 on, for kinds in which that can rise; 0 for all others. ``kind`` is that of the runbook;
    the agent fills it in.
    """

    key: str
    severity: Severity
    summary: str
    culprit: Culprit
    confidence: float
    evidence: tuple[Evidence, ...]
    cost: Cost = Cost()
    job: str = ""
    data: Mapping[str, object] = field(default_factory=dict)
    run: str = ""
    lasting_s: float = 0.0
    struck_at: float | None = None
    gravity: int = 0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """An action as data. ``verb`` names a method of the agent's action executor, ``args`` are JSON-able."""

    verb: str
    target: str
    args: Mapping[str, object] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """An action that opsd has carried out, with its arguments, at the epoch second ``at``."""

    verb: str
    target: str
    args: Mapping[str, object]
    at: float


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Who has an incident since ``at``, until ``until`` (None: its end); it pages nobody meanwhile. Epoch seconds.

    ``over_at`` is when the time was over or the incident became worse, None while it is in force.
    """

    by: str
    at: float
    until: float | None
    over_at: float | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """Who closed an incident by hand, when and why. Epoch seconds.

    ``gone_at`` is when its evidence ended or new evidence came, None while the old evidence goes on.
    """

    by: str
    at: float
    reason: str
    gone_at: float | None = None


@dataclass(frozen=True, slots=True)
class Incident:
    """A finding with a history. Times are wall-clock seconds; ``actions`` are those executed or recommended so far.

    ``cause`` is the id of the incident that this one is a symptom of. ``relapses`` counts how often it ended and
    came back, the last time at ``reopened_at``. ``job`` and ``run`` are those that it concerns, "" for none.
    ``proposed`` are the actions that its runbook asks for, whatever the policy makes of them: verb, target and args.
    ``struck_at`` is that of its newest finding, see ``Finding``; ``gravity`` is the highest so far. ``worse`` is true
    if it has risen while actions are under way. ``ack`` and ``closed`` are the word of a person. ``advice`` is what the
    runbook asks people to do. ``untold`` is what they have not been told yet, see ``agent.incidents.news``.
    """

    id: str
    kind: str
    key: str
    severity: Severity
    state: State
    summary: str
    culprit: Culprit
    confidence: float
    evidence: tuple[Evidence, ...]
    cost: Cost
    job: str
    opened_at: float
    last_seen_at: float
    healthy_since: float | None = None
    acted_at: float | None = None
    resolved_at: float | None = None
    attempts: int = 0
    verdict: str = ""
    actions: tuple[Mapping[str, object], ...] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    cause: str | None = None
    relapses: int = 0
    reopened_at: float | None = None
    run: str = ""
    proposed: tuple[Mapping[str, object], ...] = ()
    struck_at: float | None = None
    gravity: int = 0
    worse: bool = False
    ack: Acknowledgement | None = None
    closed: Closing | None = None
    advice: str = ""
    untold: str = ""


class Series(Protocol):
    """The recent past of one series, oldest first. Seconds are those of the agent's monotonic clock."""

    @property
    def labels(self) -> Mapping[str, str]: ...

    @property
    def source(self) -> str:
        """The collector that delivers it."""
        ...

    @property
    def last(self) -> float | None:
        """The newest value, or None if the newest tick has none."""
        ...

    def values(self, seconds: float) -> Sequence[tuple[float, float]]:
        """(time, value) pairs of the last ``seconds``, without gaps filled in."""
        ...

    def unchanged(self, seconds: float) -> bool:
        """True if all values of the last ``seconds`` are known to be equal, without a look at each of them."""
        ...

    def increase(self, seconds: float) -> float | None:
        """Growth of a counter over the last ``seconds`` with resets allowed for; None with fewer than two values."""
        ...


class View(Protocol):
    """All that a detector may look at. ``now`` is monotonic and matches rank pages; ``wall`` is for timestamps."""

    @property
    def node(self) -> str: ...

    @property
    def now(self) -> float: ...

    @property
    def wall(self) -> float: ...

    @property
    def gpus(self) -> Sequence[GpuFact]: ...

    @property
    def ranks(self) -> Sequence[RankFact]: ...

    @property
    def runs(self) -> Sequence[RunFact]: ...

    def ranks_then(self, second: float) -> Sequence[RankFact]:
        """The ranks that worked here at the wall second ``second``, also where they are gone or cannot be read now."""
        ...

    def select(self, metric: str, **labels: str) -> Sequence[Series]:
        """Every series of ``metric`` whose labels include ``labels``."""
        ...

    def events(self, kind: str, seconds: float, run: str | None = None) -> Sequence[Event]:
        """Events of one kind from the last ``seconds``, oldest first; with ``run`` those about it."""
        ...

    def known(self, collector: str) -> bool:
        """True if the collector delivered in the last tick; a healthy verdict needs this."""
        ...

    def done(self, verb: str, target: str) -> Done | None:
        """The newest action of this kind that opsd has carried out, also before the agent's last restart."""
        ...


Detect = Callable[[View], Iterable[Finding]]
Diagnose = Callable[[Finding, View], Finding]
Remedy = Callable[[Incident, View], Sequence[Action]]
Healed = Callable[[Incident, View], bool | None]
Confirmed = Callable[[Incident, View], bool]


def same_finding(finding: Finding, view: View) -> Finding:
    """The diagnosis of runbooks whose detector already knows the culprit."""
    return finding


Common = Literal["gpu", "rank", "run", "node"]
DRAIN = "opsd drain NODE --incident ID --reason WHY"


@dataclass(frozen=True, slots=True)
class Cause:
    """Incidents of another ``kind`` can cause those of a runbook if the two have ``by`` in common.

    A symptom may open while the cause is current and up to ``lag_s`` after its end. With ``within_s`` the cause is a
    momentary event: the symptom opens at most that many seconds from one of its occurrences. ``fits`` checks further
    conditions on the two incidents, symptom and cause.
    """

    kind: str
    by: Common
    within_s: float | None = None
    lag_s: float = 10.0
    fits: Callable[[Incident, Incident], bool] = lambda _symptom, _cause: True


@dataclass(frozen=True, slots=True)
class Runbook:
    """One kind of incident. ``kind`` is the name of its file, which the registry fills in.

    ``healed`` returns whether the fault is over: True, False, or None if that is unknown now (which
    is not healthy). An incident opens once it was found for ``open_after_s`` and resolves once healed for
    ``clear_after_s``. ``verify_s`` is how long a remedy may take to show its effect before the next attempt or
    escalation; after ``max_attempts`` the incident escalates. ``needs`` are the collectors without which the
    runbook is blind. A finding within ``hold_s`` of the end reopens the incident; None takes the policy's value, 0 is
    for independent events. ``causes`` are other kinds of incident that can cause this one, the likeliest first. An
    expensive detector runs only every ``look_every_s``; its findings stay valid meanwhile. ``prediction`` means
    that the fault is still to come; `opsd bench detect` also scores these on their own. ``confirmed`` is for findings
    that only ranks can make: whether what kernel and drivers say, in the view that it is given, bears the incident out,
    so that it may act on hardware. Without it they have to give reason for the same finding. ``told_by_runs``: findings
    that name a run rest on what that run says, as they do where ``needs`` has the ranks. ``first`` are commands for the
    person on call, the best one first. Shown is the first of which all placeholders (NODE, GPU, ID, WATTS and others)
    are known. ``proved_by`` is what must go on so that the end of the fault can be seen: its "run", or the "load" of
    its GPU. Once that has ended, the incident ends as unproven.
    """

    detect: Detect
    healed: Healed
    confirmed: Confirmed | None = None
    diagnose: Diagnose = same_finding
    remedy: Remedy = lambda _incident, _view: ()
    needs: tuple[str, ...] = ()
    open_after_s: float = 0.0
    clear_after_s: float = 5.0
    verify_s: float = 60.0
    max_attempts: int = 1
    hold_s: float | None = None
    look_every_s: float = 0.0
    causes: tuple[Cause, ...] = ()
    prediction: bool = False
    told_by_runs: bool = False
    proved_by: Literal["", "run", "load"] = ""
    first: tuple[str, ...] = (DRAIN,)
    kind: str = ""
