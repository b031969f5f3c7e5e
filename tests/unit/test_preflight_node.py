"""Node checks on fixture trees and recorded output, and what earlier jobs have left."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.kernel.messages import KERNEL, LogRecord
from opsd.preflight.base import PROFILES, CouldNotRunError, Demand, NotApplicableError, Verdict
from opsd.preflight.checks import (
    CHECKS,
    clock,
    hugepages,
    infiniband,
    kernel_log,
    leftovers,
    limits,
    numa,
    pressure,
    storage,
    versions,
)
from opsd.preflight.checks.numa import parse_list
from opsd.runbooks import RUNBOOKS
from opsd.settings.sections import PreflightSettings
from tests.fakes.nvml import gpu_device
from tests.fakes.tree import FUSE, look, silent_mount, summaries, tree

# Node checks on fixture trees and recorded output: what they read, and what they make of it.


def test_checks_have_distinct_names_known_profiles_and_runbooks_that_exist():
    """The table of checks is consistent, and every page that a failure points to can be shown."""
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert {profile for check in CHECKS for profile in check.seconds} <= {*PROFILES}
    assert {check.runbook for check in CHECKS} <= {"", *(runbook.kind for runbook in RUNBOOKS)}
    assert all(check.run and check.run.__module__.startswith("opsd.preflight.checks.") for check in CHECKS)


@given(st.frozensets(st.integers(0, 300)))
def test_a_kernel_list_is_read_back(numbers: frozenset[int]):
    """Ranges and single numbers."""
    assert parse_list(",".join(map(str, sorted(numbers))) + "\n") == numbers


def test_ranges_in_a_kernel_list():
    """As /sys/devices/system/cpu/online has it."""
    assert parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}


PORT = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "counters/link_downed": "2",
    "counters/symbol_error": "0",
    "counters/link_error_recovery": "0",
}


def ports(root: Path, **changes: dict[str, str]) -> Path:
    """Eight adapters with one port each; ``changes`` by adapter."""
    for index in range(8):
        files = {**PORT, **changes.get(f"mlx5_{index}", {})}
        tree(root / f"class/infiniband/mlx5_{index}/ports/1", files)
    return root


def test_infiniband_ports_that_are_fine(tmp_path: Path):
    """Eight active ports at equal rate, and their counters are kept for the next run."""
    outcome = look(infiniband, ports(tmp_path))
    assert outcome.findings == ()
    values = {(m.measure, m.subject): m.value for m in outcome.measurements}
    assert values["active_ports", ""] == 8
    assert values["flaps", "mlx5_3 port 1"] == 2


def test_infiniband_ports_that_are_down_or_slow_are_named(tmp_path: Path):
    """Down, initialising, downtrained, and one that tells nothing, which is not healthy."""
    changes = {
        "mlx5_1": {"state": "1: DOWN"},
        "mlx5_2": {"state": "2: INIT"},
        "mlx5_3": {"rate": "200 Gb/sec (4X HDR)"},
        "mlx5_4": {"state": "garbage"},
    }
    outcome = look(infiniband, ports(tmp_path, **changes))
    assert summaries(outcome.findings) == [
        "mlx5_1 port 1 is down",
        "mlx5_2 port 1 is initialising",
        "mlx5_3 port 1 runs at 200 of 400 Gbit/s",
        "mlx5_4 port 1 does not tell its state",
    ]
    assert [f.verdict for f in outcome.findings] == [Verdict.FAIL] * 3 + [Verdict.COULD_NOT_RUN]


def test_a_node_whose_ports_are_all_slow_fails_when_the_rate_is_configured(tmp_path: Path):
    """The neighbours cannot tell then."""
    outcome = look(infiniband, ports(tmp_path), settings=PreflightSettings(infiniband_gbps=800.0))
    assert len(outcome.findings) == 8


def test_only_ports_of_one_link_layer_are_compared(tmp_path: Path):
    """Two ports of the storage network are in Ethernet mode, at their own rate."""
    ethernet = {"rate": "200 Gb/sec (4X HDR)", "link_layer": "Ethernet"}
    outcome = look(infiniband, ports(tmp_path, mlx5_6=ethernet, mlx5_7=ethernet))
    assert summaries(outcome.findings) == []


def test_the_configuration_says_which_ports_count(tmp_path: Path):
    """Ports without a link fail a node unless they are left out, or others are expected; what is missing fails it."""
    root = ports(tmp_path, mlx5_7={"state": "1: DOWN", "rate": "10 Gb/sec (4X SDR)"})
    assert summaries(look(infiniband, root).findings) == ["mlx5_7 port 1 is down"]
    assert summaries(look(infiniband, root, ports_left_out=("mlx5_7",)).findings) == []
    assert summaries(look(infiniband, root, ports_expected=("mlx5_[0-6]/1",)).findings) == []
    wanted = look(infiniband, root, ports_expected=("mlx5_0", "mlx5_9"))
    assert summaries(wanted.findings) == ["mlx5_9 is expected and not there"]


def test_a_node_without_infiniband_is_none_of_its_business(tmp_path: Path):
    """Not applicable, with the reason."""
    with pytest.raises(NotApplicableError, match="no InfiniBand"):
        look(infiniband, tmp_path)


def test_the_kernel_log_is_judged_by_what_its_messages_call_for():
    """A lost GPU and a dead disk fail, a page fault and a corrected memory error warn, chatter is nothing."""
    count, findings = kernel_log.judge(
        [
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=python, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:5e:00): 31, pid=77, name=python, Ch 00000008, intr 00000000. MMU Fault",
            "NVRM: Xid (PCI:0000:5e:00): 31, pid=78, name=python, Ch 00000008, intr 00000000. MMU Fault",
            "nvme nvme0: Device not ready; aborting reset, CSTS=0x1",
            "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0)",
            "usb 1-1: new high-speed USB device number 2 using xhci_hcd",
        ]
    )
    assert count == 3
    assert sorted((f.verdict.value, f.summary.rpartition(" in the last day")[0]) for f in findings) == [
        ("fail", "Xid 79 on 00000000:3B:00.0"),
        ("fail", "the kernel reported nvme_error of nvme0"),
        ("warn", "Xid 31 on 00000000:5E:00.0"),
        ("warn", "the kernel reported edac"),
    ]
    assert any("(2 times): page fault" in f.summary for f in findings)


def test_an_xid_from_before_the_reset_is_over():
    """A node whose GPUs a repair has reset would fail its test for the rest of the day; another fault is not over."""

    def record(seconds: float, text: str, facility: int = KERNEL) -> LogRecord:
        return LogRecord(facility, 0, seconds, False, text)

    xid = "NVRM: Xid (PCI:0000:3b:00): 95, pid='<unknown>', name=<unknown>, Uncontained memory error."
    broken = "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x0:1860)"
    disk = "nvme nvme0: Device not ready; aborting reset, CSTS=0x1"
    log = [record(100, xid), record(200, disk), record(210, broken), record(90_000, xid), record(90_001, xid, 1)]
    assert [*kernel_log.recent(log, 90_100, 0)] == [xid]
    assert [*kernel_log.recent(log, 1000, 0)] == [xid, disk, broken, xid]
    assert [*kernel_log.recent(log, 1000, 300)] == [disk, xid]
    assert kernel_log.judge([broken])[1]


def test_xids_that_a_site_ignores_are_counted_and_no_problem():
    """As in the agent."""
    lines = [f"NVRM: Xid (PCI:0000:1a:00): {code}, pid=7, name=python, x" for code in (94, 79)]
    count, findings = kernel_log.judge(lines, ignored=(94,))
    assert count == 2
    assert [finding.summary.split(" on ")[0] for finding in findings] == ["Xid 79"]


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("kernel BUG at mm/slub.c:379!", Verdict.FAIL),
        ("NVRM: GPU6 _kgspRpcRecvPoll: GSP RM heartbeat timed out", Verdict.FAIL),
        ("md/raid1:md1: Disk failure on sda1, disabling device.", Verdict.WARN),
    ],
)
def test_faults_of_the_kernel_and_of_an_array_count(line: str, verdict: Verdict):
    """A node with an oops must be booted before its next job."""
    assert [finding.verdict for finding in kernel_log.judge([line])[1]] == [verdict]


def test_a_kernel_log_that_cannot_be_opened_could_not_run(tmp_path: Path):
    """A container without /dev/kmsg knows nothing about Xids."""
    with pytest.raises(CouldNotRunError, match="cannot be opened"):
        look(kernel_log, tmp_path)


def found(**changes) -> limits.Found:
    healthy = limits.Found(memlock=None, files=1 << 20, processes=None, shm_free=64 << 30, rdma=True)
    return healthy._replace(**changes)


def test_limits_that_a_job_runs_into():
    """Locked memory is fatal with RDMA and a warning without; few files and processes are warnings."""
    assert [*limits.judge(found())] == []
    assert [f.verdict for f in limits.judge(found(memlock=64 << 10))] == [Verdict.FAIL]
    assert [f.verdict for f in limits.judge(found(memlock=64 << 10, rdma=False))] == [Verdict.WARN]
    assert summaries(limits.judge(found(files=1024))) == [
        "only 1,024 open files are allowed, shards and sockets want 65,536"
    ]
    assert [f.verdict for f in limits.judge(found(processes=4096))] == [Verdict.WARN]


def numa_tree(root: Path, gib: list[int], **files: str) -> Path:
    for node, size in enumerate(gib):
        folder = f"devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = f"{node * 8}-{node * 8 + 7}"
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal:       {size << 20} kB"
    return tree(root, files)


def test_a_numa_node_with_less_memory_than_the_others_fails(tmp_path: Path):
    """A DIMM that is missing on one of four nodes."""
    outcome = look(numa, numa_tree(tmp_path, [256, 256, 224, 256]))
    assert summaries(outcome.findings) == ["NUMA node 2 has 224 GiB, the median node 256 GiB"]


def test_devices_without_a_numa_node_and_page_migration_are_warnings(tmp_path: Path):
    """On a machine with two nodes a GPU must know where it sits."""
    gpu = "bus/pci/devices/0000:3b:00.0"
    files = {f"{gpu}/class": "0x030200", f"{gpu}/numa_node": "-1", "sys/kernel/numa_balancing": "1"}
    outcome = look(numa, numa_tree(tmp_path, [256, 256], **files))
    assert summaries(outcome.findings) == [
        "the GPU at 0000:3b:00.0 has no NUMA node",
        "automatic NUMA balancing is on and unmaps pages under the ranks",
    ]
    assert {f.verdict for f in outcome.findings} == {Verdict.WARN}


def test_a_machine_with_one_numa_node_has_nothing_to_place(tmp_path: Path):
    """A laptop passes."""
    outcome = look(numa, numa_tree(tmp_path, [16], **{"sys/kernel/numa_balancing": "1"}))
    assert outcome.findings == ()


def thp(root: Path, enabled: str, defrag: str, reserved: int) -> Path:
    folder = "kernel/mm/transparent_hugepage"
    meminfo = f"MemTotal: 1000000 kB\nHugePages_Total: {reserved}\nHugePages_Free: {reserved}\nHugepagesize: 2048 kB"
    return tree(root, {f"{folder}/enabled": enabled, f"{folder}/defrag": defrag, "meminfo": meminfo})


def test_huge_pages_that_stall_or_lie_idle_are_warnings(tmp_path: Path):
    """defrag=always stalls page faults; reserved pages that nobody uses are lost memory."""
    outcome = look(hugepages, thp(tmp_path / "bad", "always madvise [never]", "[always] defer madvise never", 100))
    assert [f.verdict for f in outcome.findings] == [Verdict.WARN] * 3
    outcome = look(
        hugepages, thp(tmp_path / "good", "always [madvise] never", "always defer defer+madvise [madvise]", 0)
    )
    assert outcome.findings == ()
    assert outcome.facts == {"transparent huge pages, enabled": "madvise", "transparent huge pages, defrag": "madvise"}


def test_pressure_is_read_as_shares(tmp_path: Path):
    """The minute's average of the line that matters for each resource."""
    line = "some avg10=1.00 avg60=25.00 avg300=0.10 total=1\nfull avg10=0.00 avg60=3.50 avg300=0.00 total=1"
    outcome = look(pressure, tree(tmp_path, {f"pressure/{name}": line for name in ("cpu", "memory", "io")}))
    assert {m.measure: m.value for m in outcome.measurements} == {
        "cpu_some": 0.25,
        "memory_full": 0.035,
        "io_full": 0.035,
    }


