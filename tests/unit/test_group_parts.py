"""The parts of the group of launchers, and its invariants under random faults."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.election import Election, ElectionView
from opsd.launch.claims.messages import (
    MESSAGES,
    Body,
    Broadcast,
    HeartbeatReply,
    MemberChanges,
    MemberList,
    Message,
    Ready,
    Seek,
    SeekReply,
)
from opsd.launch.claims.peers import MOST_PATIENCE, FollowerTracker, Inbox, Outbox, Peer, Quorum, quorum
from opsd.launch.io.protocol import Codec, Member
from opsd.launch.run.nodes import RunShape
from tests.fakes.group import FakeClaimStore, FaultInjection, Launcher, Run, World
from tests.fakes.protocol import FREE, Costs, Launchers, run

# The parts of the group: plans in claims, patience with peers, messages that are said again.


NAMES = st.lists(st.sampled_from([f"n{number}" for number in range(12)]), min_size=1, max_size=12, unique=True)


def member(name: str) -> Member:
    return Member(name, "10.0.0.1", 1)


@given(names=NAMES, at_work=st.integers(0, 12), keep=st.integers(0, 3))
def test_a_plan_is_the_same_once_it_was_claimed(names: list[str], at_work: int, keep: int) -> None:
    """The readers of a claim have the plan of its author."""
    sizes = {name: place for place, name in enumerate(names, 1)}
    plan = Plan(7, names[0], tuple(names[:at_work]), tuple(map(member, names)), sizes, {"keep": keep})
    assert Plan.from_json(7, json.loads(json.dumps(plan.to_json()))) == plan
    assert set(plan.spares) == set(names[at_work:])
    assert plan.generation == (keep or 7)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": ["n9"]},
        {"slots": None},
        {"sizes": {}},
        {"sizes": {"n1": "many"}},
        {"payload": []},
        {"members": ["n1"]},
    ],
)
def test_what_is_no_plan_is_refused(change: dict[str, object]) -> None:
    """Slots that nobody fills, sizes that are none: nobody can follow such a claim."""
    raw = Plan(1, "n1", ("n1",), (member("n1"),), {"n1": 8}).to_json()
    assert Plan.from_json(1, raw).slots == ("n1",)
    with pytest.raises((KeyError, TypeError, ValueError)):
        Plan.from_json(1, {**raw, **change})


def test_patience_grows_with_delay_and_not_with_the_usual_interval() -> None:
    """One that answers late gets more time, up to a bound; one that is merely asked rarely gets no more."""
    rare, late, very_late = (Peer(Member(name, "10.0.0.1", 1), 0.0) for name in "abc")
    now = 0.0
    for _ in range(20):
        now += 0.8
        rare.hear(now, 0.8)
    late.hear(1.7, 0.2)
    very_late.hear(60.0, 0.2)
    assert rare.silence(now + 2.1, 2.0) is not None
    assert late.silence(1.7 + 4.0, 2.0) is None
    assert late.silence(1.7 + 5.0, 2.0) is not None
    assert very_late.silence(60.0 + 2.0 * MOST_PATIENCE + 0.1, 2.0) is not None


@pytest.mark.parametrize(
    ("some", "part"), [("abc", Quorum.MAJORITY), ("ab", Quorum.HALF), ("a", Quorum.MINORITY), ("axyz", Quorum.MINORITY)]
)
def test_a_quorum(some: str, part: Quorum) -> None:
    """Those that do not belong to it do not count."""
    assert quorum(some, "abcd") is part


@given(st.lists(st.integers(0, 2), max_size=40))
def test_what_is_said_is_heard_once_and_in_order(arrivals: list[int]) -> None:
    """However often it is sent, whatever is lost, and if somebody else has heard the first of it."""
    outbox, inbox = Outbox(), Inbox()
    for number in range(1, 6):
        outbox.add({"n": number})
    outbox.confirm(2)
    heard = []
    for choice in (*arrivals, 0):
        for envelope in list(outbox.unconfirmed())[choice:]:
            body = inbox.take(*envelope)
            heard += [] if body is None else [body["n"]]
    assert heard == [3, 4, 5]


@pytest.mark.parametrize(
    "message",
    [
        SeekReply(3, 8, member("n1"), fresh=True, incarnation="n1-7"),
        HeartbeatReply(3, 8, "n1-7", Ready(29_500, 7, None), 4, 5),
        MemberList(3, 1, (member("n1"), member("n2"))),
        MemberChanges(3, 2, (member("n3"),), ("n1",)),
    ],
)
def test_messages_arrive_as_they_were_sent(message: object) -> None:
    """Through JSON."""
    codec = Codec(MESSAGES)
    assert codec.decode(json.loads(json.dumps(codec.encode(message)))) == message


def test_a_message_of_a_version_with_fewer_fields_is_understood() -> None:
    """What it does not say has its default."""
    raw = Codec(MESSAGES).encode(HeartbeatReply(3, 8, "n1-7"))
    del raw["ready"], raw["orders"], raw["roster"]
    assert Codec(MESSAGES).decode(raw) == HeartbeatReply(3, 8, "n1-7")


@pytest.mark.parametrize(("answers", "most"), [((), 200), (("n0000",), 50), (("n0000", "n0001", "n0002"), 50)])
def test_of_many_launchers_each_asks_few(answers: tuple[str, ...], most: int) -> None:
    """A thousand that ask a thousand get no answer; the first whose turn comes knows all that ask it."""
    others = {f"n{number:04d}": member(f"n{number:04d}") for number in range(1024)}
    order = ("n0000", "own", *others)
    view = ElectionView("own", order, others, (), "", True, False, 0.0, lambda: True, lambda: False)
    sent: list[str] = []
    election = Election(0.0)
    for tick in range(100):
        now, before = 0.1 * tick, len(sent)
        election.ask(now, view, others, lambda to, _: sent.append(to.name), Seek(0, 8))
        for name in {*answers}.intersection(sent[before:]):
            election.note(others[name], SeekReply(0, 8), now)
    assert len(sent) < most
    assert answers or "n0064" in sent


@pytest.mark.parametrize("launchers", [256, 4096])
def test_a_claim_waits_for_those_who_answer_the_next_questions(launchers: int) -> None:
    """Many ask in step and less often: a majority that answered one round is not all that are there."""
    others = {f"n{number:04d}": member(f"n{number:04d}") for number in range(launchers)}
    order = ("own", *others)
    view = ElectionView("own", order, {**others, "own": member("own")}, (), "", True, False, 0.0, bool, bool)
    election, names, sent_at = Election(0.0), list(others), set[float]()
    for tick in range(20):
        now = 0.05 * tick
        election.ask(now, view, others, lambda to, _, now=now: sent_at.add(now), Seek(0, 8))
    next_round = sorted(sent_at)[1]
    for name in names[: launchers * 2 // 3]:
        election.note(others[name], SeekReply(0, 8), 0.0)
    assert not election.should_claim(0.0, view, 1.5)
    assert not election.should_claim(next_round, view, 1.5)
    for name in names[launchers * 2 // 3 :]:
        election.note(others[name], SeekReply(0, 8), next_round)
    assert election.should_claim(next_round, view, 1.5)


class Others:
    """Whom a leader speaks to: what each has heard of its orders, and what the leader has found."""

    def __init__(self) -> None:
        self.heard: dict[str, list[Body]] = {"n2": [], "n3": []}
        self._inboxes = {name: Inbox() for name in self.heard}
        self.leader = FollowerTracker(member("n1"), 1, self._send, 2.0)

    def _send(self, target: Member, message: Message) -> None:
        body = self._inboxes[target.name].take(*astuple(message)) if isinstance(message, Broadcast) else None
        if body is not None:
            self.heard[target.name].append(body)

    def answer(self, *names: str, now: float) -> None:
        for name in names:
            self.leader.handle_reply(
                member(name), HeartbeatReply(1, 1, f"{name}-1", broadcasts=self._inboxes[name].heard), now
            )


@pytest.mark.parametrize("how", ["lost", "stepped down"])
def test_orders_are_heard_by_who_has_not_noticed_that_it_was_lost(how: str) -> None:
    """It stood still, or the leader did; what the leader then begins to say is not what was said before."""
    others = Others()
    others.answer("n2", "n3", now=0.0)
    others.leader.broadcast({"say": 1})
    if how == "lost":
        others.leader.drop("n2", 3.0)
    else:
        others.leader.begin([(member("n2"), 1, "n2-1"), (member("n3"), 1, "n3-1")], 3.0)
    others.answer("n2", "n3", now=3.0)
    others.leader.broadcast({"say": 2})
    assert others.heard == {name: [{"say": 1}, {"say": 2}] for name in ("n2", "n3")}


def test_who_has_not_confirmed_the_members_is_told_the_changes_again() -> None:
    """Not all of thousands: what has changed since the claim."""
    sent: list[tuple[str, Message]] = []
    leader = FollowerTracker(member("n1"), 1, lambda target, message: sent.append((target.name, message)), 2.0)
    leader.begin([(member("n2"), 1, "n2-1"), (member("n3"), 1, "n3-1")], 0.0)
    names = ("n1", "n2", "n3")
    leader.claimed(Plan(1, "n1", names, tuple(map(member, names)), dict.fromkeys(names, 1)), 0.0)
    leader.tick(0.5)
    leader.handle_reply(member("n4"), HeartbeatReply(1, 1, "n4-1"), 1.0)
    leader.tick(1.5)
    news = MemberChanges(1, 1, (member("n4"),), ())
    assert [to for to, message in sent if message == news] == ["n2", "n3", "n4"]
    sent.clear()
    leader.handle_reply(member("n2"), HeartbeatReply(1, 1, "n2-1", members_version=1), 3.0)
    leader.handle_reply(member("n3"), HeartbeatReply(1, 1, "n3-1"), 3.0)
    assert sent == [("n3", news)]


# Random faults, and proof that the invariant checker can fail.


@pytest.mark.parametrize("seed", range(200))
def test_random_episodes_come_to_rest(seed: int) -> None:
    """Loss, cuts in one and both directions, pauses, kills, restarts, stalls, stale reads, damaged claims: one run."""
    episode(seed, 8)


def episode(seed: int, faults: int) -> int:
    """Play one; returns the number of events."""
    launchers = 1 + seed % 8
    least = 1 + seed // 8 % launchers
    most = least + seed // 64 % (launchers - least + 1)
    trouble = FaultInjection(seed, launchers, least, most)
    trouble.go(faults)
    return trouble.world.events


class TwoWin(FakeClaimStore):
    """A file system on which every claim succeeds."""

    def wins(self, claim: Claim) -> bool:
        return True


class NeverNews(FakeClaimStore):
    """A folder that shows for ever what it showed at first."""

    def seen(self) -> Claim | None:
        if not hasattr(self, "_first") or self._first is None:
            self._first = super().seen()
        return self._first


class Deaf(Launcher):
    """A launcher that ends no ranks."""

    def prepare(self, plan: Plan) -> None:
        pass


@pytest.mark.parametrize("folder", [FakeClaimStore, TwoWin])
def test_the_judge_sees_two_claims_of_one_number(folder: type[FakeClaimStore]) -> None:
    """On a file system that excludes nobody: a leader's claim is held up while the others, cut off, make theirs."""
    world = World(1)
    world.folder = folder
    run = Run(4, 1, 4, world=world).rests()
    world.stalled["n1"] = world.now + 10.0
    run["n4"].kill(noticed=True)
    world.cut(["n1"], ["n2", "n3"])
    with pytest.raises(AssertionError, match="two claims of one number") if folder is TwoWin else nullcontext():
        world.run(12.0)
        world.heal()
        run.rests()


