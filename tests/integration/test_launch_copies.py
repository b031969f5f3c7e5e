"""Copies of a run, several users on a node, and nodes or networks that are not as they should be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.checkpoints.claims import End, Fence, newest
from opsd.rundir import RunError, RunFolders
from opsd.spares import pool
from opsd.spares.pool import SpareState
from tests.fakes.launched import TRAIN, Launched
from tests.fakes.nodes import Nodes
from tests.fakes.tree import tmpfs

# Two copies of a run: one writes into the run's folder, the other stops.


def copy_of(tmp_path: Path, name: str, steps: int, *flags: str) -> Launched:
    """A copy of the run on a node of its own: another shared memory, the same folder."""
    (tmp_path / name).mkdir()
    return Launched(tmp_path / name, f"{TRAIN}\ntrain({steps})", "--run-dir", str(tmp_path / "run"), *flags)


def claims(tmp_path: Path) -> list[int]:
    """The generations that have been claimed."""
    return sorted(int(path.stem) for path in (tmp_path / "run/generations").glob("*.json"))


def test_a_second_copy_is_refused(tmp_path: Path) -> None:
    """The first one renews its lease, and goes on undisturbed."""
    with copy_of(tmp_path, "one", 100_000) as one:
        one.event("generation_started")
        with copy_of(tmp_path, "two", 100_000) as two:
            assert two.wait() == exitcodes.FENCED
            assert "is being run by a launcher on" in two.err and "--take-over" in two.err
        assert one.ask(cmd="status")["state"] == "running"
    assert claims(tmp_path) == [1]


def test_the_older_copy_stops(tmp_path: Path) -> None:
    """It is told within seconds, kills its ranks, which could not save any more, and says why in a sentence."""
    with copy_of(tmp_path, "one", 100_000) as one:
        one.event("generation_started")
        with copy_of(tmp_path, "two", 100_000, "--take-over") as two:
            two.event("generation_started")
            assert one.wait() == exitcodes.FENCED
            said = f"opsd: another copy of this run has begun in {tmp_path}/run; this one stops"
            assert one.err.splitlines()[-1] == said
            assert [event["generation"] for event in two.events("generation_started")] == [2]
            assert two.ask(cmd="status")["state"] == "running"
    assert claims(tmp_path) == [1, 2]


def copy_on_two_nodes(tmp_path: Path, job: str, *flags: str) -> Nodes:
    """A copy of the run as a Slurm job of its own, in the common folder."""
    folder = tmp_path / job
    folder.mkdir()
    environ = {name: {"SLURM_JOB_ID": job} for name in ("n1", "n2")}
    nodes = Nodes(folder, f"{TRAIN}\ntrain(100_000, step_s=0.02)", "--nnodes=2", *flags, count=2, environ=environ)
    nodes.run = tmp_path / "run"
    return nodes


def test_a_second_copy_on_several_nodes_is_refused(tmp_path: Path) -> None:
    """Each of its launchers names the job that has the run."""
    with copy_on_two_nodes(tmp_path, "4242") as one:
        one.until(lambda: len(one.events("generation_started")) == 1)
        with copy_on_two_nodes(tmp_path, "4243") as two:
            assert two.wait() == {"n1": exitcodes.FENCED, "n2": exitcodes.FENCED}
            assert "is being run by job 4242: its lease is renewed" in two.said("n1")
        assert [one.state(name)["state"] for name in one.names] == ["running", "running"]
    assert claims(tmp_path) == [1]


def test_the_older_copy_on_several_nodes_stops(tmp_path: Path) -> None:
    """All its launchers end with the code for that; the other goes on."""
    with copy_on_two_nodes(tmp_path, "4242") as one:
        one.until(lambda: len(one.events("generation_started")) == 1)
        with copy_on_two_nodes(tmp_path, "4243", "--take-over") as two:
            two.until(lambda: len(two.events("generation_started")) == 2)
            assert one.wait() == {"n1": exitcodes.FENCED, "n2": exitcodes.FENCED}
            assert "another copy of this run has begun" in one.said("n1")
            assert [two.state(name)["state"] for name in two.names] == ["running", "running"]
    assert claims(tmp_path) == [1, 2]


def test_the_older_copy_does_not_restart(tmp_path: Path) -> None:
    """A restart of its ranks would be a generation that the newer copy has claimed."""
    with copy_of(tmp_path, "one", 100_000) as one:
        one.event("generation_started")
        with copy_of(tmp_path, "two", 100_000, "--take-over") as two:
            two.event("generation_started")
            with suppress(OSError, ValueError):  # it may have noticed the other by then
                assert one.ask(cmd="restart") == {"ok": True}
            assert one.wait() == exitcodes.FENCED
    assert claims(tmp_path) == [1, 2]


def test_restarts_and_later_starts_go_on_counting(tmp_path: Path) -> None:
    """A run alone is never in its own way: each generation is claimed, and the end, after which saves may end."""
    fail = "train(3, at=1, do=lambda: generation == 1 and sys.exit(1))"
    (tmp_path / "one").mkdir()
    with Launched(tmp_path / "one", f"{TRAIN}\n{fail}", "--run-dir", str(tmp_path / "run")) as one:
        assert one.wait() == exitcodes.OK, one.err
    assert claims(tmp_path) == [1, 2, 3]
    for number in (1, 2):
        Fence(tmp_path / "run", number).check()
    with copy_of(tmp_path, "two", 3) as two:
        assert two.wait() == exitcodes.OK, two.err
    assert claims(tmp_path) == [1, 2, 3, 4, 5]
    assert newest(tmp_path / "run").end == End(0, "all ranks finished")  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_claimed(tmp_path: Path) -> None:
    """Nothing is started that could not save: one sentence with the folder and the reason."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/generations").write_text("")
    with copy_of(tmp_path, "one", 3) as one:
        assert one.wait() == exitcodes.FAILED
        assert "generations" in one.err and len(one.err.splitlines()) == 1, one.err
        assert not one.events("generation_started")


