"""The test cluster itself: its hosts fail as real ones do, and nothing of it is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until
from tests.integration.slurm.host import FAKETIME, Host

pytestmark = pytest.mark.xdist_group("slurm")

SLURMD = 6818


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster of its own, for tests that break hosts."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1", "n2", "n3"]) as cluster:
        yield cluster


def reaches(host: Host, other: str) -> bool:
    """True if ``host`` can open a connection to slurmd on ``other``."""
    return host.run("timeout", "1", "bash", "-c", f"</dev/tcp/{other}/{SLURMD}", check=False).returncode == 0


def traces() -> set[str]:
    """Network interfaces, mounts, folders and processes that a cluster could leave behind."""
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    mounted = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    mounts = {path for path in mounted if "opsd-slurm-" in path}  # other tests mount disks of their own meanwhile
    folders = {path.name for path in Path(tempfile.gettempdir()).glob("opsd-slurm-*")}
    return links | mounts | folders | set(_spaces_of_descendants())


def _spaces_of_descendants() -> Iterator[str]:
    listed = subprocess.run(["ps", "--no-headers", "-eo", "pid,ppid,stat"], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    known = {str(os.getpid())}
    for pid, parent, state in rows:
        if parent in known and not state.startswith("Z"):
            known.add(pid)
            if (link := Path(f"/proc/{pid}/ns/net")).exists():
                yield str(link.readlink())


def test_comes_up_in_seconds_and_leaves_nothing_behind() -> None:
    """Also with a job running: no process, namespace, interface, mount or file is left."""
    if reason := missing():
        pytest.skip(reason)
    before = traces()
    began = time.monotonic()
    with Cluster() as cluster:
        assert time.monotonic() - began < 60
        assert traces() > before
        cluster.nodes["n1"].run("sbatch", "--nodes=3", "--wrap=srun sleep 1000")
    assert traces() == before


SERVER = """
import socket, time
listener = socket.create_server(("", 7000))
connection = listener.accept()[0]
time.sleep(1000)
"""
CLIENT = """
import pathlib, socket, sys, time
while True:
    try:
        connection = socket.create_connection(("n1", 7000))
        break
    except OSError:
        time.sleep(0.05)
pathlib.Path("connected").touch()
connection.settimeout(2)
try:
    heard = repr(connection.recv(1))
except OSError as error:
    heard = type(error).__name__
