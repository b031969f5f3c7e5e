"""Several runs and several users on one node: none keeps another out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.rundir import RunError, RunFolders
from tests.fakes.launched import TRAIN, Launched

FIRST, SECOND = 54_321, 54_322
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as several users")
MAKE = """
import json, os, sys
from pathlib import Path
from opsd.rundir import RunError, RunFolders
uid, base, run = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
folders = RunFolders.create(run, folder=base / f"runs-{uid}" / run, logs=None, shared=base / "shm/opsd")
(folders.memory / "events.jsonl").write_text("{}")
print(json.dumps([folders.run, folders.memory.name]))
"""


@pytest.fixture
def node() -> Iterator[Path]:
    """A folder that all users may write to, as /dev/shm is."""
    base = Path(tempfile.mkdtemp(prefix="torchrun-users-"))
    base.chmod(0o755)
    for name in ("shm", f"runs-{FIRST}", f"runs-{SECOND}", "runs-0"):
        (base / name).mkdir()
        (base / name).chmod(0o1777)
    yield base
    shutil.rmtree(base)


def make(uid: int, base: Path, run: str) -> list[str]:
    """The run's name and that of its folder in memory, as the user ``uid`` gets them."""
    command = [sys.executable, "-c", MAKE, str(uid), str(base), run]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stderr
    names: list[str] = json.loads(found.stdout)
    return names


@as_root
def test_second_user_of_a_node_runs_under_the_same_name(node: Path) -> None:
    """What the first user's finished run has left, also its folder for all runs, keeps nobody out."""
    assert make(FIRST, node, "train") == ["train", "train"]
    assert make(SECOND, node, "train") == ["train", f"train.{SECOND}"]
    assert make(FIRST, node, "train") == ["train", "train"]
    assert sorted(path.name for path in (node / "shm/opsd").iterdir()) == ["train", f"train.{SECOND}"]


@as_root
def test_root_takes_over_the_folder_of_all_runs(node: Path) -> None:
    """After root has run something nobody can take away what lies there, and the users go on."""
    make(FIRST, node, "train")
    assert (node / "shm/opsd").stat().st_uid == FIRST
    folders = RunFolders.create("train", folder=node / "runs-0/train", logs=None, shared=node / "shm/opsd")
    folders.release()
    info = (node / "shm/opsd").stat()
    assert (info.st_uid, info.st_mode & 0o7777) == (0, 0o1777)
    assert folders.memory.name == "train.0"
    assert make(FIRST, node, "train") == ["train", "train"]


@as_root
def test_root_leaves_a_users_own_folder_alone(node: Path) -> None:
    """What OPSD_SHM names in a place that is not for all users stays its owner's; root is told to go elsewhere."""
    (node / "home/shm").mkdir(parents=True)
    for path in (node / "home", node / "home/shm"):
        os.chown(path, FIRST, FIRST)
    with pytest.raises(RunError, match="OPSD_SHM"):
        RunFolders.create("train", folder=node / "runs-0/train", logs=None, shared=node / "home/shm")
    assert (node / "home/shm").stat().st_uid == FIRST


@as_root
def test_root_does_not_follow_a_link_to_the_folder_of_all_runs(node: Path) -> None:
    """A user who plants a link there does not get root to change another folder."""
    (node / "victim").mkdir(mode=0o700)
    os.chown(node / "victim", FIRST, FIRST)
    (node / "shm/opsd").symlink_to(node / "victim")
    os.lchown(node / "shm/opsd", FIRST, FIRST)
    with pytest.raises(RunError, match="cannot be made"):
        RunFolders.create("train", folder=node / "runs-0/train", logs=None, shared=node / "shm/opsd")
    assert (node / "victim").stat().st_uid == FIRST


def test_launches_of_a_sweep_are_different_runs(tmp_path: Path) -> None:
    """Started in one job at the same moment, with other arguments or the same ones, each has its own run."""
    script = tmp_path / "prog.py"
    script.write_text("import os, sys, time\ntime.sleep(2)\nprint(os.environ['OPSD_RUN'], *sys.argv[1:])\n")
    own = {"OPSD_SHM": str(tmp_path / "shm"), "XDG_STATE_HOME": str(tmp_path / "state")}
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    command = [sys.executable, "-m", "opsd", "launch", "--standalone", str(script)]
    sweep = [
        subprocess.Popen(
            [*command, lr], env={**os.environ, **own, **job}, cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for lr in ("1", "2", "2")
    ]  # fmt: skip
    ends = [process.communicate(timeout=60) for process in sweep]
    assert [process.returncode for process in sweep] == [0, 0, 0], ends
    names = [out.split()[0] for out, _ in ends]
    assert len(set(names)) == 3
    assert all(name.startswith("job-77-") for name in names)
    again = subprocess.run(
        [*command, "1"], env={**os.environ, **own, **job, "SLURM_RESTART_COUNT": "1"}, cwd=tmp_path, text=True,
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert again.stdout.split() == [names[0], "1"], again.stderr


def test_run_may_be_called_like_any_job(tmp_path: Path) -> None:
    """The name of a Slurm job, with blanks and umlauts, is taken as it is."""
    with Launched(tmp_path, TRAIN + "print(os.environ['OPSD_RUN'])", "--run-id", "große Läufe") as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out.startswith("groe-Laufe-")
