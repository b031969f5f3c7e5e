"""The parts of the group: plans in claims, patience with peers, messages that are said again, looks at the folder."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.authority import CLAIM_AGAIN_S, LOOK_AGAIN_S, LOOK_S, Claiming, Look, Looks, Plan
from opsd.launch.claims.leading import Leading
from opsd.launch.claims.messages import MESSAGES, Body, Here, Message, Near, Order, Ready, Roster, Seek
from opsd.launch.claims.peers import MOST_PATIENCE, Inbox, Outbox, Peer, Share, share
from opsd.launch.claims.seeking import Seeking, Situation
from opsd.launch.io.protocol import Codec, Member

NAMES = st.lists(st.sampled_from([f"n{number}" for number in range(12)]), min_size=1, max_size=12, unique=True)


def member(name: str) -> Member:
    return Member(name, "10.0.0.1", 1)


@given(names=NAMES, at_work=st.integers(0, 12), keep=st.integers(0, 3))
def test_a_plan_is_the_same_once_it_was_claimed(names: list[str], at_work: int, keep: int) -> None:
    """Whoever reads the claim has the plan of the one that made it."""
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
    ("some", "part"), [("abc", Share.MAJORITY), ("ab", Share.HALF), ("a", Share.MINORITY), ("axyz", Share.MINORITY)]
)
def test_a_part_of_a_body(some: str, part: Share) -> None:
    """Those that do not belong to it do not count."""
    assert share(some, "abcd") is part


@given(st.lists(st.integers(0, 2), max_size=40))
def test_what_is_said_is_heard_once_and_in_order(arrivals: list[int]) -> None:
    """However often it is sent, whatever is lost, and if somebody else has heard the first of it."""
    outbox, inbox = Outbox(), Inbox()
    for number in range(1, 6):
        outbox.add({"n": number})
    outbox.confirm(2)
    heard = []
    for parcel in [parcel for choice in arrivals for parcel in list(outbox.again())[choice:]] + list(outbox.again()):
        body = inbox.take(*parcel)
        heard += [] if body is None else [body["n"]]
    assert heard == [3, 4, 5]


@pytest.mark.parametrize(
    "message",
    [
        Near(3, 8, member("n1"), fresh=True, incarnation="n1-7"),
        Here(3, 8, "n1-7", Ready(29_500, 7, None), 4, 5),
        Roster(3, 1, (member("n1"), member("n2"))),
    ],
)
def test_messages_arrive_as_they_were_sent(message: object) -> None:
    """Through JSON."""
    codec = Codec(MESSAGES)
    assert codec.decode(json.loads(json.dumps(codec.encode(message)))) == message


def test_a_message_of_a_version_with_fewer_fields_is_understood() -> None:
    """What it does not say has its default."""
    raw = Codec(MESSAGES).encode(Here(3, 8, "n1-7"))
    del raw["ready"], raw["orders"], raw["roster"]
    assert Codec(MESSAGES).decode(raw) == Here(3, 8, "n1-7")


class Asked:
    """A folder that notes what it is asked."""

    error = None

    def __init__(self) -> None:
        self.wholes: list[bool] = []
        self.claims: list[Claim] = []

    def look(self, *, whole: bool) -> None:
        self.wholes.append(whole)

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)

    def renew(self, number: int, beat: int) -> None: ...


def seen(number: int, beat: int = 0) -> Look:
    return Look((number, beat), Claim(number, "run", "n1-1"), True)


def test_what_waits_for_a_look_waits_for_one_that_began_later() -> None:
    """One that was under way may have read the folder before."""
    folder = Asked()
    looks = Looks(folder, 0.0)
    under_way, later = looks.want(0.0), looks.want(0.1)
    looks.answered(0.2, seen(1), 1)
    assert looks.confirmed == under_way < later
    looks.tick(0.2, 3)
    looks.answered(0.3, seen(1), 1)
    assert (looks.confirmed, folder.wholes) == (later, [True, True])


def test_a_stale_look_is_repeated() -> None:
    """It came back with less than is known: what waits for a fresh one goes on waiting."""
    folder = Asked()
    looks = Looks(folder, 0.0)
    wanted = looks.want(0.0)
    looks.answered(0.1, seen(4), 5)
    assert looks.confirmed < wanted
    looks.tick(0.1 + LOOK_AGAIN_S, 3)
    looks.answered(0.5, seen(5), 5)
    assert looks.confirmed >= wanted
    assert folder.wholes == [True, True]


def test_of_many_launchers_not_all_read_the_whole_folder_each_second() -> None:
    """The lease names the newest generation as well."""
    folder = Asked()
    looks = Looks(folder, 0.0)
    now, asked = 0.0, 0
    while now < 64 * LOOK_S:
        looks.tick(now, 1024)
        if len(folder.wholes) > asked:
            asked += 1
            looks.answered(now, Look((1, 1), None, False), 1)
        now += 0.1
    assert 12 <= len(folder.wholes) <= 20
    assert 3 <= sum(folder.wholes) <= 6


def test_a_lease_is_idle_only_as_far_as_it_was_seen() -> None:
    """While the folder does not answer nothing can be said of whoever leads."""
    looks = Looks(Asked(), 0.0)
    for now, beat in ((1.0, 1), (2.0, 2), (3.0, 2), (4.0, 2)):
        looks.answered(now, seen(1, beat), 1)
    assert looks.lease_idle_s(4.5) == 2.0
    assert looks.lease_idle_s(9.0) == 0.0
    looks.answered(60.0, seen(1, 2), 1)
    assert looks.lease_idle_s(60.5) == 0.0


@pytest.mark.parametrize(("answers", "most"), [((), 200), (("n0000",), 50), (("n0000", "n0001", "n0002"), 50)])
def test_of_many_launchers_each_asks_few(answers: tuple[str, ...], most: int) -> None:
    """A thousand that ask a thousand hear nobody; whose turn comes first hears of all that ask it."""
    others = {f"n{number:04d}": member(f"n{number:04d}") for number in range(1024)}
    order = ("n0000", "own", *others)
    situation = Situation("own", order, others, (), "", True, False, 0.0, lambda: True, lambda: False)
    sent: list[str] = []
    seeking = Seeking(0.0)
    for tick in range(100):
        now, before = 0.1 * tick, len(sent)
        seeking.ask(now, situation, others, lambda to, _: sent.append(to.name), Seek(0, 8))
        for name in {*answers}.intersection(sent[before:]):
            seeking.note(others[name], Near(0, 8), now)
    assert len(sent) < most
    assert answers or "n0064" in sent


class Wishes:
    """What a launcher wants to claim; generation 4 is the newest that it knows."""

    def __init__(self) -> None:
        self.folder = Asked()
        self.claiming = Claiming(self.folder, lambda plan: Claim(5, "run", "n1-1", plan=plan))

    def want(self, wish: str) -> None:
        self.claiming.want({"wish": wish})
        self.claiming.tick(0.0)

    @property
    def made(self) -> list[str]:
        return [claim.plan["wish"] for claim in self.folder.claims]


def test_one_claim_is_under_way_at_a_time() -> None:
    """The newest wish follows it, those in between do not matter any more."""
    wishes = Wishes()
    for wish in "abc":
        wishes.want(wish)
    assert wishes.made == ["a"]
    wishes.claiming.settled(1.0, True, 4)
    wishes.claiming.tick(1.0)
    assert wishes.made == ["a", "c"]


def test_a_claim_of_which_nothing_is_known_is_made_again() -> None:
    """After a second, and unless it was found in the folder meanwhile, or is not wanted any more."""
    unknown, found, unwanted = Wishes(), Wishes(), Wishes()
    for wishes, newest in ((unknown, 4), (found, 5), (unwanted, 4)):
        wishes.want("a")
        if wishes is unwanted:
            wishes.claiming.forget()
        wishes.claiming.settled(1.0, None, newest)
        wishes.claiming.tick(1.0)
        assert wishes.made == ["a"]
        wishes.claiming.tick(1.0 + CLAIM_AGAIN_S)
    assert [wishes.made for wishes in (unknown, found, unwanted)] == [["a", "a"], ["a"], ["a"]]


@pytest.mark.parametrize("mine", [False, None])
def test_a_newer_wish_outlives_the_failure_of_the_one_before(mine: bool | None) -> None:
    """Unless it turns out that somebody else leads."""
    wishes = Wishes()
    wishes.want("a")
    wishes.want("b")
    wishes.claiming.settled(1.0, mine, 4)
    wishes.claiming.tick(1.0 + CLAIM_AGAIN_S)
    assert wishes.made == ["a", "b"]


def test_a_claim_that_lands_late_is_told_from_what_is_wanted_now() -> None:
    """It was made when this launcher led before; what follows it will be what is wanted."""
    wishes = Wishes()
    wishes.want("a")
    assert wishes.claiming.answers({"wish": "a"})
    wishes.claiming.forget()
    assert not wishes.claiming.answers({"wish": "a"})
    wishes.want("b")
    assert wishes.claiming.answers({"wish": "a"})


class Others:
    """Whom a leader speaks to: what each has heard of its orders, and what the leader has found."""

    def __init__(self) -> None:
        self.heard: dict[str, list[Body]] = {"n2": [], "n3": []}
        self._inboxes = {name: Inbox() for name in self.heard}
        self.leader = Leading(member("n1"), 1, self._send, 2.0)

    def _send(self, target: Member, message: Message) -> None:
        body = self._inboxes[target.name].take(*astuple(message)) if isinstance(message, Order) else None
        if body is not None:
            self.heard[target.name].append(body)

    def answer(self, *names: str, now: float) -> None:
        for name in names:
            self.leader.here(member(name), Here(1, 1, f"{name}-1", orders=self._inboxes[name].heard), now)


@pytest.mark.parametrize("how", ["lost", "stepped down"])
def test_orders_are_heard_by_who_has_not_noticed_that_it_was_lost(how: str) -> None:
    """It stood still, or the leader did; what the leader then begins to say is not what was said before."""
    others = Others()
    others.answer("n2", "n3", now=0.0)
    others.leader.order({"say": 1})
    if how == "lost":
        others.leader.lose("n2", 3.0)
    else:
        others.leader.begin([(member("n2"), 1, "n2-1"), (member("n3"), 1, "n3-1")], 3.0)
    others.answer("n2", "n3", now=3.0)
    others.leader.order({"say": 2})
    assert others.heard == {name: [{"say": 1}, {"say": 2}] for name in ("n2", "n3")}
