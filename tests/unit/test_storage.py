"""Disks, mounts, NFS and the page cache as the storage collectors show them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent import metrics
from opsd.collectors.base import NoData, Reading
from opsd.collectors.lib.storage import (
    MAX_MOUNTS,
    Mount,
    NfsOperation,
    is_disk,
    mount_of,
    parse_disk_stat,
    parse_mdstat,
    parse_mountinfo,
    parse_mountstats,
    storage_mounts,
    way_to,
)
from opsd.collectors.storage import StorageCollector
from opsd.collectors.storage_net import StorageNetCollector
from opsd.scenarios.model import load
from opsd.scenarios.player import play
from tests.fakes.tree import MOUNTINFO, MOUNTSTATS, write_tree

# Disks, mounts, NFS and the page cache as the storage collectors show them.


STAT = "100 5 800 2000 50 6 400 1000 3 1500 3000 7 0 80 70 4 12"

VMSTAT = """\
nr_free_pages 1
workingset_refault_anon 9
workingset_refault_file 5
pgsteal_kswapd 6
pgsteal_direct 1
pgmajfault 8"""


class Machine:
    """A machine with a disk, a partition mounted at a folder that exists, and an NFS mount."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scratch = root / "scratch"
        self.scratch.mkdir()
        write_tree(root / "sys", {"block/nvme0n1/stat": STAT, "block/loop0/stat": STAT})
        write_tree(root / "sys/devices/nvme0n1/nvme0n1p1", {"partition": 1})
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "sys/dev/block/259:1").symlink_to(root / "sys/devices/nvme0n1/nvme0n1p1")
        mountinfo = (
            f"30 1 259:1 / {self.scratch} rw,noatime - ext4 /dev/nvme0n1p1 rw\n"
            f"31 1 0:50 / {root}/data rw - nfs4 10.0.0.1:/export ro,vers=4.2\n"
        )
        write_tree(
            root / "proc",
            {
                "vmstat": VMSTAT,
                "self/mountinfo": mountinfo,
                "self/mountstats": MOUNTSTATS.replace("/data", f"{root}/data"),
            },
        )
        self.collector = StorageCollector(proc=root / "proc", sys=root / "sys", paths=lambda: ())

    def look(self) -> Reading:
        return self.collector.collect()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def values(reading: Reading | NoData, metric: str) -> dict[tuple[str, ...], float]:
    assert isinstance(reading, Reading)
    return {sample.labels: sample.value for sample in reading.samples if sample.metric.name == f"opsd_storage_{metric}"}


def test_a_disk_in_base_units(machine: Machine) -> None:
    """Requests, seconds and bytes per kind of request, and what is under way; loop devices are left out."""
    reading = machine.look()
    assert values(reading, "io_total") == {
        ("nvme0n1", "read"): 100,
        ("nvme0n1", "write"): 50,
        ("nvme0n1", "discard"): 7,
        ("nvme0n1", "flush"): 4,
    }
    assert values(reading, "io_seconds_total")["nvme0n1", "read"] == 2.0
    assert values(reading, "io_bytes_total") == {
        ("nvme0n1", "read"): 800 * 512,
        ("nvme0n1", "write"): 400 * 512,
        ("nvme0n1", "discard"): 80 * 512,
    }
    assert values(reading, "in_flight") == {("nvme0n1",): 3}
    assert values(reading, "busy_seconds_total") == {("nvme0n1",): 1.5}
    assert values(reading, "io_latency_seconds") == {}


def test_latency_is_that_of_the_last_interval(machine: Machine) -> None:
    """The mean latency is of the requests completed since the last look, and absent where there were none."""
    machine.look()
    stat = "110 5 800 2300 50 6 400 1000 0 1500 3000 7 0 80 70 4 12"
    write_tree(machine.root / "sys", {"block/nvme0n1/stat": stat})
    assert values(machine.look(), "io_latency_seconds") == {("nvme0n1", "read"): pytest.approx(0.03)}
    assert values(machine.look(), "io_latency_seconds") == {}


def test_times_that_wrap_keep_growing(machine: Machine) -> None:
    """The kernel's milliseconds are 32 bits wide: busy disks wrap them within hours."""
    stat = "100 0 0 {} 0 0 0 0 0 0 0"
    write_tree(machine.root / "sys", {"block/nvme0n1/stat": stat.format(2**32 - 1000)})
    machine.look()
    write_tree(machine.root / "sys", {"block/nvme0n1/stat": stat.replace("100", "200").format(1000)})
    reading = machine.look()
    assert values(reading, "io_seconds_total")["nvme0n1", "read"] == pytest.approx((2**32 + 1000) / 1e3)
    assert values(reading, "io_latency_seconds")["nvme0n1", "read"] == pytest.approx(0.02)