pathlib.Path("heard.part").write_text(heard)
pathlib.Path("heard.part").rename("heard")
"""


def test_power_loss_is_silent(own_cluster: Cluster) -> None:
    """A peer of a host that lost its power gets neither an end of file nor a reset: it hears nothing more."""
    n1, n2 = own_cluster.nodes["n1"], own_cluster.nodes["n2"]
    with n1.process(sys.executable, "-c", SERVER), n2.process(sys.executable, "-c", CLIENT):
        wait_until((own_cluster.shared / "connected").exists, "the client is connected")
        n1.power_off()
        wait_until((own_cluster.shared / "heard").exists, "the client has waited")
    assert (own_cluster.shared / "heard").read_text() == "TimeoutError"


def test_a_host_comes_back_after_power_loss(own_cluster: Cluster) -> None:
    """It boots empty: what was in its memory is gone, and its node can be used again."""
    n1 = own_cluster.nodes["n1"]
    n1.run("touch", "/dev/shm/page")
    n1.power_off()
    n1.power_on()
    assert n1.run("ls", "/dev/shm").stdout == ""
    own_cluster.start_node(n1)
    slurm = CommandSlurm(runner_on(own_cluster.controller))
    wait_until(lambda: slurm.nodes(["n1"])[0].usable, "the node is usable again")


@pytest.mark.slow
def test_a_partition_splits_and_heals(own_cluster: Cluster) -> None:
    """Hosts on the same side reach each other, the others not; a cut cable isolates one host."""
    n1, n2, n3 = own_cluster.nodes.values()
    assert reaches(n1, "n3")
    own_cluster.partition(["n1", "n2"])
    assert reaches(n1, "n2")
    assert not reaches(n1, "n3")
    assert not reaches(n3, "n2")
    own_cluster.heal()
    wait_until(lambda: reaches(n1, "n3") and reaches(n3, "n2"), "the partition is healed")
    n2.unplug()
    assert not reaches(n1, "n2")
    n2.plug()
    wait_until(lambda: reaches(n1, "n2"), "the cable is mended")


def test_a_slow_network_is_slow_and_recovers(own_cluster: Cluster) -> None:
    """200 KB over a link of 1 Mbit take more than a second, and not without the limit."""
    n1, n2 = own_cluster.nodes["n1"], own_cluster.nodes["n2"]
    n2.run("bash", "-c", "head -c 200000 /dev/zero > /mnt/data")
    with n2.process(sys.executable, "-m", "http.server", "--directory", "/mnt", "8000"):
        fetch = "import urllib.request; assert len(urllib.request.urlopen('http://n2:8000/data').read()) == 200000"
        wait_until(lambda: n1.run(sys.executable, "-c", fetch, check=False).returncode == 0, "the server is up")
        n2.slow(1000)
        began = time.monotonic()
        n1.run(sys.executable, "-c", fetch)
        assert time.monotonic() - began > 1
        n2.unslow()
        n1.run(sys.executable, "-c", fetch)


def test_a_clock_may_be_wrong(own_cluster: Cluster) -> None:
    """What is started on the host has its time, slurmd too; Slurm runs jobs there all the same."""
    if not FAKETIME.exists():
        pytest.skip("not installed: libfaketime (see tests/debian-packages.txt)")
    n1, n2 = own_cluster.nodes["n1"], own_cluster.nodes["n2"]
    n1.run("pkill", "slurmd")
    n1.clock_ahead_s = 60
    own_cluster.start_node(n1)
    assert int(n1.run("date", "+%s").stdout) > int(n2.run("date", "+%s").stdout) + 50
    slurm = CommandSlurm(runner_on(own_cluster.controller))
    job = slurm.submit("#!/bin/sh\nexec sleep 1000\n", ["--nodelist=n1"])
    wait_until(lambda: slurm.jobs([job])[0].state == "running", "the job runs")
    assert slurm.nodes(["n1"])[0].usable


def test_each_host_has_a_disk_that_can_be_filled(own_cluster: Cluster) -> None:
    """A full local disk on one host is not full on another; the shared folder is the same on all."""
    n1, n2 = own_cluster.nodes["n1"], own_cluster.nodes["n2"]
    full = n1.run("dd", "if=/dev/zero", "of=/mnt/fill", "bs=1M", "count=100", check=False)
    assert "No space left on device" in full.stderr
    n2.run("dd", "if=/dev/zero", "of=/mnt/fill", "bs=1M", "count=10")
    n1.run("sh", "-c", "echo hello > note")
    assert n2.run("cat", "note").stdout == "hello\n"
    assert (own_cluster.shared / "note").read_text() == "hello\n"


@pytest.mark.slow
def test_jobs_survive_a_restart_of_the_controller(own_cluster: Cluster) -> None:
    """The controller recovers its state; the job does not notice."""
    slurm = CommandSlurm(runner_on(own_cluster.controller))
    job = slurm.submit("#!/bin/sh\nexec sleep 1000\n")
    wait_until(lambda: slurm.jobs([job])[0].state == "running", "the job runs")
    # Slurm saves its state some seconds after a change; what has happened since is lost in a crash.
    started, saved = time.time(), own_cluster.folder / "state/job_state"
    wait_until(lambda: saved.exists() and saved.stat().st_mtime > started, "the state is saved")
    own_cluster.stop_controller()
    own_cluster.start_controller()
    wait_until(slurm.responds, "the controller is back")
    assert [found.state for found in slurm.jobs([job])] == ["running"]
