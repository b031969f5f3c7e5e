"""How launchers agree, over a played network in virtual time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opsd.launch.io.member import Member
from opsd.launch.quorum.codec import Answers, plan_to_json
from opsd.launch.quorum.peers import Share
from opsd.launch.quorum.port import Plan
from tests.fakes.quorum import Network


def formed(size: int, seed: int = 0, least: int | None = None) -> Network:
    network = Network(size, seed=seed, least=least)
    network.run_until(network.settled, 10.0)
    return network


def safe(network: Network) -> None:
    """No number was begun with two contents, and nobody was sent back to an older plan."""
    contents = {}
    for launcher in network.launchers.values():
        numbers = [plan.number for _, plan in launcher.begun]
        assert numbers == sorted(set(numbers))
        for _, plan in launcher.begun:
            assert contents.setdefault(plan.number, plan) == plan


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 32])
def test_they_find_each_other(size: int) -> None:
    """All that start within a moment are in the first plans, under the first of them."""
    network = formed(size)
    assert {launcher.core.head for launcher in network.living} == {"n0001"}
    safe(network)


def test_a_lost_follower_is_noticed(tmp_path: object) -> None:
    """Silence for the timeout is a loss, and the others go on soon after."""
    network = formed(4)
    network.kill("n0003")
    took = network.run_until(lambda: network.settled("n0001", "n0002", "n0004"), 10)
    assert 1.5 < took < 2.6
    assert [name for _, name in network.launchers["n0001"].lost_ones] == ["n0003"]


def test_a_lost_head_is_replaced_by_the_next() -> None:
    """The first of the others takes over, knows who is missing, and never uses a number again."""
    network = formed(4)
    number = network.launchers["n0002"].running
    network.kill("n0001")
    took = network.run_until(lambda: network.settled("n0002", "n0003", "n0004"), 10)
    assert took < 3.0
    assert network.launchers["n0002"].core.head == "n0002"
    assert network.launchers["n0002"].lost_ones[0][1] == "n0001"
    assert network.launchers["n0002"].running > number
    safe(network)


def test_a_slow_launcher_is_not_lost() -> None:
    """Answers that take up to a second and a half cost nobody the place."""
    network = formed(4)
    network.delay = lambda a, b: 0.001 if "n0003" not in (a, b) else network.random.random() * 0.75
    network.run(120)
    assert not network.launchers["n0001"].lost_ones
    assert all(len(launcher.heads) == 1 for launcher in network.living)


def test_a_held_up_launcher_blames_nobody() -> None:
    """A head that was stopped for a while finds that another was elected, and takes part under it."""
    network = formed(4)
    network.launchers["n0001"].frozen = True
    network.run_until(lambda: network.settled("n0002", "n0003", "n0004"), 10)
    network.launchers["n0001"].frozen = False
    network.run_until(network.settled, 10)
    assert network.launchers["n0001"].core.head == "n0002"
    assert not network.launchers["n0001"].lost_ones
    safe(network)


def test_at_most_one_side_of_a_broken_network_goes_on() -> None:
    """The head's side is the smaller one: it ends its ranks, and the other elects a head of its own."""
    network = formed(5)
    network.part(["n0001", "n0002"], ["n0003", "n0004", "n0005"])
    took = network.run_until(lambda: network.settled("n0003", "n0004", "n0005"), 10)
    network.run(2)
    assert took < 4
    assert [network.launchers[name].running for name in ("n0001", "n0002")] == [0, 0]
    assert all(network.launchers[name].isolated_at for name in ("n0001", "n0002"))
    network.part()
    network.run_until(network.settled, 20)
    safe(network)


@pytest.mark.parametrize("go_on", [True, False])
def test_a_half_waits_for_the_tie_to_be_decided(go_on: bool) -> None:
    """Of two halves each asks; the one that may goes on, the other ends its ranks."""
    network = formed(4, least=2)
    for name in ("n0001", "n0002"):
        network.launchers[name].go_on_in_tie = go_on
    network.part(["n0001", "n0002"], ["n0003", "n0004"])
    network.run(12)
    assert network.settled("n0001", "n0002") is go_on
    for name in ("n0003", "n0004"):
        assert network.launchers[name].running == 0
        assert network.launchers[name].isolated_at
    network.part()
    network.run_until(network.settled, 20)
    safe(network)


