"""The kernel log: its records, and the messages that tell of trouble.

Reading the kernel log: each record once, across restarts of the reader and reboots of the machine.

The format and the errors of reading are those of Documentation/ABI/testing/dev-kmsg in the kernel's source.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from opsd.collectors.lib.pci import ADDRESS, bus_id

KERNEL: Final = 0
"""The facility of the kernel's own messages; a process cannot write messages of this facility."""

MESSAGE_CHARS: Final = 1024
"""Longer messages are cut: it bounds the time that matching takes."""

_RECORD_BYTES: Final = 16 << 10
_HEAD_BYTES: Final = 128


class LogRecord(NamedTuple):
    """One record of the log. ``seconds`` are since boot; ``continued``: the text goes on from the record before."""

    facility: int
    sequence: int
    seconds: float
    continued: bool
    text: str


def parse_record(raw: bytes) -> LogRecord:
    """A record as read from /dev/kmsg. Raises ValueError if it is not one.

    The kernel escapes what is not printable. Line breaks are put back, everything else stays escaped.
    """
    head, separator, body = raw.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 4 or len(head) > _HEAD_BYTES:
        raise ValueError("not a record of the kernel log")
    line = body.partition(b"\n")[0][:MESSAGE_CHARS].decode("utf-8", "replace")
    if not line.isprintable():
        line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    continued = fields[3][:1] in (b"c", b"+")
    return LogRecord(int(fields[0]) >> 3, int(fields[1]), int(fields[2]) / 1e6, continued, line.replace("\\x0a", "\n"))


class Device(Protocol):
    """An open kernel log."""

    def read(self) -> bytes:
        """The next record. Raises BlockingIOError if there is none yet, BrokenPipeError if some were overwritten."""
        ...


