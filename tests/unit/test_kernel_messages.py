"""Messages of the kernel that tell of trouble, in the words of real kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.window import Window
from opsd.bench.outside import FOLDER, INCIDENTS, REPEATED, expected, lines
from opsd.collectors.kmsg import parse_message
from opsd.collectors.lib.kernel.messages import KINDS, RULES, Trouble, parse_oom_victim, parse_trouble
from opsd.collectors.lib.kernel.xid import Xid
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Finding
from tests.fakes.kmsg import Node, read

# Messages of the kernel that tell of trouble, in the words of real kernels.


MESSAGES = [
    (
        "BUG: kernel NULL pointer dereference, address: 0000000000000008",
        "kernel_oops",
        {"cause": "NULL pointer dereference"},
    ),
    (
        "CPU: 3 UID: 0 PID: 1234 Comm: python Tainted: G           OE      6.11.0 #1",
        "kernel_task",
        {"cpu": 3, "pid": 1234, "process": "python"},
    ),
    (
        "clocksource: timekeeping watchdog on CPU373: Marking clocksource 'tsc' as unstable because of the skew",
        "clock_unstable",
        {"device": "tsc"},
    ),
    (
        "md/raid1:md1: Disk failure on sda1, disabling device.",
        "raid_failed",
        {"device": "md1", "disk": "sda1", "outcome": "disabling device"},
    ),
    (
        "NVRM: GPU6 _kgspRpcRecvPoll: GSP RM heartbeat timed out",
        "gpu_firmware_silent",
        {"instance": "6", "cause": "heartbeat timed out"},
    ),
    (
        "NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot to recover.",
        "gpu_driver_fatal",
        {"cause": "uvm encountered global fatal error 0x60", "asks": "os reboot"},
    ),
    (
        "mpt3sas_cm0: SAS host is non-operational !!!!",
        "controller_error",
        {"device": "mpt3sas_cm0", "outcome": "SAS host is non-operational"},
    ),
    (
        "DMAR: [DMA Read NO_PASID] Request device [0x3b:0x00.0] fault addr 0x1000 [fault reason 0x06] PTE Read access",
        "iommu_fault",
        {"access": "Read", "pci_bus_id": "00000000:3B:00.0"},
    ),
    (
        "ice 0000:c7:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x002b address=0x4000180000 flags=0x0020]",
        "iommu_fault",
        {"pci_bus_id": "00000000:C7:00.0"},
    ),
    (
        "nvidia 0000:3b:00.0: Refused to change power state, currently in D3",
        "pcie_error",
        {"pci_bus_id": "00000000:3B:00.0", "outcome": "currently in D3"},
    ),
    (
        "nvidia 0000:3b:00.0: can't change power state from D3cold to D0 (config space inaccessible)",
        "pcie_error",
        {"pci_bus_id": "00000000:3B:00.0", "outcome": "config space inaccessible"},
    ),
    (
        "python: attempt to access beyond end of device\nnvme0n1p1: rw=524288, sector=9, nr_sectors = 8 limit=8",
        "io_error",
        {"device": "nvme0n1p1", "cause": "access beyond end of device"},
    ),
    (
        "nfs: server 10.0.0.5 not responding, timed out",
        "network_filesystem_lost",
        {"fs": "nfs", "server": "10.0.0.5", "outcome": "timed out"},
    ),
    (
        "NFS: nfs4_reclaim_open_state: Lock reclaim failed!",
        "network_filesystem_evicted",
        {"fs": "nfs", "server": "nfs4"},
    ),
    (
        "libceph: mon0 (1)192.168.56.20:6789 session lost, hunting for new mon",
        "network_filesystem_lost",
        {"fs": "ceph", "server": "mon0"},
    ),
    (
        "libceph: mon0 (1)192.168.56.20:6789 session established",
        "network_filesystem_restored",
        {"fs": "ceph", "server": "mon0"},
    ),
    ("ceph: mds0 caps stale", "network_filesystem_lost", {"fs": "ceph", "server": "mds0"}),
    (
        r"CIFS: VFS: \\10.0.0.8 has not responded in 180 seconds. Reconnecting...",
        "network_filesystem_lost",
        {"fs": "cifs", "server": r"\\10.0.0.8"},
    ),
    (
        "infiniband rdmap16s27: The device didn't send any completion for admin cmd Create QP (1)",
        "nic_error",
        {"device": "rdmap16s27", "cause": "command timed out"},
    ),
    (
        "Memory cgroup out of memory: Killed process 1234 (python) total-vm:9kB, anon-rss:512kB, file-rss:0kB",
        "oom_kill",
        {"scope": "Memory cgroup out of memory", "pid": 1234, "process": "python", "anon_rss_kib": 512},
    ),
    (
        "Out of memory: Killed process 7 (a) b) total-vm:9kB, anon-rss:5kB",
        "oom_kill",
        {"scope": "Out of memory", "pid": 7, "process": "a) b", "anon_rss_kib": 5},
    ),
    (
        "INFO: task python:1234 blocked for more than 122 seconds.",
        "hung_task",
        {"process": "python", "pid": 1234, "seconds": 122},
    ),
    (
        "python[1234]: segfault at 0 ip 00007f12 sp 00007ffc error 4 in libnccl.so.2.26[7f12+1000]",
        "segfault",
        {"process": "python", "pid": 1234, "library": "libnccl.so.2.26"},
    ),
    (
        "traps: python[5727] general protection fault ip:7fe8 sp:7ffe error:0",
        "segfault",
        {"process": "python", "pid": 5727, "trap": "general protection"},
    ),
    (
        "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: bea0",
        "mce",
        {"cpu": 3, "bank": 5, "severity": "Uncorrected"},
    ),
    ("mce: [Hardware Error]: Machine check events logged", "mce", {}),
    ("[Hardware Error]: Corrected error, no action required.", "mce", {"severity": "Corrected"}),
    ("{1}[Hardware Error]: event severity: corrected", "mce", {"record": "1", "severity": "corrected"}),
    (
        "mlx5_core 0000:3b:00.0: AER: can't recover (no error_detected callback)",
        "pcie_unrecoverable",
        {"pci_bus_id": "00000000:3B:00.0", "cause": "no error_detected callback"},
    ),
    (
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x1)",
        "edac",
        {"controller": "MC0", "errors": 1, "severity": "CE", "location": "CPU_SrcID#0_MC#0_Chan#0_DIMM#0"},
    ),
    (
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:1234]",
        "cpu_lockup",
        {"cpu": 3, "seconds": 22, "process": "python", "pid": 1234, "lockup": "soft"},
    ),
    ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 7", "cpu_lockup", {"cpu": 7, "lockup": "hard"}),
    ("rcu: INFO: rcu_preempt self-detected stall on CPU", "cpu_lockup", {"lockup": "rcu"}),
    (
        "mce: CPU12: Core temperature above threshold, cpu clock throttled",
        "cpu_throttled",
        {"cpu": 12, "lasting": False},
    ),
    (
        "nvme nvme1: I/O 998 QID 1 timeout, completion polled",
        "nvme_error",
        {"device": "nvme1", "outcome": "completion polled"},
    ),
    (
        "nvme nvme0: I/O tag 123 (707b) opcode 0x2 (I/O Cmd) QID 5 timeout, aborting req_op:READ(0) size:4096",
        "nvme_error",
        {"device": "nvme0", "outcome": "aborting"},
    ),
    (
        "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff",
        "nvme_error",
        {"device": "nvme0", "outcome": "controller is down; will reset"},
    ),
    (
        "blk_update_request: I/O error, dev nvme0n1, sector 123 op 0x0:(READ) flags 0x0 phys_seg 1",
        "io_error",
        {"cause": "I/O", "device": "nvme0n1", "sector": 123},
    ),
    (
        "critical medium error, dev sda, sector 9 op 0x0:(READ)",
        "io_error",
        {"cause": "critical medium", "device": "sda", "sector": 9},
    ),
    ("Buffer I/O error on dev dm-0, logical block 1308, lost async page write", "io_error", {"device": "dm-0"}),
    (
        "nvme0n1: I/O Cmd(0x2) @ LBA 77, 8 blocks, I/O Error (sct 0x2 / sc 0x81) DNR",
        "io_error",
        {"device": "nvme0n1", "sector": 77},
    ),
    (
        "nvidia 0000:9b:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
        "pcie_error",
        {"pci_bus_id": "00000000:9B:00.0", "severity": "Corrected", "layer": "Data Link Layer"},
    ),
    (
        "pcieport 0000:00:02.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
        "pcie_error",
        {"pci_bus_id": "00000000:00:02.0", "severity": "Uncorrected (Fatal)", "layer": "Transaction Layer"},
    ),
    (
        "nvme 0000:03:00.0: Unable to change power state from D3cold to D0, device inaccessible",
        "pcie_error",
        {"pci_bus_id": "00000000:03:00.0", "outcome": "device inaccessible"},
    ),
    (
        "pcieport 0000:40:01.1: pciehp: Slot(3): Link Down",
        "pcie_link_down",
        {"pci_bus_id": "00000000:40:01.1", "slot": "3"},
    ),
    (
        "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature",
        "nic_error",
        {"pci_bus_id": "00000000:5C:00.0", "cause": "Cable error, High Temperature"},
    ),
    (
        "mlx5_core 0000:5c:00.0: poll_health:835:(pid 0): device's health compromised - reached miss count",
        "nic_error",
        {"pci_bus_id": "00000000:5C:00.0", "cause": "device's health compromised"},
    ),
    (
        "EXT4-fs (nvme0n1p1): Remounting filesystem read-only",
        "filesystem_readonly",
        {"fs": "EXT4", "device": "nvme0n1p1"},
    ),
    (
        "EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455: inode #2: comm python: reading directory lblock 0",
        "filesystem_error",
        {"fs": "EXT4", "device": "nvme0n1p1"},
    ),
    ("Aborting journal on device dm-0-8.", "filesystem_error", {"fs": "EXT4", "device": "dm-0"}),
    (
        'XFS (nvme1n1): metadata I/O error in "xfs_imap_to_bp" at daddr 0x40 len 32 error 5',
        "filesystem_error",
        {"fs": "XFS", "device": "nvme1n1"},
    ),
    (
        "XFS (nvme1n1): Corruption of in-memory data (0x8) detected at xfs_defer. Shutting down filesystem.",
        "filesystem_shutdown",
        {"fs": "XFS", "device": "nvme1n1"},
    ),
    (
        "BTRFS error (device sdb1: state A): Transaction aborted (error -5)",
        "filesystem_error",
        {"fs": "BTRFS", "device": "sdb1"},
    ),
    (
        "nfs: server 10.0.0.1 not responding, still trying",
        "network_filesystem_lost",
        {"fs": "nfs", "server": "10.0.0.1"},
    ),
    ("nfs: server 10.0.0.1 OK", "network_filesystem_restored", {"fs": "nfs", "server": "10.0.0.1"}),
    (
        "Lustre: scratch-OST0001-osc-ffff8: Connection to scratch-OST0001 (at 10.0.0.2@o2ib) was lost; in progress "
        "operations using this service will wait for recovery to complete",
        "network_filesystem_lost",
        {"fs": "lustre", "server": "scratch-OST0001"},
    ),
    (
        "Lustre: scratch-OST0001-osc-ffff8: Connection restored to scratch-OST0001 (at 10.0.0.2@o2ib)",
        "network_filesystem_restored",
        {"fs": "lustre", "server": "scratch-OST0001"},
    ),
    (
        "LustreError: 167-0: scratch-OST0001-osc-ffff8: This client was evicted by scratch-OST0001; in progress "
        "operations using this service will fail.",
        "network_filesystem_evicted",
        {"fs": "lustre", "server": "scratch-OST0001"},
    ),
    (
        "LustreError: 11-0: scratch-MDT0000-mdc-ffff88: operation obd_ping to node 10.0.0.8@o2ib failed: rc = -107",
        "network_filesystem_error",
        {"fs": "lustre", "server": "scratch-MDT0000", "peer": "10.0.0.8@o2ib", "status": "-107"},
    ),
    (
        "LNet: 2431:0:(o2iblnd_cb.c:3174:kiblnd_check_conns()) Timed out tx for 10.0.0.8@o2ib: 403055 seconds",
        "network_filesystem_error",
        {"fs": "lnet", "peer": "10.0.0.8@o2ib"},
    ),
    (
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=3b:00.0 domain=0x0000 address=0x00 flags=0x0000]",
        "iommu_fault",
        {"pci_bus_id": "00000000:3B:00.0"},
    ),
    (
        "LustreError: 1474:0:(lcommon_cl.c:147:cl_file_inode_init()) LBUG",
        "network_filesystem_crashed",
        {"fs": "lustre", "cause": "LBUG"},
    ),
    (
        "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
        "peermem_error",
        {"cause": "invalid context"},
    ),
    (
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x22:0x56:742)",
        "gpu_init_failed",
        {"pci_bus_id": "00000000:3B:00.0", "status": "0x22:0x56:742"},
    ),
    (
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
        "gpu_driver_loaded",
        {"version": "580.65.06"},
    ),
]

HARMLESS = [
    "EXT4-fs (vda): mounted filesystem 0000 r/w without journal. Quota mode: none.",
    "nvme nvme0: 64/0/0 default/read/poll queues",
    "XFS (nvme1n1): Mounting V5 Filesystem",
    "EDAC MC: Ver: 3.0.0",
    "mlx5_core 0000:5c:00.0: Port module event: module 0, Cable plugged",
    "mce: CPU0: Thermal monitoring enabled (TM1)",
    "pcieport 0000:40:01.1: pciehp: Slot(3): Link Up",
    "rcu: Hierarchical RCU implementation.",
    "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
]


@pytest.mark.parametrize(("message", "kind", "data"), MESSAGES, ids=[message[:40] for message, _, _ in MESSAGES])
def test_trouble_is_recognised(message: str, kind: str, data: dict[str, object]) -> None:
    """A message of trouble gives its kind and whatever it names."""
    trouble = parse_trouble(message)
    assert trouble is not None
    assert (trouble.kind, dict(trouble.data)) == (kind, data)


@pytest.mark.parametrize("message", HARMLESS)
def test_everyday_messages_are_no_trouble(message: str) -> None:
    """What a healthy machine logs is not taken for trouble."""
    assert parse_trouble(message) is None


def test_every_kind_has_an_example() -> None:
    """No kind is without a message that a kernel really writes."""
    assert {kind for _, kind, _ in MESSAGES} == set(KINDS)


def test_victim_of_the_oom_killer_and_its_cgroup() -> None:
    """The line before the kill names the cgroup, and so the job."""
    line = (
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0,mems_allowed=0-1,oom_memcg=/slurm/job_42,"
        "task_memcg=/slurm/job_42/step_0/task_0,task=python,pid=1234,uid=1000"
    )
    assert parse_oom_victim(line) == (1234, "/slurm/job_42/step_0/task_0")
    assert parse_oom_victim(line[:-40]) is None
    named = line.replace("oom_memcg=/slurm/job_42,", "oom_memcg=/user.slice/x,task_memcg=/slurm/job_7,task=y,")
    assert parse_oom_victim(named) == (1234, "")


@given(st.sampled_from([rule.literal for rule in RULES]), st.text(), st.text())
def test_any_text_can_be_parsed(literal: str, before: str, after: str) -> None:
    """No text makes the parsers raise, with or without the words they look for."""
    parse_trouble(before + literal + after)
    parse_oom_victim(before + literal + after)


USERS_TEXT = (
    "{process}[6139]: segfault at 0 ip 00007f88 sp 00007ffd error 6 in {text}[0,7f886a3a4000+1000] likely on CPU 0",
    "{process}[6139] general protection fault ip:7f88 sp:7ffd error:0 in {text}[7f88+1000]",
    "traps: {process}[6139] trap invalid opcode ip:7f88 sp:7ffd error:0 in {text}[7f88+1000]",
    "cgroup: fork rejected by pids controller in /user.slice/{text}",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/{text},task=x,pid=1,uid=65534",
    "{process}: page allocation failure: order:9, mode:0xcc0(GFP_KERNEL), nodemask=(null),cpuset={text},mems_allowed=0",
    "{process}: vmalloc error: size 4096, failed to allocate pages, mode:0xcc0, nodemask=(null){text}",
    "{process} cpuset={text} mems_allowed=0",
    "{process} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0{text}",
    "{text}IN= OUT=lo SRC=127.0.0.1 DST=127.0.0.1 LEN=30 TOS=0x00 PREC=0x00 TTL=64 ID=40121 DF PROTO=UDP LEN=10 ",
)
"""Where the kernel writes what a user has chosen: names of processes, files, control groups and cpusets, and the prefix
of a rule of iptables or nftables, which a user may set in namespaces with net.netfilter.nf_log_all_netns."""

XIDS = ("NVRM: Xid (0000:3b:00): 79, ", "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 3")


@pytest.mark.parametrize("place", USERS_TEXT)
@pytest.mark.parametrize("text", [*(message for message, *_ in MESSAGES), *XIDS], ids=lambda text: text[:40])
def test_a_user_cannot_have_the_kernel_report_a_fault(place: str, text: str) -> None:
    """Whatever message is put into a name: it is a crash at most, and no Xid."""
    for process in ("python", text[:15], f"{text.partition(':')[0]}"[:14]):
        found = parse_message(place.format(process=process, text=text))
        assert found is None or (isinstance(found, Trouble) and found.kind == "segfault")


@pytest.mark.parametrize(
    "name", ["cpuset=", " cpuset=x mems_", "IN= OUT= ", "IN= OUT= SRC=a", "x[1]: ", "IN=a OUT=b MAC="]
)
def test_the_name_of_a_process_hides_nothing(name: str) -> None:
    """Nor may a user whose process has an Xid, or is killed, name it so that the message looks like another."""
    found = parse_message(f"NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name={name}, GPU has fallen off the bus.")
    assert isinstance(found, Xid) and (found.code, found.pid) == (79, 77)
    killed = parse_message(f"Out of memory: Killed process 77 ({name}) total-vm:9kB, anon-rss:5kB")
    assert isinstance(killed, Trouble) and (killed.kind, killed.data["pid"]) == ("oom_kill", 77)


# Lines that real kernels and drivers have written, from outside this project, and the incidents that they open.


LINES = list(lines(FOLDER / "kernel_lines"))


def opened(
    node: Node, *said: str, times: int = 1, apart_s: float = 70.0, facility: int = 0
) -> list[tuple[str, Finding]]:
    """Kind and finding of the incidents that the agent's runbooks open 20 s after the kernel has ``said`` the lines."""
    agent, window = node.agent(), Window("n01", seconds=60.0)
    read(agent)
    for _ in range(times):
        node.clock.advance(apart_s)
        for line in said:
            node.say(line, facility=facility)
        window.begin(node.clock.monotonic(), node.clock.wall())
        window.add("kmsg", read(agent))
    window.begin(node.clock.monotonic() + 20.0, node.clock.wall() + 20.0)
    return [(book.kind, finding) for book in RUNBOOKS for finding in book.detect(window)]


