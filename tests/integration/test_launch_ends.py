"""How a run under ``opsd launch`` ends: asked to, by force, or with its launcher; and what it may leave behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched, alive
from tests.fakes.webhook import Webhook

TWO = "--nproc-per-node=2"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("everyone", [False, True])
def test_stop_at_a_step_boundary(tmp_path: Path, number: signal.Signals, everyone: bool) -> None:
    """SIGTERM and SIGUSR1 let the ranks stop at a step boundary, also when Slurm signals every process of the job."""
    source = TRAIN + "train(10_000)\nprint('stopped in order')"
    with Launched(tmp_path, source, TWO) as launched:
        started = launched.event("generation_started")
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        if everyone:
            for entry in started["ranks"]:
                os.kill(entry["pid"], number)
        launched.signal(number)
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.log(0) == launched.log(1) == "stopped in order\n"
        stopped = launched.event("stopped")
        assert stopped["signal"] == number.name
        assert launched.events()[-1]["exit_code"] == exitcodes.REQUEUE
        assert not launched.events("rank_exited")
        assert launched.err.count("stop requested: the ranks have 120 s to save and end") == 1


UNAWARE = """
import os, sys, time
from opsd.client import Reporter
reporter = Reporter.from_env()
reporter.step(step=7)
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
UNHANDLED = "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (UNAWARE, "stopped in good order after SIGTERM; no checkpoint was seen"),
        (UNHANDLED, "ended by SIGTERM, which ranks do not handle"),
    ],
)
def test_a_stop_of_a_program_that_reads_no_request(tmp_path: Path, source: str, reason: str) -> None:
    """It is said at once that the ranks were asked, and at the end what was seen of a checkpoint."""
    end = tmp_path / "end"
    with Launched(tmp_path, source, args=(str(end),)) as launched:
        launched.until(lambda: "ready" in launched.log())
        launched.signal(signal.SIGTERM)
        launched.until(lambda: "stop requested: the ranks have 120 s to save and end (SIGTERM; " in launched.err)
        end.touch()
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.event("finished")["reason"] == reason


@pytest.mark.parametrize("gives_way", [False, True])
def test_rank_without_page_gets_the_signal(tmp_path: Path, gives_way: bool) -> None:
    """A program that does not know opsd is sent SIGTERM; its own handler may end it in order.

    The run can go on, and has a report of what it did, unless it gives way to others.
    """
    source = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
        print("ready", flush=True)
        time.sleep(1000)
    """
    with Launched(tmp_path, source, *["--give-way"] * gives_way) as launched:
        launched.until(lambda: "ready" in launched.log())
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.REQUEUE
        assert "saved" in launched.log()
        assert (launched.run / "report.html").exists() is not gives_way


def test_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """Who does not stop in time is killed, and the exit code does not claim that anything was saved."""
    source = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(1000)
    """
    with Launched(tmp_path, source, "--stop-timeout=0.5") as launched:
        launched.until(lambda: "ready" in launched.log())
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.FAILED
        assert "rank 0 did not stop in time after SIGTERM" in launched.event("finished")["reason"]


@pytest.mark.timeout(120)
def test_a_rank_that_stays_after_the_others_is_named(tmp_path: Path) -> None:
    """The run waits for it, and says so once."""
    program = TRAIN + "train(5)\nif rank == 1:\n    time.sleep(33)\n"
    with Launched(tmp_path, program, "--nproc-per-node", "3") as run:
        assert run.wait(100) == 0, run.err
        assert run.err.count("rank 1 has not ended 30 s after rank") == 1, run.err
        assert "without progress it counts as hung" in run.err


def test_interrupt_stops_fast(tmp_path: Path) -> None:
    """Ctrl-C ends everything at once, with its own exit code."""
    with Launched(tmp_path, TRAIN + "train(10_000)", TWO) as launched:
        pids = [entry["pid"] for entry in launched.event("generation_started")["ranks"]]
        launched.signal(signal.SIGINT)
        assert launched.wait(10) == exitcodes.INTERRUPTED
        assert not any(alive(pid) for pid in pids)


FORKS = """
import os, subprocess, sys, time
for detached in (False, True):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=detached)
    print(child.pid, flush=True)
"""


