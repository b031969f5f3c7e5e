"""Times without actions (maintenance) or without notifications (mute): once, or every week. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES_A_DAY = 24 * 60
_WEEKLY = re.compile(r"(\w{3}) (\d\d):(\d\d) - (\w{3}) (\d\d):(\d\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Silence:
    """A time span for incidents of ``kinds`` (none: all of them).

    Either once, from the epoch second ``start`` to ``end``, or ``weekly``: from one minute of the week to another,
    counted from Monday 00:00 UTC, over the end of the week if the second lies before the first.
    """

    kinds: tuple[str, ...] = ()
    reason: str = ""
    start: float = 0.0
    end: float = 0.0
    weekly: tuple[int, int] | None = None

    def covers(self, kind: str, wall: float) -> bool:
        """True if the span applies to ``kind`` at the epoch second ``wall``."""
        if self.kinds and kind not in self.kinds:
            return False
        if self.weekly is None:
            return self.start <= wall < self.end
        now = datetime.fromtimestamp(wall, UTC)
        minute = now.weekday() * MINUTES_A_DAY + now.hour * 60 + now.minute
        first, last = self.weekly
        return first <= minute < last if first < last else minute >= first or minute < last


def active_silence(silences: Iterable[Silence], kind: str, wall: float) -> Silence | None:
    """The first of ``silences`` that applies at the epoch second ``wall``, or None."""
    return next((silence for silence in silences if silence.covers(kind, wall)), None)


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
