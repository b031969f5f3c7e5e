"""The agent as a process: signals, a new configuration, and its heap."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from textwrap import dedent

import pytest

from opsd.agent.daemon import Reloader
from opsd.agent.logs import Log
from opsd.config import ConfigError, Settings

# Reloading the configuration of the agent.


class World:
    """A reloader, the configuration that it will read, and what it has applied and said."""

    def __init__(self) -> None:
        self.next: Settings | Exception = Settings()
        self.applied: list[tuple[Settings, Settings]] = []
        self.said: list[Mapping[str, object]] = []
        self.wanted = threading.Event()
        self.reloader = Reloader(
            Settings(), self.read, lambda *both: self.applied.append(both), Log(self.said.append), self.wanted,
            wall=lambda: 7.0,
        )  # fmt: skip

    def read(self) -> Settings:
        if isinstance(self.next, Exception):
            raise self.next
        return self.next

    def metrics(self) -> dict[str, float]:
        return {sample.metric.name: sample.value for sample in self.reloader.samples()}


def settings(**sections: object) -> Settings:
    return Settings.model_validate(sections)


def test_new_settings_are_applied() -> None:
    """The next reload starts from them."""
    world = World()
    first, second = settings(policy={"mode": "act"}), settings(policy={"mode": "recommend"})
    for world.next in (first, second):
        world.reloader.reload()
    assert world.applied == [(Settings(), first), (first, second)]
    assert world.reloader.status() == {"reloads": 2, "loaded_at": 7.0, "problem": "", "needs_restart": []}


@pytest.mark.parametrize("error", [ConfigError("unknown key agent.x"), ZeroDivisionError()])
def test_a_configuration_that_is_wrong_changes_nothing(error: Exception) -> None:
    """Log, metric and status say so, until one is good again."""
    world = World()
    world.next = error
    world.reloader.reload()
    assert world.applied == []
    assert world.said[-1]["level"] == "error"
    assert world.metrics()["opsd_config_last_reload_successful"] == 0
    assert world.reloader.status()["problem"] == str(error) or "ZeroDivisionError" in str(world.said[-1])
    world.next = Settings()
    world.reloader.reload()
    assert world.metrics()["opsd_config_last_reload_successful"] == 1
    assert world.reloader.status()["problem"] == ""


def test_what_needs_a_restart_is_named_and_left_alone() -> None:
    """The agent does not change its address or its state folder while it runs."""
    world = World()
    world.next = settings(agent={"listen": "127.0.0.1:1", "names": ["node-17.cluster"], "interval_s": 2.0})
    world.reloader.reload()
    ((_, applied),) = world.applied
    assert (applied.agent.listen, applied.agent.interval_s) == (Settings().agent.listen, 1.0)
    assert applied.agent.names == ("node-17.cluster",)
    assert world.reloader.status()["needs_restart"] == ["agent.listen", "agent.interval_s"]


def test_a_signal_is_one_reload() -> None:
    """However often it came before the next tick."""
    world = World()
    assert not world.reloader.due()
    world.wanted.set()
    world.wanted.set()
    assert world.reloader.due()
    assert not world.reloader.due()


# Signals to the agent, at any moment and however many.


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


# The heap: what was freed goes back to the system.


HOLES = """
    import ctypes, gc, re
    from opsd.agent import heap

    def resident():
        return int(re.search(r"VmRSS:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024

    assert heap.settle()
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(32_000) for _ in range(3000)]
    for block in blocks:
        ctypes.memset(block, 1, 32_000)
    for number, block in enumerate(blocks):
        if number % 10:
            libc.free(block)
    full, trim = resident(), heap.Trim()
    assert trim.if_due(1000.0) and not trim.if_due(1000.0 + heap.TRIM_EVERY_S - 1)
    print(full - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim is glibc's")
def test_holes_in_the_heap_go_back_to_the_system() -> None:
    """Where one block in ten lives on, glibc by itself keeps all of the others."""
    run = subprocess.run([sys.executable, "-c", dedent(HOLES)], capture_output=True, text=True, check=True)
    assert float(run.stdout) > 40
