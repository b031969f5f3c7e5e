"""What Slurm's comments say against a node."""

from __future__ import annotations

import pytest

from opsd.lemons import Judgement, Lift, NodeFailure, Score
from opsd.slurm import node_comment
from opsd.slurm.candidates import LEMON, TESTED_S, candidates, due, faults, free
from opsd.slurm.node_comment import NodeHistory, Stay
from opsd.slurm.ownership import note_test
from opsd.slurm.pick import pick
from opsd.slurm.port import Node
from opsd.slurm.topology import Topology
from tests.fakes.slurm import FakeSlurm

NOW = 1_763_711_000.0
PROVEN, UNPROVEN = Lift(3.0, 2.0, 4.0, 9, 50, 3), Lift(1.0, 0.5, 2.0, 9, 50, 3)
NODES = [Node(name, "idle") for name in ("a", "b", "c", "d")]
SCORES = (Score("a", 5, 4, 0.99), Score("b", 1, 0, 0.0))


def remarks(judged: Judgement, comments: dict[str, str] | None = None) -> dict[str, tuple[str, ...]]:
    return {one.node: one.remarks for one in candidates(NODES, comments or dict.fromkeys("abcd", ""), judged, NOW)}


def test_maintenance_is_no_fault() -> None:
    """Nor is what people wrote into the comment."""
    record = NodeHistory((Stay("gpu_xid", 1.0, 2.0), Stay("maintenance", 3.0, 4.0)))
    comments = {"a": node_comment.write("rack 12", record), "b": "gpu_xid=1-2 [not opsd's]"}
    assert [(fault.node, fault.kind, fault.at, fault.back) for fault in faults(comments)] == [
        ("a", "gpu_xid", 1.0, 2.0)
    ]


def test_faults_count_only_where_they_foretold_others() -> None:
    """Lemons where the lift lasts, recent faults where it is there at all."""
    assert remarks(Judgement(UNPROVEN, UNPROVEN, 0.5, SCORES)) == dict.fromkeys("abcd", ())
    soon = remarks(Judgement(PROVEN, UNPROVEN, 0.5, SCORES))
    assert soon["a"] == ("failed again soon after a repair", "failed in the last 30 days")
    assert soon["b"] == ("failed in the last 30 days",)
    lasting = candidates(NODES, {}, Judgement(PROVEN, PROVEN, 0.5, SCORES), NOW)
    assert [one.node for one in lasting if one.badness >= LEMON] == ["a"]


def test_a_node_without_a_recent_test_comes_after_those_with_one() -> None:
    """Where no node has one, none is missed."""
    recent, old = (node_comment.write("", NodeHistory(tested_at=at)) for at in (NOW - 60, NOW - TESTED_S))
    nothing = Judgement(UNPROVEN, UNPROVEN, 0.0, ())
    told = remarks(nothing, {"a": recent, "b": old, "c": "", "d": recent})
    assert (told["a"], told["d"]) == ((), ())
    assert told["b"] == told["c"] == ("not tested in the last 30 days",)


def test_what_cannot_be_had_says_why() -> None:
    """Busy, drained, reserved, or kept as a spare."""
    nodes = [
        Node("a", "allocated"), Node("b", "idle", frozenset({"drain"})), Node("c", "idle", frozenset({"reserved"})),
        Node("d", "idle"), Node("e", "idle"),
    ]  # fmt: skip
    comments = {"d": node_comment.write("", NodeHistory(spare="ready", spare_at=NOW))}
    found = candidates(nodes, comments, Judgement(UNPROVEN, UNPROVEN, 0.0, ()), NOW)
    assert free(found) == {"e": 0.0}
    assert [one.why_not for one in found] == [
        "Slurm has it as allocated", "Slurm has it as idle+drain", "Slurm has it as idle+reserved", "it is a spare", "",
    ]  # fmt: skip