def test_the_judge_sees_who_never_looks() -> None:
    """The leader of a side that was cut off, and passed over."""
    world = World(1)
    world.folder = NeverNews
    run = Run(3, 1, 3, world=world)
    world.until(run.judge.at_rest)
    world.folder = FakeClaimStore
    for name in ("n2", "n3"):
        run[name].kill()
        run.begin(name)
    world.cut(["n1"], ["n2", "n3"])
    with pytest.raises(AssertionError, match="for good"):
        world.run(60.0)


def test_the_judge_sees_ranks_that_are_not_ended() -> None:
    """A launcher that knows of the later claim and does nothing."""
    run = Run(2, 1, 2).rests()
    Deaf(run.world, "n3", ("n1", "n2", "n3"), RunShape(1, 3, ("n1", "n2", "n3")))
    run["n3"].ranks = run["n2"].ranks
    with pytest.raises(AssertionError):
        run.world.run(10.0)


def test_the_judge_sees_who_leaves_a_healthy_run() -> None:
    """For no reason."""
    run = Run(2, 1, 2).rests()
    run["n2"].overtaken()
    with pytest.raises(AssertionError, match="n2 has left"):
        run.world.run(1.0)


def test_the_judge_sees_an_end_that_nobody_asked_for() -> None:
    """The run was healthy."""
    run = Run(2, 1, 2).rests()
    run["n1"].core.end(0, "done")
    with pytest.raises(AssertionError, match="has left"):
        run.world.run(2.0)


