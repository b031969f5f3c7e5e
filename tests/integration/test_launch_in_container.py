"""A run in a container: the agent outside sees its ranks and acts on them; the launcher takes stacks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from opsd.agent.actions import Executor
from opsd.collectors.base import RunFact
from opsd.collectors.ranks import RanksCollector
from opsd.control import ask_launcher
from opsd.runbooks.base import Action
from tests.fakes.launched import TRAIN, Launched, alive
from tests.fakes.run_folder import ranks, read, runs

PROGRAM = (
    TRAIN
    + """
import subprocess
helper = subprocess.Popen(["sleep", "600"])
reporter.add_worker(helper.pid, "data")
print("helper", helper.pid, flush=True)
train(100000, step_s=0.05)
"""
)
HANGS = (
    TRAIN
    + """
def deep_inside():
    with Reporter.from_env().phase("collective"):
        time.sleep(600)

train(8, at=7, do=lambda: os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else deep_inside())
"""
)

OWN_PROCESSES = ("--unshare-pid",)
"""As ``apptainer exec --pid``."""
FIRST_PROCESS = (*OWN_PROCESSES, "--as-pid-1")
"""As ``enroot start --pid``: the launcher is process 1."""
ROOT_INSIDE = ("--uid", "0", "--gid", "0")
"""As ``srun --container-remap-root`` and ``apptainer exec --fakeroot``."""
ANOTHER_USER = ("--uid", "1234", "--gid", "1234")

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="not installed: bubblewrap"),
]


CHECKOUT = Path(__file__).parents[2]


def container(folder: Path, *options: str) -> tuple[str, ...]:
    """The beginning of a command: /dev/shm is the machine's as in Apptainer and enroot, /tmp is not as in enroot."""
    return (
        *("bwrap", "--die-with-parent", "--unshare-user", "--unshare-ipc", "--ro-bind", "/", "/", "--dev", "/dev"),
        *("--bind", "/dev/shm", "/dev/shm", "--proc", "/proc", "--tmpfs", "/tmp"),
        *("--ro-bind", str(CHECKOUT), str(CHECKOUT), "--bind", str(folder), str(folder), *options),
    )


def running(launched: Launched, collector: RanksCollector) -> RunFact:
    """The run as the agent sees it once its two ranks take steps."""
    launched.until(lambda: launched.log(0).count("helper") + launched.log(1).count("helper") == 2)
    launched.until(lambda: all(rank.steps_reported for rank in ranks(read(collector))))
    (run,) = runs(read(collector))
    return run


@pytest.mark.parametrize("options", [ROOT_INSIDE, FIRST_PROCESS, (*OWN_PROCESSES, *ANOTHER_USER)])
def test_the_agent_sees_and_acts_from_outside(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Ranks, launcher and helpers by their numbers on this machine, whatever theirs are, and the launcher answers."""
    collector = RanksCollector(tmp_path / "shm")
    with Launched(tmp_path, PROGRAM, "--nproc-per-node", "2", within=container(tmp_path, *options)) as launched:
        run = running(launched, collector)
        found = ranks(read(collector))
        assert [rank.process in ("R", "S", "D") for rank in found] == [True, True]
        assert all(str(rank.rank).encode() in environment(rank.pid, "RANK") for rank in found)
        assert all((rank.inside or rank.pid) == number_inside(rank.pid) for rank in found)
        assert (run.alive, b"opsd" in Path(f"/proc/{run.launcher_pid}/cmdline").read_bytes()) == (True, True)
        assert ask_launcher(Path(run.control), {"cmd": "status"})["state"] == "running"

        ((helper, role),) = found[0].workers
        assert (role, found[0].worker_process) == ("data", ("S",))
        executor = Executor(shm=tmp_path / "shm", notify=lambda text, fields: None)
        kill = Action("kill_process", "r", {"pid": helper, "run": "r", "rank": 0})
        ok, detail = executor.perform(kill)
        assert ok, detail
        launched.until(lambda: not alive(helper))
        stranger, _ = executor.perform(Action("kill_process", "r", {"pid": os.getpid(), "run": "r", "rank": 0}))
        assert not stranger

        os.kill(found[1].pid, 9)
        launched.event("rank_exited")
        launched.until(lambda: [rank.generation for rank in ranks(read(collector))] == [2, 2])


def test_the_launcher_takes_stacks_inside(tmp_path: Path) -> None:
    """Of ranks that hang in the container; the file that the event names has them."""
    flags = ("--nproc-per-node", "2", "--hang-limit", "2", "--max-restarts", "0")
    with Launched(tmp_path, HANGS, *flags, within=container(tmp_path, *OWN_PROCESSES)) as launched:
        hang = launched.event("hang_detected")
        assert hang["rank"] == 1
        assert "deep_inside" in Path(str(hang["stacks"])).read_text()


@pytest.mark.parametrize(("options", "told"), [((), False), (("--ro-bind", "/proc", "/proc"), True)])
def test_the_launcher_says_so_if_proc_is_not_the_containers(
    tmp_path: Path, options: tuple[str, ...], told: bool
) -> None:
    """With the machine's, its own number is that of another process; what to do about it stands in one sentence."""
    within = container(tmp_path, *OWN_PROCESSES, *options)
    with Launched(tmp_path, "print('done')", within=within) as launched:
        assert launched.wait() == 0
    assert ("/proc is that of another PID namespace" in launched.err) is told


def number_inside(pid: int) -> int:
    """The number of a process of this machine in its own PID namespace."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("\nNSpid:")[2].split("\n")[0].split()[-1])


def environment(pid: int, name: str) -> bytes:
    """What the environment of a process has for ``name``, as the machine sees it."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(one for one in variables if one.startswith(f"{name}=".encode()))
