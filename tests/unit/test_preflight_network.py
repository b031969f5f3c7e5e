"""The network check: formulas, schedules, answers, and the search for the bad node."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from opsd import __version__, exitcodes
from opsd.preflight.base import Verdict
from opsd.preflight.checks import CHECKS
from opsd.preflight.command import validate
from opsd.preflight.engine import SelectionError
from opsd.preflight.finder import (
    Answer,
    Culprit,
    Diagnosis,
    Evidence,
    GroupTest,
    Level,
    Tolerance,
    disjoint,
    find,
    partition,
)
from opsd.preflight.network import measure, plan
from opsd.preflight.network.coordinator import (
    Coordinator,
    Done,
    Joined,
    Spec,
    slowest,
)
from opsd.preflight.network.member import Participant
from opsd.preflight.network.plan import Timing, busbw, join_outcome, sizes, slowest_rate
from opsd.preflight.network.rendezvous import (
    Place,
    RendezvousError,
    interface_towards,
    place,
    read_switches,
    resolve,
)
from opsd.preflight.report import Report, Result, Value
from opsd.settings.sections import PreflightSettings
from tests.fakes.planted import PLANTS, Fault, SimulatedCluster, cluster, score, search

# Formulas, schedules and addresses of the network check; what the coordinator makes of the answers of nodes.


RANKS = st.integers(2, 60)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(collective: str, factor: float):
    """8 GB in 0.1 s among 8 ranks."""
    assert busbw(collective, 8_000_000_000, 0.1, 8) == pytest.approx(80e9 * factor)


def test_a_timing_says_median_and_tail():
    """One slow iteration in ten moves the p99 and not the bandwidth."""
    timing = Timing("all_reduce", 1_000_000, 2, (0.1,) * 9 + (1.0,))
    assert (timing.latency, timing.p99) == (0.1, 1.0)
    assert timing.algbw == timing.busbw == pytest.approx(1e7)


def test_sizes_go_from_a_kilobyte_to_eight_gigabytes():
    """Each eight times the one before, the largest one among them."""
    assert sizes()[0] == 1 << 10
    assert sizes()[-1] == 8 << 30
    assert sizes(10, 10) == [10]


@given(RANKS)
def test_the_circle_method_lets_everybody_meet_everybody_once(n: int):
    """n-1 rounds of disjoint pairs for an even n, n rounds for an odd one, every pair exactly once."""
    rounds = measure.circle(n)
    assert len(rounds) == (n - 1 if n % 2 == 0 else n)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len({*ranks}) == n - n % 2
    assert Counter(pair for pairs in rounds for pair in pairs) == {(a, b): 1 for b in range(n) for a in range(b)}


@given(RANKS, st.integers(0, 5), st.integers())
def test_in_a_permutation_everybody_sends_to_one_other_and_receives_from_one(n: int, count: int, seed: int):
    """Nobody sends to himself."""
    for pairs in measure.permutations(n, count, Random(seed)):
        assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == [*range(n)]
        assert all(a != b for a, b in pairs)


@given(RANKS)
def test_ring_and_incast(n: int):
    """Everybody sends to the next one; everybody sends to the first one."""
    assert [b for _, b in measure.ring(n)[0]] == [*range(1, n), 0]
    assert {b for _, b in measure.incast(n)[0]} == {0}
    assert len(measure.incast(n)[0]) == n - 1


SLURM = {"SLURM_JOB_NODELIST": "n[001-004]", "SLURM_NODEID": "2", "SLURM_JOB_ID": "4242"}


def test_a_job_of_slurm_needs_no_options():
    """Names, number and meeting place come from the environment; jobs on one node do not share a port."""
    assert place("", None, "", SLURM) == Place(("n001", "n002", "n003", "n004"), 2, "n001", 29_797)
    assert place("", None, "10.0.0.1:4000", SLURM).host == "10.0.0.1"


def test_without_slurm_it_is_one_node_on_the_loopback_interface():
    """A laptop listens to nobody else."""
    here = place("", None, "", {})
    assert (len(here.names), here.node, here.host) == (1, 0, "127.0.0.1")


@pytest.mark.parametrize(
    ("hosts", "node", "rendezvous", "sentence"),
    [
        ("n[01-", 0, "", "brackets do not match"),
        ("n[4-1]", 0, "", "runs backwards"),
        ("n1,n1", 0, "", "names a node twice"),
        ("n[1-4]", 4, "", "node number 4 is not among the 4 nodes"),
        ("n[1-4]", 0, "n1:http", "no address; write host:port"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(hosts: str, node: int, rendezvous: str, sentence: str):
    """Hostlists, numbers, addresses."""
    with pytest.raises(RendezvousError, match=sentence.replace("[", r"\[")):
        place(hosts, node, rendezvous, {})


def test_the_interface_towards_this_machine_is_the_loopback():
    """Gloo must not guess by the host's name; what cannot be resolved has none."""
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") == ""