class KernelLogDevice:
    """``/dev/kmsg``, open at its oldest record. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> bytes:
        if not (raw := os.read(self._descriptor, _RECORD_BYTES)):
            raise BlockingIOError("nothing more to read")
        return raw


class Position:
    """The sequence number of the last record read, kept in ``file`` with the boot it belongs to.

    ``sequence`` is None if nothing of this boot has been read. ``skip`` makes a first reader of this boot ignore
    existing records. After a reboot they are news. Without any position they are not, because the log may be weeks old.
    ``kept`` is False while the position cannot be written, and ``problem`` says why;
    that is not an error: a full disk must not blind us.
    """

    def __init__(self, file: Path | None, boot_id: str) -> None:
        self._file = file
        self._boot_id = boot_id
        self._written: int | None = None
        self.sequence: int | None = None
        self.skip = True
        self.kept = False
        self.problem = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self._load()

    def _load(self) -> None:
        if self._file is not None:
            state = json.loads(self._file.read_bytes())
            boot_id, sequence = str(state["boot_id"]), int(state["sequence"])
            self.skip = False
            self.sequence = sequence if boot_id == self._boot_id else None

    def advance(self, sequence: int) -> None:
        """Keep ``sequence`` as the last one read."""
        self.sequence = sequence
        if self._file is None or (self.kept and sequence == self._written):
            return
        draft = self._file.with_name(f".{self._file.name}.new")
        try:
            draft.unlink(missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                json.dump({"boot_id": self._boot_id, "sequence": sequence}, file)
            draft.replace(self._file)
        except OSError as error:
            self.kept, self.problem = False, f"{self._file} cannot be written: {error.strerror}"
        else:
            self.kept, self.problem, self._written = True, "", sequence


class KernelLog:
    """The records after ``last`` (None: all). ``overrun`` and ``malformed`` count what was lost."""

    def __init__(self, device: Device, last: int | None) -> None:
        self._device = device
        self.last = last
        self.drained = False
        self.overrun = 0
        self.malformed = 0

    def skip(self) -> None:
        """Pass over everything that is in the log now."""
        while not self.drained:
            for _ in self.read(1000):
                pass
        self.overrun = self.malformed = 0

    def read(self, limit: int) -> Iterator[LogRecord]:
        """Up to ``limit`` records. Afterwards ``drained`` says whether that was all. Raises OSError."""
        self.drained = False
        for _ in range(limit):
            record = self._next()
            if self.drained:
                return
            if record is not None:
                yield record

    def _next(self) -> LogRecord | None:
        """The next record that has not been read before; None if there is none yet or it is lost."""
        try:
            record = parse_record(self._device.read())
            while self.last is not None and record.sequence <= self.last:
                record = parse_record(self._device.read())
        except BlockingIOError:
            self.drained = True
            return None
        except BrokenPipeError:
            return None  # the gap in the sequence will say how many are gone
        except ValueError:
            self.malformed += 1
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.malformed += 1  # longer than any record should be; the kernel has passed over it
            return None
        if self.last is not None:
            self.overrun += record.sequence - self.last - 1
        self.last = record.sequence
        return record


# What the kernel says about trouble other than Xids: one row per kind of message, and a pure function over the rows.
#
# Where the kernel writes several lines about one event, the row matches the line that comes once.


_DEVICE = r"(?P<device>[^\s,:)\]]+)"
_PCI = rf"(?P<pci_bus_id>{ADDRESS})"
_DRIVER = r"(?:[\w.-]+ )?"
_NUMBERS = frozenset({"pid", "uid", "cpu", "bank", "errors", "sector", "seconds", "anon_rss_kib"})


class Rule(NamedTuple):
    """Messages that contain ``literal`` and begin with ``pattern`` are of ``kind``; its groups become the event's data.

    ``data`` is added to it. ``literal`` is there for speed: most messages contain none.
    """

    kind: str
    literal: str
    pattern: re.Pattern[str]
    data: Mapping[str, object]


def _rule(kind: str, literal: str, pattern: str, **data: object) -> Rule:
    return Rule(kind, literal, re.compile(pattern, re.ASCII | re.DOTALL), data)


_GPU = (
    _rule("gpu_driver_loaded", "NVRM: loading", r"NVRM: loading NVIDIA .*?(?P<version>\d+\.\d+(?:\.\d+)?)\b"),
    _rule("gpu_init_failed", "RmInitAdapter", rf"NVRM: (?:GPU {_PCI}: )?RmInitAdapter failed!? ?\(?(?P<status>[^)]*)"),
    _rule(
        "gpu_init_failed",
        "failed with error",
        rf"nvidia(?:: probe of)? {_PCI}:?(?: probe with driver nvidia)? failed with error (?P<status>-\d+)",
    ),
    _rule(
        "gpu_firmware_silent",
        "heartbeat timed out",
        r"NVRM: (?:GPU(?P<instance>\d+) )?_kgspRpcRecvPoll: .*?(?P<cause>heartbeat timed out)",
    ),
    _rule(
        "gpu_firmware_silent",
        "probably locked",
        r"NVRM: (?:GPU(?P<instance>\d+) )?krcWatchdog\w*: .*?(?P<cause>GPU is probably locked)",
    ),
    _rule(
        "gpu_driver_fatal",
        "global fatal error",
        r"NVRM: (?:\w+: )?(?P<cause>uvm encountered a? ?global fatal error 0x[0-9a-f]+), requiring (?P<asks>os reboot)",
    ),
    _rule(
        "gpu_driver_fatal",
        "NV_ERR_RESET_REQUIRED]",
        r"NVRM: nv(?:Assert|Check)\w*: .*?failed: (?P<asks>Reset required) \[(?P<cause>NV_ERR_RESET_REQUIRED)\]",
    ),
    _rule(
        "peermem_error",
        "nv_get_p2p_free_callback",
        r"(?:nvidia-peermem|nv_mem) nv_get_p2p_free_callback:\d+ .*?(?P<cause>invalid \w+)",
    ),
    _rule(
        "peermem_error",
        "symbol ib_",
        r"(?:nvidia_peermem|nv_peer_mem): (?P<cause>disagrees about version of symbol|Unknown symbol)",
    ),
)
_PROCESSES = (
    _rule(
        "oom_kill",
        "Killed process",
        r"(?:(?P<scope>Memory cgroup out of memory|Out of memory).*?: )?Killed process (?P<pid>\d+),? "
        r"(?:UID \d+, )?\((?P<process>.*?)\)(?=,? total-vm|,? UID|\.?$)"
        r"(?:.*?anon-rss:(?P<anon_rss_kib>\d+)kB)?(?:.*? UID:(?P<uid>\d+))?",
    ),
    _rule(
        "hung_task",
        " for more than ",
        r"INFO: task (?P<process>.*):(?P<pid>\d+) .*?blocked (?:in I/O wait )?for more than (?P<seconds>\d+) seconds",
    ),
    _rule(
        "segfault",
        "segfault at",
        r"^(?P<process>.*?)\[(?P<pid>\d+)\]: segfault at .*?(?: in (?P<library>[^\s\[]+))?(?:\[|$)",
    ),
    _rule("segfault", "traps: ", r"^traps: (?P<process>.*?)\[(?P<pid>\d+)\] (?P<trap>general protection|trap [a-z ]+)"),
)
_OOPSES = (
    _rule(
        "kernel_oops",
        "BUG: ",
        r"BUG: (?:unable to handle )?(?:kernel )?(?P<cause>NULL pointer dereference|page fault|paging request)\b",
    ),
    _rule(
        "kernel_oops",
        "Unable to handle kernel",
        r"Unable to handle kernel (?P<cause>NULL pointer dereference|paging request|access to user memory)\b",
    ),
    _rule(
        "kernel_oops",
        " [#",
        r"(?:Oops: )?(?P<cause>general protection fault|divide error|stack segment|double fault)\b"
        r"[^\[]*: [0-9a-f]{4} \[#\d+\]",
    ),
    _rule("kernel_oops", "kernel BUG at", r"kernel BUG at (?P<cause>\S+:\d+)!"),
    _rule("kernel_oops", "BUG: Bad page", r"BUG: (?P<cause>Bad page (?:state|map)) in process "),
    _rule(
        "kernel_task",
        " Comm: ",
        r"CPU: (?P<cpu>\d+) (?:UID: \d+ )?PID: (?P<pid>\d+) Comm: (?P<process>.{0,15}?) "
        r"(?:Kdump: |Tainted: |Not tainted)",
    ),
    _rule(
        "clock_unstable",
        "Marking clocksource",
        r"(?:clocksource: )?timekeeping watchdog(?: on CPU\d+)?: Marking clocksource '(?P<device>[\w-]+)' as unstable",
    ),
    _rule("clock_unstable", "unstable (delta", r"Clocksource (?P<device>[\w-]+) unstable \(delta = "),
    _rule("clock_unstable", "check_tsc_sync", r"(?:tsc: )?Marking TSC unstable due to check_tsc_sync", device="tsc"),
)
"""An oops names the process that it has ended a few lines later, as other dumps of the kernel name theirs."""

_MACHINE_CHECK = (
    r"(?:mce: )?(?:\[Hardware Error\]: )?CPU (?P<cpu>\d+): Machine Check(?: Exception)?: \w+ "
    r"Bank (?P<bank>\d+): (?:0x)?"
)
"""The status follows: 64 bits in hexadecimal digits. Bit 61 is set if the error was not corrected."""

_THERMAL = r"(?:mce: )?CPU(?P<cpu>\d+): (?:Core|Package) temperature "
"""Kernels from 5.6 on add "is" and write it only while the average of some seconds is rising."""

_RECORD = r"(?:\{(?P<record>\d+)\})?\[Hardware Error\]: "
"""The lines of one record of the firmware have the same number."""

_PROCESSORS = (
    _rule("mce", "Machine Check", rf"{_MACHINE_CHECK}[2367abef]", severity="Uncorrected"),
    _rule("mce", "Machine Check", _MACHINE_CHECK, severity="Corrected"),
    _rule("mce", "hardware memory error", r"(?:mce: )?(?P<severity>Uncorrected) hardware memory error in user-access"),
    _rule("mce", "Machine check events logged", r"mce: "),
    _rule(
        "mce",
        "[Hardware Error]",
        r"(?:mce: )?\[Hardware Error\]: (?P<severity>Corrected|Uncorrected|Deferred)(?: error|, )",
    ),
    _rule(
        "mce",
        "event severity",
        rf"{_RECORD}event severity: (?P<severity>corrected|recoverable|fatal)",
    ),
    _rule(
        "mce",
        "Memory failure:",
        r"Memory failure: 0x[0-9a-f]+: recovery action for .*: (?P<outcome>\w+)",
        severity="Uncorrected",
    ),
    _rule(
        "mce",
        "hardware memory corruption",
        r"Memory failure: 0x[0-9a-f]+: (?:Sending SIGBUS to|Killing) (?P<process>.*):(?P<pid>\d+) due to",
        severity="Uncorrected",
    ),
    _rule("edac", "EDAC", r"EDAC (?P<controller>\w+): (?P<errors>\d+) (?P<severity>CE|UE)\b.*? on (?P<location>[^(]*)"),
    _rule(
        "cpu_lockup",
        "soft lockup",
        r"(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#(?P<cpu>\d+) stuck for (?P<seconds>\d+)s"
        r"(?:! \[(?P<process>.*):(?P<pid>\d+)\])?",
        lockup="soft",
    ),
    _rule(
        "cpu_lockup",
        "hard LOCKUP",
        r"(?:(?:NMI )?watchdog: )?(?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu (?P<cpu>\d+)",
        lockup="hard",
    ),
    _rule(
        "cpu_lockup",
        "rcu",
        r"(?:rcu: )?INFO: \w+ (?:self-)?detected (?:expedited )?stalls? on CPU",
        lockup="rcu",
    ),
    _rule("cpu_throttled", "is above threshold", rf"{_THERMAL}is above threshold", lasting=True),
    _rule("cpu_throttled", "above threshold", rf"{_THERMAL}above threshold", lasting=False),
)
_EFA = rf"(?:efa {_PCI}|infiniband (?P<device>(?:rdmap|efa_)\w+)): "
"""The driver of AWS names its device in one of two ways; that of its Ethernet adapters uses the same words."""

_OPTIONAL = r"(?!.*\((?:DISCARD|SECURE_ERASE|WRITE_ZEROES|WRITE_SAME)\))"
"""Not an operation that a drive need not have: some refuse it with a plain I/O error. NVMe numbers them 8 and 9."""

_DEVICES = (
    _rule("nvme_error", "nvme", rf"nvme {_DEVICE}: I/O .*timeout, (?P<outcome>completion polled|\w+(?: controller)?)"),
    _rule(
        "nvme_error",
        "nvme",
        rf"nvme {_DEVICE}: (?P<outcome>controller is down; will reset|Disabling device after reset failure"
        r"|Device not ready; aborting \w+|Removing after probe failure|frozen state error detected"
        r"|resetting controller due to AER)",
    ),
    _rule("nvme_error", "no available path", rf"block {_DEVICE}: (?P<outcome>no available path)"),
    _rule(
        "io_error",
        " error, dev ",
        rf"(?:\w+: )?(?P<cause>I/O{_OPTIONAL}|critical medium|timeout|recoverable transport|protection|device offline) "
        rf"error, dev {_DEVICE}, sector (?P<sector>\d+)",
    ),
    _rule(
        "io_error",
        "I/O Error (sct",
        r"(?P<device>nvme\w+): (?!I/O Cmd\(0x[89]\)).*?LBA (?P<sector>\d+).*I/O Error",
    ),
    _rule("io_error", "(sct 0x2 / sc 0x8", r"(?P<device>nvme\w+): .*?LBA (?P<sector>\d+).*\(sct 0x2 / sc 0x8[0-4]\)"),
    _rule(
        "io_error",
        "beyond end of device",
        r"(?:.{1,15}: )?attempt to (?P<cause>access beyond end of device)\s+(?P<device>[^\s:]+): rw=",
    ),
    _rule("io_error", ", want=", rf"{_DEVICE}: rw=\d+, want=\d+, limit=", cause="access beyond end of device"),
    _rule(
        "raid_failed",
        "Disk failure on",
        r"md/raid\w*:?(?P<device>md\w+): Disk failure on (?P<disk>[\w-]+)(?: detected)?, "
        r"(?P<outcome>failing array|disabling device)",
    ),
    _rule(
        "controller_error",
        "_cm",
        r"(?P<device>mpt[23]sas_cm\d+): (?P<outcome>SAS host is non-operational|fault_state\(0x[0-9a-f]+\))",
    ),
    _rule(
        "controller_error",
        "FAULT state",
        rf"megaraid_sas {_PCI}: (?:Found )?(?P<outcome>FW in FAULT state)",
        device="megaraid_sas",
    ),
    _rule(
        "controller_error",
        "offline",
        rf"(?P<device>smartpqi {ADDRESS}): (?P<outcome>controller (?:is )?offline)",
    ),
    _rule(
        "raid_failed",
        "Cannot continue",
        r"md/raid\w*:?(?P<device>md\w+): (?P<outcome>Cannot continue operation(?: \(\d+/\d+ failed\))?)",
    ),
    _rule("io_error", "Buffer I/O error", rf"Buffer I/O error on dev(?:ice)? {_DEVICE}, logical block"),
    _rule(
        "pcie_error",
        "Bus Error: severity=",
        rf"{_DRIVER}{_PCI}: .*?Bus Error: severity=(?P<severity>\w+(?: \([\w-]+\))?), type=(?P<layer>[\w ]+)",
    ),
    _rule(
        "pcie_error",
        "AER: ",
        rf"{_DRIVER}{_PCI}: AER: (?P<outcome>[Dd]evice recovery failed|subordinate device reset failed)",
    ),
    _rule("pcie_unrecoverable", "can't recover", rf"{_DRIVER}{_PCI}: AER: can't recover \((?P<cause>[^)]*)"),
    _rule("pcie_error", "DPC: ", rf"{_DRIVER}{_PCI}: DPC: (?P<outcome>containment event)"),
    _rule(
        "iommu_fault",
        "DMAR:",
        r"DMAR: ?\[DMA (?P<access>Read|Write)(?: NO_PASID)?\] Request device "
        r"\[(?:0x)?(?P<bus>[0-9a-f]{2}):(?:0x)?(?P<slot>[0-9a-f]{2}\.[0-7])\]",
    ),
    _rule(
        "iommu_fault",
        "IO_PAGE_FAULT",
        rf"(?:{_DRIVER}{_PCI}: )?AMD-Vi: Event logged \[IO_PAGE_FAULT "
        rf"(?:device=(?:(?P<at>{ADDRESS})|(?P<bus>[0-9a-f]{{2}}):(?P<slot>[0-9a-f]{{2}}\.[0-7])) )?",
    ),
    _rule("iommu_fault", " client: ", rf"arm-smmu-v3 {_DEVICE}: event: (?P<access>\w+) client: {_PCI} "),
    _rule("iommu_fault", "event 0x1", rf"arm-smmu-v3 {_DEVICE}: event 0x1[0-3] received"),
    _rule("iommu_fault", "context fault", rf"arm-smmu {_DEVICE}: Unhandled context fault: fsr="),
    _rule(
        "pcie_error",
        "power state",
        rf"(?:nvidia|mlx5_core|nvme|bnxt_en) {_PCI}: (?:Refused to change power state, (?P<outcome>currently in D3)"
        r"|can't change power state from \S+ to D0 \((?P<refused>config space inaccessible)\))",
    ),
    _rule(
        "pcie_error",
        "device inaccessible",
        rf"{_DRIVER}{_PCI}: Unable to change power state from \S+ to D0, (?P<outcome>device inaccessible)",
    ),
    _rule("pcie_error", "device_id: ", rf"{_RECORD} +device_id: {_PCI}", layer="firmware"),
    _rule("pcie_link_down", "Link Down", rf"{_DRIVER}{_PCI}: pciehp: Slot\((?P<slot>[^)]*)\): Link Down"),
    _rule("nic_error", "mlx5", rf"mlx5\w* {_PCI}.*?Port module event\[error\]: module \d+, (?P<cause>.*)"),
    _rule("nic_error", "Fatal error", rf"mlx5\w* {_PCI}.*?Fatal error \d+ detected", cause="Fatal error detected"),
    _rule("nic_error", "TX timeout detected", rf"{_DRIVER}{_PCI} \S+: (?P<cause>TX timeout detected)"),
    _rule("nic_error", "Tx Unit Hang", rf"{_DRIVER}{_PCI}(?: \S+)?: Detected (?P<cause>Tx Unit Hang)"),
    *(
        _rule("nic_error", said, rf"(?:igb|igc|fm10k|ixgbe|ixgbevf) {_PCI}[^:]*: {said}", cause=said)
        for said in ("PCIe link lost", "Adapter removed")
    ),
    _rule("nic_error", "tx_timeout", rf"{_DRIVER}{_PCI}:? \S+: (?P<cause>tx_timeout) recovery level"),
    _rule(
        "nic_error",
        "NETDEV WATCHDOG",
        rf"{_DRIVER}{_PCI} \S+: NETDEV WATCHDOG: (?:CPU: \d+: )?(?P<cause>transmit queue) \d+ timed out",
    ),
    _rule(
        "nic_error",
        "NETDEV WATCHDOG",
        r"NETDEV WATCHDOG: (?P<device>\S+) \((?!mlx5|bnxt|i40e|ice)\S+\): (?P<cause>transmit queue) \d+ timed out",
    ),
    _rule(
        "nic_error",
        "send a completion",
        rf"ena {_PCI} \S+: The ena device (?P<cause>didn't send a completion) for the admin cmd",
    ),
    _rule("nic_error", "mlx5", rf"mlx5\w* {_PCI}:? .*?(?P<cause>CQ error) on CQN \w+, syndrome? (?P<status>\w+)"),
    _rule(
        "nic_error",
        "cq_error_event",
        rf"mlx5\w* {_PCI} \S+: mlx5e_cq_error_event: cqn=\w+ event=(?P<status>\w+)",
        cause="CQ error",
    ),
    _rule(
        "nic_error",
        "mlx5",
        rf"mlx5\w* {_PCI}.*?(?P<cause>health recovery flow aborted|health recovery failed|Fatal error detected"
        r"|starting health recovery flow|handling bad device here)",
    ),
    _rule(
        "nic_error",
        "mlx5",
        rf"mlx5\w* {_PCI}.*?(?P<cause>Cable unplugged|device's health compromised|Health issue observed, [^,]*"
        r"|High temperature on sensors|timeout\. Will cause a leak of a command resource)",
    ),
    _rule("nic_error", "synd 0x", rf"mlx5\w* {_PCI}:.*? synd 0x[1-9a-f]\w*: (?P<cause>\w[\w ]*\w)"),
    _rule("nic_error", "mlx5", rf"mlx5\w* {_PCI}.*?(?P<cause>pre-initializing) state, aborting"),
    _rule(
        "nic_error",
        "failed with error",
        rf"(?:mlx5_core|bnxt_en|efa): probe of {_PCI} failed with error (?P<status>-\d+)",
        cause="probe failed",
    ),
    _rule(
        "nic_error",
        "failed with error",
        rf"(?:mlx5_core|bnxt_en|efa) {_PCI}: (?:probe with driver \w+|probe_one:\d+:\(pid \d+\): mlx5_\w+) "
        r"failed with error (?:code )?(?P<status>-\d+)",
        cause="probe failed",
    ),
    _rule("nic_error", "RX timeout", rf"mlx5\w* {_PCI} \S+: (?P<cause>RX timeout) on channel"),
    _rule(
        "nic_error",
        "(timeout: ",
        rf"bnxt_en {_PCI} [^:]*: Error \(timeout: \d+\) msg ",
        cause="command timed out",
    ),
    *(
        _rule("nic_error", said, rf"{_EFA}{re.escape(said)}", cause="command timed out")
        for said in (
            "The device didn't send any completion for admin cmd",
            "Admin queue is closed",
            "Wait for completion (polling) timeout",
        )
    ),
    *(
        _rule("nic_error", said, rf"{_EFA}{said}", cause="device is not ready")
        for said in ("Reset indication didn't turn o", "Device isn't ready, ")
    ),
)
_CEPH = r"ceph: (?:\[[^\]]*\]: )?(?P<server>mds\d+) "
_LUSTRE = r"Lustre\w*: (?:[0-9a-f]+-[0-9a-f]+: )?(?P<server>[^\s:]+?)(?:-(?:osc|mdc|lwp)-[^\s:]*)?: "
"""The message begins with the connection: its target, and the client's end of it. Releases differ in what follows."""

