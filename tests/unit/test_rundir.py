"""The folders of a run: who may use them, names, cleaning up."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from opsd.client import process_start
from opsd.rundir import (
    RUN_NAME,
    RunError,
    RunFolders,
    RunState,
    in_user_namespace,
    machine_uid,
    prune,
    unmapped_uid,
    valid_name,
)

# The folders of a run: who may use them, names, cleaning up.


def folders_of(run: str, tmp_path: Path) -> RunFolders:
    """The folders of a run whose shared memory is ``tmp_path / "shm"``."""
    return RunFolders.create(run, folder=tmp_path / run, logs=None, shared=tmp_path / "shm")


def state(pid: int, start: int) -> RunState:
    """A run.json with the given launcher."""
    return RunState(
        run="r", job="", node="n", state="running", generation=1, launcher_pid=pid, launcher_start=start, world_size=1,
        control="c", folder="f",
    )  # fmt: skip


def test_run_of_a_living_launcher_is_refused(tmp_path: Path) -> None:
    """Two launchers cannot have one run; the message names the other's pid and the way out."""
    folders = folders_of("r", tmp_path)
    parent = os.getppid()
    folders.write_state(state(parent, process_start(parent) or 0))
    with pytest.raises(RunError, match=f"process {parent}.*--run-id"):
        folders_of("r", tmp_path)


def test_run_of_a_dead_launcher_is_taken_over(tmp_path: Path) -> None:
    """What a killed launcher left is cleared away; generations go on counting; other people's files stay."""
    folders = folders_of("r", tmp_path)
    folders.write_state(state(os.getppid(), 1))
    folders.page(0).write_bytes(b"old")
    (folders.memory / "mine.bin").write_bytes(b"keep")
    folders.generation_logs(4).mkdir(parents=True)
    folders.release()
    again = folders_of("r", tmp_path)
    assert sorted(path.name for path in again.memory.iterdir()) == ["mine.bin"]
    assert again.last_generation() == 4


def test_run_of_a_launcher_that_nobody_has_waited_for_is_taken_over(tmp_path: Path) -> None:
    """It was killed in a container whose first process does not collect the dead: it is there, and runs no more."""
    folders = folders_of("r", tmp_path)
    with subprocess.Popen(["true"]) as launcher:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
        folders.write_state(state(launcher.pid, process_start(launcher.pid) or 0))
        folders.release()
        assert folders_of("r", tmp_path).run == "r"


def test_link_in_shared_memory_is_not_followed(tmp_path: Path) -> None:
    """A link planted under the run's name leads nowhere: the run gets the user's number, or is refused."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shm/r").symlink_to(tmp_path / "elsewhere")
    assert folders_of("r", tmp_path).memory.name == f"r.{os.getuid()}"
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "shm/q").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"shm/q.{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="another user"):
        folders_of("q", tmp_path)


def test_run_is_taken_before_its_launcher_has_said_so(tmp_path: Path) -> None:
    """Of two launchers started at the same moment one gets the run; one that nobody looks for by name is renamed."""
    first = folders_of("r", tmp_path)
    with pytest.raises(RunError, match="being run by another process"):
        folders_of("r", tmp_path)
    twin = RunFolders.create("r", folder=None, logs=tmp_path / "logs", shared=tmp_path / "shm", alone=True)
    assert (twin.run, twin.memory, twin.logs) == ("r-2", tmp_path / "shm/r-2", tmp_path / "logs/r-2")
    first.release()
    again = RunFolders.create("r", folder=tmp_path / "r", logs=None, shared=tmp_path / "shm", alone=True)
    assert again.run == "r"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("train.v2", "train.v2"),
        ("my training", "my-training-"),
        ("Büro größer", "Buro-groer-"),
        ("训练", "run-"),
        ("../../etc", "etc-"),
        ("x" * 80, "x" * 54 + "-"),
    ],
)
def test_any_text_makes_a_name(text: str, name: str) -> None:
    """What is no valid name of a run becomes one, always the same; two texts never become one name."""
    made = valid_name(text)
    assert made.startswith(name)
    assert RUN_NAME.fullmatch(made)
    assert made == valid_name(text)
    assert made == text or made != valid_name(text + " ")


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A run folder below a file is refused with its name."""
    (tmp_path / "r").write_text("")
    with pytest.raises(RunError, match=r"cannot be made"):
        folders_of("r", tmp_path)


def test_prune_removes_old_runs_only(tmp_path: Path) -> None:
    """Finished long ago: gone. Alive, recent, or with files of others in it: kept."""
    old, alive, recent, shared = (folders_of(name, tmp_path) for name in "abcd")
    alive.write_state(state(os.getppid(), process_start(os.getppid()) or 0))
    (old.memory / "events.jsonl").write_text("{}\n")
    (shared.memory / "checkpoint.bin").write_bytes(b"x")
    now = time.time()
    for folders, age in ((old, 9000), (alive, 9000), (recent, 10), (shared, 9000)):
        os.utime(folders.memory, (now - age, now - age))
    for folders in (old, recent, shared):
        folders.release()
    prune(tmp_path / "shm", now, keep_s=3600)
    assert sorted(path.name for path in (tmp_path / "shm").iterdir()) == ["b", "c", "d"]
    assert (shared.memory / "checkpoint.bin").exists()


# Whether user ids are those of the machine, or of a user namespace.


ME = os.getuid()


@pytest.mark.parametrize(
    ("mapped", "inside", "uid"),
    [
        ("         0          0 4294967295\n", False, ME),
        (f"{ME} 5000 1\n", True, 5000),
        (f"4000000000 1 1\n{ME} 7000 10\n", True, 7000),
        ("4000000000 1 1\n", True, ME),
    ],
)
def test_a_map_of_user_ids_tells(tmp_path: Path, mapped: str, inside: bool, uid: int) -> None:
    """As the kernel writes it (user_namespaces(7)): first id inside, first one outside, how many."""
    (tmp_path / "uid_map").write_text(mapped)
    assert (in_user_namespace(tmp_path), machine_uid(tmp_path)) == (inside, uid)


def test_without_user_namespaces_ids_are_the_machines(tmp_path: Path) -> None:
    """A kernel can be built without them."""
    assert (in_user_namespace(tmp_path), machine_uid(tmp_path)) == (False, ME)


def test_users_without_an_id_have_a_number_in_a_namespace_only(tmp_path: Path) -> None:
    """65534 by default, and a user of that number outside one."""
    (tmp_path / "overflowuid").write_text("65534\n")
    assert unmapped_uid(tmp_path) == (65534 if in_user_namespace() else None)
