"""The NCCL collector beside a user whose run folder is on a file system that does not respond."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.collectors.base import Reading
from opsd.collectors.nccl import NcclCollector
from tests.fakes.fuse import FUSE, silent_mount

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not FUSE.exists(), reason="needs root and FUSE for a mount")
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
