"""What ranks print and which signals they get under `opsd launch`."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched, alive

# What ranks print under ``opsd launch``, with real processes, small disks and readers that stand still.


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


# Signals that a rank gets, and those that its children do not inherit.


CHILDREN = """
import multiprocessing, os, signal, sys, threading, time
from opsd.client import Reporter

how = sys.argv[1]

def stand(pipe=None):
    found = [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGUSR1)]
    os.write(1, f"{found}\\n".encode())
    time.sleep(1000)

def fork():
    if os.fork() == 0:
        stand()

if __name__ == "__main__":
    reporter = Reporter.from_env()
    if how == "os.fork":
        child = os.fork()
        if not child:
            stand()
    elif how == "thread":
        threading.Thread(target=fork, daemon=True).start()
        child = None
        while child is None:
            kids = open(f"/proc/{os.getpid()}/task/{threading.enumerate()[-1].native_id}/children").read().split()
            child = int(kids[0]) if kids else None
    else:
        process = multiprocessing.get_context(how).Process(target=stand)
        process.start()
        child = process.pid
    while not os.path.getsize("/proc/self/fd/1"):
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    print("ended by", -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("how", ["os.fork", "thread", "fork", "spawn"])
def test_children_of_a_rank_die_of_sigterm(tmp_path: Path, how: str) -> None:
    """Only the rank itself outlives a SIGTERM to the whole job; whatever it starts has the default action."""
    with Launched(tmp_path, CHILDREN, args=(how,)) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.log() == f"[True, True]\nended by {signal.SIGTERM.value}\n"


def test_a_child_dies_of_a_signal_that_comes_with_its_first_breath(tmp_path: Path) -> None:
    """Before it has the default action back: a pool that is over at once waited for such a worker for ever."""
    source = """
        import os, signal
        from opsd.client import Reporter
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
        reporters = Reporter.from_env(), Reporter.from_env()
        child = os.fork()
        if not child:
            os._exit(0)
        print("ended by", -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """
    with Launched(tmp_path, source) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.log() == f"ended by {signal.SIGTERM.value}\nset()\n"


def test_a_pool_of_processes_ends(tmp_path: Path) -> None:
    """``multiprocessing.Pool`` ends its workers by SIGTERM and waits for them."""
    source = """
        import multiprocessing
        from opsd.client import Reporter
        reporter = Reporter.from_env()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(abs, [-1, -2]))
        pool.join()
    """
    with Launched(tmp_path, source) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.log() == "[1, 2]\n"


def test_a_program_without_a_page_has_the_default_actions(tmp_path: Path) -> None:
    """Programs of others look for handlers before they set their own: what we do not need they do not find."""
    source = """
        import signal
        names = "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGCHLD"
        print([name for name in names if signal.getsignal(getattr(signal, name)) is not signal.SIG_DFL])
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """
    with Launched(tmp_path, source) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.log() == "[]\nTrue\nset()\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_handler_of_the_program_stays(tmp_path: Path, number: signal.Signals) -> None:
    """A rank with a page and a handler of its own gets the signal there, whichever of the two came first."""
    source = TRAIN.replace(
        "reporter =", f"signal.signal({number.value}, lambda *_: print('mine', flush=True))\nreporter ="
    )
    with Launched(tmp_path, source + "train(10_000)") as launched:
        launched.until(lambda: (launched.memory / "rank-0000.page").exists())
        os.kill(launched.event("generation_started")["ranks"][0]["pid"], number)
        launched.until(lambda: "mine" in launched.log())
        launched.signal(signal.SIGTERM)
        assert launched.wait() == exitcodes.REQUEUE


ORDERLY = """
import atexit, os, sys, time
rank = os.environ["RANK"]
atexit.register(lambda: print("atexit", flush=True))
try:
    print("ready", flush=True)
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    {then}
finally:
    print("finally", flush=True)
"""


def ready(launched: Launched, ranks: int = 1) -> bool:
    """Whether the ranks have begun."""
    return all("ready" in launched.log(rank) for rank in range(ranks))


def test_sigint_ends_the_program_in_order(tmp_path: Path) -> None:
    """Every rank gets a KeyboardInterrupt and the time to clean up; the launcher ends with its own exit code."""
    with Launched(tmp_path, ORDERLY.format(then="time.sleep(0.5); raise"), "--nproc-per-node=2") as launched:
        launched.until(lambda: ready(launched, 2))
        launched.signal(signal.SIGINT)
        assert launched.wait() == exitcodes.INTERRUPTED
        assert len(launched.events("generation_started")) == 1
        assert not launched.events("rank_exited")
        for rank in range(2):
            lines = launched.log(rank).splitlines()
            ours = ("ready", "interrupted", "finally", "atexit")
            assert [line for line in lines if line in ours] == [*ours]
            assert "KeyboardInterrupt" in lines
            assert "opsd" not in launched.log(rank)


def test_sigint_ends_what_the_program_runs(tmp_path: Path) -> None:
    """As from a terminal, the processes in the rank's group get it, too; what is left after the rank is ended."""
    source = """
        import subprocess, sys, time
        code = "import time\\nprint('begun', flush=True)\\ntry: time.sleep(1000)\\nfinally: print('child', flush=True)"
        child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("left", left.pid, flush=True)
        child.wait()
    """
    with Launched(tmp_path, source) as launched:
        launched.until(lambda: "begun" in launched.log() and "left" in launched.log())
        launched.signal(signal.SIGINT)
        assert launched.wait() == exitcodes.INTERRUPTED
        assert "child" in launched.log()
        (left,) = [line.split()[1] for line in launched.log().splitlines() if line.startswith("left")]
        assert not alive(int(left))


def test_third_sigint_kills(tmp_path: Path) -> None:
    """The second one leaves 20 s and the third none."""
    with Launched(tmp_path, ORDERLY.format(then="time.sleep(1000)")) as launched:
        launched.until(lambda: ready(launched))
        launched.signal(signal.SIGINT)
        launched.until(lambda: "interrupted" in launched.log())

        def ended() -> bool:  # two of them at once are one to the kernel
            launched.signal(signal.SIGINT)
            time.sleep(0.2)
            return launched.process.poll() is not None

        launched.until(ended, 15)
        assert launched.wait() == exitcodes.INTERRUPTED
        assert "finally" not in launched.log()


def test_sigint_that_is_ignored_ends_with_the_time_to_stop(tmp_path: Path) -> None:
    """A rank that takes longer than --stop-timeout is killed."""
    with Launched(tmp_path, ORDERLY.format(then="time.sleep(1000)"), "--stop-timeout=0.5") as launched:
        launched.until(lambda: ready(launched))
        launched.signal(signal.SIGINT)
        assert launched.wait(15) == exitcodes.INTERRUPTED
        assert "finally" not in launched.log()


def test_sigint_in_the_background_of_a_shell(tmp_path: Path) -> None:
    """A shell has its background ignore the signal; sent to the launcher it is meant."""
    with Launched(
        tmp_path, ORDERLY.format(then="raise"), within=("sh", "-c", '"$@" & echo $! > pid; wait', "sh")
    ) as launched:
        launched.until(lambda: ready(launched))
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
        launched.wait()
        assert launched.event("finished")["exit_code"] == exitcodes.INTERRUPTED
        assert "interrupted" in launched.log()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_sighup_and_sigquit_stop_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """Like SIGTERM: ranks with a page checkpoint at the next step boundary."""
    with Launched(tmp_path, TRAIN + "train(10_000)\nprint('stopped in order')") as launched:
        launched.until(lambda: (launched.memory / "rank-0000.page").exists())
        launched.signal(number)
        assert launched.wait() == exitcodes.REQUEUE
        assert launched.log() == "stopped in order\n"
        assert launched.event("stopped")["signal"] == number.name


def test_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    """A SIGHUP that was ignored when the launcher began stays so."""
    with Launched(tmp_path, ORDERLY.format(then="raise"), within=("nohup",)) as launched:
        launched.until(lambda: ready(launched))
        launched.signal(signal.SIGHUP)
        launched.signal(signal.SIGINT)
        assert launched.wait() == exitcodes.INTERRUPTED