def test_every_kind_of_trouble_has_lines_from_several_places() -> None:
    """None of them is tested with our own words only."""
    assert {about for about, _ in LINES} == {*INCIDENTS, "benign", "harmless_event"}


@pytest.mark.parametrize(("about", "line"), [each for each in LINES if each[0] in INCIDENTS])
def test_a_line_of_trouble_opens_its_incident(tmp_path: Path, about: str, line: str) -> None:
    """Whatever release of the kernel or driver wrote it; storms take several."""
    times = REPEATED.get(about, 1)
    found = opened(Node(tmp_path), line, times=times, apart_s=70.0 if times < 10 else 1.0)
    assert [kind for kind, _ in found] == [expected(about, line)]


@pytest.mark.parametrize(("about", "line"), [each for each in LINES if each[0] not in INCIDENTS])
def test_a_line_that_looks_alike_opens_nothing(tmp_path: Path, about: str, line: str) -> None:
    """Lines that go with trouble or only resemble it are no incident; most are not even an event."""
    assert (parse_message(line) is None) == (about == "benign")
    assert opened(Node(tmp_path), line) == []


@pytest.mark.parametrize(("about", "line"), LINES)
def test_what_a_user_writes_into_the_log_is_not_believed(tmp_path: Path, about: str, line: str) -> None:
    """A process that may write to /dev/kmsg speaks with its own facility, never the kernel's."""
    assert opened(Node(tmp_path), line, facility=1) == []


