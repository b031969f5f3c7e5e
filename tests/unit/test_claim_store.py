"""The run's folder as a launcher sees it: when it is read, what changes, and when it is gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from queue import Queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.checkpoints import claims
from opsd.checkpoints.claims import FOLDER, Claim, newest_number
from opsd.launch.claims.claim_store import (
    CLAIM_RETRY_S,
    MANY,
    POLL_S,
    REPOLL_S,
    TELLING_S,
    ClaimWriter,
    Plan,
    StorePoller,
    StoreRead,
    listening,
)
from opsd.launch.claims.generation_state import MOST_CHANGES, changes_of, claim_from
from opsd.launch.claims.group import CUT_OFF_S
from opsd.launch.claims.messages import MESSAGES, Claimed, Message
from opsd.launch.claims.tcp_group import FolderClaimStore
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import Codec, Member
from tests.fakes.protocol import Launchers

# The run's folder as a launcher sees it: when it is read, and that one claim at a time is under way.


class Asked:
    """A folder that notes what it is asked."""

    error = None

    def __init__(self) -> None:
        self.fulls: list[bool] = []
        self.claims: list[Claim] = []

    def read(self, *, full: bool) -> None:
        self.fulls.append(full)

    def told(self, claim: Claim) -> None: ...

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)

    def renew(self, number: int, beat: int) -> None: ...


def seen(number: int, beat: int = 0) -> StoreRead:
    return StoreRead((number, beat), Claim(number, "run", "n1-1"), True)


def test_what_waits_for_a_look_waits_for_one_that_began_later() -> None:
    """One that was under way may have read the folder before."""
    folder = Asked()
    poller = StorePoller(folder, 0.0)
    under_way, later = poller.request(0.0), poller.request(0.1)
    poller.answered(0.2, seen(1), 1)
    assert poller.confirmed == under_way < later
    poller.tick(0.2, 3)
    poller.answered(0.3, seen(1), 1)
    assert (poller.confirmed, folder.fulls) == (later, [True, True])


def test_a_stale_look_is_repeated() -> None:
    """It came back with less than is known: what waits for a fresh one goes on waiting."""
    folder = Asked()
    poller = StorePoller(folder, 0.0)
    wanted = poller.request(0.0)
    poller.answered(0.1, seen(4), 5)
    assert poller.confirmed < wanted
    poller.tick(0.1 + REPOLL_S, 3)
    poller.answered(0.5, seen(5), 5)
    assert poller.confirmed >= wanted
    assert folder.fulls == [True, True]


def test_of_many_launchers_not_all_read_the_whole_folder_each_second() -> None:
    """The lease names the newest generation as well."""
    folder = Asked()
    poller = StorePoller(folder, 0.0)
    now, asked = 0.0, 0
    while now < 64 * POLL_S:
        poller.tick(now, 1024)
        if len(folder.fulls) > asked:
            asked += 1
            poller.answered(now, StoreRead((1, 1), None, False), 1)
        now += 0.1
    assert 12 <= len(folder.fulls) <= 20
    assert 3 <= sum(folder.fulls) <= 6


def test_without_a_leader_each_looks_often_among_any_number() -> None:
    """Ranks are ended if neither a leader nor the folder is heard for seconds: the folder must be asked within them."""
    folder = Asked()
    poller = StorePoller(folder, 0.0)
    read_at = []
    for tenth in range(300):
        now = tenth / 10
        poller.tick(now, 10_000, led=now < 5.0)
        if len(folder.fulls) > len(read_at):
            read_at.append(now)
            poller.answered(now, StoreRead((1, 1), None, False), 1)
    assert read_at[0] == 0.0
    assert read_at[1] == 5.0
    assert max(later - one for one, later in pairwise(read_at[1:])) <= CUT_OFF_S / 2


def test_a_lease_is_idle_only_as_far_as_it_was_seen() -> None:
    """While the folder does not answer, the leader is unknown."""
    poller = StorePoller(Asked(), 0.0)
    for now, beat in ((1.0, 1), (2.0, 2), (3.0, 2), (4.0, 2)):
        poller.answered(now, seen(1, beat), 1)
    assert poller.lease_idle_s(4.5) == 2.0
    assert poller.lease_idle_s(9.0) == 0.0
    poller.answered(60.0, seen(1, 2), 1)
    assert poller.lease_idle_s(60.5) == 0.0


def test_a_look_on_request_does_not_make_many_launchers_look_again_soon() -> None:
    """All of them are asked at once when a generation begins; the next regular look is as rare as ever."""
    folder, many = Asked(), 64 * MANY
    poller = StorePoller(folder, 0.0)
    poller.tick(0.0, many)
    poller.answered(0.1, seen(1), 1)
    poller.request(1.0)
    poller.answered(1.1, seen(1), 1)
    for second in range(2, 60):
        poller.tick(float(second), many)
        poller.answered(second + 0.1, StoreRead((1, second), None, False), 1)
    assert folder.fulls.count(True) == 2


@pytest.mark.parametrize(("launchers", "at_once"), [(MANY, True), (MANY + 1, False)])
def test_a_claim_of_which_others_know_is_being_told(launchers: int, at_once: bool) -> None:
    """Many do not read it meanwhile, but do if the telling does not come."""
    folder = Asked()
    poller = StorePoller(folder, 0.0)
    poller.tick(0.0, launchers)
    poller.answered(0.1, seen(1), 1)
    poller.expect(0.2, launchers)
    poller.expect(0.3, launchers)
    assert (len(folder.fulls) == 2) is at_once
    poller.answered(0.3, seen(2), 1) if at_once else poller.tick(0.2 + TELLING_S, launchers)
    assert folder.fulls[:2] == [True, True]


class Wishes:
    """What a launcher wants to claim; generation 4 is the newest that it knows."""

    def __init__(self) -> None:
        self.folder = Asked()
        self.writer = ClaimWriter(self.folder, lambda plan: Claim(5, "run", "n1-1", plan=plan))

    def request(self, wish: str) -> None:
        self.writer.request({"wish": wish})
        self.writer.tick(0.0)

    @property
    def made(self) -> list[str]:
        return [claim.plan["wish"] for claim in self.folder.claims]


def test_one_claim_is_under_way_at_a_time() -> None:
    """The newest wish follows it, those in between do not matter any more."""
    wishes = Wishes()
    for wish in "abc":
        wishes.request(wish)
    assert wishes.made == ["a"]
    wishes.writer.settled(1.0, True, 4)
    wishes.writer.tick(1.0)
    assert wishes.made == ["a", "c"]


def test_a_claim_of_which_nothing_is_known_is_made_again() -> None:
    """After a second, and unless it was found in the folder meanwhile, or is not wanted any more."""
    unknown, found, unwanted = Wishes(), Wishes(), Wishes()
    for wishes, newest in ((unknown, 4), (found, 5), (unwanted, 4)):
        wishes.request("a")
        if wishes is unwanted:
            wishes.writer.forget()
        wishes.writer.settled(1.0, None, newest)
        wishes.writer.tick(1.0)
        assert wishes.made == ["a"]
        wishes.writer.tick(1.0 + CLAIM_RETRY_S)
    assert [wishes.made for wishes in (unknown, found, unwanted)] == [["a", "a"], ["a"], ["a"]]


@pytest.mark.parametrize("mine", [False, None])
def test_a_newer_wish_outlives_the_failure_of_the_one_before(mine: bool | None) -> None:
    """Unless it turns out that somebody else leads."""
    wishes = Wishes()
    wishes.request("a")
    wishes.request("b")
    wishes.writer.settled(1.0, mine, 4)
    wishes.writer.tick(1.0 + CLAIM_RETRY_S)
    assert wishes.made == ["a", "b"]


def test_a_claim_that_lands_late_is_told_from_what_is_wanted_now() -> None:
    """It was made when this launcher led before; what follows it will be what is wanted."""
    wishes = Wishes()
    wishes.request("a")
    assert wishes.writer.answers({"wish": "a"})
    wishes.writer.forget()
    assert not wishes.writer.answers({"wish": "a"})
    wishes.request("b")
    assert wishes.writer.answers({"wish": "a"})


# Claims told by what they change: put together again they are the same, or else they are read from the folder.


NAMES = st.lists(st.sampled_from([f"n{number}" for number in range(12)]), min_size=1, max_size=12, unique=True)

CODEC = Codec(MESSAGES)

MANY_CLAIMS = 32


def plan_of(number: int, names: list[str], at_work: int, again: Collection[str] = ()) -> Plan:
    """Launchers that were started ``again`` listen at another port."""
    members = tuple(Member(name, f"10.0.0.{name[1:]}", 1 + (name in again)) for name in sorted(names))
    sizes = {name: 8 + (name == "n3") for name in sorted(names)}
    return Plan(number, names[0], tuple(names[:at_work]), members, sizes, {"keep": 0, "restarts": number})


def claim_of(plan: Plan) -> Claim:
    return Claim(plan.number, "start", "n0-1", plan=json.loads(json.dumps(plan.to_json())), keeps=0)


@given(before=NAMES, after=NAMES, at_work=st.integers(0, 12), again=NAMES)
def test_a_claim_that_was_told_is_the_one_that_was_made(
    before: list[str], after: list[str], at_work: int, again: list[str]
) -> None:
    """Whoever has come, gone and come again, and in whatever order nodes have slots."""
    base, plan = plan_of(4, before, at_work), plan_of(5, after, at_work, again)
    message = changes_of(claim_of(plan), plan, base, 8)
    assert message is not None
    heard = CODEC.decode(json.loads(json.dumps(CODEC.encode(message))))
    assert claim_from(heard, base, plan.leader, "start") == claim_of(plan)


@pytest.mark.parametrize(
    "changed",
    [{"base": 3}, {"mark": "0"}, {"slots": 10**9}, {"slots": -1}, {"left": ("n2",)}, {"payload": {"keep": 4}}],
    ids=str,
)
def test_what_does_not_fit_is_not_believed(changed: dict[str, object]) -> None:
    """It is read instead."""
    base, plan = plan_of(4, ["n0", "n1", "n2"], 2), plan_of(5, ["n0", "n2", "n3"], 2)
    message = changes_of(claim_of(plan), plan, base, 8)
    assert message is not None
    assert claim_from(message, base, "n0", "start") is not None
    assert claim_from(replace(message, **changed), base, "n0", "start") is None  # type: ignore[arg-type]
    assert claim_from(message, base, "n2", "start") is None


def test_much_that_changes_is_not_told() -> None:
    """The leader would send all of it to all."""
    plan = plan_of(5, [f"n{number}" for number in range(MOST_CHANGES + 2)], 2)
    assert changes_of(claim_of(plan), plan, plan_of(4, ["n0"], 1), 8) is None


def test_the_loss_of_128_nodes_is_told_in_few_bytes() -> None:
    """Racks that lose their power: of a claim of 4,096 launchers each would read fifty times as much."""
    names = [f"n{number:05d}" for number in range(4096)]
    base = plan_of(4, names, 3968)
    lost = set(base.slots[31::31][:128])
    spares = iter(names[3968:])
    there = plan_of(5, [name for name in names if name not in lost], 0)
    plan = replace(there, slots=tuple(next(spares) if name in lost else name for name in base.slots))
    message = changes_of(claim_of(plan), plan, base, 8)
    assert message is not None
    told = len(json.dumps(CODEC.encode(message)))
    assert 50 * told < len(json.dumps(claim_of(plan).plan))
    assert claim_from(message, base, plan.leader, "start") == claim_of(plan)


@pytest.mark.parametrize("how", ["read", "told"])
def test_a_claim_says_where_its_leader_listens(how: str) -> None:
    """A launcher that was given names alone calls the leader without a name service; who leads next is said anew."""
    base = plan_of(4, ["n0", "n1", "n2"], 2)
    plan = replace(plan_of(5, ["n1", "n2"], 2), members=listening(base.members[1:], "n1", "192.0.2.7"))
    claim: Claim | None = claim_of(plan)
    if how == "told":
        told = changes_of(claim_of(plan), plan, base, 8)
        assert told is not None
        claim = claim_from(CODEC.decode(json.loads(json.dumps(CODEC.encode(told)))), base, "n1", "start")
    assert claim is not None
    members = Plan.from_json(5, claim.plan).members
    assert [(one.name, one.host) for one in members] == [("n1", "192.0.2.7"), ("n2", "10.0.0.2")]


def test_a_claim_of_a_version_that_does_not_say_where_its_leader_listens() -> None:
    """Its address is the one that is listed."""
    raw = claim_of(plan_of(4, ["n1", "n2"], 2)).plan
    members = Plan.from_json(4, {key: each for key, each in raw.items() if key != "head_listens"}).members
    assert [one.host for one in members] == ["10.0.0.1", "10.0.0.2"]


def test_the_folder_says_which_claim_holds(tmp_path: Path) -> None:
    """A claim that was told counts once its file is there, and no longer than until the next one."""
    told = claims.Found(Claim(1, "run", "told"), None)
    assert claims.newest_unless(tmp_path, told) is None
    claims.create(tmp_path, Claim(1, "run", "n1-1"))
    found = claims.newest_unless(tmp_path, told)
    assert found is not None
    assert found.claim.launcher == "told"
    assert claims.newest_unless(tmp_path, found) is found
    claims.create(tmp_path, Claim(2, "run", "n2-1"))
    later = claims.newest_unless(tmp_path, found)
    assert later is not None
    assert later.claim.launcher == "n2-1"


class Untold(Launchers):
    """Launchers whose claims are not told."""

    def send(self, source: str, target: Member, message: Message) -> None:
        if not isinstance(message, Claimed):
            super().send(source, target, message)


@pytest.mark.parametrize(("kind", "readers"), [(Launchers, 0), (Untold, MANY_CLAIMS)])
def test_nobody_reads_what_was_told(kind: type[Launchers], readers: int) -> None:
    """After the loss of a node all but the leader would read the claim; they agree either way."""
    world = kind(MANY_CLAIMS, 2)
    world.until_agreed()
    world.pass_time(2.0)
    lost = world.claims[-1].plan["slots"][-1]
    world.lose(lost)
    world.until_agreed(without=[lost])
    assert world.bytes_read == readers * world.claim_bytes


class Late(Launchers):
    """One launcher and the successor of a lost leader do not hear each other until that has claimed."""

    late = ""
    newest = 0

    def send(self, source: str, target: Member, message: Message) -> None:
        if self.late not in (source, target.name) or len(self.claims) > self.newest:
            super().send(source, target, message)


def test_who_was_not_heard_in_time_is_told_when_it_asks() -> None:
    """It does not read the claim either."""
    world = Late(MANY_CLAIMS, 2)
    world.until_agreed()
    world.pass_time(2.0)
    leader = world.leader.name
    world.late, world.newest = world.claims[-1].plan["slots"][-1], len(world.claims)
    world.lose(leader)
    world.until_agreed(without=[leader])
    assert world.late not in world.claims[-1].plan["slots"]
    assert world.bytes_read == 0


# The run's folder as a launcher asks it: what takes its place, when a mount is gone, is not taken for it.


class Answers(Loop):
    """A loop that is turned by hand: each time until one thing that was done beside it is answered."""

    def __init__(self) -> None:
        super().__init__()
        self._done: Queue[Callable[[], None]] = Queue()

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self._done.put(callback)

    def turn(self) -> None:
        self._done.get(timeout=60)()


class AskedFolder:
    """A ``FolderClaimStore``, and what it has said."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self._looks: list[StoreRead | None] = []
        self._claims: list[bool | None] = []
        self._loop = Answers()
        self._folder = FolderClaimStore(path, self._loop, self._looks.append, self._claims.append, self.said.append)

    def read(self) -> StoreRead | None:
        self._folder.read(full=True)
        self._loop.turn()
        return self._looks.pop()

    def claim(self, number: int) -> bool | None:
        self._folder.claim(Claim(number, "run, job 1.0", "n1 7"))
        self._loop.turn()
        return self._claims.pop()


