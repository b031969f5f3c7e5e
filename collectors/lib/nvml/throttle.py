"""How long each reason has held a GPU's clocks back, exact where the driver counts it, sampled where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REASONS: Final[Mapping[str, int]] = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Reason to its bit in the clocks-event-reason mask (nvmlClocksEventReason* in nvml.h). Idle is no throttling."""

_MAX_GAP_S = 5.0
_SLACK_S = 1.0
_PATIENCE_S = 10.0


class ThrottleClock:
    """The throttle seconds of one GPU, per reason.

    A driver's cumulative counter is used as long as it behaves like one. The field numbers of these counters differ
    between drivers and some answer with something else, so a counter is given up for good, and the mask sampled
    instead, once it claims more time than the machine is up, grows faster than time, or stands still while its
    reason is seen active. A gap between two samples counts for at most five seconds of throttling.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(REASONS, 0.0)
        self._counted: dict[str, float] = {}
        self._stuck_s = dict.fromkeys(REASONS, 0.0)
        self._distrusted: set[str] = set()
        self._last: float | None = None

    @property
    def sampled(self) -> frozenset[str]:
        """Reasons whose counter was given up."""
        return frozenset(self._distrusted)

    def update(self, now: float, mask: int | None, counters: Mapping[str, int]) -> Mapping[str, float]:
        """Take one sample and return the seconds per reason so far.

        ``now`` is in seconds since boot, ``mask`` the clocks-event reasons or None if the driver does not tell,
        ``counters`` the driver's cumulative nanoseconds of the reasons it has a counter for.
        """
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        for reason, bit in REASONS.items():
            active = mask is not None and bool(mask & bit)
            if reason in counters and reason not in self._distrusted:
                counted = counters[reason] / 1e9
                if self._plausible(reason, counted, now, elapsed, active):
                    self._seconds[reason] = self._counted[reason] = counted
                    continue
                self._distrusted.add(reason)
            if active:
                self._seconds[reason] += min(elapsed, _MAX_GAP_S)
        return dict(self._seconds)

    def _plausible(self, reason: str, counted: float, now: float, elapsed: float, active: bool) -> bool:
        growth = counted - self._counted.get(reason, counted)
        first = reason not in self._counted
        self._stuck_s[reason] = self._stuck_s[reason] + elapsed if active and growth == 0 and not first else 0.0
        return counted <= now + _SLACK_S and growth <= elapsed * 1.1 + _SLACK_S and self._stuck_s[reason] < _PATIENCE_S
