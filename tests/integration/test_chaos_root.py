"""`opsd chaos` where it needs root: networks, disks, reboots, and runs of other users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import filterfalse
from pathlib import Path

import pytest

import opsd
from opsd.chaos.faults import reboot_node
from opsd.client import process_start
from tests.fakes.clock import eventually
from tests.fakes.namespaces import Namespaces, NoNamespacesError
from tests.fakes.tmpfs import tmpfs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="these faults need root")
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
WITH_PATH = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(Path(opsd.__file__).parents[1]), *site.getsitepackages()]),
}


@pytest.fixture(scope="module")
def network() -> Iterator[Namespaces]:
    """Two nodes on a bridge."""
    try:
        with Namespaces(2, mbit=1000, prefix="opsdch") as nodes:
            yield nodes
    except NoNamespacesError as error:
        pytest.skip(str(error))


def chaos(
    folder: Path, *arguments: str, before: Sequence[str] = (), python: str = sys.executable
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, python, "-m", "opsd", "chaos", *arguments],
        env={**WITH_PATH, "OPSD_SHM": str(folder / "shm")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def until_in_effect(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "in effect" in line:
            return
    raise AssertionError("".join(said))


def routes(network: Namespaces) -> str:
    return output(*network.command(0), "ip", "route", "show", "proto", "217")


def qdisc(network: Namespaces) -> str:
    return output(*network.command(0), "tc", "qdisc", "show", "dev", "eth0", "root")


def output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20).stdout


def reaches(network: Namespaces) -> bool:
    """True if a datagram can be sent from node 0 to node 1."""
    code = f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('{network.address(1)}', 9))"
    done = subprocess.run(
        [*network.command(0), sys.executable, "-c", code], capture_output=True, timeout=20, check=False
    )
    return done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_partition_heals(network: Namespaces, tmp_path: Path, number: signal.Signals) -> None:
    """Nothing goes to the peer while it lasts; the route is gone afterwards, also after kill -9."""
    arguments = ("partition", f"--peer={network.address(1)}", "--for=5m", "--yes", "--force")
    process = chaos(tmp_path, *arguments, before=network.command(0))
    until_in_effect(process)
    assert not reaches(network) and network.address(1) in routes(network)
    process.send_signal(number)
    finish(process)
    assert eventually(lambda: not routes(network))
    assert reaches(network)


def test_nobody_cuts_himself_off(tmp_path: Path) -> None:
    """Not by sudo either, which takes SSH_CONNECTION from what it runs."""
    login = ("env", "SSH_CONNECTION=192.0.2.7 50000 192.0.2.1 22", "sh", "-c")
    like_sudo = (*login, 'env -u SSH_CONNECTION "$@"; exit $?', "sh")
    code, said = finish(chaos(tmp_path, "partition", "--peer=192.0.2.7", "--yes", "--force", before=like_sudo))
    assert code == 2 and "192.0.2.7 is the address you are logged in from" in said


def test_a_node_is_slowed_and_let_go(network: Namespaces, tmp_path: Path) -> None:
    """A shaping that somebody else has set up is left alone; without one there is ours, for its time."""
    arguments = ("slow-node", "--interface=eth0", "--rate=1mbit", "--for=2s", "--yes", "--force")
    code, said = finish(chaos(tmp_path, *arguments, before=network.command(0)))
    assert code == 2 and "another queueing discipline (tbf)" in said
    output(*network.command(0), "tc", "qdisc", "del", "dev", "eth0", "root")
    before = qdisc(network)
    process = chaos(tmp_path, *arguments, before=network.command(0))
    until_in_effect(process)
    assert "tbf c405:" in qdisc(network) and "rate 1Mbit" in qdisc(network)
    assert finish(process)[0] == 0
    assert qdisc(network) == before


def test_what_the_kernel_refuses_is_said(network: Namespaces, tmp_path: Path) -> None:
    """A partition from a peer that already has a route of its own: exit 1, and that route is still there."""
    other = ("ip", "route", "add", "10.9.9.9", "via", network.address(1))
    output(*network.command(0), *other)
    arguments = ("partition", "--peer=10.9.9.9", "--yes", "--force")
    code, said = finish(chaos(tmp_path, *arguments, before=network.command(0)))
    assert code == 1 and "File exists" in said
    assert "10.9.9.9 via" in output(*network.command(0), "ip", "route", "show", "10.9.9.9")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("kill-node", "--method=sysrq", "--yes", "--node=other", "--run=r"), "not other"),
        (("kill-node", "--method=sysrq", "--run=r"), "no terminal to confirm this at"),
        (("partition", "--yes", "--force", "--peer=127.0.0.1"), "an address of this node"),
        (("partition", "--yes", "--force", "--peer=no.such.invalid"), "neither an address nor a known name"),
        (("partition", "--yes", "--peer=10.0.0.1"), "no run of opsd launch is active on this node"),
        (("slow-node", "--yes", "--force", "--interface=lo"), "say how slow"),
        (("slow-node", "--yes", "--force", "--interface=nil0", "--rate=1mbit"), "no interface nil0"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_what_must_not_be_is_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    """In one sentence, with exit code 2."""
    with run_of_nobody(tmp_path):
        code, text = finish(chaos(tmp_path if "--run=r" in arguments else tmp_path / "empty", *arguments))
    assert code == 2 and said in text and "Traceback" not in text


def test_a_disk_fills_and_empties(tmp_path: Path) -> None:
    """Without a file that anybody could see; the space is back when chaos is killed."""
    with tmpfs(tmp_path / "disk", "size=64m") as disk:
        process = chaos(tmp_path, "fill-disk", str(disk), "--leave=8M", "--for=5m", "--yes", "--force")
        until_in_effect(process)
        assert 4 << 20 < shutil.disk_usage(disk).free <= 8 << 20 and not list(disk.iterdir())
        process.kill()
        finish(process)
        assert eventually(lambda: shutil.disk_usage(disk).free > 60 << 20)


@contextmanager
def run_of_nobody(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of another user, whose launcher is a process that does nothing."""
    launcher = subprocess.Popen([*AS_NOBODY, "sleep", "600"])
    memory = folder / "shm/r"
    memory.mkdir(parents=True, exist_ok=True)
    state = {"run": "r", "node": "n1", "folder": str(folder), "launcher_pid": launcher.pid}
    try:
        assert eventually(lambda: Path(f"/proc/{launcher.pid}").stat().st_uid == NOBODY)
        state["launcher_start"] = process_start(launcher.pid)
        (memory / "run.json").write_text(json.dumps(state))
        os.chown(memory, NOBODY, NOBODY)
        for path in (folder, *folder.parents[:2]):
            path.chmod(0o755)
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


