"""A rank that cannot be ended, on the node of the leader: its launcher gives up, and the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opsd import exitcodes
from tests.fakes.launched import TRAIN
from tests.fakes.nodes import Nodes

HOLD = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206
assert libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), 0, 0) == 0, ctypes.get_errno()
print("held", flush=True)
time.sleep(1000)
"""
"""A tracer that does not look: what it holds stays a process after SIGKILL, as one that is stuck in the kernel does."""


def rank_of(nodes: Nodes, name: str) -> int:
    """The process of the rank on a node."""
    lines = (nodes.folder / name / "r/events.jsonl").read_text().splitlines()
    started = [event for line in lines if (event := json.loads(line))["event"] == "generation_started"]
    return int(started[-1]["ranks"][0]["pid"])


@pytest.mark.long
def test_a_leader_whose_rank_cannot_be_ended_makes_way(tmp_path: Path) -> None:
    """After 30 s it leaves, with a sentence; the spare takes its node's place, from the last checkpoint."""
    with Nodes(tmp_path, f"{TRAIN}\ntrain(100_000, step_s=0.02)", "--nnodes=2", "--spares=1", count=3) as nodes:
        nodes.until(lambda: all(nodes.state(name)["state"] in ("running", "spare") for name in nodes.names))
        leader = nodes.ask("n2", cmd="status")["head"]
        at_work = nodes.events("generation_started")[-1]["nodes"]
        assert leader in at_work
        pid = rank_of(nodes, leader)
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(pid)], stdout=subprocess.PIPE)
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            began = time.monotonic()
            assert nodes.ask(leader, cmd="restart") == {"ok": True}
            nodes.until(lambda: nodes.processes[leader].poll() is not None, 60)
            print(f"\nthe leader left after {time.monotonic() - began:.1f} s")
            assert nodes.processes[leader].returncode == exitcodes.FAILED
            assert f"rank 0 (pid {pid}) cannot be killed: stuck in the kernel" in nodes.said(leader)
            nodes.until(lambda: len(nodes.events("resumed")) == 1)
            assert set(nodes.events("generation_started")[-1]["nodes"]) == {"n3", *at_work} - {leader}
            print(f"the others went on after {time.monotonic() - began:.1f} s")
        finally:
            holder.kill()
            holder.communicate()