@pytest.mark.parametrize(("ending", "code"), [("", exitcodes.OK), ("os.kill(os.getpid(), 9)", exitcodes.FAILED)])
def test_children_that_outlive_a_rank_are_cleaned_up(tmp_path: Path, ending: str, code: int) -> None:
    """Whatever a rank started ends with its generation, daemons in sessions of their own included."""
    with Launched(tmp_path, FORKS + ending, "--max-restarts=0") as launched:
        assert launched.wait() == code
        pids = [int(line) for line in launched.log().split()]
        assert len(pids) == 2
        assert not any(alive(pid) for pid in pids)


SAVES = """
import os, subprocess, sys
from opsd.client import PERSIST, Reporter
reporter = Reporter.from_env()
save = "import pathlib, sys, time; time.sleep(1.5); pathlib.Path(sys.argv[1]).write_text('saved')"
child = subprocess.Popen([sys.executable, "-c", save, sys.argv[1]], start_new_session=True)
reporter.add_worker(child.pid, PERSIST)
reporter.step()
os.kill(os.getpid(), 9)
"""


def test_a_checkpoint_being_written_outlives_its_rank(tmp_path: Path) -> None:
    """The process that has the staged state in hand is left to finish when its rank is killed."""
    target = tmp_path / "checkpoint"
    with Launched(tmp_path, SAVES, "--max-restarts=0", args=(str(target),)) as launched:
        assert launched.wait() == exitcodes.FAILED
        launched.until(target.exists)


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    """A launcher that is killed leaves no rank behind, and the next one of the same run takes over and counts on."""
    with Launched(tmp_path, TRAIN + "train(10_000)", TWO) as launched:
        pids = [entry["pid"] for entry in launched.event("generation_started")["ranks"]]
        launched.until(lambda: len(list(launched.memory.glob("rank-*.page"))) == 2)
        launched.signal(signal.SIGKILL)
        launched.until(lambda: not any(alive(pid) for pid in pids))
    with Launched(tmp_path, TRAIN + "train(3)", TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.events("generation_started")[-1]["generation"] == 2


@contextmanager
def held(launched: Launched) -> Iterator[None]:
    """Meanwhile the guard of the launcher does nothing; it ends then."""
    children = psutil.Process(launched.process.pid).children()
    (guard,) = (child for child in children if any("leftovers.py" in word for word in child.cmdline()))
    guard.suspend()
    try:
        yield
    finally:
        guard.kill()


def test_ranks_whose_launcher_was_killed_before_they_ran_never_do(tmp_path: Path) -> None:
    """Its interpreter may need seconds to start on a busy node. It looks itself, without the guard of the launcher."""
    slow, started, gate = (tmp_path / name for name in ("slow-python", "started", "gate"))
    waits = f"echo $$ >>{started}; until test -e {gate}; do sleep 0.1; done"
    slow.write_text(f'#!/bin/sh\ntest "$1" = -c || {{ {waits}; }}\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    program = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    with Launched(tmp_path, program, env={"PYTHON_EXEC": str(slow)}) as launched:
        launched.until(started.exists)
        with held(launched):
            launched.process.kill()
            launched.process.wait()
            gate.touch()
            launched.until(lambda: not any(alive(int(pid)) for pid in started.read_text().split()))
    assert not (tmp_path / "ran").exists()


def test_people_are_notified_and_a_dead_receiver_is_one_line(tmp_path: Path) -> None:
    """Start, restart and end, with cause and report; the URL is in no file, no message and no rank's environment."""
    source = TRAIN + "assert 'OPSD_NOTIFY' not in os.environ\ntrain(20, at=5, do=lambda: restarts or os._exit(3))"
    with Webhook() as webhook:
        where = f"{webhook.url} http://127.0.0.1:9/s3cret"
        with Launched(tmp_path, source, env={"OPSD_NOTIFY": where}) as launched:
            assert launched.wait() == exitcodes.OK
        webhook.shutdown()
        told = [(post["event"], str(post["text"])) for post in webhook.posts]
    assert [event for event, _ in told] == ["started", "restarted", "finished"]
    assert "failed after step 5 with exit code 3; it goes on with step" in told[1][1]
    assert told[2][1].endswith(f"report: {launched.run / 'report.html'}")
    assert (tmp_path / "err").read_text().count("not notified: 127.0.0.1") == 1
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "prog.py"]
    assert not [path for path in written if b"s3cret" in path.read_bytes()]
