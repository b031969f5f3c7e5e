"""InfiniBand, RoCE and EFA ports through /sys/class/infiniband: state, rate, traffic, errors and flaps.

node_exporter exports the port counters too (``node_infiniband_*``), but neither hw_counters nor flaps; here is what
detection needs, in the agent's own tick.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from pydantic import Field

from opsd.collectors.base import Event, Metric, MetricKind, MonotonicCounter, NoData, Plugin, Reading, Sample
from opsd.collectors.lib.pci import ADDRESS, bus_id
from opsd.settings.sections import AnyPath, CollectorSettings

ACTIVE: Final = 4
ACTIVE_DEFER: Final = 5
"""The logical states in which a port has a link (IB specification: 1 down, 2 init, 3 armed, 4 active, 5 active while a
fault of its signal is young)."""


class PortReading(NamedTuple):
    """One look at a port; None where a file was missing or made no sense. ``rate`` is in bytes per second.

    ``state`` is ``ACTIVE`` for every port with a link. Only such a port has a rate: others show that of one lane.
    """

    state: int | None
    physical_state: int | None
    rate: float | None
    counters: Mapping[str, int]


class Happening(NamedTuple):
    """Kind of an event, what the port did in words, and the event's data."""

    kind: str
    what: str
    data: Mapping[str, object]


class LinkHistory:
    """What is remembered of one link. ``flaps`` is how often it was lost since the first look.

    The hardware counts lost links too and knows of those shorter than the time between two looks. A loss that was seen
    gets into that count sooner or later, or never once the counter is at its end; so the higher of both numbers holds.
    """

    def __init__(self) -> None:
        self.flaps = 0
        self._state: int | None = None
        self._rate: float | None = None
        self._seen = 0
        self._first_downed: int | None = None
        self._down_since: float | None = None
        self._present = True

    def update(self, reading: PortReading, downed: int | None, now: float) -> list[Happening]:
        """Take in a look at the monotonic second ``now``. ``downed`` is the hardware's growing count of lost links."""
        happened = [] if self._present else [Happening("ib_port_back", "is there again", {})]
        self._present = True
        if reading.state is None:
            return happened
        lost = self._state == ACTIVE and reading.state != ACTIVE
        happened += self._count(lost, downed)
        if lost:
            self._down_since = now
            data = {"state": reading.state, "physical_state": reading.physical_state}
            happened.append(Happening("ib_link_down", "lost its link", data))
        self._state = reading.state
        if reading.state == ACTIVE:
            happened += self._active(reading.rate, now)
        return happened

    def gone(self, now: float) -> list[Happening]:
        """Take in that the port is not there."""
        if not self._present:
            return []
        self._present = False
        if self._state == ACTIVE:
            self._count(True, None)
            self._down_since = now
        self._state = None
        return [Happening("ib_port_gone", "is no longer there", {})]

    def _count(self, lost: bool, downed: int | None) -> list[Happening]:
        self._seen += lost
        if self._first_downed is None:
            self._first_downed = downed
        counted = 0 if downed is None or self._first_downed is None else downed - self._first_downed
        flaps = max(self.flaps, self._seen, counted)
        unseen, self.flaps = flaps - self.flaps - lost, flaps
        if unseen <= 0:
            return []
        return [Happening("ib_link_flap", f"lost its link {unseen} times between two looks", {"count": unseen})]

    def _active(self, rate: float | None, now: float) -> list[Happening]:
        happened = []
        if self._down_since is not None:
            down_s, self._down_since = now - self._down_since, None
            happened.append(Happening("ib_link_up", f"has its link back after {down_s:.0f} s", {"down_s": down_s}))
        if rate is not None and rate != self._rate:
            if self._rate is not None:
                what = f"changed its rate from {_gbit(self._rate)} to {_gbit(rate)} Gbit/s"
                data = {"before_bytes_per_second": self._rate, "after_bytes_per_second": rate}
                happened.append(Happening("ib_rate_changed", what, data))
            self._rate = rate
        return happened


