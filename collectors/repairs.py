"""How far the repair of this node is, and what earlier ones did, from the files of `opsd repair`."""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from opsd.collectors.base import Metric, NoData, Plugin, Reading, RepairFact, RepairStep, Sample
from opsd.collectors.lib.clock import boot_id, uptime_s
from opsd.settings.sections import CollectorSettings

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
"""Steps after which the GPUs start again without a boot."""
OUTCOMES: Final = ("returned", "rma", "left")
STEPS: Final = (*REMEDIES, "retest", "return")
STATES: Final = ("ordered", "waiting", "paused", *STEPS, *OUTCOMES, "unknown")
"""Of the newest repair: ordered but not begun, what is being done, how it ended; ``unknown`` if it cannot be read.

``paused`` by a time or a reservation for maintenance.
"""

MOST: Final = 100
"""Ended repairs, and steps of one, that are taken in."""
LARGEST: Final = 256 << 10
"""Bytes of a record that are read."""
LONGEST: Final = 1000
"""Characters of a text that are taken in."""
LAST_S: Final = 1e12
"""Epoch seconds beyond all times."""
_ID: Final = re.compile(r"repair-[0-9A-Za-z]{1,40}")

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
    """The repairs on record, oldest first, and the state of the newest, which may be ``ordered`` only.

    ``since`` is None once it has ended, while it is paused, and if that is unknown.
    """

    repairs: tuple[RepairFact, ...]
    state: str
    since: float | None = None

    @property
    def newest(self) -> RepairFact | None:
        """The one that the state is of, None if it is only ordered or cannot be read."""
        return self.repairs[-1] if self.state not in ("ordered", "unknown") else None

    @property
    def remedies(self) -> int:
        """How many remedies the newest has tried."""
        return len(remedies(self.newest)) if self.newest else 0

    def age_s(self, now: float, boot: str, uptime_s: float) -> float | None:
        """Seconds since ``since``, by the uptime as far as that goes back: clocks are set."""
        since = self.since
        if since is None:
            return None
        steps = self.newest.attempts if self.newest else ()
        then_s, at = next(((s.uptime_s, s.at) for s in steps if s.boot == boot and s.at >= since), (uptime_s, now))
        return max(0.0, at - since) + max(0.0, uptime_s - then_s)


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
        return Reading(samples(self._known, age_s), facts=self._known.repairs)


def gpus_renewed_at(folder: Path, boot: Callable[[], str] = boot_id) -> float:
    """The uptime at which a repair has last reset the GPUs or loaded their driver in this boot, 0 if none has.

    Raises nothing.
    """
    found = [0.0]
    for path in (*folder.glob(PAST), folder / CASE):
        with suppress(OSError, ValueError):
            found += [
                step.uptime_s + step.took_s
                for step in _read(path).attempts
                if step.what in RENEWING and step.ok is True and step.boot == boot()
            ]
    return max(found)


def read(folder: Path) -> Known | None:
    """What the files in ``folder`` tell, None if there was no repair. Records that cannot be read are left out.

    The one under way is read first: it may end meanwhile, and is among the others then. Raises OSError.
    """
    current, odd = None, False
    try:
        current = _read(folder / CASE)
    except FileNotFoundError:
        pass
    except ValueError:
        odd = True
    past: dict[str, RepairFact] = {}
    ended = sorted(path.name for path in folder.glob(PAST))[-MOST:]
    for name in ended:
        with suppress(OSError, ValueError):
            if (repair := _read(folder / name)).end and f"{repair.id}.json" == name:
                past[name] = repair
    repairs = tuple(past.values())
    if current is not None and f"{current.id}.json" not in past:
        return Known((*repairs, current), current.state, _since(current))
    if odd:
        return Known(repairs, "unknown")
    with suppress(FileNotFoundError):
        return Known(repairs, "ordered", (folder / ORDER).lstat().st_mtime)
    if not ended:
        return None
    return Known(repairs, past[ended[-1]].state if ended[-1] in past else "unknown")


def remedies(repair: RepairFact) -> list[RepairStep]:
    """What was done for the node, tests and returns left out."""
    return [step for step in repair.attempts if step.what in REMEDIES]


def parse(content: bytes | str) -> RepairFact:
    """The repair in a record, the file's or the journal's. Raises ValueError for what opsd does not write."""
    repair = _shortened(_adapter().validate_json(content, strict=True))
    times = [repair.opened_at, repair.ended_at or 0.0, repair.resumed_at]
    times += [at for s in repair.attempts for at in (s.at, s.ended_at or 0.0, s.uptime_s, s.took_s)]
    if not (_ID.fullmatch(repair.id) and repair.state in STATES and (repair.end is None or repair.end in OUTCOMES)):
        raise ValueError("a name or state that no repair has")
    if not all(-LAST_S < at < LAST_S for at in times) or not {s.what for s in repair.attempts} <= {*STEPS}:
        raise ValueError("a time or a step that no repair has")
    return repair


def _shortened(repair: RepairFact) -> RepairFact:
    """``repair`` with its first and last steps, and texts of a bounded length."""
    steps = repair.attempts
    kept = steps if len(steps) <= MOST else (*steps[: MOST // 2], *steps[-MOST // 2 :])
    names = ("node", "kind", "reason", "verdict", "bundle", "paused")
    texts = {name: str(getattr(repair, name))[:LONGEST] for name in names}
    attempts = tuple(replace(step, boot=step.boot[:LONGEST], detail=step.detail[:LONGEST]) for step in kept)
    return replace(repair, attempts=attempts, **texts)  # type: ignore[arg-type]


def _read(path: Path) -> RepairFact:
    """The repair in a record. Raises OSError and ValueError."""
    return parse(read_record(path))


def read_record(path: Path) -> bytes:
    """The content of a regular file of root's or of this user: nothing else decides what root does to the node.

    Raises OSError, and ValueError for any other file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            raise ValueError("not a file of root's")
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError("larger than a record")
    return content


@cache
def _adapter() -> TypeAdapter[RepairFact]:
    return TypeAdapter(RepairFact)  # most nodes are never repaired


def _since(repair: RepairFact) -> float | None:
    if repair.end is not None or repair.state == "paused":
        return None
    tried = remedies(repair)
    return max(tried[0].at if tried else repair.opened_at, repair.resumed_at)


def samples(known: Known, age_s: float | None) -> tuple[Sample, ...]:
    """The series of a repair of this age, None for one that has none."""
    age = () if age_s is None else (Sample(AGE, age_s),)
    ended = Counter(repair.end for repair in known.repairs)
    return (
        *(Sample(STATE, float(state == known.state), (state,)) for state in STATES),
        Sample(ATTEMPTS, float(known.remedies)),
        *age,
        *(Sample(ENDED, float(ended[outcome]), (outcome,)) for outcome in OUTCOMES),
    )


COLLECTOR = Plugin(
    "repairs",
    RepairsSettings,
    lambda _settings, context: RepairsCollector(context.state and context.state / FOLDER),
    LABELS,
)