def test_a_plan_that_may_be_valid_elsewhere_has_a_say() -> None:
    """Only the old head knows that its last plan is valid; whoever goes on needs its members, however they part.

    The old head with one of them is such a majority, so the larger rest of the plan before must wait.
    """
    network = formed(5, least=2)
    old, new, third, fourth, fifth = network.launchers
    network.unsaid = {(old, "begin"), (new, "prepare")}
    network.part([old, new, third], [fourth, fifth])
    network.run_until(lambda: network.launchers[old].begun[-1][1].slots == (old, new, third), 10)
    network.part([old], [new, third, fourth, fifth])
    network.run_until(lambda: network.launchers[new].core.head == new, 10)
    network.part([old, third], [new, fourth, fifth])
    network.unsaid = set()
    network.run(12)
    safe(network)
    assert network.settled(old, third)
    assert [network.launchers[name].running for name in (new, fourth, fifth)] == [0, 0, 0]


def test_a_plan_that_comes_late_is_not_begun() -> None:
    """Once a launcher has prepared for a newer one its ranks stay ended, whatever it learns of the plan before."""
    network = formed(3)
    late, head = network.launchers["n0003"], network.launchers["n0001"]
    number, term, members = late.running, head.core.term, tuple(head.core.alive.values())
    older, newer = (Plan(number + ahead, ("n0003",), members) for ahead in (1, 2))
    proposal = {"plan": plan_to_json(newer), "base": None, "after": number, "bodies": []}
    late.core.receive(network.now, head.member, {"kind": "prepare", "term": term, **proposal})
    news = {"plan": plan_to_json(older), "answers": Answers.of({}).packed, "ballot": [term, older.number]}
    late.core.receive(network.now, head.member, {"kind": "begin", "term": term, "news": news})
    assert late.core.plan == older
    assert late.begun[-1][1].number == number
    assert late.running == 0


def test_a_head_that_is_cut_off_begins_nothing_more() -> None:
    """That the others fell silent within a moment is no reason to replace the first of them, nor to use up a number."""
    network = formed(5)
    number = network.launchers["n0001"].core.consent.highest
    network.part(["n0001", "n0002"], ["n0003", "n0004", "n0005"])
    network.run(10)
    assert not network.launchers["n0001"].lost_ones
    assert network.launchers["n0001"].core.consent.highest == number


@pytest.mark.parametrize("side", [["n0001", "n0002"], ["n0002"], ["n0002", "n0003"]])
def test_a_side_ends_its_ranks_before_the_other_could_have_new_ones(side: list[str]) -> None:
    """Within the timeout and the time that takes to see who is there, with or without the head on its side."""
    network = formed(5)
    network.delay = lambda _a, _b: network.random.random() * 0.4
    network.run(30)
    network.delay = lambda _a, _b: 0.001
    network.run(1)
    others = [name for name in network.launchers if name not in side]
    network.part(side, others)
    began = network.now
    network.run_until(lambda: network.settled(*others), 10)
    network.run(1)
    for name in side:
        assert network.launchers[name].isolated_at[0] - began < 3.2
        assert network.launchers[name].isolated_at[0] < network.launchers[others[0]].begun[-1][0] + 1.0


def test_one_of_two_can_go_on() -> None:
    """The survivor of two is a half."""
    network = formed(2, least=1)
    network.launchers["n0002"].go_on_in_tie = True
    network.kill("n0001")
    network.run_until(lambda: network.settled("n0002"), 10)


def test_losses_one_after_the_other() -> None:
    """Each plan's majority counts, not that of the beginning: five shrink to two."""
    network = formed(5, least=2)
    for name, rest in (("n0001", 4), ("n0005", 3), ("n0002", 2)):
        network.kill(name)
        network.run_until(network.settled, 10)
        assert len(network.living) == rest
    safe(network)


def test_a_launcher_that_comes_later_is_taken_in() -> None:
    """The others did not begin with it; it asks them, and is in the next plan."""
    network = formed(3)
    own = Member("n0009", "127.1.0.9", 1)
    late = network.add(own, [*(launcher.member for launcher in network.launchers.values()), own])
    network.run_until(network.settled, 10)
    assert late.core.head == "n0001"