def test_the_judge_sees_a_generation_that_two_processes_began() -> None:
    """A launcher that was restarted takes up the ranks' place as if nothing had been."""
    run = Run(2, 1, 2).rests()
    ranks = run["n2"].ranks
    run["n2"].kill()
    run.begin("n2")
    run["n2"].ranks = ranks
    with pytest.raises(AssertionError, match="begun by two processes"):
        run.judge.look()


def test_the_judge_sees_a_run_that_does_not_go_on() -> None:
    """Its file server never comes back."""
    run = Run(2, 1, 2).rests()
    run["n2"].kill()
    run.world.stalled[""] = run.world.now + 600.0
    with pytest.raises(AssertionError, match="waited in vain"):
        run.rests()


# The protocol of many launchers in virtual time: they agree, and what the leader does grows no faster than they do.


Figures = dict[str, Any]

BUSY = Costs(encode_s=1e-5, send_s=1e-5, receive_s=2e-5, connect_s=2e-4)

FEW, MANY = 64, 256

PHASES = ("start", "quiet", "node_lost", "spare_lost", "leader_lost")


@pytest.fixture(scope="module")
def few() -> Figures:
    """What 64 launchers do."""
    return run(FEW, costs=BUSY)


@pytest.fixture(scope="module")
def many() -> Figures:
    """What 256 do."""
    return run(MANY, costs=BUSY)


