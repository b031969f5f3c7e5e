"""Who has a GPU open, by the number of the device that is open and not by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.collectors.lib.processes import MAJOR, character_device, gpu_holders
from tests.fakes.fuse import FUSE, silent_mount
from tests.fakes.gpu_device import gpu_device

HOLDS = "import os, sys; os.open(sys.argv[1], os.O_PATH); print('open', flush=True); sys.stdin.read()"
STATS = "import sys; from opsd.collectors.lib.processes import character_device as look; print(look(sys.argv[1]))"


def has_open(proc: Path, pid: int, *files: str) -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "comm").write_text("python\n")
    for number, target in enumerate(files):
        (proc / str(pid) / "fd" / str(number)).symlink_to(target)


def test_a_gpu_is_held_under_whatever_name(tmp_path: Path) -> None:
    """A file that has the name of one is none, nor is another device, nor one that was closed meanwhile."""
    proc, fake = tmp_path / "proc", tmp_path / "nvidia0"
    proc.mkdir()
    fake.touch()
    has_open(proc, 10, "/dev/tty", gpu_device(proc))
    has_open(proc, 11, str(fake), "/dev/tty", "/dev/nvidia0", "socket:[7]")
    assert [*gpu_holders(proc)] == [(10, "python")]


def test_the_drivers_other_devices_are_no_gpus(tmp_path: Path) -> None:
    """Control and modeset device, capabilities of MIG: many have them open who use no GPU."""
    (tmp_path / "devices").write_text("Character devices:\n  1 nvidia-caps\n  1 nvidia-uvm\n195 nvidia-frontend\n")
    has_open(tmp_path, 10, "/dev/zero")
    assert [*gpu_holders(tmp_path)] == []


@pytest.mark.parametrize(("minor", "held"), [(0, True), (7, True), (254, False), (255, False)])
def test_a_device_that_a_process_has_made_for_itself(tmp_path: Path, minor: int, held: bool) -> None:
    """With the numbers of the driver, on this kernel. Needs the right to make devices."""
    made = tmp_path / "mine"
    try:
        os.mknod(made, 0o20600, os.makedev(MAJOR, minor))
    except PermissionError:
        pytest.skip("may not make devices here")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, made], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (process.pid in dict(gpu_holders())) is held
        process.communicate(b"")


@pytest.mark.skipif(not os.access(FUSE, os.W_OK), reason="needs FUSE")
def test_a_file_of_a_server_that_does_not_answer_holds_up_nothing(tmp_path: Path) -> None:
    """What a dead job has left behind often has such files open: the kernel knows their type."""
    with silent_mount(tmp_path):
        done = subprocess.run([sys.executable, "-c", STATS, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n"


def test_what_is_no_device_has_no_number(tmp_path: Path) -> None:
    """Folders, and what is not there."""
    assert character_device("/dev/zero") == (1, 5)
    assert character_device(tmp_path) is character_device(tmp_path / "gone") is None
