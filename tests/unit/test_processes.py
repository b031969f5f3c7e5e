"""Looking processes up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.collectors.lib.processes import DEAD, Identity, identify, process_letter, sees_all_processes, slurm_job
from tests.fakes.clock import eventually


def test_a_process_lives_becomes_a_zombie_and_is_gone() -> None:
    """A zombie still has its number, and is as dead as one that has none any more."""
    assert process_letter(os.getpid()) not in DEAD
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        assert eventually(lambda: process_letter(child.pid) == "Z")
    assert process_letter(child.pid) is None
    assert {"Z", None} <= set(DEAD)


def test_names_of_processes_do_not_matter(tmp_path: Path) -> None:
    """A name may hold spaces and brackets."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (a) R (b) D 1 7 7")
    assert process_letter(7, tmp_path) == "D"
    (tmp_path / "7/stat").write_text("")
    assert process_letter(7, tmp_path) is None


def test_without_a_proc_of_the_initial_namespace_not_all_are_seen(tmp_path: Path) -> None:
    """A folder that is no such namespace, or none at all."""
    assert not sees_all_processes(tmp_path)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    assert not sees_all_processes(tmp_path)


@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", "123"),
        ("0::/system.slice/node1_slurmstepd.scope/job_7/step_batch/user/task_special", "7"),
        ("9:memory:/slurm/uid_1000/job_42/step_0/task_0", "42"),
        ("4:cpuset:/slurm_node1/uid_1000/job_42", "42"),
        ("0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_4242/step_0", ""),
        ("0::/system.slice/slurmstepd.scope/sEKNKTV3WPV500/step_0/user/task_0", "sEKNKTV3WPV500"),
        ("0::/hpc.slice/hpc-slurm.slice/slurmstepd.scope/job_9/step_0", "9"),
        ("0::/system.slice/slurmstepd.scope/system", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/slurmstepd.scope/sEKNKTV3WPV500", ""),
        ("0::/user.slice/user-1000.slice/slurm/uid_1000/job_4242", ""),
        ("0::/../slurmstepd.scope/job_4242", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/x\r0::/system.slice/slurmstepd.scope/job_4242", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/x\v0::/system.slice/slurmstepd.scope/job_4242", ""),
        ("0::/", ""),
        ("", ""),
    ],
)
def test_the_job_of_a_process_is_that_of_its_control_group(path: str, job: str) -> None:
    """As Slurm makes them for control groups of both versions; a user can make groups of these names further down."""
    assert slurm_job(path + "\n") == job


def test_a_process_has_a_user() -> None:
    """The real one; a process that is gone has none."""
    assert identify(os.getpid()) == Identity(os.getuid(), identify(os.getpid()).job)
    assert identify(1 << 22) is None


def test_a_name_does_not_change_whose_a_process_is() -> None:
    """The kernel leaves a carriage return in a name as it is, at which text mode begins a line."""
    code = r"import time; open('/proc/self/comm', 'w').write('\rUid:\t4242 '); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        named.stdout.readline()
        found = identify(named.pid)
        named.kill()
    assert found is not None
    assert found.user == os.getuid()