def late(tmp_path: Path, environ: dict[str, str]) -> Nodes:
    """A run on two of three nodes; the launcher of the third is not started."""
    names = ("n1", "n2", "n3")
    return Nodes(
        tmp_path,
        f"{TRAIN}\ntrain(3)",
        "--nnodes=2:3",
        "--last-call=0",
        "--join-timeout=600",
        count=3,
        environ=dict.fromkeys(names, environ),
    )


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3"}


@pytest.mark.parametrize("environ", [STEP, {"SLURM_JOB_ID": "7", "OPSD_BATCH": "ab"}], ids=["step", "slurm run"])
def test_who_comes_after_the_end_ends_like_the_others(tmp_path: Path, environ: dict[str, str]) -> None:
    """A launcher whose node was slow to start it: nobody will come any more, and it holds its node no longer."""
    with late(tmp_path, environ) as nodes:
        nodes.kill("n3")
        nodes.until(lambda: nodes.events("finished"))
        nodes.start("n3")
        assert nodes.wait(20) == {"n1": exitcodes.OK, "n2": exitcodes.OK, "n3": exitcodes.OK}


def test_the_end_of_another_step_is_nobodys(tmp_path: Path) -> None:
    """The next step of the job has the run's name, and goes on from what is there."""
    with late(tmp_path, STEP) as nodes:
        nodes.kill("n3")
        assert nodes.wait(40)["n1"] == exitcodes.OK
        for name in nodes.names:
            nodes._environ = {**nodes._environ, name: {**STEP, "SLURM_STEP_ID": "1"}}
            nodes.start(name)
        assert set(nodes.wait(40).values()) == {exitcodes.OK}
        assert len(nodes.events("generation_started")) == 2


# Several runs and several users on one node: none keeps another out.


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


# A run whose nodes or network are not as they should be: no network, wrong clocks, damaged data, read-only folders.


ENDLESS = TRAIN + "\ntrain(100000, step_s=0.02)\n"

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")

TWO = ("--nnodes=2", "--spares=1")


