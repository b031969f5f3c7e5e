"""Signals that a rank gets, and those that its children do not inherit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched

CHILDREN = """
import multiprocessing, os, signal, sys, threading, time
from opsd.client import Reporter

how = sys.argv[1]

def stand(pipe=None):
    found = [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGUSR1)]
    print(*found, flush=True)
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
        assert launched.log() == f"True True\nended by {signal.SIGTERM.value}\n"


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
