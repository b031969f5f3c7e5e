"""The test after a remedy, by a real preflight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from opsd import exitcodes
from opsd.preflight.checks import CHECKS
from opsd.preflight.network.rendezvous import port_of
from opsd.repair.repair_plan import NO_HARDWARE
from opsd.repair.retest import Preflight, Retested


def test_a_retest_that_could_check_nothing_has_failed(tmp_path: Path) -> None:
    """Unknown is not healthy: none of the checks for the fault applies to this machine, or all are skipped."""
    skip = ("gpu_health",)
    whole = ["--set=agent.node=n1", f"--set=agent.state_dir={tmp_path}"]
    found = Preflight([*whole, f"--set=preflight.skip={_others('numa')}"], "quick", skip)(["gpu_health"])
    assert (found.passed, "none of gpu_health could be run" in found.detail) == (False, True), found
    broken = Preflight(["--set=agent.nonsense=1"], "quick")([])
    assert (broken.passed, "unknown key agent.nonsense" in broken.detail) == (False, True), broken
    assert broken.detail.startswith(NO_HARDWARE)


def test_what_is_not_the_node_s_own_does_not_speak_against_its_hardware(tmp_path: Path) -> None:
    """A server that is away fails the test, as it must; beside it any other check that fails does."""
    own = ["--set=agent.node=n1", f"--set=agent.state_dir={tmp_path}", f"--set=preflight.shared_dir={tmp_path}/away"]
    only = [check.name for check in CHECKS if check.name not in ("storage_shared", "numa", "gpu_inventory")]
    away = Preflight([*own, f"--set=preflight.skip={only}"], "quick")([])
    assert (away.passed, away.detail.startswith(f"{NO_HARDWARE}storage_shared failed: ")) == (False, True), away
    both = Preflight([*own, "--set=preflight.gpus=8", f"--set=preflight.skip={only}"], "quick")([])
    assert "gpu_inventory" in both.detail and not both.detail.startswith(NO_HARDWARE), both


def test_a_retest_that_must_end_takes_its_load_with_it(tmp_path: Path) -> None:
    """Within seconds, not at the end of a profile of hours."""
    here = psutil.Process()
    before = {*here.children(recursive=True)}

    def stop() -> str:
        """Once a check works."""
        loads = {*here.children(recursive=True)} - before
        return "n1 is in service" if any("opsd.preflight.worker" in _command(load) for load in loads) else ""

    own = ["--set=agent.node=n1", f"--set=agent.state_dir={tmp_path}"]
    found = Preflight([*own, f"--set=preflight.skip={_others('cpu')}"], "standard", look_s=0.1)(["cpu"], stop)
    assert found == Retested(False, "preflight standard was stopped: n1 is in service", stopped=True)
    assert not {child for child in here.children(recursive=True) if child.is_running()} - before


def test_the_network_between_two_nodes_is_measured_by_two_halves(tmp_path: Path) -> None:
    """The other one is started as a partner's job does it, which gets the port from the number of that job.

    They meet and measure; how well a machine full of other tests does is not looked at.
    """
    own = ["--set=agent.node=localhost", f"--set=agent.state_dir={tmp_path}"]
    job = os.getpid()
    half = [sys.executable, "-P", "-m", "opsd", "preflight", "network", "--hosts=localhost,n2", "--node=1"]
    with subprocess.Popen([*half, "--rendezvous=localhost"], env={**os.environ, "SLURM_JOB_ID": f"{job}"}) as partner:
        found = Preflight(own, "quick").with_partner(["localhost", "n2"], port_of(job))
        assert partner.wait(60) == exitcodes.OK
    assert not found.detail.startswith(NO_HARDWARE), found


def test_two_nodes_that_do_not_meet_say_nothing_of_the_network(tmp_path: Path) -> None:
    """A firewall, or a partner without torch, is no fault of the network, nor are settings that cannot be read."""
    own = ["--set=agent.node=localhost", f"--set=agent.state_dir={tmp_path}"]
    alone = Preflight(own, "quick", join_s=1.0).with_partner(["localhost", "n2"], port_of(os.getpid() + 1))
    assert not alone.passed
    assert alone.detail.startswith(
        f"{NO_HARDWARE}network_join failed: Nodes that take part: n2 never joined within 1 s"
    )
    broken = Preflight(["--set=agent.nonsense=1"], "quick").with_partner(["localhost", "n2"], 1)
    assert broken.detail.startswith(f"{NO_HARDWARE}preflight network made no report: ")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _others(name: str) -> list[str]:
    return [check.name for check in CHECKS if check.name != name]
