"""Xids and SXids: NVIDIA's catalogue, and what the driver writes.

NVIDIA's Xid catalogue: what each code means and calls for, and what the registers of NVLink errors add to that.

Actions follow the immediate resolutions of the catalogue for Hopper
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html); the bits are those of its workflows for NVLink errors.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from opsd.collectors.base import Event, Metric, Sample
from opsd.collectors.lib.pci import ADDRESS, bus_id


class XidAction(StrEnum):
    """What an Xid calls for. NVIDIA's names: RESTART_BM is ``reboot_node``, UPDATE_SWFW ``update_software``."""

    NONE = "none"
    IGNORE = "ignore"
    RESTART_APP = "restart_app"
    RESET_GPU = "reset_gpu"
    DRAIN_P2P = "drain_p2p"
    DRAIN_AND_RESET = "drain_and_reset"
    RECOVER_IMEX_DOMAIN = "recover_imex_domain"
    RESTART_VM = "restart_vm"
    REBOOT_NODE = "reboot_node"
    CHECK_MECHANICALS = "check_mechanicals"
    UPDATE_SOFTWARE = "update_software"
    WORKFLOW = "workflow"
    CONTACT_SUPPORT = "contact_support"


class XidInfo(NamedTuple):
    """A row of the catalogue."""

    action: XidAction
    description: str


_ROWS: Final[tuple[tuple[tuple[int, ...], XidAction, str], ...]] = (
    ((8,), XidAction.RESTART_APP, "the GPU stopped processing a channel"),
    ((11, 25, 32), XidAction.RESTART_APP, "invalid or corrupted commands in a push buffer"),
    ((13,), XidAction.RESTART_APP, "exception in a kernel: out-of-range address, illegal instruction or the like"),
    ((31,), XidAction.RESTART_APP, "page fault: access to an address that is not mapped"),
    ((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), XidAction.RESTART_APP, "copy engine error"),
    ((60,), XidAction.RESTART_APP, "security engine error"),
    ((68, 83, 84, 88, 89, 96, 97, 98), XidAction.RESTART_APP, "video decoder error"),
    ((69,), XidAction.RESTART_APP, "compute engine rejected a method"),
    ((80,), XidAction.RESTART_APP, "commands arrived corrupted at the GPU"),
    ((82, *range(99, 106)), XidAction.RESTART_APP, "JPEG decoder error"),
    ((86, 139), XidAction.RESTART_APP, "optical flow engine error"),
    ((94,), XidAction.RESTART_APP, "uncorrectable memory error, contained to the application that hit it"),
    ((14,), XidAction.IGNORE, "driver test event"),
    ((37, 38, 66, 67), XidAction.IGNORE, "context-switch firmware reported an error of the driver"),
    ((43,), XidAction.IGNORE, "the application's channel was reset after its own fault"),
    ((44,), XidAction.IGNORE, "fault during a context switch"),
    ((63,), XidAction.IGNORE, "memory row remapped, or its remapping recorded"),
    ((92,), XidAction.IGNORE, "high rate of corrected memory errors"),
    ((93,), XidAction.IGNORE, "the board's configuration memory was written more often than planned"),
    ((106, 107), XidAction.IGNORE, "test message of the management bus"),
    ((108, 137), XidAction.IGNORE, "access over NVLink refused; often the echo of a fault on a peer GPU"),
    ((121,), XidAction.IGNORE, "corrected error on the chip-to-chip link"),
    ((141,), XidAction.IGNORE, "CUDA fast-path error"),
    ((152, 153), XidAction.IGNORE, "deep-learning accelerator error"),
    ((157,), XidAction.IGNORE, "a faulty resource could not be retired"),
    ((160, 161), XidAction.IGNORE, "memory channel retirement"),
    ((46,), XidAction.RESET_GPU, "the GPU stopped processing"),
    ((62, 169), XidAction.RESET_GPU, "an internal microcontroller halted"),
    ((64,), XidAction.RESET_GPU, "a memory row could not be remapped"),
    ((95,), XidAction.RESET_GPU, "uncorrectable memory error that may have reached other applications"),
    ((109,), XidAction.RESET_GPU, "context switch timed out"),
    ((110,), XidAction.RESET_GPU, "security fault"),
    ((119,), XidAction.RESET_GPU, "the GPU system processor (GSP) does not answer the driver"),
    ((120,), XidAction.RESET_GPU, "the GPU system processor (GSP) failed"),
    ((136,), XidAction.RESET_GPU, "NVLink training failed"),
    ((140,), XidAction.RESET_GPU, "unrecovered ECC error"),
    ((143,), XidAction.RESET_GPU, "the GPU could not be initialised"),
    ((155,), XidAction.RESET_GPU, "NVLink went down"),
    ((156,), XidAction.RESET_GPU, "a faulty resource is retired at the next reset"),
    ((158, 167), XidAction.RESET_GPU, "fatal timeout inside the GPU or on PCIe"),
    ((79,), XidAction.REBOOT_NODE, "the GPU has fallen off the PCIe bus"),
    ((151,), XidAction.RESTART_VM, "confidential-computing key rotation failed"),
    ((54,), XidAction.CHECK_MECHANICALS, "auxiliary power is not connected"),
    ((78,), XidAction.UPDATE_SOFTWARE, "a virtual GPU could not be started"),
    ((45,), XidAction.WORKFLOW, "channels removed because of an earlier error or because the application was killed"),
    ((48, 171, 172), XidAction.RESET_GPU, "uncorrectable ECC error"),
    ((74,), XidAction.WORKFLOW, "NVLink error"),
    (tuple(range(144, 151)), XidAction.WORKFLOW, "NVLink 5 error"),
    ((154,), XidAction.WORKFLOW, "the driver changed what it asks for to recover"),
    ((159,), XidAction.WORKFLOW, "error on the coherent link to the processor"),
    ((162, 163), XidAction.IGNORE, "power smoothing was switched on or off"),
    ((164,), XidAction.IGNORE, "the hardware that smooths power is near the end of its life"),
    ((165,), XidAction.CONTACT_SUPPORT, "the hardware that smooths power has reached the end of its life"),
    ((166, 170), XidAction.CONTACT_SUPPORT, "NVLink was used before its encryption was set up"),
    ((168,), XidAction.CONTACT_SUPPORT, "errors in protected memory: less of it can be used"),
    ((142,), XidAction.CONTACT_SUPPORT, "video encoder error"),
    (
        (
            *range(1, 8),
            9,
            10,
            12,
            *range(15, 25),
            *range(26, 31),
            *range(33, 37),
            42,
            47,
            *range(49, 54),
            *range(55, 60),
            61,
            65,
            73,
            81,
            87,
            90,
            91,
            *range(111, 119),
            *range(122, 126),
            138,
        ),
        XidAction.CONTACT_SUPPORT,
        "listed by NVIDIA without a meaning",
    ),
)