def test_a_kernel_without_pressure_information_is_none_of_its_business(tmp_path: Path):
    """Not applicable, with the reason."""
    with pytest.raises(NotApplicableError, match="CONFIG_PSI"):
        look(pressure, tmp_path)


def test_chronys_offset_is_the_fifth_field_and_needs_a_source():
    """Recorded output of `chronyc -c tracking`; without a source there is no offset."""
    synchronised = "A9FEA97B,10.0.0.1,4,1700000000.1,-0.000012345,0,0.00002,-1.2,0.001,0.02,0.0004,0.0002,16.1,Normal"
    assert clock.parse_tracking(synchronised) == pytest.approx(-12.345e-6)
    assert clock.parse_tracking(synchronised.replace("Normal", "Not synchronised")) is None
    assert clock.parse_tracking("") is None


def test_the_clock_of_this_machine_is_read_for_real(tmp_path: Path):
    """Adjtimex answers: either the clock is synchronised and has an error bound, or that is a finding."""
    outcome = look(clock, tmp_path)
    assert outcome.measurements or outcome.findings


def test_versions_come_from_the_system_without_importing_anything(tmp_path: Path):
    """Driver, modules and firmware from the fixture tree; torch from its installed metadata."""
    root = tree(
        tmp_path,
        {
            "driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release",
            "module/mlx5_core/version": "24.10-1.1.4",
            "class/infiniband/mlx5_0/fw_ver": "28.43.1014",
            "class/infiniband/mlx5_1/fw_ver": "28.42.1000",
        },
    )
    facts = look(versions, root).facts
    assert facts["NVIDIA driver"] == "580.65.06 (open)"
    assert facts["mlx5_core"] == "24.10-1.1.4"
    assert facts["NIC firmware"] == "28.42.1000, 28.43.1014"
    assert facts["kernel"] == os.uname().release


