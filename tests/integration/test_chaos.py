"""`opsd chaos`: each fault happens and is undone, also where it needs root."""

from __future__ import annotations

import json
import os
import pty
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
from typing import Any

import pytest

import opsd
from opsd.chaos.faults import reboot_node
from opsd.chaos.guard import FaultRecord, Guard, end, find, folder_of
from opsd.chaos.undo import Process, Resume, encode
from opsd.checkpoints import manifest
from opsd.client import process_start
from opsd.rank_page import read_page
from tests.fakes.clock import eventually
from tests.fakes.launched import TRAIN, Launched, alive
from tests.fakes.namespaces import Namespaces, NoNamespacesError
from tests.fakes.tree import tmpfs

# `opsd chaos` on a real run: each fault happens, is undone, and is undone as well when chaos itself is killed.


COLLECTIVE = """
def collect(steps):
    for step in range(steps):
        with reporter.phase("forward"):
            time.sleep(0.005)
        with reporter.phase("collective"):
            time.sleep(0.02)
        reporter.step(step=step)
collect(100_000)
"""

PATIENT = "--hang-limit=60"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two ranks that step for ever, and a launcher that gives a stopped rank a minute."""
    with Launched(tmp_path_factory.mktemp("chaos"), TRAIN + COLLECTIVE, "--nproc-per-node=2", PATIENT) as run:
        run.until(lambda: all(steps(run, rank) > 3 for rank in (0, 1)))
        yield run


def steps(run: Launched, rank: int) -> int:
    path = run.memory / f"rank-{rank:04d}.page"
    return read_page(path).steps_reported if path.exists() else 0


def pid(run: Launched, rank: int) -> int:
    return read_page(run.memory / f"rank-{rank:04d}.page").pid


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def chaos(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A started `opsd chaos` that sees the runs below ``folder``."""
    return subprocess.Popen(
        [sys.executable, "-m", "opsd", "chaos", *arguments],
        env={**os.environ, "OPSD_SHM": str(folder / "shm")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"stdin": subprocess.DEVNULL, **options},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and all that it has said."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


def run_chaos(folder: Path, *arguments: str) -> tuple[int, str]:
    return finish(chaos(folder, *arguments))


def test_stop_rank_ends_by_itself(launched: Launched) -> None:
    """The rank is stopped, JSON lines tell it, and it steps again afterwards."""
    rank = pid(launched, 1)
    process = chaos(launched.folder, "stop-rank", "--rank=1", "--for=2s", "--yes", "--json")
    assert eventually(lambda: stopped(rank))
    assert process.stdout is not None
    begun = json.loads(process.stdout.readline())
    assert begun["event"] == "begun" and begun["run"] == "r" and begun["for_s"] == 2.0
    code, said = finish(process)
    assert code == 0 and json.loads(said.splitlines()[0])["event"] == "undone"
    before = steps(launched, 1)
    assert eventually(lambda: steps(launched, 1) > before)
    assert "no fault" in run_chaos(launched.folder, "list")[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_fault_is_undone_when_chaos_is_ended(launched: Launched, number: signal.Signals) -> None:
    """By Ctrl-C, politely, and by kill -9: the guard lets the rank go on."""
    rank = pid(launched, 0)
    process = chaos(launched.folder, "stop-rank", "--rank=0", "--for=5m", "--yes")
    assert eventually(lambda: stopped(rank))
    process.send_signal(number)
    code, said = finish(process)
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 3), said
    assert eventually(lambda: not stopped(rank))


def test_a_killed_guard_is_no_loss(launched: Launched) -> None:
    """Chaos itself undoes the fault when its guard is gone before the time."""
    rank = pid(launched, 0)
    process = chaos(launched.folder, "stop-rank", "--rank=0", "--for=5m", "--yes")
    assert eventually(lambda: stopped(rank))
    os.kill(guard(launched.folder), signal.SIGKILL)
    code, said = finish(process)
    assert code == 0 and "the guard was killed" in said
    assert not stopped(rank)
    assert "left over" in run_chaos(launched.folder, "list")[1]
    assert run_chaos(launched.folder, "undo")[0] == 0


def test_a_fault_without_chaos_and_guard_is_undone_by_hand(launched: Launched) -> None:
    """Its record is left, `list` says so, and `undo` ends it."""
    rank = pid(launched, 1)
    process = chaos(launched.folder, "stop-rank", "--rank=1", "--for=5m", "--yes")
    assert eventually(lambda: stopped(rank))
    process.send_signal(signal.SIGSTOP)
    os.kill(guard(launched.folder), signal.SIGKILL)
    process.kill()
    finish(process)
    assert stopped(rank)
    assert "left over" in run_chaos(launched.folder, "list")[1]
    code, said = run_chaos(launched.folder, "undo")
    assert code == 0 and "goes on" in said
    assert not stopped(rank)


def test_undo_asks_the_guard(launched: Launched) -> None:
    """`list` shows a fault in effect; it ends early, and the chaos that caused it ends as usual."""
    rank = pid(launched, 1)
    process = chaos(launched.folder, "stop-rank", "--rank=1", "--for=5m", "--yes", "--json")
    assert eventually(lambda: stopped(rank))
    assert process.stdout is not None
    begun = json.loads(process.stdout.readline())
    code, listed = run_chaos(launched.folder, "list", "--json")
    assert code == 0 and json.loads(listed)["id"] == begun["id"] and "in effect" in json.loads(listed)["state"]
    code, said = run_chaos(launched.folder, "undo")
    assert code == 0 and "undone by its guard" in said
    assert not stopped(rank)
    assert finish(process)[0] == 0


def test_a_fault_that_begins_after_its_guard_has_ended_is_undone(tmp_path: Path) -> None:
    """`undo` ends the guard of a fault that is still waiting for its moment; when that comes it is not for good."""
    rank = subprocess.Popen(["sleep", "1000"])
    try:
        process = Process.of(rank.pid)
        assert process is not None
        undo = Resume(process.pid, process.start)
        record = FaultRecord("late", "hang-collective", "stops", "r", 300.0, encode(undo))
        folder = folder_of(tmp_path / "shm", os.geteuid())
        guard = Guard(record, undo, folder)
        ((_, kept),) = find(tmp_path / "shm")
        assert end(folder, kept) == "undone by its guard"
        rank.send_signal(signal.SIGSTOP)
        guard.begun()
        result = guard.wait()
        assert result.undone and "the guard was told to end" in result.text
        assert eventually(lambda: not stopped(rank.pid))
    finally:
        rank.kill()
        rank.wait()


def guard(folder: Path) -> int:
    record = next(folder.glob("shm-chaos-*/*.json"))
    return int(json.loads(record.read_text())["guard_pid"])


def test_hang_collective_stops_a_rank_inside_of_one(launched: Launched) -> None:
    """Its page says so for as long as it is stopped."""
    process = chaos(launched.folder, "hang-collective", "--rank=1", "--for=5m", "--yes")
    assert process.stdout is not None
    assert "in effect" in process.stdout.readline()
    assert read_page(launched.memory / "rank-0001.page").phase == "collective" and stopped(pid(launched, 1))
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 3


def test_a_checkpoint_is_damaged_and_restored(launched: Launched) -> None:
    """Verification fails in between and passes afterwards."""
    root = launched.run / "checkpoints"
    folder = manifest.folder_of(root, 7)
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(bytes(1000))
    entry = manifest.FileEntry("a", 1000, manifest.checksum(folder / "a"))
    manifest.commit(folder, manifest.Manifest(7, 7, {"dp": 1}, "", (entry,), "local", 0.0))
    process = chaos(launched.folder, "corrupt-checkpoint", "--for=5m", "--yes")
    assert process.stdout is not None
    assert "in effect" in process.stdout.readline()
    with pytest.raises(manifest.CheckpointError):
        manifest.verify(folder)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 3
    manifest.verify(folder)


def test_a_rank_is_killed_and_the_run_goes_on(launched: Launched) -> None:
    """The launcher sees a SIGKILL of the rank that was asked for."""
    code, said = run_chaos(launched.folder, "kill-rank", "--run=r", "--rank=1", "--yes")
    assert code == 0 and "kills rank 1 of run r" in said
    exited = launched.event("rank_exited")
    assert exited["rank"] == 1 and exited["exit"] == "signal SIGKILL"
    launched.event("resumed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stop-rank",), "use --yes"),
        (("stop-rank", "--yes", "--rank=7"), "rank 7 of run r"),
        (("stop-rank", "--yes", "--run=x"), "no run x is active on this node; there is r"),
        (("stop-rank", "--yes", "--for=1h"), "at most 10m"),
        (("corrupt-checkpoint", "--yes", "--step=9"), "no complete checkpoint of step 9"),
        (("slow-node", "--yes", "--rate=fast"), "not of the form 100mbit"),
        (("fill-disk", "/", "--leave=10M", "--yes"), "have to stay free"),
        (("undo", "nothing"), "no fault nothing"),
    ],
    ids=lambda value: "-".join(value)[:24] if isinstance(value, tuple) else "",
)
def test_what_must_not_be_is_refused(launched: Launched, arguments: tuple[str, ...], said: str) -> None:
    """In one sentence, with exit code 2, and nothing has happened."""
    before = [pid(launched, rank) for rank in (0, 1)]
    code, text = run_chaos(launched.folder, *arguments)
    assert code == 2 and said in text and "Traceback" not in text
    assert [pid(launched, rank) for rank in (0, 1)] == before and not any(map(stopped, before))


