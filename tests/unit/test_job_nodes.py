"""The other nodes of a job: asked beside the requests, named by Slurm, and never more often than somebody looks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from opsd.agent.web.asker import Asker
from opsd.agent.web.fleet import FRESH_S, MAX_NODES, Answer, JobNodes, NodeOfJob, PeerError, connect
from opsd.collectors.slurm import SlurmSettings
from opsd.config import Settings
from opsd.settings.sections import AgentSettings
from opsd.slurm.port import SlurmError
from tests.fakes.clock import FakeClock, eventually


class Cluster:
    """Agents that answer once they are let."""

    def __init__(self, *nodes: str) -> None:
        self.nodes: Sequence[str] = nodes
        self.asked: list[str] = []
        self.let = threading.Event()
        self.let.set()
        self.clock = FakeClock(now=0.0)
        self.known = JobNodes("node-1", self.nodes_of, self.ask, clock=self.clock.monotonic)

    def nodes_of(self, job: str) -> Sequence[str]:
        if job == "666":
            raise SlurmError("the controller does not answer")
        return self.nodes

    def ask(self, node: str, job: str) -> Answer:
        self.let.wait(10)
        self.asked.append(node)
        return Answer(node, f"http://{node}:9477", NodeOfJob(node=node, state="running", generation=1, ranks=8, live=8))


def test_nobody_waits_for_other_nodes() -> None:
    """The first look begins to ask, later ones see what was told; the node itself is not asked."""
    cluster = Cluster("node-1", "node-2", "node-3")
    cluster.let.clear()
    assert cluster.known.of("4242").note == "The other nodes are being asked."
    cluster.let.set()
    assert eventually(lambda: len(cluster.known.of("4242").answers) == 2)
    assert sorted(cluster.asked) == ["node-2", "node-3"]


def test_they_are_asked_again_once_it_is_old() -> None:
    """Fifty people who look at once are one question."""
    cluster = Cluster("node-1", "node-2")
    assert eventually(lambda: bool(cluster.known.of("4242").answers))
    for _ in range(50):
        cluster.known.of("4242")
    assert len(cluster.asked) == 1
    cluster.clock.advance(FRESH_S + 0.1)
    assert cluster.known.of("4242").answers
    assert eventually(lambda: len(cluster.asked) == 2)


def test_very_many_nodes_are_not_all_asked() -> None:
    """How many are left out is said."""
    cluster = Cluster(*(f"node-{number}" for number in range(2, MAX_NODES + 12)))
    assert eventually(lambda: bool(cluster.known.of("4242").answers))
    assert len(cluster.asked) == MAX_NODES
    assert cluster.known.of("4242").note == "10 more are not asked."


def test_without_slurms_word_nobody_is_asked() -> None:
    """A controller that is silent, and a run that is no job of Slurm, say so."""
    cluster = Cluster("node-2")
    assert eventually(lambda: "the controller does not answer" in cluster.known.of("666").note)
    assert "without a job in Slurm" in cluster.known.of("../../etc").note
    assert not cluster.asked


@pytest.mark.parametrize("listen", ["127.0.0.1:9477", "localhost:9477", "[::1]:9477"])
def test_an_agent_on_a_loopback_address_asks_nobody(listen: str) -> None:
    """The others would not answer either."""
    assert connect(Settings(agent=AgentSettings(listen=listen))) is None
    assert connect(Settings(agent=AgentSettings(listen="0.0.0.0:9477"), slurm=SlurmSettings(enabled=False))) is None
    assert connect(Settings(agent=AgentSettings(listen="0.0.0.0:9477"))) is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peer_ca_file": "missing.crt"}, "holds no certificates that can be used"),
        ({"peer_ca_file": "empty"}, "holds no certificates that can be used"),
        ({"peer_credentials_file": "missing"}, "cannot be read"),
        ({"peer_credentials_file": "empty"}, "does not hold USER:PASSWORD"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    """Before the agent starts, with the name of the setting."""
    (tmp_path / "empty").write_text("")
    ((setting, file),) = changes.items()
    settings = AgentSettings(listen="0.0.0.0:9477", web_config=tmp_path / "web.yml", **{setting: tmp_path / file})
    with pytest.raises(PeerError, match=f"agent.{setting} .*{said}"):
        Asker(settings)
