"""The capabilities of the systemd units: each is needed for what the page on security says, and suffices.

A process gets user and capabilities of the unit by setpriv(1), and sees processes as ``ProtectProc=`` of the unit says.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
JOB_USER, AGENT_USER = 65_533, 65_532

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None,
    reason="needs root, and setpriv and unshare of util-linux",
)

ATTEMPTS = {
    "see": "os.readlink(f'/proc/{pid}/exe')",
    "read": "open(f'{folder}/secret').read()",
    "kill": "os.kill(pid, 0)",
    "connect": "socket.socket(socket.AF_UNIX).connect(f'{folder}/control.sock')",
    "become": "os.setuid(uid)",
    "write": "os.unlink(open(f'{folder}/mine', 'w').name)",
}


def capabilities(*files: str) -> set[str]:
    lines = [re.findall(r"^CapabilityBoundingSet=(.*)$", (UNITS / file).read_text(), re.MULTILINE) for file in files]
    return {name.removeprefix("CAP_").lower() for line in lines for name in line[0].split()}


OBSERVE, ACT = capabilities("opsd.service"), capabilities("opsd.service", "opsd-act.conf")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A process of a user, and a folder which that user keeps private, with a file and a listening socket."""
    tmp_path.chmod(0o711)
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    (folder / "secret").write_text("page")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control.sock"))
        listener.listen()
        for path in (folder, *folder.iterdir()):
            os.chown(path, JOB_USER, JOB_USER)
        (folder / "secret").chmod(0o600)
        (folder / "control.sock").chmod(0o600)
        process = subprocess.Popen(["sleep", "600"], user=JOB_USER, group=JOB_USER, extra_groups=[])
        try:
            yield process.pid, folder
        finally:
            process.kill()
            process.wait()


def can(job: tuple[int, Path], held: set[str], user: int) -> set[str]:
    """What of ``ATTEMPTS`` works for ``user`` with the capabilities ``held``."""
    pid, folder = job
    worked = set()
    for name, code in ATTEMPTS.items():
        program = f"import os, socket; pid, folder, uid = {pid}, {str(folder)!r}, {JOB_USER}; {code}"
        changes = "".join(f",+{capability}" for capability in sorted(held))
        ambient = [f"--inh-caps=-all{changes}", f"--ambient-caps=-all{changes}"] if user and held else []
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
        command += [f"--bounding-set=-all{changes}", *ambient, "/usr/bin/python3", "-c", program]
        inside = 'mount -t proc -o hidepid=ptraceable proc /proc && exec "$@"'
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", inside, "sh", *command], capture_output=True, text=True
        )
        assert done.returncode == 0 or re.search(r"PermissionError|FileNotFoundError", done.stderr), done.stderr
        worked |= {name} if done.returncode == 0 else set()
    return worked


def test_an_agent_that_observes_sees_and_reads_what_is_private(job: tuple[int, Path]) -> None:
    """And touches nothing: the ranks' pages and processes are all that it needs."""
    assert can(job, OBSERVE, AGENT_USER) == {"see", "read"}


def test_an_agent_that_acts_reaches_the_job_s_processes_and_launcher(job: tuple[int, Path]) -> None:
    """Root by its id, which without CAP_SETUID cannot become the user."""
    assert can(job, ACT, 0) == {"see", "read", "kill", "connect", "write"}


@pytest.mark.parametrize(
    ("dropped", "lost"),
    [("sys_ptrace", {"see"}), ("kill", {"kill"}), ("dac_override", {"connect", "write"})],
)
def test_each_capability_is_needed(job: tuple[int, Path], dropped: str, lost: set[str]) -> None:
    """What is lost without it, for an agent that acts."""
    assert can(job, ACT, 0) - can(job, ACT - {dropped}, 0) == lost


def test_reading_what_is_private_needs_its_capability(job: tuple[int, Path]) -> None:
    """For an agent that observes."""
    assert can(job, OBSERVE - {"dac_read_search"}, AGENT_USER) == {"see"}
