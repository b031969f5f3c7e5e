"""A launcher without a leader: who else is there, and which of them is to claim the next generation, and when.

None of this is about safety, which the claims see to: it is so that most launchers go on soon, and the others do not
get in their way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from opsd.launch.claims.messages import Message, Near, Seek
from opsd.launch.claims.peers import Share, share
from opsd.launch.io.protocol import Member

SEEK_S = 0.2
ASK_AGAIN_S = 0.5
"""Who has answered is not asked again before this: the first in order hears of all others."""
NEAR_S = 1.5
"""For so long an answer counts."""
GATHER_S = 0.4
"""How long those that are left of a generation wait for each other once there are enough of them."""
RESUME_S = 3.0
"""How long a leader that leads on waits for all who were there: their ranks may run, and nothing presses."""
SETTLE_S = 2.0
"""The same at the beginning of a run, when all that are expected may yet come."""
STAGGER_S = 0.5
"""By so much later each next launcher claims, should the one before it not do so."""
TURN_S = 3.0
LEASE_S = 4.0
"""A side with half of the launchers or fewer waits so long, and until the lease was not renewed for so long."""
LAST_S = 30.0
"""The same for a few that could not even run a generation: nobody else will, and the run ends, to be started again.
And at the beginning for half of those expected or fewer, if they are enough: the others have not come."""
GROWING_S = 2.0
"""For up to so much longer, while others still come: of a thousand not all have answered at once."""
MANY = 64
"""Of more launchers than this each asks a few first, and more rarely, so that all of them together do not drown those
whose turn comes first. These hear of everybody all the same: whoever is asked asks back."""
SLOWEST = 3.0
"""Times ``SEEK_S``: still often enough for an answer to count until the next."""
FIRST = 2
"""So many are asked at first; twice as many in each round in which nobody has answered whose turn comes before …"""
MORE_ROUNDS = 15
"""… and after so many rounds if somebody has."""
FOUND_S = 6.0
"""Somebody who has answered within this is slow, perhaps, and not gone: no reason to ask more of the others."""
SILENT_AT_ONCE, MOST_PATIENCE_S = 6, 4.0
"""So many in a round, at most, that have not answered; each of them is asked half as often every time."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another launcher that has answered at ``heard``."""

    member: Member
    heard: float
    size: int
    fresh: bool
    incarnation: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decision depends on: ``order`` says whose turn comes first, ``body`` of whom half or more are wanted.

    ``settled``: there is a generation to go on from; ``fresh``: this launcher had no part in it. ``leader`` is the
    maker of the newest claim. ``enough``: whether those who are there could run a generation; ``stuck``: whether the
    ranks of this node make no progress.
    """

    own: str
    order: Sequence[str]
    body: Collection[str]
    gone: Collection[str]
    leader: str
    settled: bool
    fresh: bool
    lease_idle_s: float
    enough: Callable[[], bool]
    stuck: Callable[[], bool]

    @property
    def place(self) -> int:
        """How many come before this launcher."""
        return self.order.index(self.own) if self.own in self.order else len(self.order)


class Seeking:
    """From the moment at which there is no leader until there is one."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._near: dict[str, Neighbour] = {}
        self._vouched = -1e9
        self._enough_since: float | None = None
        self._grew = now
        """When somebody new has answered last."""
        self._ask_at = -1e9
        self._rounds = 0.0
        self._due: dict[str, float] = {}
        """When a silent one is asked again …"""
        self._patience: dict[str, float] = {}
        """… and how long it was given to answer."""

    def forgive(self, stall_s: float) -> None:
        """This launcher was held up for so long."""
        self.since += stall_s
        self._vouched += stall_s

    def ask(
        self, now: float, situation: Situation, known: Mapping[str, Member],
        send: Callable[[Member, Message], None], message: Seek,
    ) -> None:  # fmt: skip
        """Ask the others, in the order in which it is their turn to lead, some times a second.

        Of very many only the first few are asked, unless these do not answer: nobody has to ask everybody, since those
        who are asked ask back.
        """
        if now < self._ask_at:
            return
        left = {*situation.gone} - {situation.leader} | {situation.own}  # the leader does not look for others
        names = [name for name in dict.fromkeys((*situation.order, *known)) if name in known and name not in left]
        ahead = sum(name not in situation.gone for name in situation.order[: situation.place])
        self._ask_at = now + SEEK_S * min(SLOWEST, max(1.0, len(names) / MANY))
        for name in names if len(names) <= MANY else self._few(now, names, ahead):
            if not self.knows(name, now):
                send(known[name], message)

    def _few(self, now: float, order: Sequence[str], ahead: int) -> Sequence[str]:
        """The first that answer, and some of the silent ones, more from round to round."""
        near = self.near(now)
        asked = order[: FIRST << min(int(self._rounds), 20)]
        found = any(now - self._near[name].heard < FOUND_S for name in order[:ahead] if name in self._near)
        self._rounds += 1 / MORE_ROUNDS if found else 1.0
        due = [name for name in asked if name not in near and now >= self._due.get(name, now)]
        silent = sorted(due, key=lambda name: self._patience.get(name, 0.0))[:SILENT_AT_ONCE]
        for name in silent:
            self._patience[name] = min(2 * self._patience.get(name, SEEK_S), MOST_PATIENCE_S)
            self._due[name] = now + self._patience[name]
        return [name for name in asked if name in near][:FIRST] + silent

    def note(self, sender: Member, answer: Near, now: float) -> None:
        """Somebody has answered."""
        if sender.name not in self._near:
            self._grew = now
        self._near[sender.name] = Neighbour(sender, now, answer.size, answer.fresh, answer.incarnation)

    def knows(self, name: str, now: float) -> bool:
        """Whether this one has answered just now."""
        one = self._near.get(name)
        return one is not None and now - one.heard < ASK_AGAIN_S

    def vouch(self, now: float) -> None:
        """Somebody hears the leader."""
        self._vouched = now

    def drop(self, name: str) -> None:
        """This one is gone."""
        self._near.pop(name, None)

    def near(self, now: float) -> dict[str, Neighbour]:
        """Those that are there."""
        return {name: one for name, one in self._near.items() if now - one.heard <= NEAR_S}

    def to_lead(self, now: float, situation: Situation, timeout_s: float) -> bool:
        """Whether this launcher is to claim the next generation now."""
        if now - self._vouched < timeout_s:
            self._enough_since = None
            return False
        near = self.near(now)
        here = {situation.own, *near}
        if not self._may(here, situation, now):
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        ahead = sum(name in near for name in situation.order[: situation.place])
        waited = now - max(self._enough_since, min(self._grew, self._enough_since + GROWING_S))
        return waited >= self._pause_s(here, situation, near, now) + ahead * STAGGER_S

    def _may(self, here: Collection[str], situation: Situation, now: float) -> bool:
        body = set(situation.body) - set(situation.gone)
        part = share(here, body)
        if part is Share.MAJORITY or (part is Share.HALF and situation.leader == situation.own):
            return situation.settled or situation.enough()
        if not situation.settled:
            return situation.enough() and now - self.since >= LAST_S
        can = part is Share.HALF or situation.enough()
        if not can and not situation.stuck():
            return False
        limit_s, idle_s = (TURN_S, LEASE_S) if can else (LAST_S, LAST_S)
        own = situation.leader == situation.own
        return now - self.since >= limit_s and (own or situation.lease_idle_s >= idle_s)

    def _pause_s(self, here: Collection[str], situation: Situation, near: Mapping[str, Neighbour], now: float) -> float:
        expected = set(situation.body) - set(situation.gone)
        if situation.settled:
            expected -= {situation.leader}
        back = now - self.since > TURN_S and situation.lease_idle_s < LEASE_S  # an outage that ends: the leader lives
        if expected <= set(here) and not (back and situation.settled and situation.leader not in here):
            return 0.0
        if situation.leader == situation.own or back:
            return RESUME_S
        at_work = situation.settled and not (situation.fresh and all(one.fresh for one in near.values()))
        return GATHER_S if at_work else SETTLE_S