def fio_answer(**changes) -> str:
    side = {
        "total_ios": 1000,
        "bw_bytes": 26_600_000_000,
        "iops": 337_000.0,
        "clat_ns": {"percentile": {"99.000000": 90_000}},
    }
    job = {"error": 0, "read": {**side, **changes}, "write": {"total_ios": 0}}
    return "fio: a note about the clock source\n" + json.dumps({"fio version": "fio-3.33", "jobs": [job]})


def test_fios_answer_is_read_in_base_units():
    """Bytes and operations per second, latency in seconds, a note before the JSON notwithstanding."""
    assert storage.parse(fio_answer(), "read") == storage.Speed(26.6e9, 337e3, 90e-6)


@pytest.mark.parametrize("text", ["", "fio: error", fio_answer(total_ios=0), '{"jobs": []}', fio_answer(clat_ns={})])
def test_an_answer_of_fio_without_numbers_is_no_speed(text: str):
    """Nothing moved, nothing measured."""
    with pytest.raises(CouldNotRunError, match="fio"):
        storage.parse(text, "read")


def test_fio_missing_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine without fio."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(CouldNotRunError, match="fio is not installed; apt-get install fio"),
        storage.workspace(str(tmp_path), 1),
    ):
        pass


def test_storage_is_judged_by_what_the_run_needs():
    """Too slow to feed the run fails, too slow to catch up warns, fast enough is silent; no demand, no verdict."""
    demand = Demand(tokens_per_s=1e6, bytes_per_token=4.0)
    for read, verdicts in ((3e6, [Verdict.FAIL]), (8e6, [Verdict.WARN]), (13e6, [])):
        assert [f.verdict for f in storage.needs(demand, "/fsx", read=read, write=1e9)] == verdicts
    assert [*storage.needs(Demand(), "/fsx", read=1.0, write=1.0)] == []