@pytest.fixture
def a_minute_ahead() -> dict[str, str]:
    """The environment of a node whose clock is wrong; what it measures by the monotonic one is right."""
    if not FAKETIME.exists():
        pytest.skip("not installed: libfaketime (see tests/debian-packages.txt)")
    return {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+60s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@pytest.fixture
def make_read_only() -> Iterator[Callable[[Path], None]]:
    """Puts an empty file system that cannot be written in the place of a folder, as a server that has failed does."""
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(tmpfs(folder, "ro"))


class Network:
    """A network of its own, which can be taken away from all that are on it."""

    def __init__(self) -> None:
        command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        self.up = self._holder.stdout.readline() == b"up\n"
        self.within = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net")

    def set(self, state: str) -> None:
        subprocess.run([*self.within, "ip", "link", "set", "lo", state], check=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def network() -> Iterator[Network]:
    """The network of a test's nodes."""
    if os.geteuid() != 0:
        pytest.skip("a network of its own needs root")
    with closing(Network()) as network:
        if not network.up:
            pytest.skip("a network of its own is not permitted here")
        yield network


@pytest.mark.parametrize(
    "outage_s", [pytest.param(8.0, marks=pytest.mark.slow), pytest.param(45.0, marks=pytest.mark.long)]
)
def test_an_outage_of_the_network_costs_nothing(tmp_path: Path, network: Network, outage_s: float) -> None:
    """All launchers are cut off from each other, and see in the folder that nobody has gone on without them."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=3", count=3, within=network.within) as nodes:
        nodes.until(lambda: [nodes.state(name)["state"] for name in nodes.names] == ["running"] * 3)
        network.set("down")
        time.sleep(outage_s)
        assert [nodes.state(name)["state"] for name in nodes.names] == ["running"] * 3
        network.set("up")
        time.sleep(5.0)
        assert [nodes.state(name)["state"] for name in nodes.names] == ["running"] * 3
        assert [event["event"] for event in nodes.events() if event["event"] in ("finished", "resumed")] == []
        assert [event["nodes"] for event in nodes.events("generation_started")] == [["n1", "n2", "n3"]]


def test_clocks_a_minute_apart(tmp_path: Path, a_minute_ahead: dict[str, str]) -> None:
    """The node is not blamed for it, a loss is noticed as ever, and the run's events are of the leader's clock."""
    pause = TRAIN.replace("time.sleep(step_s)", "select.select([], [], [], step_s)")  # libfaketime spoils the former
    source = f"import select\n{pause}\ntrain(100000, at=5, do=lambda: not restarts and rank == 1 and 1 / 0)\n"
    began = time.time()
    with Nodes(tmp_path, source, *TWO, count=3, environ={"n2": a_minute_ahead}) as nodes:
        nodes.until(lambda: nodes.events("resumed"))
        (failed,) = nodes.events("rank_exited")
        assert (failed["node"], failed["culprit"]) == ("n2", True)
        nodes.kill("n2")
        nodes.until(lambda: len(nodes.events("resumed")) == 2)
        assert [event["lost"] for event in nodes.events("node_lost")] == ["n2"]
        assert nodes.events("generation_started")[-1]["nodes"] == ["n1", "n3"]
        leaders = {event["node"] for event in nodes.events("generation_started")}
        ahead_s = 60.0 if "n2" in leaders else 0.0  # on a busy machine the second may be elected first
        assert all(began <= event["t"] <= time.time() + ahead_s for event in nodes.events())


def test_a_spare_with_damaged_data_is_never_used(tmp_path: Path) -> None:
    """It says why, and the run is given back to Slurm rather than go on with it."""
    settings, folder = tmp_path / "opsd.toml", tmp_path / "state"
    settings.write_text(f'agent.state_dir = "{folder}"\nspare = {{source = "/fsx", folder = "/scratch"}}\n')
    pool.write(folder, SpareState(lacks={"data": "shard-00007.tokens was damaged and has been removed"}))
    with Nodes(tmp_path, ENDLESS, *TWO, count=3, environ={"n3": {"OPSD_CONFIG": str(settings)}}) as nodes:
        nodes.until(lambda: nodes.events("spare_refused"))
        assert nodes.events("spare_refused")[0]["refused"] == "n3"
        nodes.kill("n2")
        assert {name: nodes.processes[name].wait(60) for name in ("n1", "n3")} == {
            "n1": exitcodes.REQUEUE, "n3": exitcodes.REQUEUE,
        }  # fmt: skip
        assert len(nodes.events("generation_started")) == 1
        assert "not used as a spare: data: shard-00007.tokens was damaged and has been removed" in nodes.said("n3")


def test_a_shared_folder_that_becomes_read_only(tmp_path: Path, make_read_only: Callable[[Path], None]) -> None:
    """A run cannot begin another generation there: the leader ends, and says which folder it is."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", count=2) as nodes:
        nodes.until(lambda: all(nodes.state(name)["state"] == "running" for name in nodes.names))
        make_read_only(nodes.run / "generations")
        assert nodes.ask("n1", cmd="restart") == {"ok": True}
        nodes.until(lambda: any(process.poll() is not None for process in nodes.processes.values()))
        ended = [process.poll() for process in nodes.processes.values()]
        said = nodes.said("n1") + nodes.said("n2")
    assert exitcodes.FAILED in ended
    assert f"cannot be claimed in {tmp_path}/run/generations: Read-only file system" in said
    assert "Traceback" not in said


def test_a_run_does_not_start_in_a_folder_that_is_read_only(
    tmp_path: Path, make_read_only: Callable[[Path], None]
) -> None:
    """One sentence with the folder, before anything has been started."""
    make_read_only(tmp_path / "run")
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", count=2) as nodes:
        assert set(nodes.wait().values()) == {exitcodes.USAGE}
        for name in nodes.names:
            (sentence,) = nodes.said(name).splitlines()
            assert f"{tmp_path}/run" in sentence and "Read-only file system" in sentence
