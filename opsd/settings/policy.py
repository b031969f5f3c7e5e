"""The ``[policy]`` section of the configuration, and times without actions (maintenance) or notifications (mute)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AwareDatetime, Field, model_validator

from opsd.settings.sections import Section

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES_A_DAY = 24 * 60
_WEEKLY = re.compile(r"(\w{3}) (\d\d):(\d\d) - (\w{3}) (\d\d):(\d\d)", re.IGNORECASE)


def parse_weekly(text: str) -> tuple[int, int]:
    """The minutes of the week in "sat 22:00 - sun 06:00". Raises ValueError."""
    match = _WEEKLY.fullmatch(text.strip())
    if match is None:
        raise ValueError('should be like "sat 22:00 - sun 06:00", in UTC')
    return _minute(*match.groups()[:3]), _minute(*match.groups()[3:])


def _minute(day: str, hour: str, minute: str) -> int:
    if day.lower() not in DAYS:
        raise ValueError(f"has the day {day}; days are {', '.join(DAYS)}")
    if int(hour) > 24 or int(minute) > 59 or (int(hour) == 24 and int(minute)):
        raise ValueError(f"has the time {hour}:{minute}, which does not exist")
    return DAYS.index(day.lower()) * MINUTES_A_DAY + int(hour) * 60 + int(minute)


Mode = Literal["observe", "recommend", "act"]


def _is_weekly(text: str) -> str:
    parse_weekly(text)
    return text


class Silence(Section):
    """One span for incidents of ``kinds`` (none: all of them): ``start`` and ``end``, or ``weekly``, in UTC."""

    start: AwareDatetime | None = None
    end: AwareDatetime | None = None
    weekly: Annotated[str, AfterValidator(_is_weekly)] | None = None
    kinds: tuple[str, ...] = Field(default=(), strict=False)
    reason: str = ""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        once = self.start is not None and self.end is not None
        if once == (self.weekly is not None) or (self.weekly and (self.start or self.end)):
            raise ValueError("should have either start and end, or weekly")
        if self.start is not None and self.end is not None and self.end <= self.start:
            raise ValueError("should end after its start")
        return self

    def covers(self, kind: str, wall: float) -> bool:
        """True if the span applies to ``kind`` at the epoch second ``wall``."""
        if self.kinds and kind not in self.kinds:
            return False
        if self.weekly is None:
            assert self.start is not None and self.end is not None
            return self.start.timestamp() <= wall < self.end.timestamp()
        now = datetime.fromtimestamp(wall, UTC)
        minute = now.weekday() * MINUTES_A_DAY + now.hour * 60 + now.minute
        first, last = parse_weekly(self.weekly)
        return first <= minute < last if first < last else minute >= first or minute < last


def active_silence(silences: Iterable[Silence], kind: str, wall: float) -> Silence | None:
    """The first of ``silences`` that applies at the epoch second ``wall``, or None."""
    return next((silence for silence in silences if silence.covers(kind, wall)), None)


class Override(Section):
    """What differs for one runbook."""

    mode: Mode | None = None
    cooldown_s: float | None = Field(default=None, ge=0)


class PolicySettings(Section):
    """Actions that opsd may take without a person."""

    mode: Mode = Field(
        default="observe",
        description="observe: only tell; recommend: say what it would do; act: do it.",
    )
    runbooks: Mapping[str, Mode | Override] = Field(
        default_factory=dict,
        examples=[{"gpu_throttle": "recommend", "rank_hang": {"mode": "act", "cooldown_s": 300.0}}],
        description="Another mode or cool-down for single runbooks; names are those of `opsd runbook list`.",
    )
    cooldown_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds before the same kind of incident may be acted on again at the same target.",
    )
    max_actions_per_hour: int = Field(
        default=12,
        ge=0,
        description="Beyond this many actions in an hour about one kind of incident opsd only notifies; counted for "
        "each user whose processes it acts on, and for the hardware.",
    )
    reopen_within_s: float = Field(
        default=300.0,
        ge=0,
        description="An incident that is over and comes back within this many seconds goes on as the same one.",
    )
    max_relapses: int = Field(default=3, ge=1, description="An incident that comes back this often is escalated.")
    maintenance: tuple[Silence, ...] = Field(
        default=(),
        strict=False,
        examples=[({"weekly": "tue 08:00 - tue 10:00", "reason": "service"},)],
        description="Times at which opsd does nothing and tells nobody: start and end, or weekly (UTC); for kinds. "
        "An incident still open afterwards is told then.",
    )
    mute: tuple[Silence, ...] = Field(
        default=(),
        strict=False,
        examples=[({"weekly": "sat 00:00 - mon 06:00", "kinds": ("fan_failing",), "reason": "weekend"},)],
        description="Times at which opsd tells nobody, and does what it may. An incident still open afterwards is told "
        "then.",
    )
    drain: bool = Field(
        default=False, description="Let opsd drain its own node in Slurm where a runbook asks for it (mode act)."
    )
    repair: Mode = Field(
        default="observe",
        description="What opsd may do on a node that it has drained: observe: nothing; recommend: say that it could be "
        "repaired; act: repair, test and return it, as [repair] says (needs policy.drain and opsd-repair.path).",
    )
    max_drained_share: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Share of the cluster's nodes that opsd may hold drained or down at once; one node always.",
    )
    min_drained: int = Field(
        default=3,
        ge=1,
        description="So many it may hold in a small cluster where that share is less, but only one in four nodes.",
    )
    drain_cooldown_s: float = Field(
        default=3600.0, ge=0, description="A node that was given back is not drained again within this many seconds."
    )
    max_returns: int = Field(
        default=2,
        ge=1,
        description="A node that failed again this often soon after its return is given back by people only.",
    )
    relapse_days: float = Field(
        default=14.0, gt=0, description="How many days after a return a new drain is a relapse."
    )
    return_profile: Literal["quick", "standard", "burn-in", "spare"] = Field(
        default="standard", description="Preflight that a drained node must have passed before it is given back."
    )

    def mode_of(self, kind: str) -> Mode:
        """The mode that applies to incidents of ``kind``."""
        override = self.runbooks.get(kind)
        return (override.mode if isinstance(override, Override) else override) or self.mode

    def cooldown_of(self, kind: str) -> float:
        """The cool-down in seconds that applies to incidents of ``kind``."""
        override = self.runbooks.get(kind)
        own = override.cooldown_s if isinstance(override, Override) else None
        return self.cooldown_s if own is None else own

    def muted(self, kind: str, wall: float) -> str:
        """Why notifications about ``kind`` are silenced at the epoch second ``wall``, "" if they are not."""
        for name, spans in (("maintenance", self.maintenance), ("muted", self.mute)):
            if span := active_silence(spans, kind, wall):
                return f"{name}: {span.reason}" if span.reason else name
        return ""

    def named_kinds(self) -> Sequence[tuple[str, str]]:
        """Each place that names a kind of incident: (key of the file, kind)."""
        spans = (("maintenance", self.maintenance), ("mute", self.mute))
        return [
            *(("policy.runbooks", kind) for kind in self.runbooks),
            *((f"policy.{name}.kinds", kind) for name, times in spans for time in times for kind in time.kinds),
        ]
