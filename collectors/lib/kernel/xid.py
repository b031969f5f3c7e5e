"""NVIDIA's Xid and SXid errors as the driver writes them into the kernel log, each counted once.

Formats are those of krcReportXid and NVSWITCH_PRINT_SXID in NVIDIA's open kernel modules.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from opsd.collectors.base import Event, Metric, Sample
from opsd.collectors.lib.kernel.xid_catalogue import XidAction, decode
from opsd.collectors.lib.pci import ADDRESS, bus_id

FALLEN_OFF_THE_BUS: Final = 79
RECOVERY_ACTION_CHANGED: Final = 154

COUNTED: Final = (
    8, 13, 31, 32, 43, 45, 46, 48, 62, 63, 64, 69, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 137, 140, 143, 154,
    156, 158, 171, 172,
)  # fmt: skip
"""Codes with a series of their own; all others are counted together as "other". A bounded set is what lets every
counter stand at 0 from the start, without which increase() misses the first error of its kind."""

_MAX_REMEMBERED: Final = 1000

_DRIVER_VERDICTS: Final = (
    XidAction.NONE,
    XidAction.RESET_GPU,
    XidAction.REBOOT_NODE,
    XidAction.DRAIN_P2P,
    XidAction.DRAIN_AND_RESET,
    XidAction.RECOVER_IMEX_DOMAIN,
)
"""By number: NV2080_CTRL_GPU_RECOVERY_ACTION. The names in the text differ between drivers, the numbers do not."""

TOTAL = Metric("opsd_xid_total", "Xid errors of the GPU.", "counter", labels=("pci_bus_id", "code"), kept=False)
LABELS: Final = {
    "code": "30 Xids with a series of their own, and other",
}

_XID = re.compile(
    rf"NVRM: Xid \((?:PCI:)?(?P<pci>{ADDRESS})(?: (?P<mig>GPU-I[^)]*))?\):"
    r" (?P<code>\d{1,4}), ?(?:pid='?(?P<pid>\d+|<unknown>)'?, (?:name=(?P<process>.*?), )?)?(?P<detail>.*)",
    re.DOTALL | re.ASCII,
)
_FALLEN = re.compile(
    rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?(?P<pci>{ADDRESS})\b.{{0,200}}?fallen off the bus", re.DOTALL
)
_VERDICT = re.compile(
    r"recovery action changed from 0x[0-9a-f]+ \(.*?\) to 0x(?P<number>[0-9a-f]+) \((?P<text>[^)]*)\)"
)
_CAUSE = re.compile(r"caused by previous Xid (\d+)")
_SXID = re.compile(
    rf"nvidia-\w+: SXid \((?:PCI:)?(?P<pci>{ADDRESS})\):"
    r" (?P<code>\d{1,6}), (?!Data \{|Severity \d)(?:(?P<severity>Fatal|Non-fatal|Correctable), )?"
    r"(?:Link (?P<link>\d+) )?(?P<detail>.*)",
    re.DOTALL | re.ASCII | re.IGNORECASE,
)


class Xid(NamedTuple):
    """One Xid. ``pid`` is None if the driver did not know; ``verdict`` is the driver's own, from Xid 154's text."""

    code: int
    pci_bus_id: str
    pid: int | None = None
    process: str = ""
    detail: str = ""
    mig: str = ""
    verdict: str = ""
    caused_by: int | None = None
    inferred: bool = False

    @property
    def action(self) -> str:
        """What it calls for; the driver's own verdict supersedes the catalogue."""
        return self.verdict or decode(self.code, self.detail).action


class Sxid(NamedTuple):
    """One SXid of an NVSwitch; ``severity`` is fatal, non_fatal, correctable or unknown."""

    code: int
    pci_bus_id: str
    severity: str
    link: int | None
    detail: str


def parse_xid(message: str) -> Xid | None:
    """The Xid in a message of the kernel log, or None.

    A line that was cut off inside its number is None, not another code. "Fallen off the bus" without a number is
    Xid 79, marked as inferred.
    """
    if (match := _XID.match(message)) is None:
        fallen = _FALLEN.match(message)
        return None if fallen is None else Xid(FALLEN_OFF_THE_BUS, bus_id(fallen["pci"]), inferred=True)
    code, detail = int(match["code"]), match["detail"].strip()
    cause = _CAUSE.search(detail)
    return Xid(
        code=code,
        pci_bus_id=bus_id(match["pci"]),
        pid=int(match["pid"]) if (match["pid"] or "").isdecimal() else None,
        process=(match["process"] or "").replace("<unknown>", ""),
        detail=detail,
        mig=match["mig"] or "",
        verdict=_driver_verdict(detail) if code == RECOVERY_ACTION_CHANGED else "",
        caused_by=int(cause[1]) if cause else None,
    )


