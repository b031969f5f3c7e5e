"""What ranks print under ``opsd launch``, with real processes, small disks and readers that stand still."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched

TWO = "--nproc-per-node=2"
BOTH = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)"


def test_streams_are_the_ranks_own(tmp_path: Path) -> None:
    """As under torchrun without flags: stdout to stdout, stderr to stderr, nothing added."""
    with Launched(tmp_path, BOTH, TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert sorted(launched.out.splitlines()) == ["out 0", "out 1"]
        assert sorted(launched.rank_err.splitlines()) == ["err 0", "err 1"]
        assert sorted(launched.log(1).splitlines()) == ["err 1", "out 1"]


def test_redirects_and_tee_by_local_rank(tmp_path: Path) -> None:
    """``-r 0:1 -t 1:2`` as torchrun's: files for those streams, and the console without or with the rank."""
    with Launched(tmp_path, BOTH, TWO, "-r", "0:1", "-t", "1:2") as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out == "out 1\n"
        assert sorted(launched.rank_err.splitlines()) == ["[rank1]: err 1", "err 0"]
        logs = launched.run / "logs/gen-0001"
        assert (logs / "rank-0000.stdout.log").read_text() == "out 0\n"
        assert (logs / "rank-0001.stderr.log").read_text() == "err 1\n"
        assert sorted(path.name for path in logs.glob("*.std*")) == ["rank-0000.stdout.log", "rank-0001.stderr.log"]
        assert sorted(launched.log(0).splitlines()) == ["err 0", "out 0"]


def test_warm_standby_has_streams_of_its_own_too(tmp_path: Path) -> None:
    """A rank that was started from a warm interpreter prints to the same places."""
    source = TRAIN + (
        "print('out', generation)\nprint('err', generation, file=sys.stderr)\n"
        "train(400 if generation == 1 else 5, at=390, do=lambda: os.kill(os.getpid(), signal.SIGKILL))"
    )
    with Launched(tmp_path, source, "-r", "2") as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out == "out 1\nout 2\n"
        assert "err" not in launched.err
        assert launched.events("generation_started")[1]["standby"] == 1
        assert (launched.run / "logs/gen-0002/rank-0000.stderr.log").read_text() == "err 2\n"


def test_progress_bar_moves_on_a_terminal(tmp_path: Path) -> None:
    """A frame without a line's end is on the screen while the program goes on to the next one."""
    (tmp_path / "prog.py").write_text(
        "import sys, time\nfor n in range(3):\n    sys.stderr.write(f'\\r{n}0%')\n    time.sleep(2)\n"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "opsd", "launch", "--run-dir", str(tmp_path / "run"), str(tmp_path / "prog.py")]
    environment = {**os.environ, "OPSD_SHM": str(tmp_path / "shm")}
    process = subprocess.Popen(command, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    with suppress(OSError):
        while b"\r10%" not in seen:
            seen += os.read(ours, 1000)
    assert process.poll() is None, "shown only at the end"
    assert seen.count(b"\r00%") == 1
    assert process.wait(30) == exitcodes.OK
    os.close(ours)


def test_closed_descriptors(tmp_path: Path) -> None:
    """Started without stdout and stderr, as by some daemons, the launcher prints into none of its own files."""
    (tmp_path / "prog.py").write_text(BOTH)
    launcher = f"{sys.executable} -m opsd launch --run-dir {tmp_path}/run --run-id r {tmp_path}/prog.py"
    environment = {**os.environ, "OPSD_SHM": str(tmp_path / "shm")}
    assert subprocess.run(f"{launcher} >&- 2>&-", shell=True, env=environment, timeout=60).returncode == exitcodes.OK
    events = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events][-1] == "finished"
    assert (tmp_path / "run/logs/gen-0001/rank-0000.log").read_text() == "out 0\nerr 0\n"


