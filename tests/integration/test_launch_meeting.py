"""Torchrun's lines for several nodes without Slurm: launchers that nobody has named find each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.launch.ranks.settings import free_port

PROGRAM = """
import os
print("PLACE", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"], os.environ["MASTER_ADDR"])
"""


def launch(folder: Path, name: str, *flags: str, run: Path | None = None) -> subprocess.Popen[str]:
    """A launcher that takes itself for one on the node ``name``."""
    script = folder / "prog.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "opsd", "launch", "--node-name", name, *flags]
    command += ["--run-dir", str(run or folder / "run"), str(script)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"OPSD_SHM": str(folder / name)}
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
