"""Draining, taking down and giving back: whose nodes opsd touches and whose it does not."""

from __future__ import annotations

import pytest

from opsd.slurm.drain import NotOurs, drain, give_back, owned, take_down
from opsd.slurm.output import parse_nodes
from opsd.slurm.port import Node, SlurmRejected
from tests.fakes.slurm import FakeSlurm

DRAINED = frozenset({"drain"})


def test_drains_with_the_reason() -> None:
    """A node in service gets the state and the reason in one update."""
    slurm = FakeSlurm([Node("n1", "mixed"), Node("n2", "idle")])
    assert drain(slurm, ["n1"], "opsd:42 gpu_xid") == ("n1",)
    assert slurm.updates == [(("n1",), "drain", "opsd:42 gpu_xid")]
    assert "drain" in slurm.by_name["n1"].flags
    assert owned(slurm.by_name["n1"])


def test_keeps_the_first_reason_of_its_own() -> None:
    """A node that opsd has drained already keeps the reason that leads to the evidence."""
    slurm = FakeSlurm([Node("n1", "idle", DRAINED, "opsd:41 ib_link")])
    assert drain(slurm, ["n1"], "opsd:42 gpu_xid") == ()
    assert slurm.updates == []


@pytest.mark.parametrize(
    "foreign",
    [
        Node("n2", "idle", DRAINED, "NHC: check_fs /scratch", "root"),
        Node("n2", "idle", DRAINED, "replacing a fan", "alice"),
        Node("n2", "idle", DRAINED, "not opsd: this one", "alice"),
        Node("n2", "idle", DRAINED),
        Node("n2", "down", frozenset({"not_responding"}), "Not responding", "slurm"),
    ],
)
def test_leaves_what_others_took_out_of_service(foreign: Node) -> None:
    """Neither drained again nor resumed, and nothing else in the same request is touched either."""
    slurm = FakeSlurm([Node("n1", "idle", DRAINED, "opsd:1 x"), foreign, Node("n3", "idle")])
    with pytest.raises(NotOurs, match="n2 was taken out of service"):
        drain(slurm, ["n3", "n2"], "opsd:42 gpu_xid")
    with pytest.raises(NotOurs, match="opsd leaves it alone"):
        give_back(slurm, ["n1", "n2"])
    with pytest.raises(NotOurs):
        take_down(slurm, "n2", "opsd:42 dead")
    assert slurm.updates == []


def test_an_old_reason_on_a_node_in_service_is_nobodys_claim() -> None:
    """Slurm keeps the last reason of a resumed node for a while; it does not protect the node."""
    slurm = FakeSlurm([Node("n1", "idle", reason="replaced a fan", reason_by="alice")])
    assert drain(slurm, ["n1"], "opsd:42 gpu_xid") == ("n1",)


def test_gives_back_only_what_it_holds() -> None:
    """Nodes in service are not resumed: there is nothing to resume."""
    slurm = FakeSlurm(
        [Node("n1", "idle", DRAINED, "opsd:1 x"), Node("n2", "idle"), Node("n3", "down", reason="opsd:2 y")]
    )
    assert give_back(slurm, ["n1", "n2", "n3"]) == ("n1", "n3")
    assert slurm.updates == [(("n1", "n3"), "resume", "")]


def test_takes_down_by_draining_first() -> None:
    """Set down alone, a living node would come back by itself where ReturnToService is 2."""
    slurm = FakeSlurm([Node("n1", "allocated")])
    take_down(slurm, "n1", "opsd:42 dead")
    take_down(slurm, "n1", "opsd:42 dead")
    assert [update for _, update, _ in slurm.updates] == ["drain", "down"]


@pytest.mark.parametrize("reason", ["gpu broken", "", "opsd", "opsd:1 two\nlines"])
def test_a_reason_without_the_prefix_is_a_mistake_of_the_caller(reason: str) -> None:
    """Without the prefix opsd would later not know the node as its own."""
    with pytest.raises(ValueError, match="begins with opsd:"):
        drain(FakeSlurm([Node("n1", "idle")]), ["n1"], reason)


@pytest.mark.parametrize("name", ["n9", "ALL"])
def test_unknown_nodes_are_refused(name: str) -> None:
    """Slurm takes ALL for every node, so a name is used only if a node has it."""
    slurm = FakeSlurm([Node("n1", "idle")])
    with pytest.raises(SlurmRejected, match=f"Slurm has no node {name}"):
        drain(slurm, ["n1", name], "opsd:1 x")
    assert slurm.updates == []


@pytest.mark.parametrize(
    ("node", "usable"),
    [
        (Node("n", "idle"), True),
        (Node("n", "mixed", frozenset({"planned"})), True),
        (Node("n", "allocated", DRAINED), False),
        (Node("n", "idle", frozenset({"not_responding"})), False),
        (Node("n", "down"), False),
        (Node("n", "unknown"), False),
    ],
)
def test_usable_nodes_could_get_a_job(node: Node, usable: bool) -> None:
    """Drained, silent, down and unknown nodes are not usable."""
    assert node.usable is usable


@pytest.mark.parametrize(
    ("state", "free"),
    [
        ("IDLE", True),
        ("IDLE+PLANNED", True),
        ("IDLE+CLOUD+DYNAMIC_NORM", True),
        ("IDLE+COMPLETING", False),
        ("IDLE+REBOOT_REQUESTED", False),
        ("IDLE+CLOUD+POWER_DOWN", False),
        ("IDLE+CLOUD+POWERED_DOWN", False),
        ("IDLE+CLOUD+POWERING_UP", False),
        ("IDLE+CLOUD+POWERED_DOWN+POWER_UP", False),
        ("IDLE+BLOCKED", False),
        ("IDLE+MAINTENANCE+RESERVED", False),
        ("MIXED+PLANNED", False),
    ],
)
def test_free_nodes_could_run_a_job_at_once(state: str, free: bool) -> None:
    """One that still ends a job, boots or waits for its reboot could not, though Slurm calls it idle."""
    (node,) = parse_nodes(f"n1|{state}|Unknown|Unknown|none|\n", "|")
    assert node.free is free
