"""What the observations of a soak come to. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.adversary.soak.observe import Observed, total
from tests.fakes.tree import ROOT

BLOCKS = 10
STUDENT = 2.306
"""97.5 % quantile of Student's t with ``BLOCKS`` - 2 degrees of freedom."""
GROWTH_MIB = 3.0
"""What the memory of an hour may grow at most, by the upper end of the confidence interval."""
SERVICE = (ROOT / "deploy/systemd/opsd.service").read_text()
MOST_MIB = int(re.findall(r"^MemoryMax=(\d+)M$", SERVICE, re.MULTILINE)[0]) - 16
"""The most memory that the agent may ever have had: what the kernel lets the service take, less what it counts besides
(sockets, page tables)."""
SHORTEST_S = 1200.0
"""Less time than this says nothing about growth."""
SCRAPE_S = 1.0
STALE_S = 12.0
"""The age that the newest evaluation may reach: one is written every five seconds."""
OPENS_WITHIN_S = 15.0


class Plant(NamedTuple):
    """An Xid that the driver reported of the GPU ``uuid`` at an epoch second."""

    at: float
    uuid: str
    code: int


class Slope(NamedTuple):
    """MiB per hour, with the ends of the 95 % confidence interval."""

    value: float
    low: float
    high: float


def floors(memory: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What stays in memory: the time and the least of ``BLOCKS`` stretches of equal length.

    Answers that are under way come and go, by dozens of MiB while users ask for the largest; what leaks never goes.
    """
    size = len(memory) // BLOCKS
    blocks = [memory[number * size : (number + 1) * size] for number in range(BLOCKS)]
    return [(statistics.fmean(at for at, _ in block), min(mib for _, mib in block)) for block in blocks]


def slope(memory: Sequence[tuple[float, float]]) -> Slope:
    """Growth of what stays in memory over time, by least squares; the scatter around the line gives the interval."""
    hours, stays = zip(*((at / 3600, mib) for at, mib in floors(memory)), strict=True)
    line = statistics.linear_regression(hours, stays)
    rest = sum((y - line.slope * x - line.intercept) ** 2 for x, y in zip(hours, stays, strict=True))
    middle = statistics.fmean(hours)
    error = (rest / (BLOCKS - 2) / sum((x - middle) ** 2 for x in hours)) ** 0.5
    return Slope(line.slope, line.slope - STUDENT * error, line.slope + STUDENT * error)


def memory_verdict(growth: Slope, seconds: float) -> str:
    """What is wrong with the memory, "" if it is flat, or was not watched for long enough to say."""
    if seconds < SHORTEST_S or growth.high <= GROWTH_MIB:
        return ""
    return f"memory grows by up to {growth.high:.1f} MiB an hour"


def peak_verdict(highest_mib: float) -> str:
    """What is wrong with the most memory that the agent has had, "" if nothing is."""
    return f"memory was at {highest_mib:.0f} MiB" if highest_mib > MOST_MIB else ""


def scrape_verdict(seen: Observed) -> list[str]:
    """What is wrong with the scrapes."""
    late = [seconds for seconds in seen.scrapes if seconds > SCRAPE_S]
    said = [f"{len(late)} scrapes took longer than {SCRAPE_S:g} s, up to {max(late):.1f} s"] if late else []
    if seen.unanswered:
        said.append(f"{len(seen.unanswered)} scrapes were not answered, the first at {seen.unanswered[0]:.0f} s")
    if seen.stale_s > STALE_S:
        said.append(f"an evaluation was {seen.stale_s:.0f} s old before the next one was seen")
    return said


def ticks_verdict(values: Mapping[str, float]) -> list[str]:
    """What the agent says of itself: all of these have to be 0."""
    names = ("opsd_agent_missed_ticks_total", "opsd_journal_lost_records_total", "opsd_log_lines_lost_total")
    said = [f"{name} is {total(dict(values), name):g}" for name in names if total(dict(values), name)]
    errors = {one: value for one, value in values.items() if one.startswith("opsd_runbook_errors_total") and value}
    hung = [one for one, value in values.items() if one.startswith("opsd_collector_state") and 'hung"' in one and value]
    return [*said, *(f"{one} is {value:g}" for one, value in errors.items()), *hung]


def incidents_verdict(
    plants: Sequence[Plant], journal: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Planted incidents that are not in the journal, or not told exactly once when they opened and when they ended.

    ``journal`` has the incidents' documents, ``told`` the notifications.
    """
    said = []
    times = Counter((one["id"], _state(one["text"])) for one in told if "id" in one)
    for plant in plants:
        found = [
            one
            for one in journal
            if one["kind"] == "gpu_xid"
            and one["data"]["uuid"] == plant.uuid
            and 0 <= one["opened_at"] - plant.at <= OPENS_WITHIN_S
        ]
        name = f"Xid {plant.code} at {plant.at:.0f}"
        if len(found) != 1:
            said.append(f"{name}: {len(found)} incidents in the journal")
            continue
        (incident,) = found
        if incident["state"] != "resolved":
            said.append(f"{name}: {incident['state']} in the journal")
        for state in ("opened", "resolved"):
            if times[incident["id"], state] != 1:
                said.append(f"{name}: told {times[incident['id'], state]} times that it was {state}")
    twice = [key for key, count in times.items() if count > 1 and key[1] == "opened"]
    return [*said, *([f"{len(twice)} incidents were opened more than once"] if twice else [])]


def _state(text: str) -> str:
    """The state in a notification such as ``[warning] node1: gpu_xid opened: GPU 0: Xid 8``."""
    return text.split(": ")[1].rpartition(" ")[2]
