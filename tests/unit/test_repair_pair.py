"""The network of a node in repair, measured with nodes in service: who is taken, and what is made of what is found."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from opsd.preflight.network.rendezvous import port_of
from opsd.repair.pair import Pair
from opsd.repair.repair_plan import NO_HARDWARE
from opsd.repair.retest import Retested
from opsd.slurm import node_comment
from opsd.slurm.leaf_paths import note
from opsd.slurm.node_comment import NodeHistory
from opsd.slurm.port import Job, Node, Partition, SlurmDenied, SlurmUnavailable
from opsd.slurm.topology import Topology, parse
from tests.fakes.slurm import FakeSlurm

PASSED = Retested(True, "passed infiniband and preflight standard")
GOOD, BAD = Retested(True, ""), Retested(False, "network_search failed: n1 is slow")
TREE = parse("SwitchName=leaf1 Nodes=n[1,3]\nSwitchName=leaf2 Nodes=n[2,4]\nSwitchName=top Switches=leaf[1-2]\n")
DRAINED = Node("n1", "idle", frozenset({"drain"}), "opsd:nic_failed-1 nic_failed: mlx5_0", "root", 100.0)
CHECKS = Partition("checks", ("n1", "n2", "n3", "n4"), 0, "REQUEUE")


class Nodes(FakeSlurm):
    """n1 is in repair, n3 is next to it. Jobs start at once, or are ``slow`` or refused."""

    def __init__(self, *nodes: Node, slow: bool = False, refused: bool = False) -> None:
        super().__init__([DRAINED, *(nodes or [Node(f"n{number}", "idle") for number in (2, 3, 4)])])
        self._partitions = [CHECKS]
        self._slow, self._refused = slow, refused
        self.submitted: list[tuple[str, Sequence[str]]] = []

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        if self._refused:
            raise SlurmDenied("sbatch: error: Access/permission denied")
        self.submitted.append((script, options))
        named = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        state = "pending" if self._slow else "running"
        self.add(90 + len(self.submitted), named["job-name"], named["nodelist"], state)
        return self._jobs[-1].id

    def add(self, number: int, name: str, node: str, state: str = "running") -> None:
        job = Job(number, state, "", "root", "checks", (node,), node, None, None, None, 0, name)
        self._jobs.append(job)

    def cancel(self, job: int) -> None:
        self._jobs = [one for one in self._jobs if one.id != job]

    def named(self) -> list[str]:
        return [job.name for job in self._jobs]


class Halves:
    """What the node finds with each partner; it is with none that is not in ``results``."""

    def __init__(self, results: Mapping[str, Retested]) -> None:
        self._results = results
        self.asked: list[tuple[tuple[str, ...], int]] = []

    def __call__(self, hosts: Sequence[str], port: int, stop: Callable[[], str]) -> Retested:
        self.asked.append((tuple(hosts), port))
        return self._results[hosts[1]]


def pair(slurm: FakeSlurm, half: Callable[[Sequence[str], int, Callable[[], str]], Retested]) -> Pair:
    return Pair(slurm, "n1", "checks", half, lambda: TREE, lambda: 1000.0, lambda _seconds: None)


def test_the_nearest_idle_node_runs_the_other_half() -> None:
    """In a job of its own, all by itself on the node, which has ended when that is measured."""
    slurm, halves = Nodes(), Halves({"n3": GOOD})
    found = pair(slurm, halves)(PASSED, True, str)
    assert found == Retested(True, "passed infiniband and preflight standard, and the network with n3")
    assert (halves.asked, slurm.named()) == ([(("n1", "n3"), port_of(91))], [])
    ((script, options),) = slurm.submitted
    assert {"--nodelist=n3", "--partition=checks", "--exclusive", "--propagate=NONE"} <= {*options}
    words = shlex.split(script.splitlines()[1])
    assert words[1:] == ["-P", "-m", "opsd", "preflight", "network", "--hosts=n1,n3", "--node=1", "--rendezvous=n1"]


def test_a_partner_across_a_bad_way_comes_last() -> None:
    """What it would find says nothing about the node; the way is that of the leaf switches, whoever measured it."""
    slurm = Nodes()
    note(slurm, ("n1", "n2"), TREE.leaf, 900.0, passed=False)
    slurm.set_comment("n3", node_comment.write("", NodeHistory(spare="ready", spare_at=900.0)))
    assert pair(slurm, Halves({"n2": GOOD}))(PASSED, True, str).passed, "there is no other"
    leaves = "SwitchName=leaf1 Nodes=n1\nSwitchName=leaf2 Nodes=n[2-3]\nSwitchName=leaf3 Nodes=n4\n"
    tree = parse(f"{leaves}SwitchName=top Switches=leaf[1-3]\n")
    note(slurm, ("n1", "n3"), tree.leaf, 900.0, passed=False)
    other = replace(pair(slurm, Halves({"n4": GOOD})), topology=lambda: tree)
    assert other(PASSED, True, str).detail.endswith("the network with n4")


def test_a_node_that_no_switch_connects_is_no_partner() -> None:
    """Two that cannot meet would speak against the node; one of which no switch is known may be anywhere."""
    tree = parse("SwitchName=here Nodes=n1\nSwitchName=elsewhere Nodes=n[2-3]\n")
    apart = replace(pair(Nodes(), Halves({"n4": GOOD})), topology=lambda: tree)
    assert apart(PASSED, True, str).detail.endswith("the network with n4")


def test_one_bad_way_of_two_is_the_partner_s() -> None:
    """The node is good with another one; whose way is bad is told."""
    found = pair(Nodes(), Halves({"n3": BAD, "n2": GOOD}))(PASSED, True, str)
    assert found.passed
    assert found.detail.endswith(f"the network with n2; not with n3, whose way is bad: {BAD.detail}")


def test_what_a_good_pair_was_warned_of_is_told() -> None:
    """Slower than before, for instance, which another way can be."""
    found = pair(Nodes(), Halves({"n3": Retested(True, "latency is 40% above the median")}))(PASSED, True, str)
    assert (found.passed, found.detail.endswith("the network with n3 (latency is 40% above the median)")) == (
        True,
        True,
    )


def test_bad_with_two_partners_is_the_node_s() -> None:
    """The test has failed, and both are named."""
    slurm = Nodes()
    found = pair(slurm, Halves({"n3": BAD, "n2": BAD}))(PASSED, False, str)
    assert found == Retested(False, f"the network is bad with n3: {BAD.detail}; n2: {BAD.detail}")
    assert slurm.named() == []


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize(
    ("slurm", "half", "why"),
    [
        (Nodes(Node("n2", "allocated"), Node("n3", "down")), {}, "no node of partition checks is idle"),
        (Nodes(refused=True), {}, "n3: Slurm: sbatch: error: Access/permission denied; n2: Slurm: sbatch: error"),
        (Nodes(slow=True), {}, "n3: its job has not started within 120 s; n2: its job has not started"),
        (
            Nodes(Node("n3", "idle")),
            {"n3": Retested(False, f"{NO_HARDWARE}torch is not installed in /opt/opsd/bin/python")},
            "n3: torch is not installed in /opt/opsd/bin/python; Slurm: no other node of partition checks is idle",
        ),
    ],
    ids=["nobody", "refused", "slow", "no torch"],
)
def test_a_network_that_nobody_could_measure_is_good_enough_for_faults_of_other_kinds(
    slurm: Nodes, half: Mapping[str, Retested], why: str, needed: bool
) -> None:
    """It is told; for a network card the test could not be made, which has nobody replace it."""
    found = pair(slurm, Halves(half))(PASSED, needed, str)
    assert found.passed is not needed
    assert found.detail.startswith(NO_HARDWARE if needed else f"{PASSED.detail}; the network was not tested: ")
    assert why in found.detail
    assert slurm.named() == []


def test_a_bad_way_without_a_second_opinion_returns_no_node() -> None:
    """Neither does it have one replaced: one of two is bad."""
    found = pair(Nodes(Node("n3", "idle")), Halves({"n3": BAD}))(PASSED, False, str)
    assert (found.passed, found.detail.startswith(f"{NO_HARDWARE}the network is bad with n3: ")) == (False, True)
    assert "no other node could tell whose fault that is" in found.detail


def test_a_partner_that_was_preempted_is_no_bad_way() -> None:
    """Its job gives way to any other; what is measured at its end says nothing."""
    slurm = Nodes(Node("n3", "idle"))

    def half(_hosts: Sequence[str], _port: int, _stop: Callable[[], str]) -> Retested:
        slurm.cancel(91)
        return BAD

    found = pair(slurm, half)(PASSED, False, str)
    assert found.passed
    assert "n3: its job has ended meanwhile" in found.detail


def test_a_node_that_is_somebody_else_s_waits_for_no_partner() -> None:
    """The test makes way, and the job does not stay behind."""
    slurm = Nodes(slow=True)
    found = pair(slurm, Halves({}))(PASSED, True, lambda: "n1 is in service")
    assert found == Retested(False, "the test of the network was stopped: n1 is in service", stopped=True)
    stopped = Retested(False, "preflight network was stopped: n1 is in service", stopped=True)
    assert pair(other := Nodes(), Halves({"n3": stopped}))(PASSED, True, str) == stopped
    assert (slurm.named(), other.named()) == ([], [])


def test_what_a_killed_repair_has_left_is_ended_first() -> None:
    """Only what is of this node: others are repaired at the same time."""
    slurm = Nodes()
    slurm.add(7, "opsd-pair-n1", "n4")
    slurm.add(8, "opsd-pair-n10", "n2")

    def half(_hosts: Sequence[str], _port: int, _stop: Callable[[], str]) -> Retested:
        assert [job.id for job in slurm.jobs()] == [8, 91]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair(slurm, half)(PASSED, True, str)
    assert slurm.named() == ["opsd-pair-n10"], "also if this one is ended"


def test_names_that_are_none_reach_no_script() -> None:
    """Nor the command line of a preflight."""
    slurm = Nodes()
    odd = replace(pair(slurm, Halves({})), node="n1;reboot")
    assert "'n1;reboot' is no name of a machine" in odd(PASSED, True, str).detail
    assert slurm.submitted == []


def test_without_topology_partition_or_answer_it_says_so() -> None:
    """A node is found without the first; the others are told."""
    slurm = Nodes()
    anywhere = replace(pair(slurm, Halves({"n2": GOOD})), topology=Topology)
    assert "the network with n2" in anywhere(PASSED, True, str).detail
    elsewhere = replace(pair(slurm, Halves({})), partition="none")(PASSED, False, str)
    assert "there is no partition none (repair.pair_partition)" in elsewhere.detail
    slurm.error = SlurmUnavailable("no answer")
    assert pair(slurm, Halves({}))(PASSED, True, str).detail.endswith("was not tested: Slurm: no answer")