def test_a_mount_and_the_disk_under_it(machine: Machine) -> None:
    """A mount names its file system, its options and its disk, and has a size."""
    reading = machine.look()
    point = str(machine.scratch)
    info = (point, "ext4", "/dev/nvme0n1p1", "nvme0n1", "rw,noatime")
    assert info in values(reading, "mount_info")
    assert values(reading, "read_only") == {(point,): 0, (f"{machine.root}/data",): 1}
    status = os.statvfs(machine.scratch)
    assert values(reading, "size_bytes") == {(point,): status.f_blocks * status.f_frsize}


def test_nfs_is_told_without_asking_the_server(machine: Machine) -> None:
    """An NFS mount's operations come from the kernel's tables, although its folder is not even there."""
    reading = machine.look()
    data = f"{machine.root}/data"
    assert values(reading, "nfs_operations_total")[data, "read"] == 100
    assert values(reading, "nfs_seconds_total")[data, "read"] == 0.9
    assert values(reading, "nfs_round_trip_seconds_total")[data, "read"] == 0.8
    assert values(reading, "nfs_retransmits_total")[data, "read"] == 3
    assert values(reading, "nfs_timeouts_total")[data, "read"] == 2
    assert values(reading, "nfs_bytes_total") == {(data, "read"): 5000, (data, "write"): 6000}
    later = MOUNTSTATS.replace("/data", data).replace(
        "READ: 100 103 2 17000 1048576 40 800 900", "READ: 110 113 2 0 0 0 0 1900"
    )
    write_tree(machine.root / "proc", {"self/mountstats": later})
    assert values(machine.look(), "nfs_latency_seconds") == {(data, "read"): pytest.approx(0.1)}


def test_the_page_cache(machine: Machine) -> None:
    """Pages evicted, pages read again, and faults that waited for a disk."""
    reading = machine.look()
    shown = {
        name: values(reading, name)[()]
        for name in ("page_refaults_total", "pages_reclaimed_total", "major_faults_total")
    }
    assert shown == {"page_refaults_total": 5, "pages_reclaimed_total": 7, "major_faults_total": 8}


def test_older_kernels_do_not_split_refaults(machine: Machine) -> None:
    """Before Linux 5.9 there is one counter for refaults of files and anonymous memory."""
    write_tree(machine.root / "proc", {"vmstat": "workingset_refault 12\nsomething"})
    reading = machine.look()
    assert values(reading, "page_refaults_total") == {(): 12}
    assert values(reading, "major_faults_total") == {}


def test_a_disk_that_vanishes_costs_only_itself(machine: Machine) -> None:
    """A disk listed but gone, and a machine without disks or NFS, leave the rest standing."""
    (machine.root / "sys/block/nvme0n1/stat").unlink()
    (machine.root / "proc/self/mountstats").unlink()
    reading = machine.look()
    assert values(reading, "io_total") == {}
    assert values(reading, "size_bytes") != {}


def test_a_disk_file_of_nonsense_is_an_error(machine: Machine) -> None:
    """Statistics that cannot be understood are an error of the collector, not a healthy silence."""
    write_tree(machine.root / "sys", {"block/nvme0n1/stat": "1 2 3"})
    with pytest.raises(ValueError, match="not the statistics of a disk"):
        machine.look()


def test_which_names_are_disks() -> None:
    """Memory and loop devices and the single paths of a multipath drive are not watched."""
    names = ["nvme0n1", "nvme0c0n1", "sda", "vda", "dm-0", "md127", "loop3", "zram0", "ram1", "sr0"]
    assert [name for name in names if is_disk(name)] == ["nvme0n1", "sda", "vda", "dm-0", "md127"]


@given(st.one_of(st.text(), st.lists(st.integers()).map(lambda numbers: " ".join(map(str, numbers)))))
def test_any_statistics_are_parsed_or_refused(text: str) -> None:
    """The statistics of a disk have two to four kinds of requests, or are a ValueError."""
    try:
        assert 2 <= len(parse_disk_stat(text).operations) <= 4
    except ValueError:
        return


def net(machine: Machine, **arguments: object) -> StorageNetCollector:
    return StorageNetCollector(proc=machine.root / "proc", **arguments)  # type: ignore[arg-type]


def test_a_network_file_system_that_answers(machine: Machine) -> None:
    """Size, reachability and the time the answer took."""
    data = machine.root / "data"
    data.mkdir()
    reading = net(machine).collect()
    assert values(reading, "reachable") == {(str(data),): 1}
    assert values(reading, "response_seconds")[str(data),] >= 0
    assert values(reading, "size_bytes")[str(data),] > 0


