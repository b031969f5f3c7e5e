"""Huge pages that are reserved on this node, through /proc/meminfo: nobody else can use that memory.

Format: Documentation/admin-guide/mm/hugetlbpage.rst of the kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field

from opsd.collectors.base import Metric, NoData, Plugin, Reading, Sample
from opsd.settings.section import CollectorSettings

TOTAL = Metric("opsd_hugepages_total_bytes", "Memory that is reserved as huge pages.", unit="bytes")
FREE = Metric("opsd_hugepages_state_bytes", "Memory of huge pages by what it is.", unit="bytes", labels=("state",))
METRICS: Final = (TOTAL, FREE)
LABELS: Final = {"state": "free, reserved and surplus"}

_STATES: Final = {"free": "HugePages_Free", "reserved": "HugePages_Rsvd", "surplus": "HugePages_Surp"}


class HugepagesSettings(CollectorSettings):
    """Huge pages that are reserved, and how many are not used."""

    interval_s: float = Field(default=10.0, ge=0, le=3600, description="Seconds between two looks at them.")


class HugepagesCollector:
    """The huge pages of the default size, from ``proc``."""

    name = "hugepages"
    metrics = METRICS

    def __init__(self, proc: Path = Path("/proc"), *, interval_s: float = 10.0) -> None:
        self._meminfo = proc / "meminfo"
        self.interval_s = interval_s

    def collect(self) -> Reading | NoData:
        """Read the file."""
        values = parse_hugepages(self._meminfo.read_text(encoding="ascii"))
        if values is None:
            return NoData("this kernel has no huge pages")
        return Reading(
            (
                Sample(TOTAL, values["HugePages_Total"]),
                *(Sample(FREE, values[key], (state,)) for state, key in _STATES.items()),
            )
        )


def parse_hugepages(text: str) -> dict[str, int] | None:
    """Bytes of the huge pages of the default size by the kernel's name; None where there is no such size."""
    lines = dict(line.split(":", 1) for line in text.splitlines() if line.startswith("Huge"))
    if "Hugepagesize" not in lines:
        return None
    size = int(lines["Hugepagesize"].split()[0]) << 10
    return {key: int(value) * size for key, value in lines.items() if key.startswith("HugePages_")}


COLLECTOR = Plugin(
    "hugepages",
    HugepagesSettings,
    lambda settings, _context: HugepagesCollector(interval_s=settings.interval_s),
    LABELS,
)
