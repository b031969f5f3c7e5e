"""The run's folder as a launcher sees it: when it is read, and that one claim at a time is under way."""

from __future__ import annotations

from itertools import pairwise

import pytest

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import (
    CLAIM_RETRY_S,
    MANY,
    POLL_S,
    REPOLL_S,
    TELLING_S,
    ClaimWriter,
    StorePoller,
    StoreRead,
)
from opsd.launch.claims.group import CUT_OFF_S


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
