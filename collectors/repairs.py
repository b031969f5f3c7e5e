"""How far the repair of this node is, and how earlier ones ended, from the files of `opsd repair`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opsd.collectors.base import Metric, NoData, Plugin, Reading, Sample
from opsd.collectors.lib.boot import boot_id, uptime_s
from opsd.settings.section import CollectorSettings

FOLDER: Final = "repair"
"""In the state folder of the agent; written by ``opsd.repair.case_file``."""
ORDER: Final = "order"
"""An empty file: the agent has drained its node and policy.repair is act. ``opsd-repair.path`` waits for it."""
CASE: Final = "case.json"
"""The repair under way."""
PAST: Final = "repair-*.json"
"""Those that have ended; their names sort by time."""

REMEDIES: Final = ("end_processes", "reset_gpus", "reload_driver", "reboot")
RENEWING: Final = ("reset_gpus", "reload_driver")
"""After these the GPUs begin anew, without a boot."""
OUTCOMES: Final = ("returned", "rma", "left")
STATES: Final = ("ordered", "waiting", "paused", *REMEDIES, "retest", "return", *OUTCOMES, "unknown")
"""Of the newest repair: ordered but not begun, what is being done, how it ended; ``unknown`` if it cannot be read.

``paused`` by a time or a reservation for maintenance.
"""

SETTLED_S: Final = 1.0
"""A folder that changed so lately may change again with the same time stamp."""

STATE = Metric("opsd_repair_state", "1 for the state of this node's newest repair.", labels=("state",))
ATTEMPTS = Metric("opsd_repair_attempts", "Remedies that this node's newest repair has tried.")
AGE = Metric(
    "opsd_repair_age_seconds",
    "Time since the first remedy of the repair under way, its order, or its last pause.",
    unit="seconds",
)
ENDED = Metric("opsd_repair_ended", "Repairs of this node that are on record, by how they ended.", labels=("outcome",))

METRICS: Final = (STATE, ATTEMPTS, AGE, ENDED)
LABELS: Final = {"state": "states of a repair, 13 known", "outcome": "returned, rma or left"}


class RepairsSettings(CollectorSettings):
    """What is known of repairs of this node; whether it is repaired says policy.repair."""


@dataclass(frozen=True, slots=True)
class Known:
    """The newest repair, and how many ended how. ``since`` is None once it has ended, and while it is paused.

    ``seen`` are the beginnings of its attempts: the boot of the node, the uptime, and the epoch second by its clock.
    """

    state: str
    attempts: int
    since: float | None
    ended: Mapping[str, int]
    seen: tuple[tuple[str, float, float], ...] = ()

    def age_s(self, now: float, boot: str, uptime_s: float) -> float | None:
        """Seconds since ``since``, by the uptime as far as that goes back: clocks are set."""
        if self.since is None:
            return None
        seen = (one for one in self.seen if one[0] == boot and one[2] >= (self.since or 0.0))
        _, then_s, at = next(seen, (boot, uptime_s, now))
        return max(0.0, at - self.since) + max(0.0, uptime_s - then_s)


class RepairsCollector:
    """Repairs below ``folder``, which is read when it has changed: most nodes have none."""

    name = "repairs"
    metrics = METRICS
    interval_s = 10.0

    def __init__(
        self,
        folder: Path | None,
        *,
        wall: Callable[[], float] = time.time,
        uptime: Callable[[], float] = uptime_s,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        self._folder, self._wall, self._uptime, self._boot = folder, wall, uptime, boot
        self._changed = 0
        self._known: Known | None = None

    def collect(self) -> Reading | NoData:
        """Look whether the folder has changed; every change of a repair is the renaming of a file."""
        try:
            changed = self._folder.stat().st_mtime_ns if self._folder else 0
        except FileNotFoundError:
            changed = 0
        if self._folder and changed != self._changed:
            self._known = read(self._folder) if changed else None
            self._changed = changed if self._wall() - changed / 1e9 > SETTLED_S else 0
        if self._known is None:
            return NoData("this node was never repaired by opsd")
        age_s = self._known.age_s(self._wall(), self._boot(), self._uptime())
        return Reading(samples(self._known, age_s))


def gpus_renewed_at(folder: Path, boot: Callable[[], str] = boot_id) -> float:
    """The uptime at which a repair has last reset the GPUs or loaded their driver in this boot, 0 if none has.

    Raises nothing.
    """
    found = [0.0]
    for path in (*folder.glob(PAST), folder / CASE):
        with suppress(OSError, KeyError, TypeError, ValueError):
            case = _parse(path.read_bytes()) or {}
            found += [
                float(one["uptime_s"]) + float(one["took_s"])
                for one in case["attempts"]
                if one["what"] in RENEWING and one["ok"] is True and one["boot"] == boot()
            ]
    return max(found)


def read(folder: Path) -> Known | None:
    """What the files in ``folder`` tell, None if there was no repair. Raises OSError."""
    past = [_parse(path.read_bytes()) for path in sorted(folder.glob(PAST))]
    ended = Counter(case["end"] for case in past if case and case.get("end") in OUTCOMES)
    with suppress(FileNotFoundError):
        return _newest(_parse((folder / CASE).read_bytes()), ended)
    with suppress(FileNotFoundError):
        return Known("ordered", 0, (folder / ORDER).stat().st_mtime, ended)
    return _newest(past[-1], ended) if past else None


def _newest(case: Mapping[str, Any] | None, ended: Mapping[str, int]) -> Known:
    unknown = Known("unknown", 0, None, ended)
    if case is None:
        return unknown
    try:
        attempts: Sequence[Mapping[str, Any]] = case["attempts"]
        remedies = [attempt for attempt in attempts if attempt["what"] in REMEDIES]
        waiting = "paused" if case.get("paused") else "waiting"
        doing = attempts[-1]["what"] if attempts and attempts[-1]["ok"] is None else waiting
        since = float(max(remedies[0]["at"] if remedies else case["opened_at"], case.get("resumed_at", 0.0)))
        state = case["end"] or doing
        seen = tuple((str(one["boot"]), float(one["uptime_s"]), float(one["at"])) for one in attempts)
    except (KeyError, TypeError, ValueError):
        return unknown
    if state not in STATES:
        return unknown
    return Known(state, len(remedies), None if case["end"] or doing == "paused" else since, ended, seen)


def _parse(content: bytes) -> Mapping[str, Any] | None:
    with suppress(ValueError):
        case = json.loads(content)
        return case if isinstance(case, dict) else None
    return None


def samples(known: Known, age_s: float | None) -> tuple[Sample, ...]:
    """The series of a repair of this age, None for one that has none."""
    age = () if age_s is None else (Sample(AGE, age_s),)
    return (
        *(Sample(STATE, float(state == known.state), (state,)) for state in STATES),
        Sample(ATTEMPTS, float(known.attempts)),
        *age,
        *(Sample(ENDED, float(known.ended.get(outcome, 0)), (outcome,)) for outcome in OUTCOMES),
    )


COLLECTOR = Plugin(
    "repairs",
    RepairsSettings,
    lambda _settings, context: RepairsCollector(context.state and context.state / FOLDER),
    LABELS,
)