def test_a_node_that_slurm_keeps_for_another_job_comes_last() -> None:
    """A job of a higher priority waits for it: a lemon can be had sooner."""
    nodes = [Node("a", "idle"), Node("b", "idle", frozenset({"planned"})), Node("c", "idle")]
    found = candidates(nodes, {}, Judgement(PROVEN, PROVEN, 0.5, SCORES), NOW)
    assert max(found, key=lambda one: one.badness).node == "b"
    assert found[1].remarks[0] == "Slurm keeps it for another job"
    choice = pick(free(found), 2, Topology())
    assert choice is not None
    assert choice.nodes == ("a", "c")


def test_idle_nodes_are_due_for_a_test_the_longest_untested_first() -> None:
    """Busy nodes and spares are not, nor are those that were tested lately."""
    nodes = [*(Node(name, "idle") for name in "abcde"), Node("f", "allocated")]
    days = {"a": 8, "b": 6, "c": 30}
    comments = {
        **{name: node_comment.write("", NodeHistory(tested_at=NOW - age * 86_400)) for name, age in days.items()},
        "d": node_comment.write("", NodeHistory(spare="ready", spare_at=NOW)),
    }
    assert due(nodes, comments, NOW, 7 * 86_400) == ["e", "c", "a"]


def test_a_test_of_next_year_is_none() -> None:
    """The clock of the node was wrong when it was tested; an hour's difference is no matter."""
    nodes = [Node("a", "idle"), Node("b", "idle")]
    told = (NOW + 365 * 86_400, NOW + 3600)
    comments = {
        node.name: node_comment.write("", NodeHistory(tested_at=at)) for node, at in zip(nodes, told, strict=True)
    }
    assert due(nodes, comments, NOW, 7 * 86_400) == ["a"]
    unknown = Judgement(UNPROVEN, UNPROVEN, 0.0, ())
    assert remarks(unknown, comments)["a"] == ("not tested in the last 30 days",)
    assert remarks(unknown, {"a": comments["a"]})["a"] == (), "nobody tests nodes here"
    slurm = FakeSlurm(nodes)
    slurm.by_comment = dict(comments)
    assert note_test(slurm, "a", NOW - 60, now=NOW)
    assert due(nodes, slurm.by_comment, NOW, 7 * 86_400) == []
    assert not note_test(slurm, "a", NOW - 120, now=NOW)


def test_what_failed_before_hardware_was_replaced_does_not_count() -> None:
    """Stays and failed jobs go, also those that Slurm's accounting tells again; a node that is out stays so."""
    record = NodeHistory(
        (Stay("gpu_xid", NOW - 900, NOW - 800), Stay("gpu_xid", NOW - 700)), failed=(NOW - 950,), domain="u.1"
    )
    anew = record.replaced(NOW)
    assert (anew.out, anew.domain, anew.relapses(3600.0)) == (True, "u.1", [])
    again = anew.returned(NOW + 10).blamed([NOW - 950, NOW + 9e4], NOW + 1e5)
    comments = {"a": node_comment.write("rack 12", again.drained("ib_link", NOW + 2e5))}
    sacct = [NodeFailure("a", "job", NOW - 500, NOW - 500), NodeFailure("z", "job", NOW - 500, NOW - 500)]
    assert [(fault.node, fault.kind, fault.at) for fault in faults(comments, sacct)] == [
        ("a", "ib_link", NOW + 2e5), ("a", "job", NOW + 9e4), ("z", "job", NOW - 500),
    ]  # fmt: skip
    assert node_comment.read(comments["a"]).anew == NOW


@pytest.mark.parametrize(
    "word", ["sacct={}", "tested={}", "anew={}", "failed={}", "gpu_xid={}-", "spare=ready@{}", "path=leaf1@{}"]
)
def test_a_time_that_no_calendar_has_is_none(word: str) -> None:
    """Somebody has edited the comment: `opsd nodes lemons` tells the times, and ended with a traceback."""
    assert node_comment.read(f"[opsd1 {word.format('9' * 17)}]") == node_comment.read("")
    assert node_comment.read(f"[opsd1 {word.format('9' * 11)}]") != node_comment.read("")