def _gbit(rate: float) -> str:
    return f"{rate * 8 / 1e9:g}"


N = TypeVar("N", int, float)

_PORT: Final = ("device", "port")


def _ib(name: str, help_text: str, unit: str = "", *labels: str, kind: MetricKind = "gauge") -> Metric:
    return Metric(f"opsd_ib_{name}", help_text, kind, unit, (*_PORT, *labels))


INFO = _ib("port_info", "What the port is.", "", "link_layer", "firmware_version", "board", "pci_bus_id", kind="info")
STATE = _ib("port_state", "Logical state: 0 not there, 1 down, 2 initialising, 3 armed, 4 active.")
PHYSICAL_STATE = _ib(
    "port_physical_state",
    "Physical state: 1 sleep, 2 polling, 3 disabled, 4 training, 5 link up, 6 recovering from errors, 7 test.",
)
RATE = _ib(
    "port_rate_bytes_per_second", "Signalling rate in bytes per second; none without a link.", "bytes_per_second"
)
EXPECTED = _ib(
    "port_expected_rate_bytes_per_second",
    "Rate that the configuration expects of the port, in bytes per second; 0: a link of any rate.",
    "bytes_per_second",
)
SENT = _ib("transmitted_bytes_total", "Data sent.", "bytes", kind="counter")
RECEIVED = _ib("received_bytes_total", "Data received.", "bytes", kind="counter")
WAIT = _ib("transmit_wait_ticks_total", "Ticks in which there was data to send and no credit to do so.", kind="counter")
ERRORS = _ib("errors_total", "Errors by the kernel's name of their counter.", "", "error", kind="counter")
CONGESTION = Metric(
    "opsd_ib_congestion_events_total",
    "Congestion notifications by the kernel's name.",
    "counter",
    labels=(*_PORT, "event"),
    kept=False,
)
FLAPS = _ib("link_flaps_total", "Times the link was lost since the agent started.", kind="counter")

METRICS: Final = (INFO, STATE, PHYSICAL_STATE, RATE, EXPECTED, SENT, RECEIVED, WAIT, ERRORS, CONGESTION, FLAPS)


class Counter(NamedTuple):
    """Where the number in a file goes. ``bits`` is the width of the hardware counter."""

    metric: Metric
    extra: tuple[str, ...] = ()
    scale: int = 1
    bits: int = 32


_PORT_ERRORS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
)  # fmt: skip
LABELS: Final = {
    "device": "RDMA devices, 64 ports at most",
    "port": "ports of an RDMA device",
    "link_layer": "one per RDMA port",
    "firmware_version": "one per device",
    "board": "one per RDMA device",
    "pci_bus_id": "one per RDMA device",
    "error": "errors that RDMA drivers count, 27 known",
    "event": "congestion notifications that RDMA drivers count, 4 known",
}
_HARDWARE_ERRORS = (
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "duplicate_request",
    "implied_nak_seq_err", "out_of_buffer", "req_cqe_error", "resp_cqe_error", "req_remote_access_errors",
    "roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart", "rx_icrc_encapsulated",
    "rx_drops", "retrans_pkts", "retrans_timeout_events", "impaired_remote_conn_events", "unresponsive_remote_events",
)  # fmt: skip
_CONGESTION = ("np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored")

FILES: Final[Mapping[str, Counter]] = {
    # Data is counted in units of four bytes (Documentation/ABI/stable/sysfs-class-infiniband).
    "counters/port_xmit_data": Counter(SENT, scale=4, bits=64),
    "counters/port_rcv_data": Counter(RECEIVED, scale=4, bits=64),
    "counters/port_xmit_wait": Counter(WAIT),
    **{f"counters/{name}": Counter(ERRORS, (name,)) for name in _PORT_ERRORS},
    **{f"hw_counters/{name}": Counter(ERRORS, (name,)) for name in _HARDWARE_ERRORS},
    **{f"hw_counters/{name}": Counter(CONGESTION, (name,)) for name in _CONGESTION},
    # EFA has no counters/ and counts in bytes.
    "hw_counters/tx_bytes": Counter(SENT, bits=64),
    "hw_counters/rx_bytes": Counter(RECEIVED, bits=64),
}
"""File of a port to its series; a port has those of them that its driver provides."""

