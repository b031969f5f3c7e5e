"""Temperatures of the host and how hard it cools, through /sys/class/thermal: processors throttle as GPUs do.

Format: Documentation/driver-api/thermal/sysfs-api.rst of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from opsd.collectors.base import Metric, NoData, Plugin, Reading, Sample
from opsd.settings.sections import CollectorSettings

MAX_ZONES: Final = 64
MAX_TYPES: Final = 16

TEMPERATURE = Metric(
    "opsd_thermal_zone_celsius", "Temperature of the thermal zone.", unit="celsius", labels=("zone", "type")
)
COOLING = Metric(
    "opsd_thermal_cooling_ratio",
    "State of the cooling devices of this type, as a share of their highest; that of the device that cools hardest. "
    "Above 0 for processors means that they are held back.",
    unit="ratio",
    labels=("type",),
)
METRICS: Final = (TEMPERATURE, COOLING)
LABELS: Final = {
    "zone": f"thermal zones, {MAX_ZONES} at most",
    "type": f"the kernel's name of what a zone or a cooling device is, {MAX_TYPES} of cooling devices at most",
}


class ThermalSettings(CollectorSettings):
    """Temperatures of the host, and its cooling."""


class ThermalCollector:
    """The thermal zones and cooling devices below ``sys``. A zone that does not tell its temperature is left out."""

    name = "thermal"
    metrics = METRICS

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._root = sys / "class/thermal"

    def collect(self) -> Reading | NoData:
        """Read every zone and device."""
        zones = [sample for folder in _numbered(self._root, "thermal_zone")[:MAX_ZONES] for sample in _zone(folder)]
        if not zones:
            return NoData(f"no thermal zone in {self._root} tells a temperature")
        return Reading((*zones, *self._cooling()))

    def _cooling(self) -> Iterator[Sample]:
        ratios: dict[str, float] = {}
        for folder in _numbered(self._root, "cooling_device"):
            kind, now, most = (_text(folder / name) for name in ("type", "cur_state", "max_state"))
            if kind and now.isdecimal() and most.isdecimal() and int(most):
                ratios[kind] = max(ratios.get(kind, 0.0), int(now) / int(most))
        for kind in sorted(ratios)[:MAX_TYPES]:
            yield Sample(COOLING, ratios[kind], (kind,))


def parse_temperature(text: str) -> float | None:
    """Degrees Celsius from a ``temp`` file, which has thousandths; None if that is no number."""
    return int(text) / 1e3 if re.fullmatch(r"-?\d+", text, re.ASCII) else None


def _zone(folder: Path) -> Iterator[Sample]:
    if (celsius := parse_temperature(_text(folder / "temp"))) is not None:
        yield Sample(TEMPERATURE, celsius, (folder.name, _text(folder / "type") or "unknown"))


def _numbered(root: Path, prefix: str) -> list[Path]:
    """The folders ``prefix``0, ``prefix``1 and so on, by number."""
    folders = [path for path in root.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix(prefix)))


def _text(path: Path) -> str:
    """The content of a file, "" if it is missing or cannot be read, as with sensors that are off or busy."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


COLLECTOR = Plugin("thermal", ThermalSettings, lambda _settings, _context: ThermalCollector(), LABELS, witness=True)
