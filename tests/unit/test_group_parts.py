"""The parts of the group: plans in claims, patience with peers, messages that are said again."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.election import Election, ElectionView
from opsd.launch.claims.followers import FollowerTracker
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
from opsd.launch.claims.peers import MOST_PATIENCE, Inbox, Outbox, Peer, Quorum, quorum
from opsd.launch.io.protocol import Codec, Member

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
