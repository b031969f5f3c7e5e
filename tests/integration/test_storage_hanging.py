"""The collectors of storage beside a user's file system that never answers."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.collectors.base import Collector, NoData, Reading
from opsd.collectors.host import HostCollector
from opsd.collectors.storage import StorageCollector
from opsd.collectors.storage_net import StorageNetCollector
from tests.fakes.fuse import FUSE, silent_mount
from tests.fakes.tmpfs import tmpfs

USER = 1000
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not FUSE.exists(), reason="needs root and FUSE for a mount")


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
