"""Which ways between leaf switches are due for a measurement, and what the nodes' comments keep of one."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.nodes import nodes as nodes_command
from opsd.slurm import leaf_paths, node_comment
from opsd.slurm.node_comment import KEPT_PATHS, NodeHistory, Path
from opsd.slurm.port import Node
from opsd.slurm.topology import Topology, even
from tests.fakes.slurm import FakeSlurm

NAMES = ("a1", "a2", "b1", "b2", "c1", "c2")
TREE = even(NAMES, 2)
A, B, C = "leaf-000", "leaf-001", "leaf-002"
NOW, WEEK = 1_763_711_000.0, 7 * 86_400.0


def measure(slurm: FakeSlurm, one: str, other: str, at: float, *, passed: bool | None = True) -> None:
    leaf_paths.note(slurm, (one, other), TREE.leaf, at, passed=passed)


def due(slurm: FakeSlurm, *idle: str, tree: Topology = TREE) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    found = leaf_paths.due(idle or NAMES, slurm.comments(), tree, NOW, WEEK)
    return [(way.leaves, way.nodes) for way in found]


def cluster() -> FakeSlurm:
    return FakeSlurm([Node(name, "idle") for name in NAMES])


def test_every_pair_of_leaves_comes_once_a_week() -> None:
    """Those never measured first, then the longest ago; each node is in one pair only."""
    slurm = cluster()
    assert due(slurm) == [((A, B), ("a1", "b1")), ((A, C), ("a2", "c1")), ((B, C), ("b2", "c2"))]
    assert due(slurm, "a1", "b1", "c1") == [((A, B), ("a1", "b1"))]
    measure(slurm, "a1", "b1", NOW - 60)
    assert due(slurm, "a1", "b1", "c1") == [((A, C), ("a1", "c1"))]
    measure(slurm, "a1", "c1", NOW - WEEK)
    assert [leaves for leaves, _ in due(slurm)] == [(B, C), (A, C)]
    assert due(slurm, tree=Topology()) == []


def test_a_measurement_of_next_year_is_none() -> None:
    """The clock of a node was wrong; that of another one counts, and an hour's difference is no matter."""
    slurm = cluster()
    measure(slurm, "a1", "b1", NOW + 365 * 86_400)
    assert (A, B) in [leaves for leaves, _ in due(slurm)]
    measure(slurm, "a2", "b2", NOW + 3600)
    assert (A, B) not in [leaves for leaves, _ in due(slurm)]


def test_a_way_that_was_not_well_stays_due_and_gets_other_nodes() -> None:
    """A bad node must not look like a bad way."""
    slurm = cluster()
    for one, other in (("a1", "c1"), ("b1", "c2")):
        measure(slurm, one, other, NOW - 120)
    measure(slurm, "a1", "b1", NOW - 60, passed=False)
    (way,) = leaf_paths.due(NAMES, slurm.comments(), TREE, NOW, WEEK)
    assert (way.leaves, way.nodes, way.at, way.passed) == ((A, B), ("a2", "b2"), NOW - 60, False)
    measure(slurm, "a2", "b2", NOW - 30)
    assert due(slurm) == []


def test_a_measurement_that_could_not_be_made_does_not_come_again_at_once() -> None:
    """For want of torch, for instance: jobs every ten minutes would keep two nodes busy for nothing."""
    slurm = cluster()
    measure(slurm, "a1", "b1", NOW - 60, passed=None)
    assert f"path={B}@{NOW - 60:.0f}?" in slurm.comments(["a1"])["a1"]
    assert (A, B) not in [leaves for leaves, _ in due(slurm)]
    way = leaf_paths.due(NAMES, slurm.comments(), TREE, NOW + WEEK, WEEK)[-1]
    assert (way.leaves, way.passed) == ((A, B), None)


def test_what_the_comment_keeps() -> None:
    """The newest measurement of each way, a few of them, beside the rest of the record."""
    slurm = cluster()
    slurm.set_comment("a1", node_comment.write("rack 12", NodeHistory(tested_at=NOW)))
    measure(slurm, "a1", "b1", NOW - 60, passed=False)
    assert slurm.comments(["a1"])["a1"] == f"rack 12 [opsd1 tested={NOW:.0f} path={B}@{NOW - 60:.0f}!]"
    record = node_comment.read(slurm.comments(["a1"])["a1"])
    assert (record.paths, record.tested_at) == ((Path(B, NOW - 60, False),), NOW)
    for number in range(2 * KEPT_PATHS):
        record = record.measured(Path(f"rack_{number}", NOW + number, True))
    assert [path.leaf for path in record.paths] == [f"rack_{number}" for number in range(KEPT_PATHS, 2 * KEPT_PATHS)]
    assert node_comment.read(node_comment.write("", record)) == record


@pytest.mark.parametrize(
    "word", ["sacct={}", "tested={}", "failed=1,{}", "path=b@{}!", "spare=ready@{}", "a={}-1", "a=1-{}"]
)
def test_a_moment_that_no_clock_can_show_is_none(word: str) -> None:
    """A comment that somebody has edited; `opsd nodes lemons` ended in an error by it."""
    assert node_comment.read(f"[opsd1 {word.format(99_999_999_999)}]") != NodeHistory()
    assert node_comment.read(f"[opsd1 {word.format('9' * 400)}]") == NodeHistory()


def test_only_nodes_that_nobody_has_are_measured() -> None:
    """Neither spares nor reserved nor busy ones."""
    nodes = [
        Node("a1", "idle"),
        Node("a2", "allocated"),
        Node("b1", "idle", frozenset({"reserved"})),
        Node("c1", "idle"),
    ]
    spare = node_comment.write("", NodeHistory(spare="ready", spare_at=NOW))
    assert leaf_paths.idle(nodes, {"a1": "", "c1": spare}) == ["a1"]


def test_a_topology_without_pairs_is_refused() -> None:
    """It would change nothing, and nobody would see that."""
    done = CliRunner().invoke(nodes_command, ["due", "--topology=/dev/null"])
    assert (done.exit_code, "--topology goes with --pairs only" in done.stderr) == (exitcodes.USAGE, True)


def test_a_bad_way_is_known_by_the_newest_measurement_that_was_made() -> None:
    """With what it measured; one that could not be made, or of next year, says nothing, and a good one ends it."""
    slurm = cluster()
    leaf_paths.note(slurm, ("a1", "b1"), TREE.leaf, NOW - 60, passed=False, rate=1.234e9)
    assert f"path={B}@{NOW - 60:.0f}!1234M" in slurm.comments(["a1"])["a1"]
    measure(slurm, "a1", "c1", NOW - 60)
    measure(slurm, "b1", "c1", NOW - 60, passed=False)
    measure(slurm, "a2", "b2", NOW - 30, passed=None)
    measure(slurm, "a2", "c2", NOW + 365 * 86_400, passed=False)
    bad = leaf_paths.with_bad(TREE, slurm.comments(), NOW)
    assert sorted(bad.bad) == [(A, B), (B, C)]
    assert bad.bad[A, B].startswith("1.23 GB/s, 20")
    assert (bad.bad_from("a2", ["b1", "c1"]), bad.bad_towards(["a1", "c1"])) == ([(A, B)], {B: 2})
    measure(slurm, "a2", "b2", NOW - 10)
    assert sorted(leaf_paths.with_bad(TREE, slurm.comments(), NOW).bad) == [(B, C)]
