"""deploy/deb: a package that dpkg installs on a node, again with the settings kept, and removes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_install import MAINTAINER, pin, wheel

BUILD = Path(__file__).parents[2] / "deploy" / "deb"
PYTHON = "/usr/bin/python3"
DPKG = Path("/var/lib/dpkg/status")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("dpkg-deb") and DPKG.exists()), reason="this is not Debian"),
]


def build(script: Path, folder: Path, version: str, package: str) -> Path:
    """The file ``package`` (a pattern) that ``script`` makes of this checkout in ``folder``."""
    wanted = ("--wheel", str(wheel(folder, version)), "--requirements", str(pin(folder / "nothing")))
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PYTHON": PYTHON}
    command = [str(script), *wanted, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)
    if "ensurepip is not available" in done.stdout + done.stderr:
        pytest.skip(f"{PYTHON} makes no virtual environments: install python3-venv")
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob(package)
    return made


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """This machine's root as it is, with all changes to it in memory."""
    if os.geteuid() != 0:
        pytest.skip("a changed root needs root")
    memory, root = tmp_path / "memory", tmp_path / "root"
    memory.mkdir()
    root.mkdir()
    mount("-t", "tmpfs", "tmpfs", str(memory))
    try:
        for name in ("upper", "work"):
            (memory / name).mkdir()
        layers = f"lowerdir=/,upperdir={memory}/upper,workdir={memory}/work"
        if mount("-t", "overlay", "overlay", "-o", layers, str(root), check=False):
            pytest.skip("no overlay file system here")
        try:
            yield root
        finally:
            subprocess.run(["umount", str(root)], check=True)
    finally:
        subprocess.run(["umount", str(memory)], check=True)


def mount(*arguments: str, check: bool = True) -> int:
    return subprocess.run(["mount", *arguments], check=check, capture_output=True).returncode


def inside(root: Path, *command: str) -> str:
    done = subprocess.run(["chroot", str(root), *command], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dpkg_installs_it_again_and_removes_it(machine: Path, tmp_path: Path) -> None:
    """The program runs from /opt/opsd, an edited setting stays, and purging leaves nothing."""
    say = ("/opt/opsd/bin/python", "-c", "import opsd; print(opsd.__version__)")
    settings = machine / "etc/opsd/opsd.toml"
    package = build(BUILD, tmp_path, "0.0.1", "opsd_0.0.1_*.deb")
    told = subprocess.run(["dpkg-deb", "--field", package, "Maintainer"], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == MAINTAINER
    shutil.copy(package, machine / "opsd.deb")
    install = ("dpkg", "--install", "--force-depends", "--force-confold", "--force-unsafe-io", "/opsd.deb")
    inside(machine, *install)
    assert inside(machine, *say).strip() == "0.0.1"
    assert settings.stat().st_mode & 0o777 == 0o644
    assert str((machine / "usr/bin/opsd").readlink()) == "/opt/opsd/bin/opsd"
    settings.write_text("mine")
    inside(machine, *install)
    assert settings.read_text() == "mine"
    for unit in ("opsd.service", "opsd-repair.path", "opsd-repair-driver@.service", "opsd-targets.timer"):
        assert (machine / "usr/lib/systemd/system" / unit).exists()
    assert (machine / "usr/share/man/man1/opsd-launch.1.gz").exists()
    pip = (machine / "opt/opsd/bin/pip").read_text().splitlines()[0]
    assert pip.startswith("#!/opt/opsd/bin/python")
    inside(machine, "dpkg", "--remove", "opsd")
    assert not (machine / "opt/opsd").exists() and settings.read_text() == "mine"
    inside(machine, "dpkg", "--purge", "opsd")
    assert not (machine / "etc/opsd").exists()
    assert not (machine / "usr/share/man/man1/opsd-launch.1.gz").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--wheel"], "--wheel needs a file"),
        (["--requirements"], "--requirements needs a folder"),
        (["--wat"], "unknown option --wat; see deploy/deb --help"),
        (["/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(options: list[str], said: str) -> None:
    """With exit code 2."""
    done = subprocess.run([str(BUILD), *options], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (2, f"opsd: {said}")