@pytest.mark.parametrize("phase", PHASES)
def test_what_the_leader_sends_and_hears_grows_no_faster_than_the_run(few: Figures, many: Figures, phase: str) -> None:
    """Four times the launchers, at most four times the messages and bytes, and a little for what is fixed."""
    for what in ("sent", "received", "messages_per_s", "kb_per_s"):
        assert many[phase][what] <= 1.15 * MANY / FEW * few[phase][what], (phase, what)


def test_a_spare_that_goes_costs_no_list_of_all_members(few: Figures, many: Figures) -> None:
    """The list would have been sixteen times as many bytes for four times the launchers."""
    more = [figures["spare_lost"]["kb_per_s"] - figures["quiet"]["kb_per_s"] for figures in (few, many)]
    assert more[1] < 1.5 * MANY / FEW * max(more[0], 1.0)
    assert many["spare_lost"]["sent"] > many["quiet"]["sent"]


def test_all_agree_soon(few: Figures, many: Figures) -> None:
    """In virtual time: after a loss within the node's silence and a little."""
    for figures in (few, many):
        assert figures["start"]["seconds"] < 3
        assert figures["node_lost"]["seconds"] < 3
        assert figures["leader_lost"]["seconds"] < 4


def test_all_know_who_is_there_after_a_spare_has_gone() -> None:
    """By the changes alone: a successor would wait for nobody who has gone."""
    world = Launchers(FEW, 2)
    world.until_agreed()
    gone = world.alive[-1].name
    world.lose(gone)
    world.pass_time(5.0)
    assert {frozenset(one.members) for one in world.alive} == {frozenset(world.members) - {gone}}


def test_a_leader_that_is_busy_is_late() -> None:
    """The thread of a launcher does one thing at a time."""
    slow = Launchers(FEW, 2, replace(BUSY, receive_s=2e-3)).until_agreed()
    assert slow > Launchers(FEW, 2, FREE).until_agreed() + 0.05


def test_launchers_that_cannot_agree_are_said_to() -> None:
    """Without enough nodes for the run there is no generation."""
    world = Launchers(16)
    world.lose("n00003")
    with pytest.raises(TimeoutError, match="15 launchers agree on no generation within 5 s"):
        world.until_agreed(limit_s=5.0)