def test_a_network_file_system_that_fails(machine: Machine) -> None:
    """A stale handle or a dead server process is a 0, without sizes that nobody knows."""
    reading = net(machine).collect()
    assert values(reading, "reachable") == {(f"{machine.root}/data",): 0}
    assert values(reading, "size_bytes") == {}


def test_a_mount_that_may_not_be_entered_is_unknown(machine: Machine) -> None:
    """A missing permission says nothing about the file system."""

    def refuse(point: str) -> os.statvfs_result:
        raise PermissionError(point)

    reading = net(machine, statvfs=refuse).collect()
    assert isinstance(reading, Reading)
    assert reading.samples == ()


def test_one_collector_for_one_mount(machine: Machine) -> None:
    """A collector restricted to one mount has its own name and looks at no other."""
    collector = net(machine, only=["/elsewhere"], name="storage_net:/elsewhere")
    assert collector.name == "storage_net:/elsewhere"
    assert isinstance(collector.collect(), NoData)


def test_the_storage_of_this_machine() -> None:
    """The real kernel's tables are understood, and a second look is quick."""
    collector = StorageCollector()
    first = collector.collect()
    assert values(first, "size_bytes")["/",] > 0
    started = time.monotonic()
    collector.collect()
    assert time.monotonic() - started < 10


MDSTAT = """\
Personalities : [raid1] [raid0] [raid6] [raid5] [raid4]
md1 : active raid1 nvme0n1p2[0] nvme1n1p2[1](F)
      1046528 blocks super 1.2 [2/1] [U_]
      bitmap: 3/8 pages [12KB], 65536KB chunk

md0 : active raid0 nvme2n1[0] nvme3n1[1]
      15002669056 blocks super 1.2 512k chunks

md5 : active raid5 sdd[3] sdc[1] sdb[0]
      7813774336 blocks super 1.2 level 5, 512k chunk, algorithm 2 [3/2] [UU_]
      [==>..................]  recovery = 12.6% (492552448/3906887168) finish=280.1min speed=203100K/sec

md2 : broken raid0 nvme4n1[0]
      7501333504 blocks super 1.2 512k chunks

md127 : inactive sde[0](S)
      3906887512 blocks super 1.2

md3 : active (auto-read-only) raid1 sdf1[0] sdg1[1]
      104320 blocks [2/2] [UU]

unused devices: <none>
"""


def test_arrays_that_lack_disks(machine: Machine) -> None:
    """A degraded and a broken array count; one that is rebuilt, complete or was never started does not."""
    missing = {"md1": 1, "md0": 0, "md5": 0, "md2": -1, "md3": 0}
    assert parse_mdstat(MDSTAT) == missing
    write_tree(machine.root / "proc", {"mdstat": MDSTAT})
    found = [sample for sample in machine.look().samples if sample.metric.name == "opsd_storage_array_missing_disks"]
    assert {sample.labels: sample.value for sample in found} == {(name,): count for name, count in missing.items()}
    assert parse_mdstat("Personalities : \nunused devices: <none>\n") == {}


# The tables of mounts and of NFS operations that the kernel prints.


def mount(point: str, fstype: str = "ext4", device: str = "8:1") -> Mount:
    return Mount(device, point, fstype, "/dev/x", "rw", False)


def test_mountinfo() -> None:
    """Every line that makes sense is a mount, with its place unescaped and both kinds of options."""
    mounts = {entry.point: entry for entry in parse_mountinfo(MOUNTINFO)}
    assert len(mounts) == 9
    assert mounts["/"] == Mount("259:2", "/", "ext4", "/dev/nvme0n1p2", "rw,relatime,errors=remount-ro", False)
    assert mounts["/srv/bind mount"].device == "259:3"


def test_a_mount_that_is_read_only_for_the_agent_alone_is_not() -> None:
    """Under ProtectSystem=strict each mount is; the file systems are written by others all the same."""
    (mount,) = parse_mountinfo("27 1 259:2 / / ro,relatime - ext4 /dev/nvme0n1p2 rw,errors=remount-ro")
    assert not mount.read_only


def test_a_file_system_that_errors_made_read_only() -> None:
    """Read-only after an error shows in the file system's options while the mount's still say read-write."""
    by_point = {entry.point: entry.read_only for entry in parse_mountinfo(MOUNTINFO)}
    assert by_point["/scratch"]
    assert not by_point["/data"]


def test_network_file_systems_are_told_apart() -> None:
    """What can wait for another machine or process is known by its type."""
    network = {entry.point for entry in parse_mountinfo(MOUNTINFO) if entry.network}
    assert network == {"/data", "/lustre", "/bucket"}


def test_the_mounts_that_matter() -> None:
    """Disks and networks once each, and what the given folders lie on; no proc, no tmpfs nobody asked for."""
    mounts = parse_mountinfo(MOUNTINFO)
    points = [entry.point for entry in storage_mounts(mounts)]
    assert points == ["/", "/bucket", "/data", "/lustre", "/scratch"]
    assert "/dev/shm" in [entry.point for entry in storage_mounts(mounts, ["/dev/shm/opsd/run"])]


