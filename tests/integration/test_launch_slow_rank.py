"""A slow rank among those of several nodes is named while it trains, at its node."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from opsd.agent.window import Window
from opsd.collectors.base import Reading
from opsd.collectors.ranks import RanksCollector
from opsd.runbooks.straggler import announced
from tests.fakes.nodes import Nodes

IN_STEP = """
import os, socket, struct, time
from opsd.client import Reporter

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
meeting = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    listener = socket.create_server(meeting)
    others = [listener.accept()[0] for _ in range(world - 1)]
else:
    while True:
        try:
            others = [socket.create_connection(meeting)]
            break
        except OSError:
            time.sleep(0.05)

def all_meet():
    "All ranks wait for the last."
    for call in (("recv", "sendall") if rank == 0 else ("sendall", "recv")):
        for other in others:
            other.sendall(b"x") if call == "sendall" else other.recv(1)

reporter = Reporter.from_env()
for step in range(100000):
    with reporter.phase("forward"):
        time.sleep(SECONDS.get(rank, 0.1))
    with reporter.phase("collective"):
        all_meet()
    reporter.step()
"""


def named(nodes: Nodes, node: str) -> list[dict[str, object]]:
    """The events in which the launcher of ``node`` says that a rank of its own is slow."""
    path = nodes.folder / node / "r/events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["event"] == "straggler_found"]


def announced_to_agent(nodes: Nodes, node: str) -> list[str]:
    """What the runbook of the agent of ``node`` finds in what its collector reads."""
    reading = RanksCollector(nodes.folder / node).collect()
    assert isinstance(reading, Reading)
    window = Window(node)
    window.begin(time.monotonic(), time.time())
    window.add("ranks", reading)
    return [finding.key for finding in announced(window)]


@pytest.mark.slow
def test_the_slow_rank_of_another_node_is_named(tmp_path: Path) -> None:
    """The leader's log names rank, node, cause and cost; the event is on the rank's node and on no other."""
    source = IN_STEP.replace("SECONDS", "{2: 0.16}")
    with Nodes(tmp_path, source, "--nnodes=3", "--nproc-per-node=1", count=3) as nodes:
        nodes.until(lambda: bool(nodes.events("straggler_found")) and bool(named(nodes, "n3")), 60.0)
        event, local = nodes.events("straggler_found")[0], named(nodes, "n3")[0]
        assert (event["rank"], event["culprit_nodes"], event["cause"]) == (2, ["n3"], "slow worker")
        assert 1.3 < event["slowdown"] < 1.9
        assert local["ranks"] == [2]
        assert named(nodes, "n1") == named(nodes, "n2") == []
        seen = {name: announced_to_agent(nodes, name) for name in nodes.names}
        assert seen == {"n1": [], "n2": [], "n3": ["r/rank 2"]}
        assert "slow worker" in (nodes.run / "job.log").read_text(encoding="utf-8")
