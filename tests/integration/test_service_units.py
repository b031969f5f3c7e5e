"""The systemd units: each capability is needed, suffices, and ends with its order."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opsd.preflight.checks import CHECKS
from opsd.repair.case_file import CaseFile
from tests.fakes.systemd_machine import NODE, SystemdMachine, why_not

SERVICE_PRIVILEGES = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None,
    reason="needs root, and setpriv and unshare of util-linux",
)


# The capabilities of the systemd units: each is needed for what the page on security says, and suffices.


UNITS = Path(__file__).parents[2] / "deploy" / "systemd"

JOB_USER, AGENT_USER = 65_533, 65_532

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


@SERVICE_PRIVILEGES
def test_an_agent_that_observes_sees_and_reads_what_is_private(job: tuple[int, Path]) -> None:
    """And touches nothing: the ranks' pages and processes are all that it needs."""
    assert can(job, OBSERVE, AGENT_USER) == {"see", "read"}


@SERVICE_PRIVILEGES
def test_an_agent_that_acts_reaches_the_job_s_processes_and_launcher(job: tuple[int, Path]) -> None:
    """Root by its id, which without CAP_SETUID cannot become the user."""
    assert can(job, ACT, 0) == {"see", "read", "kill", "connect", "write"}


@SERVICE_PRIVILEGES
@pytest.mark.parametrize(
    ("dropped", "lost"),
    [("sys_ptrace", {"see"}), ("kill", {"kill"}), ("dac_override", {"connect", "write"})],
)
def test_each_capability_is_needed(job: tuple[int, Path], dropped: str, lost: set[str]) -> None:
    """What is lost without it, for an agent that acts."""
    assert can(job, ACT, 0) - can(job, ACT - {dropped}, 0) == lost


@SERVICE_PRIVILEGES
def test_reading_what_is_private_needs_its_capability(job: tuple[int, Path]) -> None:
    """For an agent that observes."""
    assert can(job, OBSERVE - {"dac_read_search"}, AGENT_USER) == {"see"}


# The units of a repair under systemd itself: an order starts it, each part has its own rights, and all of it ends.


SETTINGS = f"""[agent]
node = "{NODE}"
[nvml]
enabled = false
[policy]
mode = "act"
drain = true
repair = "act"
return_profile = "quick"
max_drained_share = 1.0
[preflight]
skip = {[check.name for check in CHECKS if check.name != "numa"]}
[repair]
remedies = ["reset_gpus"]
services = ["nvidia-persistenced"]
"""

CAP_KILL, CAP_SYS_MODULE, CAP_SYS_ADMIN = 5, 16, 21

USER = 65_533

HOLDS = "import os, time; os.open('/dev/nvidia0', os.O_PATH); print('open', flush=True); time.sleep(600)"
"""No driver opens it otherwise."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SystemdMachine]:
    if reason := why_not():
        pytest.skip(reason)
    with SystemdMachine(tmp_path, SETTINGS) as made:
        if made.systemctl("is-active", "opsd-repair.path") != "active":
            pytest.skip(f"systemd does not start in namespaces here: {made.log()[-500:]}")
        yield made


def until(condition: Callable[[], object], what: str, machine: SystemdMachine, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{machine.log()}"
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_order_is_carried_out_with_the_rights_of_each_part(machine: SystemdMachine) -> None:
    """A user's process that holds a GPU ends, the GPUs are reset while nothing else holds them, the node is tested and
    returned. What speaks to Slurm has no GPU, no rights over the driver and no way to systemd; what resets has no
    network. At the end nobody listens.
    """
    machine.drain("opsd:gpu_xid-1 preflight: Xid 95")
    command = machine.command("/opt/opsd/bin/python", "-c", HOLDS, user=USER)
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
    cases = CaseFile(machine.state)
    cases.order()
    until(cases.past, "the repair has ended", machine)
    (case,) = cases.past()
    assert [(attempt.what, attempt.ok) for attempt in case.attempts] == [
        ("reset_gpus", True), ("retest", True), ("return", True),
    ], case  # fmt: skip
    assert machine.slurm()["StateComplete"] == "idle"
    assert holder.wait(30) != 0
    (driver,), repair = machine.seen("driver"), machine.seen("repair")[0]
    assert driver["arguments"] == ["--gpu-reset"]
    asked = ("network", "gpu", "systemd", "settings")
    assert [driver[what] for what in asked] == [False, True, True, False]
    assert [repair[what] for what in asked] == [True, False, False, False]
    assert repair["shm"], "where runs have their folders"
    rights = (CAP_KILL, CAP_SYS_MODULE, CAP_SYS_ADMIN)
    assert [[who["rights"] >> right & 1 for right in rights] for who in (repair, driver)] == [[1, 0, 0], [0, 1, 1]]
    until(lambda: machine.systemctl("is-active", "opsd-repair-driver.socket") == "inactive", "nobody listens", machine)
    assert machine.systemctl("is-active", "nvidia-persistenced") == "active"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_a_repair_has_begun_ends_with_it(machine: SystemdMachine) -> None:
    """A reset that hangs is ended when the repair is killed, and the services that it had stopped run again. Meanwhile
    users can neither ask for another, nor order a repair.
    """
    machine.drain("opsd:gpu_xid-1 preflight: Xid 95")
    (machine.state / "hangs").touch()
    CaseFile(machine.state).order()
    until(lambda: machine.seen("driver"), "the reset has begun", machine)
    assert machine.systemctl("is-active", "nvidia-persistenced") == "inactive"
    for attempt in ("ls /run/opsd-repair", "ls /var/lib/opsd/repair", "touch /var/lib/opsd/repair/order"):
        done = subprocess.run(machine.command(*attempt.split(), user=USER), capture_output=True, text=True, check=False)
        assert "Permission denied" in done.stderr
    machine.systemctl("kill", "--signal=KILL", "opsd-repair.service")
    until(lambda: machine.systemctl("is-active", "nvidia-persistenced") == "active", "the services run again", machine)
    until(lambda: "opsd-repair-driver@" not in machine.systemctl("list-units", "--plain"), "no reset goes on", machine)