ONE_FAULT = [
    (
        ["nvme nvme5: Removing after probe failure status: -19"],
        "nvme5 is lost: Removing after probe failure",
    ),
    (
        [
            "nvme nvme5: I/O 12 QID 3 timeout, reset controller",
            "nvme nvme5: Device not ready; aborting reset, CSTS=0x1",
        ],
        "nvme5 is lost: Device not ready; aborting reset and nvme5 does not answer in time: reset controller",
    ),
    (
        [
            "md/raid1:md8: Disk failure on sdr1, disabling device.",
            "I/O error, dev sdr, sector 8 op 0x0:(READ) flags 0x0",
        ],
        "the array md8 has lost sdr1 and I/O errors of sdr",
    ),
    (
        [
            "I/O error, dev sdr, sector 8 op 0x1:(WRITE) flags 0x800",
            "md/raid1:md8: Disk failure on sdr1, disabling device.",
            "md/raid1:md9: Disk failure on sdr2, disabling device.",
        ],
        "the array md8 has lost sdr1 and the array md9 has lost sdr2 and I/O errors of sdr",
    ),
    (
        ["md/raid:md5: Cannot continue operation (2/4 failed)."],
        "the array md5 has failed: Cannot continue operation (2/4 failed)",
    ),
    (
        ["EXT4-fs error (device sdr1): ext4_find_entry:1455: inode #2", "I/O error, dev sdr, sector 8 op 0x0:(READ)"],
        "I/O errors of sdr and errors of the file system on sdr1",
    ),
]


@pytest.mark.parametrize(("said", "summary"), ONE_FAULT, ids=lambda value: value if isinstance(value, str) else "")
def test_the_lines_about_one_fault_are_one_incident_and_each_is_told_once(
    tmp_path: Path, said: list[str], summary: str
) -> None:
    """Whatever parts of the disk they name."""
    assert [finding.summary for _, finding in opened(Node(tmp_path), *said)] == [f"n01: {summary}"]
