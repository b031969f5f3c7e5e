"""Which job gives a node back that is to be repaired: one whose own launcher says that it has no ranks there."""

from __future__ import annotations

import getpass
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from opsd.repair.release import release
from opsd.slurm.port import Job, Node
from tests.fakes.fuse import FUSE, silent_mount
from tests.fakes.slurm import FakeSlurm

JOB = Job(7, "running", "", getpass.getuser(), "train", ("n1", "n2", "n3"), "n1", None, None, None, 0, "run")
OTHER_USER = 65_533
LAUNCHER = 4242


@dataclass
class Shrinking(FakeSlurm):
    """Remembers to which nodes a job was reduced."""

    shrunk: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    of_job: dict[str, frozenset[str]] = field(default_factory=lambda: {"1": frozenset({"n1"}), "2": frozenset({"n2"})})

    def __post_init__(self) -> None:
        FakeSlurm.__init__(self, [Node("n2", "allocated", frozenset({"drain"}))])

    def shrink(self, job: int, names: Sequence[str]) -> None:
        self.shrunk.append((job, tuple(names)))

    def steps(self, job: int) -> Mapping[str, frozenset[str]]:
        return self.of_job


@contextmanager
def launcher(root: Path, run: str, job: int, nodes: Sequence[str]) -> Iterator[None]:
    """The folder of a run whose launcher answers that it has ranks on ``nodes``."""
    folder = root / run
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run": run, "job": str(job), "launcher_pid": LAUNCHER}))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "control.sock"))
        server.listen()

        def serve() -> None:
            with suppress(OSError), server.accept()[0] as connection:  # nobody may ask
                connection.recv(4096)
                connection.sendall(json.dumps({"nodes": list(nodes)}).encode() + b"\n")

        threading.Thread(target=serve, daemon=True).start()
        yield


@pytest.fixture
def proc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher on n2, in the step 7.2."""
    folder = tmp_path_factory.mktemp("proc")
    (folder / str(LAUNCHER)).mkdir()
    (folder / str(LAUNCHER) / "environ").write_bytes(b"LANG=C\0SLURM_JOB_ID=7\0SLURM_STEP_ID=2\0")
    return folder


def test_a_run_that_has_moved_on_gives_its_node_back(tmp_path: Path, proc: Path) -> None:
    """The job is reduced to its other nodes, and goes on."""
    slurm = Shrinking()
    with launcher(tmp_path, "run", 7, ["n1", "n3"]):
        assert release(slurm, "n2", [JOB], tmp_path, proc) == "job 7 goes on without n2, which its run has left"
    assert slurm.shrunk == [(7, ("n1", "n3"))]


def test_a_job_with_another_step_on_the_node_keeps_it(tmp_path: Path, proc: Path) -> None:
    """A server of data or an evaluation, which Slurm would end with the node."""
    slurm = Shrinking(of_job={"2": frozenset({"n2"}), "3": frozenset({"n1", "n2"}), "4": frozenset({"n1"})})
    with launcher(tmp_path, "run", 7, ["n1", "n3"]):
        said = release(slurm, "n2", [JOB], tmp_path, proc)
    assert (said, slurm.shrunk) == ("job 7 keeps n2: its step 3 is not one of the run's launchers", [])


def test_a_launcher_that_cannot_be_told_from_other_steps_keeps_the_node(tmp_path: Path) -> None:
    """In a container its number is another one."""
    slurm = Shrinking()
    with launcher(tmp_path, "run", 7, ["n1", "n3"]):
        assert "keeps n2: its step 2" in release(slurm, "n2", [JOB], tmp_path, tmp_path)
    assert slurm.shrunk == []


@pytest.mark.parametrize(
    ("job", "told", "places"),
    [
        (JOB, 7, ["n1", "n2"]),
        (JOB, 8, ["n1", "n3"]),
        (JOB, 7, []),
        (JOB, 7, ["n1", "n2.cluster"]),
        (replace(JOB, batch_host="n2"), 7, ["n1", "n3"]),
        (replace(JOB, state="suspended"), 7, ["n1", "n3"]),
        (replace(JOB, nodes=("n2",)), 7, ["n1", "n3"]),
        (replace(JOB, user="no-such-user"), 7, ["n1", "n3"]),
    ],
    ids=[
        "has ranks",
        "is another job",
        "does not say",
        "other names",
        "batch host",
        "suspended",
        "only node",
        "unknown user",
    ],
)
def test_all_other_jobs_keep_it(tmp_path: Path, job: Job, told: int, places: Sequence[str]) -> None:
    """Also one whose launcher does not say where it has ranks."""
    slurm = Shrinking()
    with launcher(tmp_path, "run", told, places):
        assert release(slurm, "n2", [job], tmp_path) == ""
    assert slurm.shrunk == []


def test_of_two_runs_in_a_job_both_must_have_left(tmp_path: Path) -> None:
    """A job may have several."""
    slurm = Shrinking()
    with launcher(tmp_path, "a", 7, ["n1"]), launcher(tmp_path, "b", 7, ["n2"]):
        assert release(slurm, "n2", [JOB], tmp_path) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a folder of another user, which needs root")
def test_nobody_speaks_for_another_user_s_job(tmp_path: Path) -> None:
    """A folder in shared memory claims the job, and is somebody else's."""
    slurm = Shrinking()
    with launcher(tmp_path, "run", 7, ["n1", "n3"]):
        os.chown(tmp_path / "run", OTHER_USER, OTHER_USER)
        assert release(slurm, "n2", [JOB], tmp_path) == ""
    assert slurm.shrunk == []


def test_a_link_in_place_of_the_run_s_file_is_not_followed(tmp_path: Path) -> None:
    """It could name a device that acts on being opened by root, such as a watchdog."""
    slurm = Shrinking()
    runs = tmp_path / "runs"
    runs.mkdir()
    with launcher(runs, "run", 7, ["n1", "n3"]):
        (runs / "run/run.json").rename(tmp_path / "elsewhere.json")
        (runs / "run/run.json").symlink_to(tmp_path / "elsewhere.json")
        assert release(slurm, "n2", [JOB], runs) == ""
    assert slurm.shrunk == []


def test_an_environment_without_end_is_not_read_whole(tmp_path: Path, proc: Path) -> None:
    """A user may declare any part of a process's memory its environment (PR_SET_MM in prctl(2))."""
    slurm, runs = Shrinking(), tmp_path / "runs"
    runs.mkdir()
    os.truncate(proc / str(LAUNCHER) / "environ", 1 << 42)
    with launcher(runs, "run", 7, ["n1", "n3"]):
        assert "goes on without n2" in release(slurm, "n2", [JOB], runs, proc)


@pytest.mark.skipif(os.geteuid() != 0 or not FUSE.exists(), reason="needs root and FUSE for a mount")
def test_what_somebody_has_mounted_over_a_run_is_not_waited_for(tmp_path: Path, proc: Path) -> None:
    """The repair of the node would not go on."""
    slurm, runs = Shrinking(), tmp_path / "runs"
    (runs / "silent").mkdir(parents=True)
    said = list[str]()
    with launcher(runs, "run", 7, ["n1", "n3"]), silent_mount(runs / "silent", OTHER_USER):
        work = threading.Thread(target=lambda: said.append(release(slurm, "n2", [JOB], runs, proc)), daemon=True)
        work.start()
        work.join(20)
        assert said == ["job 7 goes on without n2, which its run has left"]
