"""The tables of mounts and of NFS operations that the kernel prints."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.storage.mounts import (
    MAX_MOUNTS,
    Mount,
    NfsOperation,
    mount_of,
    parse_mountinfo,
    parse_mountstats,
    storage_mounts,
    way_to,
)
from tests.fakes.mounts import MOUNTINFO, MOUNTSTATS


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
