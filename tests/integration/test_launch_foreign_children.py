"""Processes below the launcher that no rank has started are left alone, and nothing of a rank stays all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched, alive

DAEMONS = """
import subprocess, sys
stay = [sys.executable, "-c", "import time; time.sleep(1000)"]
print("daemon", subprocess.Popen(stay, start_new_session=True).pid, flush=True)
print("daemon", os.popen("setsid sleep 1000 >/dev/null & echo $!").read().strip(), flush=True)
"""
FAILING = TRAIN + DAEMONS + "train(40, at=20, do=lambda: restarts == 0 and os.kill(os.getpid(), signal.SIGKILL))"


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """A file of pids, one a line, which are killed in the end."""
    path = tmp_path / "foreign"
    path.touch()
    yield path
    for pid in map(int, path.read_text().split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def daemons(launched: Launched, generation: int) -> list[int]:
    """What the rank of a generation has started."""
    return [int(line.split()[1]) for line in launched.log(0, generation).splitlines() if line.startswith("daemon")]


def test_what_a_shell_ran_before_it_became_the_launcher(tmp_path: Path, foreign: Path) -> None:
    """A restart and the end kill what ranks have started, and neither the shell's children nor their orphans."""
    shell = (
        f"sleep 1000 & echo $! >> {foreign}; setsid sleep 1000 & echo $! >> {foreign}\n"
        f"bash -c 'sleep 1; sleep 1000 & echo $! >> {foreign}' &\n"
        'exec "$@"'
    )
    with Launched(tmp_path, FAILING, within=("bash", "-c", shell, "bash")) as launched:
        launched.until(lambda: len(foreign.read_text().split()) == 3)
        assert launched.wait() == exitcodes.OK
        assert len(launched.events("generation_started")) == 2
        assert [len(daemons(launched, generation)) for generation in (1, 2)] == [2, 2]
        assert not any(alive(pid) for generation in (1, 2) for pid in daemons(launched, generation))
        assert [alive(int(pid)) for pid in foreign.read_text().split()] == [True, True, True]


def test_a_launcher_that_gets_all_orphans_of_a_container(tmp_path: Path) -> None:
    """As the first process of its namespace it has children that came in from outside; they are left alone, too."""
    within = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a namespace for processes is not permitted here")
    source = FAILING.replace("train(40", "train(100_000")
    with Launched(tmp_path, source, within=within) as launched:
        launched.until(lambda: bool(launched.log()))
        (first,) = Path(f"/proc/{launched.process.pid}/task/{launched.process.pid}/children").read_text().split()
        enter = ("nsenter", "--pid", f"--target={first}", "bash", "-c", "setsid sleep 2000 >/dev/null & echo")
        subprocess.run(enter, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        launched.event("resumed")
        launched.until(lambda: sleepers(first) == ["1000", "2000"])


def sleepers(parent: str) -> list[str]:
    """For how long the children of ``parent`` sleep."""
    commands = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    return sorted(command[1] for command in commands if command[0] == "sleep")