def test_no_number_of_users_mounts_leaves_out_a_server() -> None:
    """Collectors look at the first of them; a user may mount a thousand file systems of processes."""
    users = "".join(
        f"{100 + n} 1 0:{100 + n} / /home/u/{n:04} rw,nosuid - fuse.sshfs x rw,user_id=1000,group_id=1000\n"
        for n in range(2 * MAX_MOUNTS)
    )
    nodes = (
        "50 1 0:50 / /scratch rw - nfs4 server:/ rw\n51 1 0:51 / /data rw - fuse.juicefs j rw,user_id=0,group_id=0\n"
    )
    found = storage_mounts(parse_mountinfo(users + nodes))[:MAX_MOUNTS]
    assert [mount.point for mount in found[:2]] == ["/data", "/scratch"]


@pytest.mark.parametrize(
    ("path", "point"),
    [("/data", "/data"), ("/data/x", "/data"), ("/database", "/"), ("/", "/"), ("/data/deep/x", "/data/deep")],
)
def test_a_path_lies_on_its_deepest_mount(path: str, point: str) -> None:
    """The longest mount point that the path is below decides, by whole names."""
    found = mount_of(path, [mount("/"), mount("/data"), mount("/data/deep")])
    assert found is not None
    assert found.point == point


def test_a_later_mount_hides_an_earlier_one() -> None:
    """Of two mounts on one point the last is the one that is seen."""
    found = mount_of("/data/x", [mount("/data", "ext4"), mount("/data", "xfs")])
    assert found is not None
    assert found.fstype == "xfs"
    assert mount_of("/data", []) is None


@pytest.mark.parametrize(
    ("point", "way"),
    [
        ("/home/u", ["/home", "/home/u"]),
        ("/home/u/scratch", ["/home", "/home/u"]),
        ("/home", []),
        ("/late", []),
        ("/homework", []),
        ("/", []),
    ],
)
def test_the_way_to_a_mount_point(point: str, way: list[str]) -> None:
    """Through the network mounts above it, and those that were made over it later; not through one below the root."""
    mounts = [
        mount("/", "nfs4"),
        mount("/home", "nfs4"),
        mount("/home/u"),
        mount("/home/u/scratch"),
        mount("/homework"),
        mount("/home/u", "fuse.sshfs"),
        mount("/late", "fuse.sshfs"),
        mount("/late"),
    ]
    found = next(entry for entry in mounts if entry.point == point and (not entry.network or point in ("/", "/home")))
    assert [passed.point for passed in way_to(found, mounts)] == way


def test_nfs_operations() -> None:
    """An NFS mount gives its bytes and, for the operations that matter, counts, repeats and times in seconds."""
    (data,) = parse_mountstats(MOUNTSTATS)
    assert (data.point, data.read, data.written) == ("/data", 5000, 6000)
    assert data.operations == (
        NfsOperation("READ", 100, 103, 2, 0.8, 0.9),
        NfsOperation("WRITE", 7, 7, 0, 0.014, 0.021),
    )


@given(st.text())
def test_any_text_can_be_parsed(text: str) -> None:
    """No text makes the parsers raise, alone or in the middle of a real table."""
    for candidate in (text, MOUNTINFO + text, MOUNTSTATS + text, MOUNTSTATS[:200] + text + MOUNTSTATS[200:]):
        for entry in parse_mountinfo(candidate):
            assert len(entry.options) <= 256
        parse_mountstats(candidate)


def test_the_mounts_of_this_machine() -> None:
    """The real table has a root, and every mount that matters exists."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = parse_mountinfo(file.read())
    assert mount_of("/", mounts) is not None
    assert all(os.path.lexists(entry.point) for entry in storage_mounts(mounts) if not entry.network)


# What an agent exports of a file system that is full: that of the network has its mount, as all its nodes tell it.


SCENARIOS = Path(__file__).parents[1] / "scenarios" / "storage_full"


@pytest.mark.parametrize(("scenario", "mount"), [("network_mount", "/results"), ("few_bytes", "")])
def test_only_a_network_file_system_is_told_by_its_mount(scenario: str, mount: str) -> None:
    """An alert is then one for all nodes; a disk of the node stays the node's."""
    played = play(load(SCENARIOS / f"{scenario}.toml"), "observe")
    samples = metrics.runbook_samples(("storage_full",), played.incidents.values(), {}, {})
    shown = [s.labels for s in samples if s.metric is metrics.INCIDENTS and s.value]
    assert shown == [("storage_full", shown[0][1], "open", "", mount)]
