"""A file system of the node is full, or will be soon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from opsd.runbooks.base import SHARED_MOUNT, Cost, Culprit, Finding, Incident, Runbook, Series, Severity, View
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import live_ranks
from opsd.runbooks.lib.signals import said, text

COUNTED = (
    ("host", "space", "opsd_host_filesystem_size_bytes", "opsd_host_filesystem_available_bytes"),
    ("host", "inodes", "opsd_host_filesystem_inodes", "opsd_host_filesystem_inodes_free"),
    ("storage", "space", "opsd_storage_size_bytes", "opsd_storage_available_bytes"),
    ("storage", "inodes", "opsd_storage_inodes", "opsd_storage_inodes_free"),
)
"""Source, what is counted, the series of all of it and of what is left. Of what two sources count the first counts."""

READ_ONLY = "opsd_storage_read_only"
SHARED = "opsd_storage_reachable"
"""Only network file systems have this series."""

LOW, CRITICAL = 0.05, 0.01
"""Share of space or inodes left."""

PLENTY_BYTES = 100 * 2**30
"""With this much space left a large disk is not full, whatever the share."""

SOON_S = 3600.0
TREND_S, LEAST_TREND_S = 600.0, 300.0
LASTING_S = 900.0
"""How long a trend must last, at most half of the time that is left: a checkpoint is written in minutes."""

HALF = 0.5
"""A trend is only looked at on a file system that is half full: a checkpoint being written is steep, too."""

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"))


@dataclass(frozen=True, slots=True)
class _Room:
    """What is left of one resource of a file system. ``full_in_s`` is None if it is not filling up."""

    what: str
    source: str
    left: float
    share: float
    full_in_s: float | None

    @property
    def little(self) -> bool:
        """Whether little is left now."""
        plenty = self.what == "space" and self.left > PLENTY_BYTES
        return self.share < LOW and not plenty

    @property
    def low(self) -> bool:
        return self.little or self.full_in_s is not None

    @property
    def lasting_s(self) -> float:
        """How long this must have been so before it counts."""
        return 0.0 if self.little or self.full_in_s is None else min(LASTING_S, self.full_in_s / 2)

    def __str__(self) -> str:
        left = f"{_bytes(self.left)} ({self.share:.1%})" if self.what == "space" else f"{self.left:.0f} inodes"
        soon = f", full in {self.full_in_s / 60:.0f} minutes at this rate" if self.full_in_s is not None else ""
        return f"{left} left{soon}"


def _bytes(count: float) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), (1, "bytes"))
    return f"{count / size:.1f} {unit}"


def _full_in(series: Series, share: float) -> float | None:
    """Seconds until nothing is left at the rate of the last minutes, None if that is not soon.

    The rate is the median over the sixths of that time, so that one large file being written is no trend.
    """
    points = series.values(TREND_S) if share < HALF else ()
    if not points or points[-1][0] - points[0][0] < LEAST_TREND_S:
        return None
    cuts = [points[index * (len(points) - 1) // 6] for index in range(7)]
    rates = [(a[1] - b[1]) / (b[0] - a[0]) for a, b in pairwise(cuts) if b[0] > a[0]]
    rate = median(rates)
    seconds = points[-1][1] / rate if rate > 0 else None
    return seconds if seconds is not None and seconds < SOON_S else None


def _room(view: View) -> dict[str, list[_Room]]:
    """What is left on each mount that can be written: space, and inodes where they are counted."""
    found: dict[str, dict[str, _Room]] = {}
    read_only = {series.labels["mount"] for series in view.select(READ_ONLY) if series.last}
    for source, what, total, left in COUNTED:
        sizes: Mapping[str, float | None] = {s.labels["mount"]: s.last for s in view.select(total)}
        for series in view.select(left):
            mount, value = series.labels["mount"], series.last
            size = sizes.get(mount)
            if value is None or not size or mount in read_only or what in found.get(mount, ()):
                continue
            share = value / size
            found.setdefault(mount, {})[what] = _Room(what, source, value, share, _full_in(series, share))
    return {mount: list(rooms.values()) for mount, rooms in found.items()}


def _detect(view: View) -> Iterator[Finding]:
    runs = sorted({rank.run for rank in live_ranks(view)})
    for mount, rooms in _room(view).items():
        if not (low := [room for room in rooms if room.low]):
            continue
        what, share = " and ".join(map(str, low)), min(room.share for room in low)
        yield Finding(
            key=f"{view.node}{mount}",
            severity=Severity.CRITICAL if share < CRITICAL else Severity.WARNING,
            summary=f"{mount} on {view.node}: {what}",
            culprit=Culprit("storage", view.node, detail=mount),
            confidence=0.95 if share < LOW else 0.7,
            evidence=said(view, low[0].source, f"{mount}: {what}"),
            cost=Cost(text=f"checkpoints and logs of {', '.join(runs)} may not be written" if runs else ""),
            data={"mount": mount, SHARED_MOUNT: mount if view.select(SHARED, mount=mount) else ""},
            lasting_s=min(room.lasting_s for room in low),
        )


def _healed(incident: Incident, view: View) -> bool | None:
    rooms = _room(view).get(text(incident.data, "mount"))
    return None if rooms is None else not any(room.low for room in rooms)


RUNBOOK = Runbook(
    first=("du -xh --max-depth=2 MOUNT",),
    detect=_detect,
    remedy=notify_node(),
    healed=_healed,
    open_after_s=5.0,
    clear_after_s=30.0,
    verify_s=1800.0,
)