_LINK_DOWNED = "counters/link_downed"


def parse_state(text: str) -> int:
    """The number in "4: ACTIVE". Raises ValueError."""
    return int(text.partition(":")[0])


def parse_rate(text: str) -> float:
    """Bytes per second from "400 Gb/sec (4X NDR)". Raises ValueError."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text, re.ASCII)
    if match is None:
        raise ValueError(f"not a rate: {text[:40]!r}")
    return float(match[1]) * 1e9 / 8


def read_port(folder: Path) -> PortReading:
    """Read a port's folder. Files that are not there, vanish meanwhile or refuse to be read are left out."""
    port = str(folder)
    counters = {}
    for group in ("counters", "hw_counters"):
        for name in (f"{group}/{file}" for file in _names(f"{port}/{group}")):
            if name in FILES and (text := _text(f"{port}/{name}")).isdecimal():
                counters[name] = int(text)
    state = _parsed(parse_state, f"{port}/state")
    linked = state in (ACTIVE, ACTIVE_DEFER)
    return PortReading(
        ACTIVE if linked else state,
        _parsed(parse_state, f"{port}/phys_state"),
        _parsed(parse_rate, f"{port}/rate") if linked else None,
        counters,
    )


def _parsed(parse: Callable[[str], N], file: str) -> N | None:
    try:
        return parse(_text(file))
    except ValueError:
        return None


