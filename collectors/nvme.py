"""Health of NVMe drives: wear, temperature, media errors.

Wear and errors are in the SMART log, which only root may ask a drive for; the temperature is also in sysfs (hwmon).
Asking disturbs the drive a little and hangs when its controller does, so it is a collector of its own that asks
rarely.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import Field

from opsd.collectors.base import Metric, MetricKind, NoData, Plugin, Reading, Sample
from opsd.settings.sections import CollectorSettings

_MAX_DRIVES: Final = 64


def _nvme(name: str, help_text: str, unit: str = "", *labels: str, kind: MetricKind = "gauge") -> Metric:
    return Metric(f"opsd_storage_nvme_{name}", help_text, kind, unit, ("controller", *labels))


INFO = _nvme("info", "What the drive is.", "", "model", "serial", "firmware_version", kind="info")
LIVE = _nvme("live", "1 if the kernel can use the drive's controller.")
READABLE = _nvme("smart_readable", "1 if the drive's SMART log could be read; its other series are missing otherwise.")
TEMPERATURE = _nvme("temperature_celsius", "Temperature.", "celsius", "sensor")
WEAR = _nvme("wear_ratio", "Share of the drive's rated endurance that is used up; can pass 1.", "ratio")
SPARE = _nvme("available_spare_ratio", "Share of the spare blocks that is left.", "ratio")
SPARE_LIMIT = _nvme("available_spare_threshold_ratio", "Share of spare blocks at which the drive warns.", "ratio")
WARNING = _nvme("critical_warning", "1 if the drive gives this warning.", "", "warning")
MEDIA_ERRORS = _nvme("media_errors_total", "Data that could not be read back as written.", kind="counter")
WRITTEN = _nvme("written_bytes_total", "Data written by the host in the drive's life.", "bytes", kind="counter")
POWER_ON = _nvme("power_on_seconds_total", "Time the drive was powered.", "seconds", kind="counter")
OVERHEATED = _nvme(
    "overheated_seconds_total", "Time spent above the temperature limit.", "seconds", "limit", kind="counter"
)

METRICS: Final = (
    INFO, LIVE, READABLE, TEMPERATURE, WEAR, SPARE, SPARE_LIMIT, WARNING, MEDIA_ERRORS, WRITTEN, POWER_ON,
    OVERHEATED,
)  # fmt: skip
LABELS: Final = {
    "controller": "NVMe drives, 64 at most",
    "model": "one per drive",
    "serial": "one per NVMe drive",
    "firmware_version": "one per drive",
    "sensor": "temperature sensors of an NVMe drive, 9 at most",
    "warning": "warnings of an NVMe drive, 6 known",
    "limit": "warning, critical",
}

WARNINGS: Final = ("spare_low", "temperature", "reliability", "read_only", "backup_failed", "pmr_unreliable")
"""Bits 0 to 5 of the critical warning (NVM Express Base Specification, SMART / Health Information)."""

_SMART_BYTES: Final = 512
_SMART_HEAD = struct.Struct("<BHBBB")
_COUNTERS_AT, _COUNTER_BYTES = 32, 16
_OVERHEATED = struct.Struct("<II8H")
_OVERHEATED_AT = 192
_ZERO_CELSIUS_IN_KELVIN: Final = 273
_DATA_UNIT_BYTES: Final = 512_000

# linux/nvme_ioctl.h: _IOWR('N', 0x41, struct nvme_passthru_cmd); Get Log Page, log 2, all namespaces.
_ADMIN_COMMAND = 0xC0484E41
_PASSTHROUGH = struct.Struct("<BBHIIIQQIIIIIIIIII")
_GET_LOG_PAGE, _SMART_LOG, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_TIMEOUT_MS = 2000


class Smart(NamedTuple):
    """The SMART log. ``temperatures`` are in degrees Celsius by sensor, "composite" first; times in seconds."""

    warnings: frozenset[str]
    temperatures: Mapping[str, int]
    spare: float
    spare_limit: float
    wear: float
    written_bytes: int
    power_on_s: int
    media_errors: int
    warm_s: int
    hot_s: int


def parse_smart(log: bytes) -> Smart:
    """The SMART / Health Information log page, 512 bytes. Raises ValueError if it is shorter or empty."""
    if len(log) < _SMART_BYTES or not any(log):
        raise ValueError(f"a SMART log has {_SMART_BYTES} bytes and is not all zero; this one has {len(log)}")
    warning, kelvin, spare, spare_limit, used = _SMART_HEAD.unpack_from(log)
    _, written, _, _, _, _, hours, _, media, _ = (
        int.from_bytes(log[at : at + _COUNTER_BYTES], "little")
        for at in range(_COUNTERS_AT, _OVERHEATED_AT, _COUNTER_BYTES)
    )
    warm_minutes, hot_minutes, *sensors = _OVERHEATED.unpack_from(log, _OVERHEATED_AT)
    kelvins = {"composite": kelvin, **{f"sensor {index}": value for index, value in enumerate(sensors, 1)}}
    return Smart(
        warnings=frozenset(name for bit, name in enumerate(WARNINGS) if warning >> bit & 1),
        temperatures={name: value - _ZERO_CELSIUS_IN_KELVIN for name, value in kelvins.items() if value},
        spare=spare / 100,
        spare_limit=spare_limit / 100,
        wear=used / 100,
        written_bytes=written * _DATA_UNIT_BYTES,
        power_on_s=hours * 3600,
        media_errors=media,
        warm_s=warm_minutes * 60,
        hot_s=hot_minutes * 60,
    )


def smart_samples(controller: str, smart: Smart) -> Iterator[Sample]:
    """The samples of a drive's SMART log."""
    for sensor, celsius in smart.temperatures.items():
        yield Sample(TEMPERATURE, celsius, (controller, sensor))
    for warning in WARNINGS:
        yield Sample(WARNING, float(warning in smart.warnings), (controller, warning))
    for metric, value in (
        (WEAR, smart.wear), (SPARE, smart.spare), (SPARE_LIMIT, smart.spare_limit), (MEDIA_ERRORS, smart.media_errors),
        (WRITTEN, smart.written_bytes), (POWER_ON, smart.power_on_s),
    ):  # fmt: skip
        yield Sample(metric, value, (controller,))
    yield Sample(OVERHEATED, smart.warm_s, (controller, "warning"))
    yield Sample(OVERHEATED, smart.hot_s, (controller, "critical"))


