"""What a preflight check is, and the values it yields.

A check is one file with one ``Check``: what it is called, what it needs, what it measures, and a function that
measures. The function does no judging by numbers: it returns measurements, and ``judge`` compares every one of them
with its limits, with its peers on the node, with the fleet and with the node's own past. What is no number (a setting
that is wrong, an Xid in the kernel log) comes back as a finding.

The function runs in a process of its own, so it may block, crash or be killed without harm to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

PROFILES: Final = ("quick", "standard", "burn-in", "spare")
Need = Literal["gpu", "root", "network", "exclusive", "torch", "run"]
"""``exclusive``: measures a speed, so nothing else of the preflight may run beside it. ``torch``: runs in the Python of
the training (preflight.python). ``run``: looks at the run that is about to start."""


class Verdict(StrEnum):
    """How a check ended, from best to worst. ``COULD_NOT_RUN`` counts as a failure unless the check is optional."""

    NOT_APPLICABLE = "not_applicable"
    PASS = "pass"  # noqa: S105
    WARN = "warn"
    COULD_NOT_RUN = "could_not_run"
    FAIL = "fail"

    @property
    def rank(self) -> int:
        """Larger is worse."""
        return list(Verdict).index(self)


class NotApplicableError(Exception):
    """There is nothing here that the check could look at; the message says what is absent."""


class CouldNotRunError(Exception):
    """The check should have run and could not; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Absolute bounds of a measure. A value beyond a bound, in the direction that is worse, gets that verdict."""

    warn: float | None = None
    fail: float | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """How far a subject may lag its peers: ``warn`` as a share below their median, ``fail`` below the best of them."""

    warn: float
    fail: float


@dataclass(frozen=True, slots=True)
class Measure:
    """Something a check measures, once for every subject (a core, a GPU, a port) or once for the node.

    ``unit`` is a base unit ("bytes_per_second", "seconds", "celsius", "ratio") or "" for plain counts. ``better``
    says which direction is good; without it the value is only recorded. ``growth`` bounds how much a counter may
    have grown since the last run, per day. ``noise`` is the relative scatter from run to run that means nothing. A
    ``required`` measure without a value makes the check one that could not run.
    """

    name: str
    unit: str
    help: str
    better: Literal["higher", "lower", ""] = ""
    limits: Limits = Limits()
    peers: Peers | None = None
    growth: Limits | None = None
    noise: float = 0.05
    required: bool = True


@dataclass(frozen=True, slots=True)
class Measurement:
    """One value of the measure called ``measure``; ``subject`` is what was measured, "" for the node as a whole."""

    measure: str
    value: float
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about something that is not as it should be, and what to do about it."""

    verdict: Verdict
    summary: str
    advice: str = ""
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check returns. ``facts`` are texts worth keeping, such as versions."""

    measurements: tuple[Measurement, ...] = ()
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the coming run asks of one node, in base units; None where that is not known."""

    tokens_per_s: float | None = None
    bytes_per_token: float = 4.0
    checkpoint_bytes: float | None = None
    checkpoint_interval_s: float | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """All that a check may know. ``seconds`` is how long it shall measure; the roots let tests use fixture trees."""

    node: str
    profile: str
    seconds: float
    device: str = "cuda"
    gpus: int | None = None
    """How many GPUs the node must have; None if nobody said."""
    demand: Demand = Demand()
    local_dir: str = ""
    shared_dir: str = ""
    infiniband_gbps: float | None = None
    train: str = ""
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    sbatch: str = ""
    """The run that is about to start: its configuration and overrides, its nodes, and its batch script."""
    fire_alerts: bool = False
    alertmanager: str = ""
    prometheus: str = ""
    alert_inbox: str = ""
    """Whether every alert is to be fired once, the addresses to ask, and where Alertmanager posts what it tells."""
    nvml_library: str | None = None
    proc: str = "/proc"
    sys: str = "/sys"
    dev: str = "/dev"


Progress = Callable[[float, str], None]
"""Called with the share that is done, 0 to 1, and the subject it is about."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``run`` must be a function at the top level of its module.

    Without ``run`` it is no check of the engine's: whoever measures, such as the head of a network check, hands an
    outcome to ``engine.judged``.

    ``seconds`` maps each profile that the check is part of to how long it measures there. ``advice`` is what to do
    when it fails and ``runbook`` the page with more (`opsd runbook show NAME`). With ``stable``, facts that differ from
    the node's last run are a warning.
    """

    name: str
    title: str
    run: Callable[[Context, Progress], Outcome] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    measures: tuple[Measure, ...] = ()
    needs: frozenset[Need] = frozenset()
    advice: str = ""
    runbook: str = ""
    stable: bool = False