_XFS = rf"(?P<fs>XFS) \({_DEVICE}\): (?!.*(?:User initiated|goingdown))"
"""Not the shutdown that an administrator or a test has asked for."""

_FILESYSTEMS = (
    _rule(
        "filesystem_readonly", "Remounting", rf"(?P<fs>EXT[34]|F2FS)-fs \({_DEVICE}\): Remounting filesystem read-only"
    ),
    _rule("filesystem_readonly", "forced readonly", rf"(?P<fs>BTRFS).*?\(device {_DEVICE}"),
    _rule("filesystem_shutdown", "XFS (", rf"{_XFS}.*(?:[Ss]hutting down|has been shut down)"),
    _rule(
        "filesystem_shutdown", "has been suspended", r"WARNING: Pool '(?P<device>[^']+)' has encountered an ", fs="ZFS"
    ),
    _rule("filesystem_error", "-fs error", rf"(?P<fs>EXT[234])-fs error \(device {_DEVICE}\)"),
    _rule(
        "filesystem_error",
        "EXT4-fs warning",
        rf"(?P<fs>EXT4)-fs warning \(device {_DEVICE}\): ext4_end_bio:\d+: I/O error",
    ),
    _rule(
        "filesystem_error",
        "EXT4-fs (",
        rf"(?P<fs>EXT4)-fs \({_DEVICE}\): (?:.*I/O error|failed to (?:convert unwritten|initialize system zone))",
    ),
    _rule(
        "filesystem_error", "Aborting journal", r"Aborting journal on device (?P<device>\S+?)(?:-\d+)?\.?$", fs="EXT4"
    ),
    _rule("filesystem_error", "XFS (", rf"{_XFS}.*(?:I/O [Ee]rror|[Cc]orruption)"),
    _rule("filesystem_error", "BTRFS", rf"(?P<fs>BTRFS):? (?:error|critical) \(device {_DEVICE}"),
    _rule(
        "network_filesystem_lost",
        "not responding",
        r"(?P<fs>nfs\d?|lockd): server (?P<server>\S+) not responding(?:, (?P<outcome>timed out))?",
    ),
    _rule("network_filesystem_restored", "server", r"(?P<fs>nfs\d?|lockd): server (?P<server>\S+) OK"),
    _rule(
        "network_filesystem_evicted",
        "lease",
        r"NFS: state manager: (?:check lease|lease expired) failed on NFSv4 server (?P<server>\S+) with error ",
        fs="nfs",
    ),
    _rule(
        "network_filesystem_evicted",
        "reclaim failed",
        r"(?:NFS: )?(?P<server>nfs4)_reclaim_open_state: Lock reclaim failed",
        fs="nfs",
    ),
    _rule(
        "network_filesystem_lost",
        "libceph",
        r"libceph: (?P<server>mon\d+) \S+ session lost",
        fs="ceph",
    ),
    _rule("network_filesystem_restored", "libceph", r"libceph: (?P<server>mon\d+) \S+ session established", fs="ceph"),
    _rule(
        "network_filesystem_lost",
        ": mds",
        rf"{_CEPH}(?:caps (?:went |still )?stale|hung)",
        fs="ceph",
    ),
    _rule("network_filesystem_evicted", ": mds", rf"{_CEPH}(?:reconnect denied|session bl\w+listed)", fs="ceph"),
    _rule(
        "network_filesystem_restored",
        ": mds",
        rf"{_CEPH}(?:caps renewed|came back|reconnect success|recovery completed)",
        fs="ceph",
    ),
    _rule(
        "network_filesystem_lost",
        "has not responded",
        r"CIFS:? VFS: (?:Server )?(?P<server>\S+) has not responded in \d+ seconds",
        fs="cifs",
    ),
    _rule(
        "network_filesystem_lost",
        "beegfs",
        r"beegfs: .*?Connect failed on all available routes: (?P<server>[\w.@-]+)",
        fs="beegfs",
    ),
    _rule(
        "network_filesystem_restored",
        "beegfs",
        r"beegfs: .*?Connected: (?P<server>[\w.-]+)@",
        fs="beegfs",
    ),
    _rule("network_filesystem_lost", "Lustre", rf"{_LUSTRE}Connection to \S+ \(at .*?\) was lost", fs="lustre"),
    _rule("network_filesystem_restored", "Lustre", rf"{_LUSTRE}Connection restored to ", fs="lustre"),
    _rule("network_filesystem_evicted", "Lustre", rf"{_LUSTRE}This client was evicted by ", fs="lustre"),
    _rule(
        "network_filesystem_error",
        "failed: rc = -",
        rf"{_LUSTRE}operation \w+ to node (?P<peer>\S+) failed: rc = (?P<status>-\d+)",
        fs="lustre",
    ),
    _rule(
        "network_filesystem_error",
        "LNet",
        r"LNet(?:Error)?: \d+:\d+:\([\w.-]+:\d+:\w+\(\)\) Timed out (?:tx|RDMA)\b"
        r"(?: (?:for|with) (?P<peer>[\w.:-]+@\w+))?",
        fs="lnet",
    ),
    _rule(
        "network_filesystem_crashed",
        "Lustre",
        r"LustreError: \d+:\d+:\([\w.-]+:\d+:\w+\(\)\) (?P<cause>LBUG|ASSERTION)",
        fs="lustre",
    ),
)