def read_smart(device: Path) -> bytes:
    """The SMART log page of the drive behind ``device`` (/dev/nvme0). Raises OSError; PermissionError if not root."""
    log = ctypes.create_string_buffer(_SMART_BYTES)
    dwords = _SMART_BYTES // 4 - 1
    command = bytearray(
        _PASSTHROUGH.pack(
            _GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0, 0, ctypes.addressof(log), 0, _SMART_BYTES,
            dwords << 16 | _SMART_LOG, 0, 0, 0, 0, 0, _TIMEOUT_MS, 0,
        )
    )  # fmt: skip
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = fcntl.ioctl(descriptor, _ADMIN_COMMAND, command)
    finally:
        os.close(descriptor)
    if status:
        raise OSError(f"{device} refused its SMART log with NVMe status {status:#x}")
    return log.raw


class NvmeSettings(CollectorSettings):
    """Wear, errors and temperature of NVMe drives. Needs root."""

    interval_s: float = Field(default=60.0, ge=0, le=86_400, description="Seconds between two questions to a drive.")


class NvmeCollector:
    """The NVMe drives below ``sys``, 64 at most."""

    name = "nvme"
    metrics = METRICS

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        read_smart: Callable[[Path], bytes] = read_smart,
        interval_s: float = 60.0,
    ) -> None:
        self._sys = sys
        self._dev = dev
        self._read_smart = read_smart
        self.interval_s = interval_s

    def collect(self) -> Reading | NoData:
        """Ask every drive."""
        folder = self._sys / "class/nvme"
        drives = sorted(folder.iterdir()) if folder.is_dir() else []
        drives = [drive for drive in drives if re.fullmatch(r"nvme\d+", drive.name)][:_MAX_DRIVES]
        if not drives:
            return NoData("no NVMe drive on this node")
        return Reading(tuple(sample for drive in drives for sample in self._drive(drive)))

    def _drive(self, drive: Path) -> Iterator[Sample]:
        controller = drive.name
        about = tuple(_text(drive / name) for name in ("model", "serial", "firmware_rev"))
        yield Sample(INFO, 1, (controller, *about))
        if state := _text(drive / "state"):
            yield Sample(LIVE, float(state == "live"), (controller,))
        try:
            smart = parse_smart(self._read_smart(self._dev / controller))
        except (OSError, ValueError):
            yield Sample(READABLE, 0, (controller,))
            yield from _hwmon(drive)
        else:
            yield Sample(READABLE, 1, (controller,))
            yield from smart_samples(controller, smart)


def _hwmon(drive: Path) -> Iterator[Sample]:
    """Temperatures without root. The kernel gives millidegrees and calls the sensors Composite, Sensor 1, Sensor 2 …"""
    for file in sorted([*drive.glob("hwmon*/temp*_input"), *drive.glob("device/hwmon/hwmon*/temp*_input")]):
        with contextlib.suppress(OSError, ValueError):
            celsius = int(_text(file)) / 1e3
            sensor = _text(file.with_name(file.name.replace("_input", "_label"))) or file.name.removesuffix("_input")
            yield Sample(TEMPERATURE, celsius, (drive.name, sensor.lower()))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


COLLECTOR = Plugin(
    "nvme", NvmeSettings, lambda settings, _context: NvmeCollector(interval_s=settings.interval_s), LABELS, witness=True
)
