"""What earlier jobs have left on a node: processes on GPUs, and files in shared memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from opsd.preflight.checks import leftovers
from tests.fakes.fixture_tree import look, summaries, tree
from tests.fakes.fuse import FUSE, silent_mount
from tests.fakes.gpu_device import gpu_device


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