_OF_A_PROCESS = tuple(rule for rule in _PROCESSES if rule.kind == "segfault")
_NAMED = re.compile(
    r".{0,15}(?:\[\d+\]:? | invoked oom-killer: |: page allocation failure: |: vmalloc error: | cpuset=)", re.DOTALL
)
"""A message about a process, which begins with its name: 15 characters that its user chooses."""

_FIREWALL: Final = re.compile(r"IN=\S* OUT=\S* (?:[A-Z]+=\S* )*(?:SRC=\S+ DST=|ARP HTYPE=|TRUNCATED|$)", re.ASCII)
"""The text after the prefix of a firewall rule. No name of a process is that long."""

RULES: Final = (*_GPU, *_PROCESSES, *_OOPSES, *_PROCESSORS, *_DEVICES, *_FILESYSTEMS)
"""The first row that matches decides."""

KINDS: Final = tuple(dict.fromkeys(rule.kind for rule in RULES))

_VICTIM = re.compile(r"oom-kill:constraint=.*?,task_memcg=(?P<cgroup>[^,]*),task=.*,pid=(?P<pid>\d+),uid=", re.ASCII)


class Trouble(NamedTuple):
    """What a message reports. ``data`` holds what it names: device, pid, process, server, pci_bus_id …"""

    kind: str
    data: Mapping[str, object]


