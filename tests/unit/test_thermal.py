"""Thermal zones and cooling devices from a fixture tree in the form of /sys/class/thermal."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.collectors.base import NoData, Reading
from opsd.collectors.thermal import MAX_TYPES, MAX_ZONES, ThermalCollector, parse_temperature


def put(sys: Path, folder: str, **files: str) -> None:
    path = sys / "class/thermal" / folder
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(f"{text}\n")


def series(sys: Path) -> dict[tuple[str, ...], float]:
    reading = ThermalCollector(sys).collect()
    assert isinstance(reading, Reading)
    return {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples}


def test_zones_and_the_hardest_cooling_of_each_type(tmp_path: Path) -> None:
    """Degrees from thousandths; of many processors the one that is held back most."""
    put(tmp_path, "thermal_zone0", type="acpitz", temp="27800")
    put(tmp_path, "thermal_zone10", type="x86_pkg_temp", temp="-5000")
    put(tmp_path, "cooling_device0", type="Processor", cur_state="0", max_state="10")
    put(tmp_path, "cooling_device1", type="Processor", cur_state="3", max_state="10")
    put(tmp_path, "cooling_device2", type="Fan", cur_state="1", max_state="1")
    assert series(tmp_path) == {
        ("opsd_thermal_zone_celsius", "thermal_zone0", "acpitz"): 27.8,
        ("opsd_thermal_zone_celsius", "thermal_zone10", "x86_pkg_temp"): -5.0,
        ("opsd_thermal_cooling_ratio", "Processor"): 0.3,
        ("opsd_thermal_cooling_ratio", "Fan"): 1.0,
    }


def test_what_does_not_tell_is_left_out(tmp_path: Path) -> None:
    """Sensors that are off have no readable ``temp``; some devices have no states, or a highest of 0."""
    put(tmp_path, "thermal_zone0", type="iwlwifi_1")
    put(tmp_path, "thermal_zone1", temp="40000")
    put(tmp_path, "thermal_zone", type="no zone", temp="1000")
    put(tmp_path, "cooling_device0", type="broken", cur_state="0", max_state="0")
    put(tmp_path, "cooling_device1", type="intel_powerclamp", cur_state="-1", max_state="50")
    assert series(tmp_path) == {("opsd_thermal_zone_celsius", "thermal_zone1", "unknown"): 40.0}


@pytest.mark.parametrize("zones", [(), ("thermal_zone0",)], ids=["none", "one that is off"])
def test_a_host_without_temperatures_has_no_data(tmp_path: Path, zones: tuple[str, ...]) -> None:
    """As in a virtual machine or container; it is not the same as a cool host."""
    for zone in zones:
        put(tmp_path, zone, type="acpitz")
    assert isinstance(ThermalCollector(tmp_path).collect(), NoData)


def test_the_number_of_series_is_bounded(tmp_path: Path) -> None:
    """A host with hundreds of sensors does not flood Prometheus."""
    for number in range(100):
        put(tmp_path, f"thermal_zone{number}", type="zone", temp="1000")
        put(tmp_path, f"cooling_device{number}", type=f"type-{number}", cur_state="0", max_state="1")
    assert len(series(tmp_path)) == MAX_ZONES + MAX_TYPES


@pytest.mark.parametrize(("text", "celsius"), [("31000", 31.0), ("-1", -0.001), ("", None), ("1e3", None), ("٣", None)])
def test_temperatures(text: str, celsius: float | None) -> None:
    """Whole thousandths of a degree and nothing else."""
    assert parse_temperature(text) == celsius