def test_full_disk_costs_logs_and_not_the_run(tmp_path: Path, small_disk: Path) -> None:
    """With no byte left below the run folder ranks print on, are started again, and why they failed is known."""
    source = TRAIN + (
        "for n in range(3000):\n    print('x' * 1000)\n"
        "def fail():\n    if restarts == 0:\n        raise RuntimeError('on purpose')\n"
        "train(30, at=20, do=fail)"
    )
    with Launched(tmp_path, source, f"--run-dir={small_disk / 'run'}") as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out.count("\n") == 6000
        assert launched.event("rank_exited")["error"]["message"] == "on purpose"
        assert "RuntimeError: on purpose" in launched.event("rank_exited")["log_tail"]
        assert launched.err.count("No space left on device") >= 1


def test_full_shared_memory_costs_no_output(tmp_path: Path, small_disk: Path) -> None:
    """Output is held in memory that /dev/shm has no part in."""
    (small_disk / "ballast").write_bytes(b"x" * 1_000_000)
    source = "import os\nfor n in range(300):\n    print('x' * 10_000)\nprint('end')"
    with Launched(tmp_path, source, env={"OPSD_SHM": str(small_disk / "shm")}) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.out.endswith("x\nend\n")
        assert len(launched.log()) == len(launched.out) == 300 * 10_001 + 4


def test_stopped_launcher_does_not_stop_the_ranks(tmp_path: Path) -> None:
    """A rank that prints 50 MB while its launcher is stopped is done with that before it goes on."""
    source = (
        "import time\nfrom pathlib import Path\n"
        "while not Path('go').exists():\n    time.sleep(0.01)\n"
        "for _ in range(50):\n    print('x' * (1 << 20))\n"
        "Path('printed').touch()\n"
    )
    with Launched(tmp_path, source) as launched:
        launched.event("generation_started")
        launched.signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        launched.until(lambda: (tmp_path / "printed").exists())
        launched.signal(signal.SIGCONT)
        assert launched.wait() == exitcodes.OK
        assert (tmp_path / "out").stat().st_size == 50 * ((1 << 20) + 1)


def test_log_of_a_killed_launcher_has_what_was_printed(tmp_path: Path) -> None:
    """What a rank has printed a second before is in its log when the launcher dies of SIGKILL."""
    source = TRAIN + "print('before')\ntime.sleep(1)\nopen('now', 'w').close()\ntime.sleep(60)"
    with Launched(tmp_path, source) as launched:
        launched.until(lambda: (tmp_path / "now").exists())
        launched.process.kill()
        launched.process.wait()
        assert launched.log() == "before\n"


def test_full_stderr_does_not_stop_recovery(tmp_path: Path) -> None:
    """Nobody reads what launcher and ranks say any more: a rank that dies is still replaced, and the run ends."""
    source = TRAIN + (
        "sys.stderr.write('x' * 1_000_000 + '\\n')\n"
        "train(30 if generation == 1 else 5, at=20, do=lambda: os.kill(os.getpid(), signal.SIGKILL))"
    )
    (tmp_path / "prog.py").write_text(source)
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "opsd", "launch", "--run-dir", str(tmp_path / "run"), "--run-id=r", "prog.py"]
    environment = {**os.environ, "OPSD_SHM": str(tmp_path / "shm")}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(60) == exitcodes.OK
    os.close(reader)
    events = [json.loads(line)["event"] for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert "resumed" in events
    assert events[-1] == "finished"


@pytest.mark.slow
def test_rank_that_prints_on_and_on_fills_no_disk(tmp_path: Path) -> None:
    """Logs rotate: three megabytes stay of a hundred."""
    source = "for _ in range(100):\n    print('x' * (1 << 20))\n"
    with Launched(tmp_path, source, "--log-size=1", "-r", "3") as launched:
        assert launched.wait() == exitcodes.OK
        logs = list((launched.run / "logs").rglob("rank-0000.log*"))
        assert len(logs) == 3
        assert sum(path.stat().st_size for path in logs) < 5 << 20
