"""Torchrun's lines for several nodes without Slurm: launchers that nobody has named find each other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.checkpoints.claims import newest_number
from opsd.ports import free_port

PROGRAM = """
import os
print("PLACE", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"], os.environ["MASTER_ADDR"])
"""


def launch(
    folder: Path, name: str, *flags: str, run: Path | None = None, program: str = PROGRAM, shm: str = ""
) -> subprocess.Popen[str]:
    """A launcher that takes itself for one on the node ``name``."""
    script = folder / "prog.py"
    script.write_text(program)
    command = [sys.executable, "-m", "opsd", "launch", "--node-name", name, *flags]
    command += ["--run-dir", str(run or folder / "run"), str(script)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"OPSD_SHM": str(folder / (shm + name))}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_an_endpoint_is_enough(tmp_path: Path, backend: str) -> None:
    """By --master-addr and node ranks, or by --rdzv-endpoint: the node ranks given hold, and all ranks are there."""
    port = str(free_port())
    flags = {
        "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        "c10d": ["--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint=localhost:{port}"],
    }[backend]
    named = {"x": ["--node-rank=1"], "y": ["--node-rank=0"]} if backend == "static" else {"x": [], "y": []}
    started = {name: launch(tmp_path, name, "--nnodes=2", *flags, *rank) for name, rank in named.items()}
    ended = {name: process.communicate(timeout=60) for name, process in started.items()}
    assert [process.returncode for process in started.values()] == [0, 0], ended
    said = sorted(line.split() for out, _ in ended.values() for line in out.splitlines() if "PLACE" in line)
    assert [words[-4:-1] for words in said] == [["0", "2", "0"], ["1", "2", "1"]]
    if backend == "static":
        assert "PLACE 0 2 0" in ended["y"][0]


@pytest.mark.slow
def test_who_waits_alone_is_told_why(tmp_path: Path) -> None:
    """Two nodes with a folder each never meet: the sentence says what all of them must see."""
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400", "--join-timeout=2")
    alone = launch(tmp_path, "x", *flags)
    _, err = alone.communicate(timeout=60)
    assert alone.returncode not in (exitcodes.OK, exitcodes.REQUEUE)
    assert f"1 of 2 launchers have come to {tmp_path}/run within 2 s; all nodes must see this folder" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_other_launchers_of_the_same_names_replace_those_that_run(tmp_path: Path) -> None:
    """In other containers of the same names, while the run goes on: the older launchers end, the run goes on."""
    flags = ("--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint=localhost:{free_port()}")
    launchers: list[subprocess.Popen[str]] = []

    def start_all(containers: str) -> list[subprocess.Popen[str]]:
        program = "import time; time.sleep(600)"
        launchers.extend(launch(tmp_path, name, *flags, program=program, shm=containers) for name in "xyz")
        return launchers[-3:]

    try:
        older = start_all("older-")
        wait_for(lambda: newest_number(tmp_path / "run") == 1)
        younger = start_all("younger-")
        assert [each.wait(60) for each in older] == [exitcodes.FENCED] * 3
        wait_for(lambda: settled(tmp_path / "run"))
        assert [each.poll() for each in younger] == [None] * 3
    finally:
        for each in launchers:
            each.kill()
            each.communicate()


def settled(run: Path) -> bool:
    """Whether no generation is claimed for a while."""
    before = newest_number(run)
    time.sleep(6)
    return newest_number(run) == before


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
