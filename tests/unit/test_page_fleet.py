"""All nodes on one page, and the other nodes of a job."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from opsd.agent.web.app import App, Request
from opsd.agent.web.asker import Asker
from opsd.agent.web.fleet import (
    FRESH_S,
    MAX_NODES,
    Answer,
    Fleet,
    FleetView,
    JobNodes,
    NodeOfJob,
    NodeSummary,
    OtherNodes,
    PeerError,
    RunSummary,
    connect,
    node_summary,
)
from opsd.agent.web.fleet_page import ALONE, MAX_ROWS, fleet_page
from opsd.collectors import repairs, spare
from opsd.collectors.base import RunFact, Sample
from opsd.collectors.slurm import LEMON, SlurmSettings
from opsd.config import Settings
from opsd.plan.forecast import Forecast
from opsd.runbooks.base import Severity
from opsd.settings.sections import AgentSettings
from opsd.slurm.port import Node, SlurmError, SlurmUnavailable
from tests.fakes.clock import FakeClock, eventually
from tests.fakes.incidents import incident, known
from tests.fakes.slurm import FakeSlurm
from tests.unit.test_page import HOSTILE, Structure, gpu, rank, run, snapshot
from tests.unit.test_plan_forecast import after

# All nodes on one page: what needs a look comes first, and what is not known is not shown as healthy.


HERE = NodeSummary(node="node-1", version="1", age_s=0.5, gpus=8, gpus_lost=0)


def told(node: str, **changes: Any) -> Answer[NodeSummary]:
    return Answer(node, f"http://{node}:9477", HERE.model_copy(update={"node": node, **changes}))


def page(*others: Answer[NodeSummary], slurm: tuple[Node, ...] = (), note: str = "") -> Structure:
    view = FleetView(OtherNodes(others, note), {node.name: node for node in slurm})
    return Structure(fleet_page(HERE, view, refresh_s=0))


def order(found: Structure) -> list[str]:
    """The nodes in the order of the rows."""
    return re.findall(r"node-\d", found.text.partition("SlurmRepairSpareRuns")[2].partition("runbooks")[0])[:-1]


def test_what_needs_a_look_comes_first() -> None:
    """Critical incidents, silence, warnings, what Slurm does not use, and then the others."""
    found = page(
        told("node-2"), told("node-3", incidents={"warning": 2}, worst="GPU 1 is hot"),
        Answer("node-4", "", problem="does not answer: timed out"), told("node-5"),
        told("node-6", incidents={"critical": 1, "warning": 1}, worst="GPU 3 is lost", gpus_lost=1),
        told("node-7", age_s=300.0), slurm=(Node("node-5", "idle", frozenset({"drain"}), "opsd: GPU 3"),),
    )  # fmt: skip
    assert order(found) == ["node-6", "node-4", "node-7", "node-3", "node-5", "node-1", "node-2"]
    text = re.sub(r"\s+", " ", found.text)
    for said in ("6 of 7 answer", "GPUs 48", "1 critical 3 warning", "GPU 3 is lost", "stands still for 5 min"):
        assert said in text
    for said in ("timed out", "idle+drain", "opsd: GPU 3", "2 warning", "lost 1"):
        assert said in text


def test_the_problems_of_all_nodes_come_before_the_list_of_nodes() -> None:
    """With what each costs, who acts, and a link to the incident on its node; without any it says so."""
    ill = {
        "incidents": {"critical": 1},
        "worst": "GPU 3 is lost",
        "worst_id": "a/b",
        "cost": "8 GPUs",
        "acts": "you act",
    }
    silent = Answer("node-4", "http://node-4:9477", problem="timed out")
    found = page(told("node-2"), told("node-3", **ill), silent)
    problems = found.text.partition("Problems")[2].partition("Repair")[0]
    for said in ("node-3", "GPU 3 is lost", "8 GPUs", "you act", "node-4", "timed out", "you act: see"):
        assert said in problems
    assert "http://node-3:9477/incident/a%2Fb" in {a["href"] for tag, a in found.tags if tag == "a"}
    assert "No node that answers has one" in page(told("node-2")).text


def test_long_sentences_stay_on_a_line() -> None:
    """They are cut by the browser; a pointer shows all of it, as does the page of the node."""
    long = "GPU 3 is throttled by " + "sw_thermal, " * 12
    found = page(told("node-2", incidents={"warning": 2}, worst=long), slurm=(Node("node-2", "idle", reason=long),))
    briefs = [a["title"] for tag, a in found.tags if tag == "span" and a.get("class") == "brief"]
    assert briefs == [long]


def test_runs_lead_to_their_pages_on_their_nodes() -> None:
    """By job, or by name without one; a run on several nodes is one."""
    runs = (RunSummary(run="train", job="4242", state="running"), RunSummary(run="eval", job="", state="finished"))
    found = page(told("node-2", runs=runs), told("node-3", runs=runs, spare=True), told("node-4", spare=False))
    links = {a["href"] for tag, a in found.tags if tag == "a"}
    assert {"http://node-2:9477/", "http://node-2:9477/job/4242", "http://node-3:9477/job/eval", "/"} <= links
    text = re.sub(r"\s+", " ", found.text)
    assert "runs 1" in text and "spares 1 of 2 ready" in text


def test_a_node_that_was_not_asked_is_listed_as_such() -> None:
    """Slurm knows it; its agent may be well."""
    found = page(told("node-2"), slurm=(Node("node-1", "idle"), Node("node-9", "down", reason="broken")))
    assert "not asked" in found.text and "broken" in found.text and "2 of 3 answer" in re.sub(r"\s+", " ", found.text)
    many = page(*(told(f"node-{n}") for n in range(2, MAX_ROWS + 12)))
    assert "and 11 more" in many.text
    alone = Structure(fleet_page(HERE, ALONE, refresh_s=60))
    assert (
        "Only this node is known" in alone.text and ("meta", {"http-equiv": "refresh", "content": "60"}) in alone.tags
    )


def test_a_node_in_brief() -> None:
    """Open incidents without symptoms, the gravest in words, lost GPUs, the state of runs and of a spare."""
    known = (
        incident("a", summary="warm"), incident("b", severity=Severity.CRITICAL, summary="lost"),
        incident("c", cause="b", severity=Severity.CRITICAL),
    )  # fmt: skip
    verdict = spare.parse(b'{"ready": true, "expires_at": 200.0, "checked_at": 40.0, "staged_bytes": 1}', 100.0)
    shown = snapshot(
        gpus=[gpu(0), gpu(1, lost="fell off the bus")], incidents=known, samples=(verdict,), runs=[run(alive=False)]
    )
    brief = node_summary(shown, "node-17", 1003.0)
    assert (brief.incidents, brief.worst) == ({"warning": 1, "critical": 1}, "lost")
    assert (brief.worst_id, brief.acts) == ("b", "you act: opsd only observes") and brief.cost
    assert (brief.gpus, brief.gpus_lost, brief.spare, brief.age_s) == (2, 1, True, 3.0)
    assert brief.runs[0].state == "running, no launcher"
    status, body, _ = App(lambda: shown, {"node": "node-17"}, stale_s=5.0)(Request("/api/v1/node", {}))
    assert status == 200 and NodeSummary.model_validate_json(body).worst == "lost"
    assert node_summary(snapshot(), "n", 1000.0).spare is None


def test_plan_and_forecast_of_runs_are_told_by_the_node_of_rank_0() -> None:
    """Other nodes ask for none, so that one ledger is made for a run; a late one says what is to blame."""
    shown, asked = snapshot(runs=[run(), run(run="other")], ranks=[rank(0), rank(1, run="other")]), list[str]()

    def late(of: RunFact) -> Forecast:
        asked.append(of.run)
        return after(10, restart=3)

    brief = node_summary(shown, "node-2", 1000.0, late)
    assert asked == ["train"]
    text = page(told("node-2", runs=brief.runs)).text
    assert (
        "late" in text
        and "days left, ETTR" in text
        and "spares advised" in text
        and "beyond the plan by restart" in text
    )
    studies = node_summary(shown, "node-2", 1000.0, late, lambda of: f"12.00 GPU-hours beside {of.run}")
    assert "ablations: 12.00 GPU-hours beside train" in page(told("node-2", runs=studies.runs)).text
    ended = node_summary(shown, "node-2", 1000.0, lambda of: after(10))
    assert "beyond" not in page(told("node-2", runs=ended.runs)).text


def test_repairs_and_lemons_are_seen_at_a_glance() -> None:
    """What is ordered or under way, what waits for its replacement, and who fails again and again."""
    repair = repairs.samples(known("retest", 2, 40.0), 60.0)
    brief = node_summary(snapshot(samples=(repair, (Sample(LEMON, 1.0),))), "node-17", 1000.0)
    assert (brief.repair, brief.lemon) == ("retest, remedy 2, for 60 s", True)
    text = page(Answer("node-17", "", brief), told("node-18", repair="rma, remedy 3"), told("node-19")).text
    assert "lemon retest, remedy 2, for 60 s" in text
    assert "rma, remedy 3" in text
    assert "in repair or to be replaced 2" in text


def test_without_slurms_word_this_node_is_all_there_is() -> None:
    """With the reason."""
    slurm = FakeSlurm([Node("node-1", "idle")])
    slurm.error = SlurmUnavailable("the controller does not answer")
    fleet = Fleet("node-1", lambda: slurm, lambda node, _: told(node))
    assert eventually(lambda: "the controller does not answer" in fleet.view().others.note)


def test_what_was_written_into_names_has_no_effect() -> None:
    """Other agents and Slurm's reasons may say anything."""
    runs = (RunSummary(run=HOSTILE, job=HOSTILE[:64], state=HOSTILE[:32]),)
    hostile = told(HOSTILE, runs=runs, incidents={"critical": 1, HOSTILE: 3}, worst=HOSTILE)
    found = page(hostile, Answer("b", HOSTILE, problem=HOSTILE), slurm=(Node(HOSTILE, HOSTILE, reason=HOSTILE),))
    assert not {tag for tag, _ in found.tags} & {"script", "img"}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)


# The other nodes of a job: asked beside the requests, named by Slurm, and never more often than somebody looks.


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