def test_a_name_without_an_address_is_told_at_once():
    """Two minutes passed before, and torch showed its C++ frames; both nodes, also without torch."""
    for node in (0, 1):
        command = [sys.executable, "-m", "opsd", "preflight", "network", "--hosts=no.such.host.invalid,localhost"]
        done = subprocess.run([*command, f"--node={node}"], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == exitcodes.USAGE
        assert done.stderr.startswith("opsd: no.such.host.invalid, where the nodes meet, has no address here")
    resolve(Place(("localhost",), 0, "127.0.0.1", 29_555))


def test_limits_of_measures_of_the_network_are_accepted():
    """They are read by `opsd preflight network`; a name that nobody has is refused as ever."""
    validate(PreflightSettings(limits={"network_patterns": {"bandwidth": 40e9}}), CHECKS)
    for name, measure_name, sentence in (
        ("network_patterns", "speed", "has no such measure; it has bandwidth"),
        ("network_paterns", "bandwidth", "did you mean network_patterns?"),
    ):
        with pytest.raises(SelectionError, match=re.escape(sentence)):
            validate(PreflightSettings(limits={name: {measure_name: 1.0}}), CHECKS)


def test_leaf_switches_come_from_slurms_topology(tmp_path: Path):
    """Comments and the upper levels of the tree are left out."""
    text = """
    # two leaves
    SwitchName=leaf1 Nodes=n[1-2]
    SwitchName=leaf2 LinkSpeed=400 Nodes=n3,n4   # not n5
    SwitchName=spine Switches=leaf[1-2]
    """
    path = tmp_path / "topology.conf"
    path.write_text(text)
    assert read_switches(path) == {"n1": "leaf1", "n2": "leaf1", "n3": "leaf2", "n4": "leaf2"}
    with pytest.raises(RendezvousError, match="cannot be read"):
        read_switches(tmp_path / "none.conf")


def test_an_iteration_is_as_slow_as_its_slowest_node():
    """And a test is as good as its worst node."""
    assert slowest({0: Done((1.0, 2.0)), 1: Done((3.0, 1.0))}).seconds == (3.0, 2.0)
    failed = slowest({0: Done((1.0,)), 1: Done(error="connection reset")})
    assert (failed.seconds, failed.error) == ((), "node 1: connection reset")


def test_nodes_that_never_join_or_differ_are_named():
    """Absent, with another release, with a GPU too few."""
    participant = Participant(Place(tuple(f"n{i}" for i in range(5)), 0, "n0", 1), 8, "nccl", join_s=9.0)
    members = {
        0: Joined(0, "n0", 8, __version__, "nccl"),
        3: Joined(3, "n3", 7, __version__, "nccl"),
        4: Joined(4, "n4", 8, "0.0.1", "nccl"),
    }
    found = [(finding.verdict, finding.summary) for finding in join_outcome(participant, members).findings]
    assert found == [
        (Verdict.FAIL, "n[1-2] never joined within 9 s"),
        (Verdict.FAIL, "n3 came with 7 GPUs, the first node with 8"),
        (Verdict.FAIL, f"n4 runs opsd 0.0.1, the first node {__version__}"),
    ]


class Store:
    """What the nodes of a check have told the coordinator, and what it told them."""

    def __init__(self, *joined: Joined) -> None:
        self._told = {f"join/{one.node}": TypeAdapter(Joined).dump_json(one) for one in joined}
        self.orders: list[Spec] = []

    def check(self, keys: list[str]) -> bool:
        return all(key in self._told for key in keys)

    def get(self, key: str) -> bytes:
        return self._told[key]

    def set(self, key: str, text: str) -> None:
        spec = TypeAdapter(Spec).validate_json(text)
        self.orders.append(spec)
        self._told[f"done/{spec.test}/{key.split('/')[1]}"] = TypeAdapter(Done).dump_json(Done((1.0,)))


@pytest.mark.parametrize(
    ("first", "second", "used", "told"),
    [
        ((8, "nccl"), (8, "nccl"), (8, "nccl"), []),
        ((8, "nccl"), (4, "nccl"), (4, "nccl"), ["n1 came with 4 GPUs, the first node with 8"]),
        ((1, "gloo"), (8, "nccl"), (1, "gloo"), ["n1 came with 8 GPUs, the first node with 0"]),
        ((1, "nccl"), (1, "gloo"), (1, "gloo"), ["n1 came with 0 GPUs, the first node with 1"]),
    ],
)
def test_a_pair_is_measured_with_what_both_have(first, second, used, told):
    """Nodes of two kinds are below two leaf switches as well; their number of GPUs is no fault of the way."""
    store = Store(Joined(0, "n0", first[0], __version__, first[1]), Joined(1, "n1", second[0], __version__, second[1]))
    coordinator = Coordinator(store, 2, backend=first[1])
    joined = coordinator.gather(1.0)
    assert coordinator.measure([Spec((0, 1), "ring", 1, 1, 1.0)])[0].seconds == (1.0,)
    assert {(spec.processes, spec.backend) for spec in store.orders} == {used}
    outcome = join_outcome(Participant(Place(("n0", "n1"), 0, "n0", 1), *first), joined)
    assert [(finding.verdict, finding.summary) for finding in outcome.findings] == [(Verdict.WARN, one) for one in told]


def test_the_rate_of_a_way_is_that_of_its_slowest_exchange():
    """Kept with a way that was not well; 0 where nothing was measured, as of nodes that never met."""
    values = [Value("bandwidth", subject, rate, "bytes_per_second", Verdict.PASS) for subject, rate in
              (("ring", 3e9), ("incast", 1e9))]  # fmt: skip
    result = Result(plan.PATTERNS.name, "", Verdict.PASS, values=tuple(values))
    other = Result(plan.SEARCH.name, "", Verdict.FAIL, values=(Value("tests", "", 2.0, "", Verdict.PASS),))
    assert slowest_rate(Report("network of 2 nodes", "quick", __version__, 1.0, 2.0, (result, other))) == 1e9
    assert slowest_rate(Report("network of 2 nodes", "quick", __version__, 1.0, 2.0, (other,))) == 0.0


def test_a_culprit_is_told_with_the_tests_that_convict_it():
    """Numbers of the last failing tests it took part in, and every test in the protocol."""
    evidence = (
        Evidence(0, "screen", ("n0", "n1"), True, Level(42e9, 41e9), Level(42e9, 41e9)),
        Evidence(0, "screen", ("n2", "n3"), False, Level(30e9, 29e9), Level(42e9, 41e9)),
        Evidence(1, "confirm", ("n2", "n0"), False, None, Level(42e9, 41e9)),
    )
    diagnosis = Diagnosis((Culprit("node", ("n2",)),), (), 3, 2, evidence)
    (finding,) = plan.findings(diagnosis)
    assert finding.verdict is Verdict.FAIL
    assert finding.summary == "node n2 is bad: n2 with n3 reached 30 GB/s of 42 GB/s; n2 with n0 did not finish"
    assert [*plan.protocol(diagnosis).values()][-1] == "FAILED: n2 with n0 did not finish"


def test_a_failure_that_nobody_can_explain_is_still_told():
    """One failing test, no culprit: a warning, not silence."""
    evidence = (Evidence(0, "all", ("n0", "n1"), False, None, None),)
    (finding,) = plan.findings(Diagnosis((), (), 1, 1, evidence))
    assert finding.verdict is Verdict.WARN


def test_of_two_nodes_the_first_collective_that_fails_is_the_last_that_is_tried():
    """Each further one would wait for its deadline, as would the search; of more nodes all are measured."""
    effort = plan.effort("quick", gpus=False)
    for nodes, tried in (((0, 1), 1), ((0, 1, 2), 6)):
        asked: list[str] = []

        class Broken:
            """No measurement ends."""

            def measure(self, requests):
                asked.extend(request.name for request in requests)  # noqa: B023
                return [Done(error="it did not finish")]

        outcome = plan.collectives(Broken(), nodes, len(nodes), effort, lambda _text: None)
        assert (len(asked), len(outcome.findings)) == (tried, tried)


# The search for the bad node: on simulated clusters with planted faults, and on arbitrary answers.


SIZES = st.integers(2, 200)

PROMISED = [plant for plant in PLANTS if plant != "flaky in 30 % of the tests"]


def diagnose(switch_of: dict[str, str], *faults: Fault, topology: bool = True) -> Diagnosis:
    simulated = SimulatedCluster([*switch_of], switch_of, faults, Random(7))
    return search(simulated, topology=topology)


def named(diagnosis: Diagnosis) -> set[str]:
    return {str(culprit) for culprit in diagnosis.culprits}


def node(name: str, **how: float) -> Fault:
    return Fault(Culprit("node", (name,)), **how)


@given(SIZES, st.integers(1, 40))
def test_groups_hold_every_node_once_and_nobody_is_alone(count: int, per_switch: int):
    """No remainder is left untested, whatever the number of nodes and the size of switches."""
    switch_of = cluster(count, per_switch)
    for topology in (switch_of, {}):
        groups = partition([*switch_of], topology)
        assert sorted(n for group in groups for n in group) == sorted(switch_of)
        assert min(map(len, groups)) >= 2


def test_groups_follow_the_switches():
    """232 nodes, 16 to a switch: every group is one switch, the last one half full."""
    switch_of = cluster(232, 16)
    groups = partition([*switch_of], switch_of)
    assert len(groups) == 15
    assert all(len({switch_of[n] for n in group}) == 1 for group in groups)


@given(st.lists(st.frozensets(st.sampled_from("abcdefgh"), min_size=2, max_size=3), max_size=12))
def test_tests_of_one_round_share_no_node(groups: list[frozenset[str]]):
    """Nobody has to be in two places, and every test is in exactly one round."""
    tests = [GroupTest(tuple(sorted(group)), "") for group in groups]
    rounds = disjoint(tests)
    assert sorted(index for indexes in rounds for index in indexes) == [*range(len(tests))]
    for indexes in rounds:
        members = [member for index in indexes for member in tests[index].members]
        assert len(members) == len({*members})


@given(st.integers(4, 120), st.integers(2, 40), st.data())
@settings(max_examples=60)
def test_one_bad_node_is_named_and_nobody_else(count: int, per_switch: int, data: st.DataObject):
    """Slow or dead, in a cluster of any size, with the topology or without."""
    switch_of = cluster(count, per_switch)
    bad = data.draw(st.sampled_from([*switch_of]))
    factor = data.draw(st.sampled_from([0.0, 0.5, 0.7]))
    diagnosis = diagnose(switch_of, node(bad, factor=factor), topology=data.draw(st.booleans()))
    assert named(diagnosis) == {f"node {bad}"}
    assert diagnosis.suspected == ()


GOOD, SCATTERED, SLOW, DEAD = (1.4e9,) * 10, (1.42e9,) * 8 + (0.9e9,) * 2, (0.4e9,) * 10, ()


@pytest.mark.parametrize(
    ("answers", "floor", "fails", "suspected"),
    [
        ((GOOD, SCATTERED), 0.0, False, ()),
        ((SCATTERED, SLOW), 0.0, False, ()),
        ((DEAD, GOOD, GOOD), 0.0, False, ("n1", "n2")),
        ((GOOD, DEAD, DEAD), 0.0, True, ()),
        ((SLOW, SLOW), 1e9, True, ()),
    ],
)
def test_the_only_pair_has_no_other_to_compare_with(
    answers: tuple[tuple[float, ...], ...], floor: float, fails: bool, suspected: tuple[str, ...]
) -> None:
    """On a busy machine one test of it says little. It fails if it does not end twice, or stays below the floor."""
    finder, given_answers = find(["n1", "n2"], tolerance=Tolerance(floor=floor)), iter(answers)
    next(finder)
    with pytest.raises(StopIteration) as end:
        while True:
            finder.send([Answer(next(given_answers))])
    diagnosis: Diagnosis = end.value.value
    assert (bool(diagnosis.culprits), diagnosis.suspected) == (fails, suspected)
    assert next(given_answers, None) is None


@given(st.integers(2, 150), st.integers(1, 40))
@settings(max_examples=40)
def test_a_healthy_cluster_is_called_healthy_and_every_node_was_tested(count: int, per_switch: int):
    """Two kinds of tests are enough: the groups, and all together."""
    switch_of = cluster(count, per_switch)
    diagnosis = diagnose(switch_of)
    assert diagnosis.clean
    assert {member for entry in diagnosis.evidence for member in entry.members} == {*switch_of}
    assert {entry.purpose for entry in diagnosis.evidence} == ({"screen", "all"} if count > 2 else {"pair"})


@given(st.integers(2, 60), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_whatever_the_answers_the_search_ends(count: int, random: Random):
    """Tests that fail at random, or never finish, neither loop for ever nor raise."""
    finder = find([f"n{i}" for i in range(count)])
    tests = next(finder)
    for _ in range(40 * count + 400):
        try:
            tests = finder.send([Answer((random.random(),) * random.randrange(3)) for _ in tests])
        except StopIteration as end:
            assert end.value.tests == len(end.value.evidence)
            return
    pytest.fail("the search did not end")


@pytest.mark.parametrize("topology", [True, False])
def test_a_suspect_is_confirmed_with_two_different_partners(topology: bool):
    """One from its own switch, where that is known, and one from a group that passed."""
    diagnosis = diagnose(cluster(64, 8), node("node-0009"), topology=topology)
    partners = {
        next(m for m in entry.members if m != "node-0009")
        for entry in diagnosis.evidence
        if entry.purpose == "confirm" and "node-0009" in entry.members
    }
    own = {f"node-{i:04}" for i in range(8, 16)}
    assert len(partners) == 2
    assert len(partners & own) == (1 if topology else 0)


def test_a_link_is_named_as_a_link_and_not_as_its_ends():
    """Within one group, where both halves pass, and between groups, where all groups pass."""
    for one, two in (("node-0008", "node-0013"), ("node-0003", "node-0060")):
        diagnosis = diagnose(cluster(64, 8), Fault(Culprit("link", (one, two))))
        assert named(diagnosis) == {f"the link between {one} and {two}"}


def test_a_path_between_two_switches_is_told_from_a_link():
    """Other nodes of the same two switches are slow with each other, too."""
    diagnosis = diagnose(cluster(64, 8), Fault(Culprit("path", ("leaf-001", "leaf-006"))))
    assert named(diagnosis) == {"the path between switch leaf-001 and switch leaf-006"}


def test_a_switch_is_named_instead_of_its_nodes():
    """All through it, or only what leaves it; without the topology the nodes that share something are named."""
    for kind, text in (("switch", "switch leaf-003"), ("uplink", "the uplink of switch leaf-003")):
        assert named(diagnose(cluster(64, 8), Fault(Culprit(kind, ("leaf-003",))))) == {text}
    (shared,) = diagnose(cluster(64, 8), Fault(Culprit("switch", ("leaf-003",))), topology=False).culprits
    assert shared.kind == "group"
    assert shared.parts == tuple(f"node-{i:04}" for i in range(24, 32))


def test_two_bad_nodes_of_one_switch_do_not_make_a_bad_switch():
    """One node out of every quarter is asked before a switch is blamed."""
    assert named(diagnose(cluster(64, 8), node("node-0024"), node("node-0030", factor=0.0))) == {
        "node node-0024",
        "node node-0030",
    }


def test_a_cluster_in_which_nothing_works_is_not_blamed_on_somebody():
    """Every pair fails: the fabric, the rendezvous or the whole idea is broken."""
    switch_of = cluster(8, 4)
    diagnosis = diagnose(switch_of, *(node(name, factor=0.0) for name in switch_of))
    assert [culprit.kind for culprit in diagnosis.culprits] == ["everything"]


def test_an_absolute_floor_fails_a_cluster_that_is_evenly_slow():
    """Relative thresholds cannot see that."""
    switch_of = cluster(16, 4)
    finder = find([*switch_of], switch_of, Tolerance(floor=40.0))
    tests = next(finder)
    with pytest.raises(StopIteration) as end:
        while True:
            tests = finder.send([Answer((30.0,) * 8) for _ in tests])
    assert [culprit.kind for culprit in end.value.value.culprits] == ["everything"]


def test_a_fault_that_does_not_show_again_is_told_as_such():
    """One test fails, once: nobody is blamed, the group is suspected, and the cluster is not called clean."""
    switch_of = cluster(16, 4)
    finder = find([*switch_of], switch_of)
    tests, first = next(finder), True
    with pytest.raises(StopIteration) as end:
        while True:
            answers = [Answer((100.0,) * 8) for _ in tests]
            if first:
                answers[1], first = Answer(()), False
            tests = finder.send(answers)
    diagnosis = end.value.value
    assert diagnosis.culprits == ()
    assert diagnosis.suspected == tuple(f"node-{i:04}" for i in range(4, 8))
    assert not diagnosis.clean


@pytest.mark.parametrize("nodes", [[], ["a"], ["a", "b", "a"]])
def test_what_cannot_be_searched_is_refused(nodes: list[str]):
    """Fewer than two nodes, or one named twice."""
    with pytest.raises(ValueError, match="two nodes"):
        next(find(nodes))


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_switch", "budget"), [(232, 16, 60), (1024, 32, 120)])
@pytest.mark.parametrize("plant", PROMISED)
def test_the_right_culprit_within_the_budget(plant: str, nodes: int, per_switch: int, budget: int):
    """At least 99 % of 200 seeded trials name exactly what was planted, none uses more tests than promised."""
    right, most_tests = score(plant, nodes, per_switch, trials=200, seed=11)
    assert right >= 198
    assert most_tests <= budget