@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("y\n", 0)])
def test_it_asks_at_a_terminal(launched: Launched, answer: str, code: int) -> None:
    """No is no."""
    terminal, other_end = pty.openpty()
    os.write(terminal, answer.encode())
    process = chaos(launched.folder, "stop-rank", "--rank=0", "--for=10ms", stdin=other_end)
    assert finish(process)[0] == code
    os.close(terminal)
    os.close(other_end)


def test_a_lost_node_takes_everything_of_the_run_with_it(tmp_path: Path) -> None:
    """Launcher, ranks and what has slipped away from both; other processes stay."""
    source = "import subprocess\n" + TRAIN + "subprocess.Popen(['sleep', '600'], start_new_session=True)\n" + COLLECTIVE
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        with Launched(tmp_path, source, "--nproc-per-node=1") as run:
            run.until(lambda: steps(run, 0) > 1)
            rank = pid(run, 0)
            (daemon,) = map(int, Path(f"/proc/{rank}/task/{rank}/children").read_text().split())
            code, said = run_chaos(tmp_path, "kill-node", "--yes")
            assert code == 0, said
            assert run.wait() == -signal.SIGKILL
            assert eventually(lambda: not alive(rank) and not alive(daemon))
        assert bystander.poll() is None
        code, said = run_chaos(tmp_path, "kill-node", "--yes")
        assert code == 2 and "no run of opsd launch is active on this node" in said
    finally:
        bystander.kill()
        bystander.wait()


