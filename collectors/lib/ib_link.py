"""What happens to a link from one look to the next: lost, back, flapping, at another rate. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

ACTIVE: Final = 4
ACTIVE_DEFER: Final = 5
"""The logical states in which a port has a link (IB specification: 1 down, 2 init, 3 armed, 4 active, 5 active while a
fault of its signal is young)."""


class PortReading(NamedTuple):
    """One look at a port; None where a file was missing or made no sense. ``rate`` is in bytes per second.

    ``state`` is ``ACTIVE`` for every port with a link. Only such a port has a rate: others show that of one lane.
    """

    state: int | None
    physical_state: int | None
    rate: float | None
    counters: Mapping[str, int]


class Happening(NamedTuple):
    """Kind of an event, what the port did in words, and the event's data."""

    kind: str
    what: str
    data: Mapping[str, object]


class LinkHistory:
    """What is remembered of one link. ``flaps`` is how often it was lost since the first look.

    The hardware counts lost links too and knows of those shorter than the time between two looks. A loss that was seen
    gets into that count sooner or later, or never once the counter is at its end; so the higher of both numbers holds.
    """

    def __init__(self) -> None:
        self.flaps = 0
        self._state: int | None = None
        self._rate: float | None = None
        self._seen = 0
        self._first_downed: int | None = None
        self._down_since: float | None = None
        self._present = True

    def update(self, reading: PortReading, downed: int | None, now: float) -> list[Happening]:
        """Take in a look at the monotonic second ``now``. ``downed`` is the hardware's growing count of lost links."""
        happened = [] if self._present else [Happening("ib_port_back", "is there again", {})]
        self._present = True
        if reading.state is None:
            return happened
        lost = self._state == ACTIVE and reading.state != ACTIVE
        happened += self._count(lost, downed)
        if lost:
            self._down_since = now
            data = {"state": reading.state, "physical_state": reading.physical_state}
            happened.append(Happening("ib_link_down", "lost its link", data))
        self._state = reading.state
        if reading.state == ACTIVE:
            happened += self._active(reading.rate, now)
        return happened

    def gone(self, now: float) -> list[Happening]:
        """Take in that the port is not there."""
        if not self._present:
            return []
        self._present = False
        if self._state == ACTIVE:
            self._count(True, None)
            self._down_since = now
        self._state = None
        return [Happening("ib_port_gone", "is no longer there", {})]

    def _count(self, lost: bool, downed: int | None) -> list[Happening]:
        self._seen += lost
        if self._first_downed is None:
            self._first_downed = downed
        counted = 0 if downed is None or self._first_downed is None else downed - self._first_downed
        flaps = max(self.flaps, self._seen, counted)
        unseen, self.flaps = flaps - self.flaps - lost, flaps
        if unseen <= 0:
            return []
        return [Happening("ib_link_flap", f"lost its link {unseen} times between two looks", {"count": unseen})]

    def _active(self, rate: float | None, now: float) -> list[Happening]:
        happened = []
        if self._down_since is not None:
            down_s, self._down_since = now - self._down_since, None
            happened.append(Happening("ib_link_up", f"has its link back after {down_s:.0f} s", {"down_s": down_s}))
        if rate is not None and rate != self._rate:
            if self._rate is not None:
                what = f"changed its rate from {_gbit(self._rate)} to {_gbit(rate)} Gbit/s"
                data = {"before_bytes_per_second": self._rate, "after_bytes_per_second": rate}
                happened.append(Happening("ib_rate_changed", what, data))
            self._rate = rate
        return happened


def _gbit(rate: float) -> str:
    return f"{rate * 8 / 1e9:g}"
