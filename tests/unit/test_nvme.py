"""The health of NVMe drives, as the SMART log and sysfs tell it."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import NoData, Reading
from opsd.collectors.nvme import WARNINGS, NvmeCollector, parse_smart, read_smart
from tests.fakes.tree import write_tree

DRIVE = {"model": "MZWLO3T8HCLS", "serial": "S123", "firmware_rev": "OPPA1B5Q", "state": "live"}
HWMON = {"hwmon3/temp1_input": 41850, "hwmon3/temp1_label": "Composite", "hwmon3/temp2_input": 48850}


def smart_log(*, warning: int = 0, used: int = 3, media_errors: int = 0) -> bytes:
    """A SMART log page as the specification lays it out."""
    log = bytearray(512)
    struct.pack_into("<BHBBB", log, 0, warning, 315, 100, 10, used)
    for at, value in ((32, 2), (48, 5), (112, 9), (128, 1000), (144, 4), (160, media_errors), (176, 7)):
        log[at : at + 16] = value.to_bytes(16, "little")
    struct.pack_into("<II8H", log, 192, 2, 1, 320, 0, 330, 0, 0, 0, 0, 0)
    return bytes(log)


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    write_tree(tmp_path / "class/nvme/nvme0", {**DRIVE, **HWMON})
    return tmp_path


def values(reading: Reading | NoData, metric: str) -> dict[tuple[str, ...], float]:
    assert isinstance(reading, Reading)
    name = f"opsd_storage_nvme_{metric}"
    return {sample.labels: sample.value for sample in reading.samples if sample.metric.name == name}


def test_a_smart_log_in_base_units() -> None:
    """Every field of the log arrives as ratio, degrees Celsius, bytes or seconds."""
    smart = parse_smart(smart_log(warning=0b1001, used=130, media_errors=2**70))
    assert smart.warnings == {"spare_low", "read_only"}
    assert smart.temperatures == {"composite": 42, "sensor 1": 47, "sensor 3": 57}
    assert (smart.wear, smart.spare, smart.spare_limit) == (1.3, 1.0, 0.1)
    assert smart.written_bytes == 2_560_000
    assert (smart.power_on_s, smart.warm_s, smart.hot_s) == (3_600_000, 120, 60)
    assert smart.media_errors == 2**70


@given(st.binary(max_size=600))
def test_any_log_is_parsed_or_refused(log: bytes) -> None:
    """Bytes are a log whose warnings are known ones, or ValueError."""
    for candidate in (log, log.ljust(512, b"\1")):
        with contextlib.suppress(ValueError):
            assert parse_smart(candidate).warnings <= set(WARNINGS)


@pytest.mark.parametrize("log", [b"", b"\1" * 511, bytes(512)])
def test_a_log_that_cannot_be_true_is_refused(log: bytes) -> None:
    """A short log or one of zeros is no healthy drive at 0 degrees Kelvin."""
    with pytest.raises(ValueError, match="SMART"):
        parse_smart(log)


def test_a_drive_that_tells_everything(sys: Path) -> None:
    """With the SMART log readable, wear, errors and every warning have their series, those not given at 0."""
    collector = NvmeCollector(sys=sys, read_smart=lambda _: smart_log(warning=0b100, media_errors=5))
    reading = collector.collect()
    assert values(reading, "info") == {("nvme0", "MZWLO3T8HCLS", "S123", "OPPA1B5Q"): 1}
    assert values(reading, "live") == {("nvme0",): 1}
    assert values(reading, "smart_readable") == {("nvme0",): 1}
    assert values(reading, "wear_ratio") == {("nvme0",): 0.03}
    assert values(reading, "media_errors_total") == {("nvme0",): 5}
    assert values(reading, "critical_warning") == {("nvme0", name): float(name == "reliability") for name in WARNINGS}
    assert values(reading, "overheated_seconds_total") == {("nvme0", "warning"): 120, ("nvme0", "critical"): 60}


def test_without_root_the_temperature_remains(sys: Path) -> None:
    """Where the SMART log may not be read that is visible, and the temperatures come from sysfs."""

    def refuse(device: Path) -> bytes:
        raise PermissionError(device)

    reading = NvmeCollector(sys=sys, read_smart=refuse).collect()
    assert values(reading, "smart_readable") == {("nvme0",): 0}
    assert values(reading, "wear_ratio") == {}
    assert values(reading, "temperature_celsius") == {("nvme0", "composite"): 41.85, ("nvme0", "temp2"): 48.85}


def test_a_dead_controller_is_not_live(sys: Path) -> None:
    """A drive that the kernel has given up shows as such."""
    write_tree(sys / "class/nvme/nvme0", {"state": "dead"})
    reading = NvmeCollector(sys=sys, dev=sys).collect()
    assert values(reading, "live") == {("nvme0",): 0}
    assert values(reading, "smart_readable") == {("nvme0",): 0}


def test_no_drive_is_no_data(tmp_path: Path) -> None:
    """A machine without NVMe has no data; entries that are no controllers are no drives."""
    assert isinstance(NvmeCollector(sys=tmp_path).collect(), NoData)
    write_tree(tmp_path / "class/nvme/nvme-fabrics", {"state": "live"})
    assert isinstance(NvmeCollector(sys=tmp_path).collect(), NoData)


def test_a_file_that_is_no_drive_is_an_error(tmp_path: Path) -> None:
    """The real question to a file that is no drive fails with OSError, and a link is not followed."""
    plain = tmp_path / "nvme0"
    plain.write_bytes(b"")
    (tmp_path / "nvme1").symlink_to(plain)
    for device in (plain, tmp_path / "nvme1", tmp_path / "missing"):
        with pytest.raises(OSError, match=device.name if device is not plain else "ioctl"):
            read_smart(device)


def test_the_drives_of_this_machine() -> None:
    """The real sysfs gives drives or says that there are none."""
    reading = NvmeCollector().collect()
    assert isinstance(reading, NoData) or values(reading, "live")
