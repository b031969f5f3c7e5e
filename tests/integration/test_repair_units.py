"""The units of a repair under systemd itself: an order starts it, each part has its own rights, and all of it ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opsd.preflight.checks import CHECKS
from opsd.repair.case_file import CaseFile
from tests.fakes.systemd_machine import NODE, SystemdMachine, why_not

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

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


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
