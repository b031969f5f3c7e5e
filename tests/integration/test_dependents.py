"""What a program has started ends with it, and its folders go, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.clock import eventually

PROGRAM = """
import subprocess, sys, time
from pathlib import Path
from opsd.dependents import Dependents
folder, end = Path(sys.argv[1]), sys.argv[2]
mine = Dependents(orderly_s=1.0)
mine.folder(folder / "memory").mkdir()
apart = "setsid bash -c 'echo $$ > {0}; sleep 600' & wait"
mine.claim_descendants()
subprocess.Popen(["bash", "-c", apart.format(folder / "apart")])
obedient = "sleep 600 & echo $$ $! > {0}; wait"
stubborn = "trap '' TERM; sleep 600 & echo $$ $! > {0}; wait; wait"
with open(folder / "log", "wb") as log:
    for name, script in (("obedient", obedient), ("stubborn", stubborn)):
        mine.start(["bash", "-c", script.format(folder / name)], log)
while not all((folder / name).exists() for name in ("obedient", "stubborn", "apart")):
    time.sleep(0.05)
(folder / "ready").touch()
if end == "closes":
    mine.close()
    sys.exit(0)
if end == "returns":
    sys.exit(0)
time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["closes", "returns", *(signal.Signals(n).name for n in (1, 2, 9, 15))])
def test_nothing_is_left(tmp_path: Path, end: str) -> None:
    """Neither a child nor its child, nor one that hears no SIGTERM or is in another session, nor a folder."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, tmp_path, end], start_new_session=True)
    assert eventually((tmp_path / "ready").exists, 60)
    pids = [int(pid) for name in ("obedient", "stubborn", "apart") for pid in (tmp_path / name).read_text().split()]
    if end.startswith("SIG"):
        assert all(map(lives, pids))
        os.killpg(process.pid, signal.Signals[end])
    process.wait(60)
    assert eventually(lambda: not any(map(lives, pids)) and not (tmp_path / "memory").exists(), 60)


USES_MULTIPROCESSING = """
import multiprocessing.util, sys, tempfile
from pathlib import Path
from opsd.dependents import nothing_left
with nothing_left("opsd-test-"):
    Path(sys.argv[1]).write_text(f"{tempfile.mkdtemp()} {multiprocessing.util.get_temp_dir()}")
"""


def test_folders_of_a_block_go_in_silence(tmp_path: Path) -> None:
    """Those of multiprocessing too, which removes its own at the very end of the program."""
    ended = subprocess.run(
        [sys.executable, "-c", USES_MULTIPROCESSING, tmp_path / "folders"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not any(Path(folder).exists() for folder in (tmp_path / "folders").read_text().split())