def _driver_verdict(detail: str) -> str:
    match = _VERDICT.search(detail)
    if match is None:
        return ""
    number = int(match["number"], 16)
    return _DRIVER_VERDICTS[number] if number < len(_DRIVER_VERDICTS) else match["text"].lower().replace(" ", "_")


def parse_sxid(message: str) -> Sxid | None:
    """The SXid in a message of the kernel log, or None, also for the lines of data that follow each SXid."""
    match = _SXID.match(message)
    if match is None:
        return None
    return Sxid(
        code=int(match["code"]),
        pci_bus_id=bus_id(match["pci"]),
        severity=(match["severity"] or "unknown").lower().replace("-", "_"),
        link=int(match["link"]) if match["link"] else None,
        detail=match["detail"].strip(),
    )


def xid_event(
    xid: Xid, *, at: float, source: str, count: int = 1, where: Mapping[str, object] = MappingProxyType({})
) -> Event:
    """The event of an Xid; the same from every source.

    ``at`` is in wall seconds, ``count`` how often it was seen. ``where`` has the GPU's index as "gpu", its "uuid", and
    the "job" of the process, as far as the source knows them.
    """
    description = decode(xid.code, xid.detail).description
    who = f" by {xid.process or 'pid'} {xid.pid}" if xid.pid is not None else ""
    data: dict[str, object] = {
        "code": xid.code,
        "pci_bus_id": xid.pci_bus_id,
        "action": str(xid.action),
        "description": description,
        "pid": xid.pid,
        "process": xid.process,
        "detail": xid.detail,
        "mig": xid.mig,
        "verdict": str(xid.verdict),
        "caused_by": xid.caused_by,
        "caused_by_action": str(decode(xid.caused_by, "").action) if xid.caused_by is not None else "",
        "inferred": xid.inferred,
        "source": source,
        "count": count,
        **where,
    }
    what = " ".join(xid.detail.split()) or description
    return Event("xid", at, f"Xid {xid.code} on {xid.pci_bus_id}{who}: {what}"[:256], data)


class XidLedger:
    """The Xids of this node counted once each, whichever source reports them first.

    An Xid is the same as the last counted one if that has the same code and GPU, came from another source and is not
    more than ``window_s`` away. Used from the threads of several collectors.

    ``kernel_log`` is True while the kernel log is being read. It tells more of an Xid than the driver's own events do
    (process, link, verdict), so other sources then wait a little for it to be first. Codes in ``ignored`` are
    counted only.
    """

    def __init__(self, *, window_s: float = 10.0, max_gpus: int = 32) -> None:
        self._window_s = window_s
        self._max_gpus = max_gpus
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int], tuple[float, str]] = {}
        self._newest: dict[str, int] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._samples: tuple[Sample, ...] | None = None
        self.kernel_log = False
        self.ignored: frozenset[int] = frozenset()

    def report(self, code: int, pci: str, *, at: float, source: str) -> bool:
        """Count an Xid seen at the wall second ``at``. True if it is to be reported, and not by another source."""
        with self._lock:
            last_at, last_source = self._last.get((pci, code), (float("-inf"), source))
            if last_source != source and abs(at - last_at) <= self._window_s:
                return False
            if len(self._last) >= _MAX_REMEMBERED:
                self._last.clear()
            self._last[pci, code] = at, source
            self._gpu(pci)[str(code) if code in COUNTED else "other"] += 1
            self._samples = None
            if pci in self._counts:
                self._newest[pci] = code
            return code not in self.ignored

    def newest(self, pci: str) -> int:
        """The code of the last Xid counted for the GPU, 0 if there was none."""
        return self._newest.get(pci, 0)

    def expect(self, gpus: Iterable[str]) -> None:
        """Have a series at 0 for each code of these GPUs, whichever source knows of them."""
        with self._lock:
            for pci in gpus:
                self._gpu(pci)

    def samples(self) -> tuple[Sample, ...]:
        """``opsd_xid_total`` of every code for every GPU that is expected or had an Xid."""
        with self._lock:
            if self._samples is None:
                counts = self._counts.items()
                self._samples = tuple(Sample(TOTAL, n, (pci, code)) for pci, of in counts for code, n in of.items())
            return self._samples

    def _gpu(self, pci: str) -> dict[str, int]:
        if pci not in self._counts and len(self._counts) >= self._max_gpus:
            pci = "other"
        if pci not in self._counts:
            self._counts[pci] = dict.fromkeys((*map(str, COUNTED), "other"), 0)
            self._samples = None
        return self._counts[pci]
