"""`opsd chaos` on a real run: each fault happens, is undone, and is undone as well when chaos itself is killed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.chaos.guard import FaultRecord, Guard, end, find, folder_of
from opsd.chaos.undo import Process, Resume, encode
from opsd.checkpoints import manifest
from opsd.rank_page import read_page
from tests.fakes.clock import eventually
from tests.fakes.launched import TRAIN, Launched, alive

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