def _text(file: str | Path) -> str:
    """What is in a small file, "" if it cannot be read: some drivers list counters that they then refuse."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 4096).decode("ascii", "replace").strip()
        finally:
            os.close(descriptor)
    except OSError:
        return ""


def _names(folder: str | Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # paths are slow to make
    except OSError:
        return []


class _Port:
    """What is remembered of a port from look to look. ``folder`` is ".../DEVICE/ports/PORT"."""

    def __init__(self, folder: Path) -> None:
        device = folder.parent.parent
        parent = (device / "device").resolve().name
        self.folder = folder
        self.link_layer = _text(folder / "link_layer") or "unknown"
        about = (
            self.link_layer,
            _text(device / "fw_ver"),
            _text(device / "board_id"),
            bus_id(parent) if re.fullmatch(ADDRESS, parent) else "",
        )
        self.link = LinkHistory()
        self.labels = (device.name, folder.name)
        self._info = Sample(INFO, 1, (*self.labels, *about))
        self._totals = MonotonicCounter()

    def look(self, now: float) -> tuple[list[Sample], list[Happening]]:
        """Read the port at the monotonic second ``now``."""
        reading = read_port(self.folder)
        totals = {name: self._totals.add(name, raw, bits=FILES[name].bits) for name, raw in reading.counters.items()}
        happened = self.link.update(reading, totals.get(_LINK_DOWNED), now)
        return [self._info, *self._samples(reading, totals)], happened

    def gone(self, now: float) -> tuple[list[Sample], list[Happening]]:
        """Take in that the port is not there."""
        return [Sample(STATE, 0, self.labels)], self.link.gone(now)

    def _samples(self, reading: PortReading, totals: Mapping[str, int]) -> Iterator[Sample]:
        for metric, value in ((STATE, reading.state), (PHYSICAL_STATE, reading.physical_state), (RATE, reading.rate)):
            if value is not None:
                yield Sample(metric, value, self.labels)
        for name, total in totals.items():
            metric, extra, scale, _ = FILES[name]
            yield Sample(metric, total * scale, (*self.labels, *extra))


class InfinibandSettings(CollectorSettings):
    """State and counters of InfiniBand, RoCE and EFA ports."""

    root: AnyPath = Field(default=Path("/sys/class/infiniband"), description="Folder with one folder per RDMA device.")
    interval_s: float = Field(default=2.0, ge=0, le=3600, description="Seconds between two looks at the ports.")
    expect: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[("mlx5_0", "mlx5_1")],
        description="Ports that must have a link, as DEVICE or DEVICE/PORT; * and [0-7] are wildcards. By default "
        "those whose peers have one.",
    )
    expect_gbps: float = Field(
        default=0.0, ge=0, examples=[400.0], description="Rate in Gbit/s that these ports must have; 0: that of peers."
    )
    leave_out: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[("mlx5_bond_*",)],
        description="Ports that are not looked at, written alike.",
    )


def chosen(port: tuple[str, str], patterns: Sequence[str]) -> bool:
    """Whether one of ``patterns`` (DEVICE or DEVICE/PORT, with wildcards) names the port."""
    return any(fnmatchcase("/".join(port) if "/" in pattern else port[0], pattern) for pattern in patterns)


class InfinibandCollector:
    """The RDMA ports below ``root``, ``max_ports`` at most. ``clock`` is monotonic, ``wall`` since the epoch.

    The firmware of the adapter answers for each of some fifty files a port, so not every second by default.
    """

    name = "infiniband"
    metrics = METRICS

    def __init__(
        self,
        root: Path = Path("/sys/class/infiniband"),
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        max_ports: int = 64,
        settings: InfinibandSettings | None = None,
    ) -> None:
        self._settings = settings or InfinibandSettings()
        self.interval_s = self._settings.interval_s
        self._root = root
        self._clock = clock
        self._wall = wall
        self._max_ports = max_ports
        self._ports: dict[str, _Port] = {}

    def collect(self) -> Reading | NoData:
        """Read every port once. A port that was there before and is gone has the state 0."""
        found = self._find()
        for path in found:
            if path not in self._ports and len(self._ports) < self._max_ports:
                self._ports[path] = _Port(Path(path))
        samples = list(self._expected())
        if not self._ports and not samples:
            return NoData("no InfiniBand, RoCE or EFA device on this node")
        now, wall = self._clock(), self._wall()
        events: list[Event] = []
        for path, port in self._ports.items():
            read, happened = port.look(now) if path in found else port.gone(now)
            samples += read
            samples.append(Sample(FLAPS, port.link.flaps, port.labels))
            events += (_event(port, wall, happening) for happening in happened)
        return Reading(tuple(samples), tuple(events))

    def _find(self) -> list[str]:
        devices = [(name, f"{self._root}/{name}/ports") for name in _names(self._root)]
        out = self._settings.leave_out
        return [f"{ports}/{port}" for name, ports in devices for port in _names(ports) if not chosen((name, port), out)]

    def _expected(self) -> Iterator[Sample]:
        """What the settings expect; a port that they name in full and that has never been there has the state 0."""
        rate, there = self._settings.expect_gbps * 1e9 / 8, [port.labels for port in self._ports.values()]
        for port in there:
            if chosen(port, self._settings.expect):
                yield Sample(EXPECTED, rate, port)
        for pattern in self._settings.expect:
            if not set("*?[") & set(pattern) and not any(chosen(port, (pattern,)) for port in there):
                device, _, number = pattern.partition("/")
                yield Sample(EXPECTED, rate, (device, number or "1"))
                yield Sample(STATE, 0, (device, number or "1"))


def _event(port: _Port, wall: float, happening: Happening) -> Event:
    device, number = port.labels
    data = {"device": device, "port": number, "link_layer": port.link_layer, **happening.data}
    return Event(happening.kind, wall, f"port {number} of {device} {happening.what}", data)


COLLECTOR = Plugin(
    "infiniband",
    InfinibandSettings,
    lambda settings, _context: InfinibandCollector(settings.root, settings=settings),
    LABELS,
    witness=True,
)
