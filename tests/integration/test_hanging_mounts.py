"""Collectors beside a user's file system that never answers."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.collectors.base import Collector, NoData, Reading
from opsd.collectors.host import HostCollector
from opsd.collectors.nccl import NcclCollector
from opsd.collectors.storage import StorageCollector
from opsd.collectors.storage_net import StorageNetCollector
from tests.fakes.tree import FUSE, silent_mount, tmpfs

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not FUSE.exists(), reason="needs root and FUSE for a mount")


# The NCCL collector beside a user whose run folder is on a file system that does not respond.


NOBODY = 65534

WARN = b"n1:42:50 [0] transport/net_ib.cc:905 NCCL WARN NET/IB: Got async event : port error\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter, as pytest's are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def start_run(root: Path, name: str, owner: int, folder: Path) -> None:
    """A run of ``owner`` with rank 0 on this node."""
    memory = root / name
    memory.mkdir(parents=True)
    (memory / "rank-0000.page").touch()
    run = {
        "run": name, "job": "7", "node": "n1", "state": "running", "generation": 1, "launcher_pid": 1,
        "launcher_start": 1, "world_size": 1, "control": "", "folder": str(folder),
    }  # fmt: skip
    (memory / "run.json").write_text(json.dumps(run))
    for path in (memory, memory / "run.json"):
        os.chown(path, owner, -1)


def values(collector: NcclCollector) -> dict[tuple[str, ...], float]:
    """One collection: values by metric and labels."""
    reading = collector.collect()
    assert isinstance(reading, Reading)
    return {(sample.metric.name, *sample.labels): sample.value for sample in reading.samples}


def test_a_file_system_that_hangs_blinds_for_its_user_only(place: Path) -> None:
    """The other run is followed meanwhile; the blocked one is said to be blocked, and followed once it responds."""
    root, stuck, logs = place / "shm", place / "stuck", place / "run/logs/gen-0001"
    stuck.mkdir()
    logs.mkdir(parents=True)
    start_run(root, "healthy", 0, place / "run")
    start_run(root, "blocked", NOBODY, stuck / "run")
    collector = NcclCollector(root, addresses=(("127.0.0.1", 1),))
    warnings, followed = ("opsd_nccl_log_messages_total", "healthy", "0", "warning"), ("opsd_nccl_rank_logs", "blocked")
    with silent_mount(stuck):
        first = values(collector)
        (logs / "rank-0000.log").write_bytes(WARN)
        second = values(collector)
        assert first["opsd_nccl_blocked_users",] == second["opsd_nccl_blocked_users",] == 1
        assert second[warnings] == 1
        assert followed not in second
    after = values(collector)
    assert after[warnings] == 1
    assert after["opsd_nccl_blocked_users",] == 0
    assert after[followed] == 0


# The collectors of storage beside a user's file system that never answers.


USER = 1000


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder that is a mount."""
    with tempfile.TemporaryDirectory() as folder, tmpfs(Path(folder) / "home", "size=1m") as home:
        yield home


def collected(collector: Collector) -> Reading | NoData:
    """One collection, which must end while the file system is silent."""
    found: list[Reading | NoData] = []
    thread = threading.Thread(target=lambda: found.append(collector.collect()), daemon=True)
    thread.start()
    thread.join(30)
    assert found, f"{collector.name} hangs"
    return found[0]


def labels(reading: Reading | NoData, metric: str) -> set[tuple[str, ...]]:
    """The labels of the series of ``metric``."""
    assert isinstance(reading, Reading)
    return {sample.labels for sample in reading.samples if sample.metric.name == metric}


def test_a_users_file_system_above_a_mount_hangs_no_collector(home: Path) -> None:
    """What is mounted there is told, its size is not asked for."""
    mount = home / "scratch"
    mount.mkdir()
    with tmpfs(mount, "size=1m"), silent_mount(home, USER):
        reading = collected(StorageCollector(paths=lambda: ("/", str(mount))))
        assert (str(mount),) in labels(reading, "opsd_storage_read_only")
        assert (str(mount),) not in labels(reading, "opsd_storage_size_bytes")
        assert ("/",) in labels(reading, "opsd_storage_size_bytes")
        disks = labels(collected(HostCollector(mounts=(Path("/"), mount))), "opsd_host_filesystem_size_bytes")
        assert disks == {("/",)}


def test_a_users_file_system_is_not_asked_for_its_size(home: Path) -> None:
    """One of a user who never answers would hide every server of the node."""
    with silent_mount(home, USER):
        reading = collected(StorageNetCollector())
    assert isinstance(reading, NoData) or (str(home),) not in labels(reading, "opsd_storage_reachable")
