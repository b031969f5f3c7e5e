"""Draining this node: within the cluster's budget, by its own name only, and never blindly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.actions import Executor
from opsd.runbooks.base import Action
from opsd.settings.policy import PolicySettings
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.ownership import Refused, allowance, drain_objections, held, kind_of, surplus, take_over
from opsd.slurm.port import Node, SlurmError, SlurmUnavailable
from tests.fakes.slurm import FakeSlurm

DRAIN = frozenset({"drain"})


def ours(name: str, at: float = 1.0) -> Node:
    return Node(name, "idle", DRAIN, "opsd: GPU 2 is lost", "root", at)


def cluster(*nodes: Node, idle: int = 40) -> FakeSlurm:
    return FakeSlurm([*nodes, *(Node(f"n{number:02d}", "allocated") for number in range(idle))])


def drainer(slurm: FakeSlurm, node: str = "n07", share: float = 0.05) -> SlurmDrainer:
    return SlurmDrainer(lambda: slurm, node, PolicySettings(max_drained_share=share, min_drained=1))


def test_a_node_is_drained_with_opsds_reason() -> None:
    """The reason tells whose it is."""
    slurm = cluster()
    assert drainer(slurm)("n07", "GPU 2 is lost") == "drained n07"
    assert slurm.updates == [(("n07",), "drain", "opsd: GPU 2 is lost")]


def test_a_second_time_changes_nothing() -> None:
    """The first reason is kept, and the node it holds already does not count against it."""
    slurm = cluster(ours("x1"))
    drain = drainer(slurm)
    drain("n07", "GPU 2 is lost")
    assert drain("n07", "again") == "n07 was drained by opsd already"
    assert len(slurm.updates) == 1


def test_the_budget_is_the_clusters() -> None:
    """Two of 42 nodes at 5 %; nodes that other people hold do not count."""
    others = Node("x3", "down", DRAIN, "replace the fan", "alice", 1.0)
    with pytest.raises(SlurmError, match=r"opsd holds 2 of 43 nodes already \(x1, x2\); 2 may be held at once"):
        drainer(cluster(ours("x1"), ours("x2"), others))("n07", "GPU 2 is lost")
    assert drainer(cluster(ours("x1"), others))("n07", "GPU 2 is lost") == "drained n07"


def test_somebody_elses_node_is_left_alone() -> None:
    """The user who drained it decides."""
    slurm = cluster(Node("n99", "idle", DRAIN, "mine", "alice"))
    with pytest.raises(SlurmError, match="out of service by alice"):
        drainer(slurm, "n99")("n99", "GPU 2 is lost")
    assert slurm.updates == []


def test_without_an_answer_of_slurm_nothing_is_done() -> None:
    """How many nodes are held is not known then."""
    slurm = cluster()
    slurm.error = SlurmUnavailable("scontrol has not answered within 5 s")
    with pytest.raises(SlurmError, match="Slurm: scontrol has not answered"):
        drainer(slurm)("n07", "GPU 2 is lost")


class Raced(FakeSlurm):
    """Another agent drains a node between our look at the cluster and our update."""

    def update_nodes(self, names, update, reason="") -> None:
        if not self.updates:
            self.by_name["a0"] = ours("a0", at=0.5)
        super().update_nodes(names, update, reason)


def test_of_two_agents_that_drain_at_once_one_gives_back() -> None:
    """The budget holds although nobody coordinates."""
    slurm = Raced([Node("a0", "idle"), *(Node(f"n{number:02d}", "idle") for number in range(9))])
    with pytest.raises(SlurmError, match="at the same time"):
        drainer(slurm)("n07", "GPU 2 is lost")
    assert [update for _, update, _ in slurm.updates] == ["drain", "resume"]
    assert [node.name for node in held(slurm.nodes())] == ["a0"]


def test_of_two_agents_that_take_over_at_once_one_leaves_its_node_as_it_was() -> None:
    """Slurm had drained it, and it stays drained."""
    mine = Node("n07", "idle", frozenset({"drain"}), "Prolog error", "slurm", 1.0)
    slurm = Raced([Node("a0", "idle"), mine, *(Node(f"n{number:02d}", "idle") for number in range(8, 16))])
    with pytest.raises(Refused, match="at the same time"):
        take_over(
            slurm,
            "n07",
            "opsd:prolog preflight: it failed",
            PolicySettings(max_drained_share=0.05, min_drained=1),
            now=2.0,
        )
    assert (slurm.by_name["n07"].reason, "drain" in slurm.by_name["n07"].flags) == ("Prolog error", True)
    assert slurm.by_comment.get("n07", "") == ""


def test_an_agent_drains_its_own_node_only(tmp_path) -> None:
    """Whatever an action names; and nothing at all unless that was allowed."""
    slurm = cluster()
    action = Action("drain_node", "n08", {"node": "n08"}, "GPU 2 is lost")
    executor = Executor(shm=tmp_path, notify=lambda _text, _fields: None, drain_node=drainer(slurm))
    assert executor.perform(action) == (False, "this agent drains n07 only, not n08")
    forbidden = Executor(shm=tmp_path, notify=lambda _text, _fields: None)
    ok, why = forbidden.perform(action)
    assert (ok, "policy.drain" in why, slurm.updates) == (False, True, [])
    own = replace(action, args={"node": "n07", "kind": "gpu_lost", "incident": "gpu_lost-7"})
    assert executor.perform(own) == (True, "drained n07")
    ((_, _, told),) = slurm.updates
    assert told == "opsd:gpu_lost-7 gpu_lost: GPU 2 is lost; see opsd incidents show gpu_lost-7"
    assert kind_of(told) == "gpu_lost"


names = st.integers(0, 30).map(lambda n: f"n{n}")
nodes = st.lists(
    st.builds(
        Node,
        names,
        st.sampled_from(["idle", "allocated", "down"]),
        st.sampled_from([DRAIN, frozenset()]),
        st.sampled_from(["", "opsd: x", "bad disk"]),
        st.just("root"),
        st.one_of(st.none(), st.floats(0, 10)),
    ),
    min_size=1,
    unique_by=lambda n: n.name,
)


@given(nodes, names, st.floats(0.001, 1))
def test_the_budget_is_never_exceeded(cluster_nodes: list[Node], name: str, share: float) -> None:
    """What may be drained fits in; what is surplus is exactly what does not."""
    ours, limit = held(cluster_nodes), allowance(cluster_nodes, PolicySettings(max_drained_share=share))
    if not drain_objections(cluster_nodes, {}, [name], PolicySettings(max_drained_share=share), 0.0) and name not in {
        node.name for node in ours
    }:
        assert len(ours) + 1 <= limit
    beyond = [node for node in ours if surplus(cluster_nodes, node.name, PolicySettings(max_drained_share=share))]
    assert len(beyond) == max(0, len(ours) - limit)
