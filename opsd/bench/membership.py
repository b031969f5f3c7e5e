"""How soon launchers begin a new generation, and what it costs the head to hear of them all.

All launchers are on this machine, over TCP on the loopback network, and claim in a folder in its memory. The first few,
which are head in turn, and the last few, which are lost, have a process each; the others share one. A launcher is lost
by SIGSTOP, which is as silent as a power loss, or by SIGKILL, which its machine tells the others.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import psutil

from opsd.launch.ranks.settings import free_port

NODES = 1024
TRIALS = 3
IDLE_S = 20.0
SETTLE_S = 5.0
DEADLINE_S = 120.0


class MembershipError(click.ClickException):
    """The launchers did not do what was to be measured, most likely because the machine was busy otherwise."""


class Launchers:
    """A process that runs the launchers ``first`` to ``last``."""

    def __init__(self, first: int, last: int, run: dict[str, Any]) -> None:
        settings = {**run, "numbers": [first, last]}
        command = [sys.executable, "-m", "opsd.bench.launchers", json.dumps(settings)]
        self.first, self.size = first, last - first + 1
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._line()

    def status(self) -> tuple[int, int, float, bool]:
        """Number and slots of the plan of all here, the monotonic second of its last beginning; is the head here?"""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        number, slots, at, head = json.loads(self._line())
        return number, slots, at, head

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise MembershipError("the simulated launchers have ended")
        return line

    def lose(self, number: signal.Signals) -> float:
        """Stop or kill it; returns when."""
        os.kill(self.process.pid, number)
        return time.monotonic()

    def end(self) -> None:
        """Whatever its state."""
        self.process.kill()
        self.process.wait()


@contextmanager
def _running(nodes: int, trials: int) -> Iterator[list[Launchers]]:
    """The heads of the trials, the many, those that are lost; the many start last."""
    single, alone = 2 * trials, trials + 1
    bounds = [(number, number) for number in range(1, alone + 1)]
    bounds.append((alone + 1, nodes - single))
    bounds += [(number, number) for number in range(nodes - single + 1, nodes + 1)]
    groups: list[Launchers] = []
    with TemporaryDirectory(prefix="opsd-bench-", dir="/dev/shm") as folder:
        run = {"nodes": nodes, "port": free_port(), "secret": secrets.token_hex(32), "folder": folder}
        try:
            for first, last in sorted(bounds, key=lambda bound: bound[1] - bound[0]):
                groups.append(Launchers(first, last, run))
            groups.sort(key=lambda group: group.first)
            yield groups
        finally:
            for group in groups:
                group.end()


def _agreed(groups: Sequence[Launchers], after: int) -> tuple[int, float]:
    """Wait until all of ``groups`` have begun a plan newer than ``after`` with just them; its number and when."""
    size = sum(group.size for group in groups)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        states = [groups[0].status()]
        if states[0][0] > after and states[0][1] == size:
            states += [group.status() for group in groups[1:]]
            if len({state[:2] for state in states}) == 1:
                return states[0][0], max(at for _, _, at, _ in states)
        time.sleep(0.1)
    raise MembershipError(f"no generation of them all within {DEADLINE_S:g} s")


def _head(groups: Sequence[Launchers]) -> int:
    """The place of the process that is the head's alone."""
    places = [place for place, group in enumerate(groups) if group.size == 1 and group.status()[3]]
    if len(places) != 1:
        raise MembershipError("the machine is too busy: the first launchers have lost their turn to be head")
    return places[0]


def _cpu_percent(process: psutil.Process, seconds: float) -> float:
    """Of one core."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return 100 * (sum(process.cpu_times()[:2]) - before) / seconds


def run(
    nodes: int = NODES, *, trials: int = TRIALS, idle_s: float = IDLE_S, settle_s: float = SETTLE_S
) -> dict[str, float | int]:
    """Seconds from the loss to the new generation's beginning on the last launcher, ``trials`` times of each kind.

    Before that the head is watched for ``idle_s``; after each change things settle for ``settle_s``.
    """
    took: dict[str, list[float]] = {"silent": [], "killed": [], "head": []}
    began = time.monotonic()
    with _running(nodes, trials) as groups:
        number, at = _agreed(groups, 0)
        formed_s = at - began
        time.sleep(settle_s)
        idle = _cpu_percent(psutil.Process(groups[_head(groups)].process.pid), idle_s)
        for kind, sign in (
            *[("silent", signal.SIGSTOP)] * trials,
            *[("killed", signal.SIGKILL)] * trials,
            *[("head", signal.SIGSTOP)] * trials,
        ):
            lost = groups.pop(_head(groups) if kind == "head" else -1)
            lost_at = lost.lose(sign)
            try:
                number, at = _agreed(groups, number)
            finally:
                lost.end()
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