def test_a_checkpoint_that_takes_too_long_for_its_interval():
    """37 GB at 10 MB/s take an hour: a warning for an interval of two hours, impossible within half an hour."""
    for interval, verdicts in ((1800.0, [Verdict.FAIL]), (7200.0, [Verdict.WARN]), (86_400.0, [])):
        demand = Demand(checkpoint_bytes=37e9, checkpoint_interval_s=interval)
        assert [f.verdict for f in storage.needs(demand, "/fsx", read=1e9, write=10e6)] == verdicts


def test_shared_storage_that_is_not_configured_is_none_of_its_business(tmp_path: Path):
    """Which folder is shared cannot be guessed."""
    with pytest.raises(NotApplicableError, match="shared_dir"):
        look(storage.SHARED, tmp_path)


# What earlier jobs have left on a node: processes on GPUs, and files in shared memory.


def process(root: Path, pid: int, name: str, *files: str, uid: int = 0, group: str = "/", thread: str = "") -> None:
    """``thread`` is the one that has the files, the process if none is named."""
    folder = root / str(pid)
    texts = {"comm": name, "status": f"Name:\t{name}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}", "cgroup": f"0::{group}"}
    tree(folder, texts)
    (folder / "fd").mkdir()
    of = folder / "task" / thread / "fd" if thread else folder / "fd"
    of.mkdir(parents=True, exist_ok=True)
    for number, target in enumerate(files):
        (of / str(number)).symlink_to(target)


def test_processes_that_hold_a_gpu_fail_the_node_but_the_driver_s_own_do_not(tmp_path: Path):
    """A rank that outlived its job is named with its pid; persistenced and the agent may hold GPUs open."""
    (tmp_path / "shm").mkdir()
    gpu = gpu_device(tmp_path)
    process(tmp_path, 4242, "python", "/dev/tty", gpu)
    process(tmp_path, 100, "nvidia-persiste", gpu)
    process(tmp_path, 101, "bash", "/dev/tty", "/dev/nvidia0")
    outcome = look(leftovers, tmp_path)
    assert summaries(outcome.findings) == ["process 4242 (python) holds a GPU open"]