def usable_by_nobody(python: str) -> bool:
    """True if every user may run opsd with this Python."""
    for probe in (["test", "-x", os.path.realpath(python)], [python, "-c", "import psutil, xxhash, click, opsd"]):
        done = subprocess.run([*AS_NOBODY, *probe], env=WITH_PATH, capture_output=True, timeout=20, check=False)
        if done.returncode:
            return False
    return True


PYTHONS = (sys.executable, "/usr/bin/python3")


def test_root_keeps_its_hands_off_what_is_not_the_runs(tmp_path: Path) -> None:
    """The launcher of the user's run is killed, a process of root that claims to be a rank of it is not."""
    python = next(filter(usable_by_nobody, PYTHONS), None)
    if python is None:
        pytest.skip("no Python here that every user may use")
    claims = {**os.environ, "OPSD_RANK_PAGE": str(tmp_path / "shm/r/rank-0000.page")}
    bystander = subprocess.Popen(["sleep", "600"], env=claims)
    try:
        with run_of_nobody(tmp_path) as launcher:
            code, said = finish(chaos(tmp_path, "kill-node", "--run=r", "--yes", python=python))
            assert code == 0 and "every process of run r on node n1 (SIGKILL), 1 at" in said, said
            assert launcher.wait(20) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_python_of_root_is_not_for_others(tmp_path: Path) -> None:
    """What root alone can read cannot be used on behalf of the run's owner; a sentence says what to do."""
    python = next(filterfalse(usable_by_nobody, PYTHONS), None)
    if python is None:
        pytest.skip("every Python here may be used by every user")
    with run_of_nobody(tmp_path) as launcher:
        code, said = finish(chaos(tmp_path, "kill-node", "--run=r", "--yes", python=python))
        assert code == 2 and "install opsd where every user may read it" in said
        assert launcher.poll() is None


def test_a_reboot_is_one_letter(tmp_path: Path) -> None:
    """What the kernel's trigger is told, told to a file."""
    fault = reboot_node(socket.gethostname(), trigger=tmp_path / "trigger")
    assert "reboots" in fault.text and not (tmp_path / "trigger").exists()
    fault.begin()
    assert (tmp_path / "trigger").read_text() == "b"
