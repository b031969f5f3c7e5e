"""How fast launchers agree on a new generation, and the CPU time that this costs the leader.

Each launcher is a process on this machine. They use TCP on the loopback network and a claims folder in memory. A
launcher is lost by SIGSTOP, which is as silent as a power loss, or by SIGKILL, after which its kernel closes sockets.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from statistics import median

import psutil

from opsd.bench import BenchError, memory_folder
from opsd.bench.launchers import States
from opsd.ports import free_port

NODES = 1024
TRIALS = 3
IDLE_S = 20.0
SETTLE_S = 5.0
DEADLINE_S = 120.0


@contextmanager
def _running(nodes: int) -> Iterator[tuple[list[int], States]]:
    """The process ids of the launchers, and their states."""
    with memory_folder() as folder:
        path = folder / "states"
        states = States(path, nodes)
        settings = {
            "nodes": nodes, "port": free_port(), "secret": secrets.token_hex(32), "folder": str(folder),
            "states": str(path),
        }  # fmt: skip
        command = [sys.executable, "-m", "opsd.bench.launchers", json.dumps(settings)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline()), states
        finally:
            process.communicate()


def _agreed(states: States, there: Collection[int], after: int) -> tuple[int, float]:
    """Wait until exactly those ``there`` have begun a plan newer than ``after``; returns its number and time."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = [states[launcher] for launcher in there]
        plans = {(state.number, state.slots) for state in found}
        if len(plans) == 1 and found[0].number > after and found[0].slots == len(there):
            return found[0].number, max(state.at for state in found)
        time.sleep(0.1)
    raise BenchError(f"no generation of them all within {DEADLINE_S:g} s")


def _leader(states: States, there: Collection[int]) -> int:
    leaders = [launcher for launcher in there if states[launcher].leader]
    if len(leaders) != 1:
        raise BenchError(f"the machine is too busy: {len(leaders)} launchers lead")
    return leaders[0]


def _cpu_percent(process: psutil.Process, seconds: float) -> float:
    """Percent of one core."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return 100 * (sum(process.cpu_times()[:2]) - before) / seconds


def run(
    nodes: int = NODES, *, trials: int = TRIALS, idle_s: float = IDLE_S, settle_s: float = SETTLE_S
) -> dict[str, float | int]:
    """Seconds from the loss until the last launcher has begun the new generation, ``trials`` times of each kind.

    Before that the leader's CPU time is measured for ``idle_s``; each change is followed by a pause of ``settle_s``.
    """
    took: dict[str, list[float]] = {"silent": [], "killed": [], "head": []}
    began = time.monotonic()
    with _running(nodes) as (pids, states):
        there = list(range(1, nodes + 1))
        number, at = _agreed(states, there, 0)
        formed_s = at - began
        time.sleep(settle_s)
        idle = _cpu_percent(psutil.Process(pids[_leader(states, there) - 1]), idle_s)
        for kind, sign in (
            *[("silent", signal.SIGSTOP)] * trials,
            *[("killed", signal.SIGKILL)] * trials,
            *[("head", signal.SIGSTOP)] * trials,
        ):
            lost = _leader(states, there) if kind == "head" else there[-1]
            there.remove(lost)
            lost_at = time.monotonic()
            os.kill(pids[lost - 1], sign)
            number, at = _agreed(states, there, number)
            took[kind].append(at - lost_at)
            time.sleep(settle_s)
    return {
        "nodes": nodes,
        "ours_formed_s": formed_s,
        "ours_head_idle_cpu_percent": idle,
        "ours_silent_follower_max_s": max(took["silent"]),
        "ours_silent_follower_median_s": median(took["silent"]),
        "ours_killed_follower_max_s": max(took["killed"]),
        "ours_silent_head_max_s": max(took["head"]),
        "ours_silent_head_median_s": median(took["head"]),
    }