def test_messages_arrive_once_and_in_order_whoever_is_head() -> None:
    """What was told before the head was lost is told to the next one."""
    network = formed(3)
    for number in range(5):
        network.launchers["n0003"].core.tell_head({"n": number})
    network.run(1)
    network.kill("n0001")
    for number in range(5, 10):
        network.launchers["n0003"].core.tell_head({"n": number})
    network.run_until(lambda: network.settled("n0002", "n0003"), 10)
    network.run(1)
    heard = {name: [m["n"] for _, m in network.launchers[name].heard] for name in ("n0001", "n0002")}
    assert heard == {"n0001": [0, 1, 2, 3, 4], "n0002": [5, 6, 7, 8, 9]}


def test_orders_reach_everybody_over_a_bad_network() -> None:
    """A third of the messages is lost; each order still comes exactly once, in order."""
    network = formed(4)
    network.delay = lambda _a, _b: None if network.random.random() < 0.3 else 0.001
    for number in range(10):
        network.launchers["n0001"].core.tell_all({"n": number})
    network.run(20)
    for launcher in network.living:
        assert [message["n"] for _, message in launcher.heard] == list(range(10))


def test_a_goodbye_is_known_at_once() -> None:
    """Nobody waits for the silence of who has said goodbye."""
    network = formed(3)
    network.launchers["n0003"].core.leave()
    network.kill("n0003")
    network.launchers["n0003"].on = True
    took = network.run_until(lambda: bool(network.launchers["n0001"].lost_ones), 10)
    assert took < 0.1


def test_a_refused_connection_is_known_at_once() -> None:
    """The machine is there and says that the launcher is not."""
    network = formed(3)
    network.kill("n0001")
    for name in ("n0002", "n0003"):
        network.launchers[name].core.unreachable(network.now, "n0001")
    assert network.run_until(lambda: network.settled("n0002", "n0003"), 10) < 1.0


FAULTS = st.lists(st.sampled_from(["kill", "revive", "part", "heal", "freeze", "thaw", "loss", "mute"]), max_size=8)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(3, 6), seed=st.integers(0, 10_000), faults=FAULTS, waits=st.lists(st.floats(0, 4), min_size=8))
@example(3, 349, ["kill", "kill", "kill", "part"], [0.0, 0.0, 0.0, 2.0])  # two candidates that voted for themselves
def test_whatever_happens_there_is_one_story(size: int, seed: int, faults: list[str], waits: list[float]) -> None:
    """Random crashes, partitions, stops and losses: never two plans of one number, nor two sides running at rest."""
    network = Network(size, seed=seed)
    network.run(3)
    names = list(network.launchers)
    for fault, wait in zip(faults, itertools.cycle(waits), strict=False):
        chosen = network.random.choice(names)
        launcher = network.launchers[chosen]
        if fault == "kill" and len(network.living) > size // 2 + 1:
            network.kill(chosen)
        elif fault == "part":
            cut = network.random.randrange(1, size)
            shuffled = network.random.sample(names, size)
            network.part(shuffled[:cut], shuffled[cut:])
        elif fault == "heal":
            network.part()
            network.unsaid.clear()
            network.delay = lambda _a, _b: 0.002
        elif fault == "freeze":
            launcher.frozen = True
        elif fault in ("thaw", "revive"):
            launcher.frozen = False
        elif fault == "mute":
            network.unsaid.add((chosen, network.random.choice(["begin", "prepare", "say"])))
        elif fault == "loss":
            network.delay = lambda _a, _b: None if network.random.random() < 0.2 else network.random.random() * 0.05
        network.run(wait)
        safe(network)
    quiet = {name for name, launcher in network.launchers.items() if launcher.on and not launcher.frozen}
    network.run(12)
    running = {network.launchers[name].running for name in quiet} - {0}
    assert len(running) <= 1 or {"loss", "mute"} & set(faults)
    network.part()
    network.unsaid.clear()
    network.delay = lambda _a, _b: 0.002
    for launcher in network.living:
        launcher.frozen = False
    network.run(25)
    safe(network)
    living = [launcher.name for launcher in network.living]
    newest = max((launcher.core.consent for launcher in network.living), key=lambda consent: consent.newest)
    if newest.share(living, head=False) is Share.MAJORITY:
        assert network.settled()
