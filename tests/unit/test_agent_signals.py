"""Signals to the agent, at any moment and however many."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys
from opsd.commands.agent import listen_to_signals
stop, reload = listen_to_signals()
left = 200

def hang_up(frame, event, _argument):
    # One signal after each lock that the main thread takes or gives back, and in a handler the next.
    global left
    if event == "c_return" and frame.f_globals["__name__"] == "threading" and left:
        left -= 1
        os.kill(os.getpid(), signal.SIGHUP)

sys.setprofile(hang_up)
while left:
    reload.clear()
    stop.wait(0.001)
sys.setprofile(None)
print("reload", reload.wait(20), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("stop", stop.wait(20), flush=True)
"""


def test_signals_at_the_worst_moment_stop_nothing() -> None:
    """A handler that set the event waited for ever if it interrupted the main thread, or itself, within that event."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["reload True", "stop True", ""]
