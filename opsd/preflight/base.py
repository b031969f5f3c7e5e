"""The contract of a preflight check, and the values it returns.

A check is one file with one ``Check``: its name, its needs, its measures, and a function that measures. The function
does not judge numbers: it returns measurements, and ``judge`` compares each with its limits, with its peers on the
node, with the fleet and with the node's history. What is not a number (a wrong setting, an Xid in the kernel log) is
returned as a finding.

The function runs in its own process, so it may block, crash or be killed without affecting other checks.

"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final, Literal

from opsd.settings.sections import PreflightSettings

PROFILES: Final = ("quick", "standard", "burn-in", "spare")
Need = Literal["gpu", "root", "network", "exclusive", "torch", "run", "script"]
"""``exclusive``: measures a speed, so no other check may run at the same time. ``torch``: runs in the training's Python
(preflight.python). ``run``: examines the run that is about to start. ``script``: the same of a post-training script."""


class Verdict(StrEnum):
    """The verdict on a check, from best to worst. ``COULD_NOT_RUN`` is a failure unless the check is optional."""

    NOT_APPLICABLE = "not_applicable"
    PASS = "pass"  # noqa: S105
    WARN = "warn"
    COULD_NOT_RUN = "could_not_run"
    FAIL = "fail"

    @property
    def rank(self) -> int:
        """Larger is worse."""
        return list(Verdict).index(self)


class NotMeasuredError(Exception):
    """A check ended with ``verdict`` and without an outcome."""

    verdict: ClassVar[Verdict]


class NotApplicableError(NotMeasuredError):
    """The node has nothing that the check could examine; the message says what is absent."""

    verdict = Verdict.NOT_APPLICABLE


class CouldNotRunError(NotMeasuredError):
    """The check applies but could not run; the message says why and what to do."""

    verdict = Verdict.COULD_NOT_RUN


class UnfitError(NotMeasuredError):
    """The check failed before it could measure, because of the node; the message says why and what to do."""

    verdict = Verdict.FAIL


class Interrupted(Exception):
    """The user interrupted the check; raised by what it tells of its progress."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Absolute bounds of a measure. A value that is worse than a bound gets that verdict."""

    warn: float | None = None
    fail: float | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """How far a subject may lag its peers: ``warn`` as a share below their median, ``fail`` below the best of them."""

    warn: float
    fail: float


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity that a check measures, once for every subject (a core, a GPU, a port) or once for the node.

    ``unit`` is a base unit ("bytes_per_second", "seconds", "celsius", "ratio") or "" for counts. ``better`` is the good
    direction; without it the value is only recorded. ``growth`` bounds the growth of a counter since the last run, per
    day. ``noise`` is the relative scatter between runs that is normal. If a ``required`` measure has no value, the
    check could not run.
    """

    name: str
    unit: str
    help: str
    better: Literal["higher", "lower", ""] = ""
    limits: Bounds = Bounds()
    peers: Peers | None = None
    growth: Bounds | None = None
    noise: float = 0.05
    required: bool = True


@dataclass(frozen=True, slots=True)
class Measurement:
    """One value of ``measure``; ``subject`` is what was measured, "" for the whole node."""

    measure: str
    value: float
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in one sentence, and what to do about it."""

    verdict: Verdict
    summary: str
    advice: str = ""
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a check. ``facts`` are texts to keep, such as versions."""

    measurements: tuple[Measurement, ...] = ()
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the coming run requires of one node, in base units; None if unknown."""

    tokens_per_s: float | None = None
    bytes_per_token: float = 4.0
    checkpoint_bytes: float | None = None
    checkpoint_interval_s: float | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """Everything a check may know. ``seconds`` is its measuring time; the roots let tests use fixture trees."""

    node: str
    profile: str
    seconds: float
    device: str = "cuda"
    settings: PreflightSettings = field(default_factory=PreflightSettings)
    services: tuple[str, ...] = ()
    """Those that may hold GPUs, whatever user runs them (``repair.services``)."""
    demand: Demand = Demand()
    ports_expected: tuple[str, ...] = ()
    ports_left_out: tuple[str, ...] = ()
    """Patterns of ports, as in the section ``[infiniband]``."""
    ignored_xids: tuple[int, ...] = ()
    script: str = ""
    """The words of a post-training script that is about to start, as after ``opsd launch``."""
    train: str = ""
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    sbatch: str = ""
    """The run that is about to start: its configuration and overrides, its nodes, and its batch script."""
    fire_alerts: bool = False
    """Whether to fire every alert once."""
    nvml_library: str | None = None
    gpus_renewed_at: float = 0.0
    """The uptime at which a repair has reset the GPUs in this boot: what the kernel said of them before is over."""
    proc: str = "/proc"
    sys: str = "/sys"
    dev: str = "/dev"


Progress = Callable[[float, str], None]
"""Called with the completed share, 0 to 1, and the subject that it refers to."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``run`` must be a top-level function of its module.

    A check without ``run`` is not run by the engine: its caller, such as the coordinator of a network check, passes an
    outcome to ``judge``.

    ``seconds`` maps each profile that includes the check to its measuring time. ``advice`` is what to do when it fails,
    ``runbook`` the page with details (`opsd runbook show NAME`). With ``stable``, facts that differ from the node's
    last run are a warning.
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


_SCALED: Final = {
    "bytes_per_second": "B/s",
    "bytes": "B",
    "flops": "FLOP/s",
    "hertz": "Hz",
    "bits_per_second": "b/s",
    "tokens_per_second": "tokens/s",
    "operations_per_second": "IO/s",
}
_PLAIN: Final = {"celsius": "°C", "watts": "W", "ratio": "", "": ""}
_LARGE: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SHORT: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def quantity(value: float, unit: str) -> str:
    """``value`` in the base unit ``unit`` with three significant digits and a decimal prefix: "55.2 GB/s"."""
    if unit == "seconds":
        return duration(value)
    if unit == "ratio":
        return f"{value:.1%}"
    if unit in _SCALED:
        scale, prefix = next(((s, p) for s, p in _LARGE if abs(value) >= s), (1.0, ""))
        return f"{_digits(value / scale)} {prefix}{_SCALED[unit]}"
    return f"{_digits(value)} {_PLAIN.get(unit, unit)}".strip()


def duration(seconds: float) -> str:
    """A time span: "235 us", "1.5 s", "3 h 20 min", "16.1 d"."""
    if abs(seconds) < 60:
        if seconds == 0:
            return "0 s"
        scale, name = next(((s, n) for s, n in _SHORT if abs(seconds) >= s), _SHORT[-1])
        return f"{_digits(seconds / scale)} {name}"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    if seconds < 2 * 86_400:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    return f"{seconds / 86_400:.1f} d"


def _digits(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