def away(path: Path) -> None:
    """The mount above is gone, and nothing lies below."""
    path.parent.rename(path.parent.with_name("real"))


def bare(path: Path) -> None:
    """The mount is gone, and an empty folder lies below."""
    path.rename(path.with_name("real"))
    path.mkdir()


@pytest.mark.parametrize("lose", [away, bare])
def test_nothing_is_claimed_where_the_mount_was(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    """Elsewhere others may claim the same number at that time: then both would go on, each with a claim of its own."""
    path = tmp_path / "mount" / "run"
    path.mkdir(parents=True)
    asked = AskedFolder(path)
    assert asked.read() is not None and asked.claim(1) is True
    lose(path)
    assert asked.read() is None
    assert asked.claim(2) is None
    assert newest_number(path) == 0
    assert "another folder than before, without generation 1" in asked.said[0]


def test_a_folder_that_is_mounted_again_is_known_by_its_claims(tmp_path: Path) -> None:
    """A server's folder may come back as another device: the claims in it say that it is the same."""
    path = tmp_path / "run"
    path.mkdir()
    asked = AskedFolder(path)
    assert asked.read() is not None and asked.claim(1) is True
    bare(path)
    assert asked.read() is None
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "real", path)
    found = asked.read()
    assert found is not None and found.claim is not None and found.claim.number == 1
    assert asked.claim(2) is True


def test_a_run_goes_on_in_a_folder_that_somebody_has_emptied(tmp_path: Path) -> None:
    """It is the same folder for all nodes, so the next claim excludes a second one as ever."""
    path = tmp_path / "run"
    path.mkdir()
    asked = AskedFolder(path)
    assert asked.read() is not None and asked.claim(1) is True
    shutil.rmtree(path / FOLDER)
    assert asked.read() is not None
    assert asked.claim(2) is True