def test_no_user_s_process_may_hold_a_gpu_by_its_name(tmp_path: Path):
    """Nor one whose first thread has ended, nor one of a job in the group of slurmd."""
    (tmp_path / "shm").mkdir()
    gpu = gpu_device(tmp_path)
    process(tmp_path, 100, "nv-hostengine", gpu, uid=1007, group="/user.slice/user-1007.slice/session-1.scope")
    process(tmp_path, 101, "python", gpu, uid=1007, thread="102")
    process(tmp_path, 103, "opsd", gpu, uid=1007, group="/system.slice/slurmd.service")
    found = sorted(summaries(look(leftovers, tmp_path).findings))
    assert found == [
        f"process {pid} ({name}) holds a GPU open"
        for pid, name in ((100, "nv-hostengine"), (101, "python"), (103, "opsd"))
    ]


def test_what_a_repair_would_not_end_is_no_leftover(tmp_path: Path):
    """A service of the system under whatever name, and one of the site's own user that the settings name."""
    (tmp_path / "shm").mkdir()
    gpu = gpu_device(tmp_path)
    process(tmp_path, 100, "telegraf", gpu, uid=998, group="/system.slice/telegraf.service")
    process(tmp_path, 101, "python", gpu, uid=1001, group="/system.slice/gpu-exporter.service")
    process(tmp_path, 102, "python", gpu, uid=1001, group="/system.slice/gpu-agent.service")
    found = look(leftovers, tmp_path, services=("gpu-exporter", "dcgm-exporter.service")).findings
    assert summaries(found) == ["process 102 (python) holds a GPU open"]


def test_a_job_of_root_in_the_group_of_slurmd_is_a_leftover(tmp_path: Path):
    """Where Slurm makes no control groups; slurmd itself, which may read the GPUs' energy, is none."""
    (tmp_path / "shm").mkdir()
    gpu = gpu_device(tmp_path)
    process(tmp_path, 100, "slurmd", gpu, group="/system.slice/slurmd.service")
    process(tmp_path, 101, "python", gpu, group="/system.slice/slurmd.service")
    process(tmp_path, 102, "python", gpu, group="/system.slice/slurmstepd.scope/job_7/step_0/user/task_0")
    found = sorted(summaries(look(leftovers, tmp_path).findings))
    assert found == [f"process {pid} (python) holds a GPU open" for pid in (101, 102)]


def test_old_files_in_shared_memory_are_counted(tmp_path: Path):
    """What a running job has just written is not old."""
    tree(tmp_path, {"shm/nccl-old": "x" * 5000, "shm/new": "x" * 5000})
    os.utime(tmp_path / "shm/nccl-old", (1, 1))
    values = {m.measure: m.value for m in look(leftovers, tmp_path).measurements}
    assert values["stale_shm_files"] == 1
    assert values["stale_shm"] >= 5000


@pytest.mark.skipif(os.geteuid() != 0 or not FUSE.exists(), reason="needs root and FUSE for a mount")
@pytest.mark.parametrize("over", ["shm/folder", "shm/file"])
def test_what_a_user_has_mounted_in_shared_memory_is_not_waited_for(tmp_path: Path, over: str):
    """The check would hang, in the prolog of every job."""
    tree(tmp_path, {"shm/file": "x", "shm/folder/file": "x", "shm/old": "x" * 5000})
    os.utime(tmp_path / "shm/old", (1, 1))
    found = list[float]()
    with silent_mount(tmp_path / over):
        work = threading.Thread(
            target=lambda: found.extend(
                m.value for m in look(leftovers, tmp_path).measurements if m.measure == "stale_shm_files"
            ),
            daemon=True,
        )
        work.start()
        work.join(60)
        assert found == [1]


def test_what_a_run_left_in_memory_on_purpose_is_no_leftover_for_a_day(tmp_path: Path):
    """A job that was put back into the queue meets its own checkpoints, and goes on from them."""
    tree(tmp_path, {"shm/opsd/smol/rank-0000.state": "x" * 5000, "shm/opsd/old/rank-0000.state": "x" * 9000})
    for run, hours in (("smol", 23), ("old", 25)):
        at = time.time() - hours * 3600
        os.utime(tmp_path / "shm/opsd" / run / "rank-0000.state", (at, at))
    values = {m.measure: m.value for m in look(leftovers, tmp_path).measurements}
    assert values["stale_shm_files"] == 1
    assert 5000 <= values["kept_shm"] < 9000 <= values["stale_shm"]