CATALOGUE: Final[Mapping[int, XidInfo]] = {
    code: XidInfo(action, description) for codes, action, description in _ROWS for code in codes
}
"""Xid to its action and meaning; what is not in it calls for NVIDIA's support."""

UNKNOWN: Final = XidInfo(XidAction.CONTACT_SUPPORT, "not in the catalogue")

_HARMLESS: Final = sum(1 << bit for bit in (0, 23, 30))
_PARITY_1: Final = sum(1 << bit for bit in (4, 5))
_PARITY_3: Final = sum(1 << bit for bit in (0, 1, 2, 6))
_SIGNAL: Final = sum(1 << bit for bit in (21, 22))
_LINK: Final = sum(1 << bit for bit in (8, 9, 12, 16, 17, 24, 28))
"""Bits of the first and the third register of Xid 74, by NVIDIA's workflow for NVLink errors."""

_ENDS_PROGRAM: Final = {"RLW_REMAP": 0x3F, "RLW_SRC_TRACK": 0x0C}
"""Units of NVLink 5 and the bits of their error status that end the program without being fatal for the link."""

_NVLINK = re.compile(r"link (?P<link>\d+) ?\((?P<registers>0x[0-9a-f]+(?:, ?0x[0-9a-f]+)*)\)", re.IGNORECASE)
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]*) +(?:Link +)?(?P<status>Non-?fatal|Fatal)\b.*?Link (?P<link>-?\d+)"
    r"(?: \(0x[0-9a-f]+ (?P<error>0x[0-9a-f]+))?",
    re.IGNORECASE,
)


def _nvlink(detail: str) -> XidInfo | None:
    """An error of NVLink 2 to 4, by the bits of its registers; Hopper fills the first, third, fourth and fifth."""
    if (match := _NVLINK.search(detail)) is None:
        return None
    registers = [int(register, 16) for register in match["registers"].split(",")]
    first, third = registers[0], registers[2] if len(registers) > 2 else 0
    link = f"NVLink error on link {int(match['link'])}"
    if first & _PARITY_1 or third & _PARITY_3:
        return XidInfo(XidAction.RESET_GPU, f"{link}: parity or ECC error in the GPU's link logic")
    if first & _SIGNAL:
        return XidInfo(XidAction.RESET_GPU, f"{link}: marginal signal; check the seating if it comes again")
    if first & _LINK:
        return XidInfo(XidAction.RESET_GPU, f"{link}: the link failed; check the seating if it comes again")
    if first and not first & ~_HARMLESS and not any(registers[1:]):
        return XidInfo(XidAction.IGNORE, f"{link}: status bits without a meaning of their own")
    return XidInfo(XidAction.WORKFLOW, f"{link}: registers that the catalogue does not explain")


def _nvlink5(detail: str) -> XidInfo | None:
    """An error of NVLink 5: it says itself whether it is fatal; some that are not end the program."""
    if (match := _NVLINK5.match(detail)) is None:
        return None
    unit = match["unit"].upper()
    what = f"NVLink 5 error on link {int(match['link'])}, {unit}"
    if match["status"].lower() == "fatal":
        return XidInfo(XidAction.RESET_GPU, f"{what}: fatal for the link")
    if int(match["error"] or "0", 16) & _ENDS_PROGRAM.get(unit, 0):
        return XidInfo(XidAction.RESTART_APP, f"{what}: the program's access was refused")
    return XidInfo(XidAction.IGNORE, f"{what}: not fatal")


_DECODERS: Final[Mapping[int, Callable[[str], XidInfo | None]]] = {
    74: _nvlink,
    **dict.fromkeys(range(144, 151), _nvlink5),
}


def decode(code: int, detail: str) -> XidInfo:
    """What an Xid with this text means: its registers, if it has any that the catalogue explains, else its code."""
    decoded = _DECODERS[code](detail) if code in _DECODERS else None
    return decoded or CATALOGUE.get(code, UNKNOWN)


# NVIDIA's Xid and SXid errors as the driver writes them into the kernel log, each counted once.
#
# Formats are those of krcReportXid and NVSWITCH_PRINT_SXID in NVIDIA's open kernel modules.


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