def parse_trouble(message: str) -> Trouble | None:
    """The trouble that ``message`` reports, or None if its kind is unknown.

    A user may have the kernel write any text in the middle of a message, as the name of a file in which a program
    crashes. So the beginning decides, which is the kernel's or a driver's, or the name of a process. See also
    ``by_firewall``.
    """
    for rule in _OF_A_PROCESS if _NAMED.match(message) else RULES:
        if rule.literal in message and (match := rule.pattern.match(message)):
            named = {name: _value(name, text) for name, text in match.groupdict().items() if text}
            return Trouble(rule.kind, _with_address({**named, **rule.data}))
    return None


def _with_address(data: dict[str, object]) -> dict[str, object]:
    """The same with the device's address in one form: Intel's IOMMU gives it in parts, AMD's in one of two places."""
    if "refused" in data:
        data["outcome"] = data.pop("refused")
    if "bus" in data:
        data["pci_bus_id"] = bus_id(f"0000:{data.pop('bus')}:{data.pop('slot')}")
    if "at" in data:
        data["pci_bus_id"] = bus_id(str(data.pop("at")))
    return data


def by_firewall(message: str) -> bool:
    """Whether it tells of a packet. It begins as a rule says, which may be one of a user's network namespace."""
    return _FIREWALL.search(message) is not None


def _value(name: str, text: str) -> object:
    if name in _NUMBERS:
        return int(text)
    return bus_id(text) if name == "pci_bus_id" else text.strip()


def parse_oom_victim(message: str) -> tuple[int, str] | None:
    """Process id and cgroup of the process that the out-of-memory killer has chosen, or None.

    The kernel writes this one line before it says that the process was killed, which names no cgroup.
    """
    if "oom-kill:" not in message or (match := _VICTIM.match(message)) is None:
        return None
    # A user's control group may have ",task_memcg=" and another path in its name.
    return int(match["pid"]), match["cgroup"] if message.count(",task_memcg=") == 1 else ""
