"""Signals that a rank gets, and those that its children do not inherit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched, alive

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