CHAOS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="these faults need root")


# `opsd chaos` where it needs root: networks, disks, reboots, and runs of other users.


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


def chaos_as_root(
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


def finish_as_root(process: subprocess.Popen[str]) -> tuple[int, str]:
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


@CHAOS_ROOT
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_partition_heals(network: Namespaces, tmp_path: Path, number: signal.Signals) -> None:
    """Nothing goes to the peer while it lasts; the route is gone afterwards, also after kill -9."""
    arguments = ("partition", f"--peer={network.address(1)}", "--for=5m", "--yes", "--force")
    process = chaos_as_root(tmp_path, *arguments, before=network.command(0))
    until_in_effect(process)
    assert not reaches(network) and network.address(1) in routes(network)
    process.send_signal(number)
    finish_as_root(process)
    assert eventually(lambda: not routes(network))
    assert reaches(network)


@CHAOS_ROOT
def test_nobody_cuts_himself_off(tmp_path: Path) -> None:
    """Not by sudo either, which takes SSH_CONNECTION from what it runs."""
    login = ("env", "SSH_CONNECTION=192.0.2.7 50000 192.0.2.1 22", "sh", "-c")
    like_sudo = (*login, 'env -u SSH_CONNECTION "$@"; exit $?', "sh")
    code, said = finish_as_root(
        chaos_as_root(tmp_path, "partition", "--peer=192.0.2.7", "--yes", "--force", before=like_sudo)
    )
    assert code == 2 and "192.0.2.7 is the address you are logged in from" in said


@CHAOS_ROOT
def test_a_node_is_slowed_and_let_go(network: Namespaces, tmp_path: Path) -> None:
    """A shaping that somebody else has set up is left alone; without one there is ours, for its time."""
    arguments = ("slow-node", "--interface=eth0", "--rate=1mbit", "--for=2s", "--yes", "--force")
    code, said = finish_as_root(chaos_as_root(tmp_path, *arguments, before=network.command(0)))
    assert code == 2 and "another queueing discipline (tbf)" in said
    output(*network.command(0), "tc", "qdisc", "del", "dev", "eth0", "root")
    before = qdisc(network)
    process = chaos_as_root(tmp_path, *arguments, before=network.command(0))
    until_in_effect(process)
    assert "tbf c405:" in qdisc(network) and "rate 1Mbit" in qdisc(network)
    assert finish_as_root(process)[0] == 0
    assert qdisc(network) == before


@CHAOS_ROOT
def test_what_the_kernel_refuses_is_said(network: Namespaces, tmp_path: Path) -> None:
    """A partition from a peer that already has a route of its own: exit 1, and that route is still there."""
    other = ("ip", "route", "add", "10.9.9.9", "via", network.address(1))
    output(*network.command(0), *other)
    arguments = ("partition", "--peer=10.9.9.9", "--yes", "--force")
    code, said = finish_as_root(chaos_as_root(tmp_path, *arguments, before=network.command(0)))
    assert code == 1 and "File exists" in said
    assert "10.9.9.9 via" in output(*network.command(0), "ip", "route", "show", "10.9.9.9")


@CHAOS_ROOT
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
def test_what_must_not_be_is_refused_of_chaos_root(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    """In one sentence, with exit code 2."""
    with run_of_nobody(tmp_path):
        code, text = finish_as_root(
            chaos_as_root(tmp_path if "--run=r" in arguments else tmp_path / "empty", *arguments)
        )
    assert code == 2 and said in text and "Traceback" not in text


@CHAOS_ROOT
def test_a_disk_fills_and_empties(tmp_path: Path) -> None:
    """Without a file that anybody could see; the space is back when chaos is killed."""
    with tmpfs(tmp_path / "disk", "size=64m") as disk:
        process = chaos_as_root(tmp_path, "fill-disk", str(disk), "--leave=8M", "--for=5m", "--yes", "--force")
        until_in_effect(process)
        assert 4 << 20 < shutil.disk_usage(disk).free <= 8 << 20 and not list(disk.iterdir())
        process.kill()
        finish_as_root(process)
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


@CHAOS_ROOT
def test_root_keeps_its_hands_off_what_is_not_the_runs(tmp_path: Path) -> None:
    """The launcher of the user's run is killed, a process of root that claims to be a rank of it is not."""
    python = next(filter(usable_by_nobody, PYTHONS), None)
    if python is None:
        pytest.skip("no Python here that every user may use")
    claims = {**os.environ, "OPSD_RANK_PAGE": str(tmp_path / "shm/r/rank-0000.page")}
    bystander = subprocess.Popen(["sleep", "600"], env=claims)
    try:
        with run_of_nobody(tmp_path) as launcher:
            code, said = finish_as_root(chaos_as_root(tmp_path, "kill-node", "--run=r", "--yes", python=python))
            assert code == 0 and "every process of run r on node n1 (SIGKILL), 1 at" in said, said
            assert launcher.wait(20) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@CHAOS_ROOT
def test_a_python_of_root_is_not_for_others(tmp_path: Path) -> None:
    """What root alone can read cannot be used on behalf of the run's owner; a sentence says what to do."""
    python = next(filterfalse(usable_by_nobody, PYTHONS), None)
    if python is None:
        pytest.skip("every Python here may be used by every user")
    with run_of_nobody(tmp_path) as launcher:
        code, said = finish_as_root(chaos_as_root(tmp_path, "kill-node", "--run=r", "--yes", python=python))
        assert code == 2 and "install opsd where every user may read it" in said
        assert launcher.poll() is None


@CHAOS_ROOT
def test_a_reboot_is_one_letter(tmp_path: Path) -> None:
    """What the kernel's trigger is told, told to a file."""
    fault = reboot_node(socket.gethostname(), trigger=tmp_path / "trigger")
    assert "reboots" in fault.text and not (tmp_path / "trigger").exists()
    fault.begin()
    assert (tmp_path / "trigger").read_text() == "b"
