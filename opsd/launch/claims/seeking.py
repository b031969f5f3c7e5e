"""A launcher without a head: who else is there, and which of them is to claim the next generation, and when.

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
NEAR_S = 1.5
"""For so long an answer counts."""
GATHER_S = 0.4
"""How long those that are left of a generation wait for each other once there are enough of them."""
RESUME_S = 3.0
"""How long a head that leads on waits for all who were there: their ranks may run, and nothing presses."""
SETTLE_S = 2.0
"""The same at the beginning of a run, when all that are expected may yet come."""
STAGGER_S = 0.5
"""By so much later each next launcher claims, should the one before it not do so."""
TURN_S = 3.0
LEASE_S = 4.0
"""A side with half of the launchers or fewer waits so long, and until the lease was not renewed for so long."""
LAST_S = 30.0
"""The same for a few that could not even run a generation: nobody else will, and the run ends, to be started again."""
ALL_AT_ONCE = 64
"""Of more launchers than this a few are asked first, those whose turn comes first."""
FEW_ROUNDS, MORE_ROUNDS = 3, 15
"""After so many rounds twice as many are asked: as long as nobody is found whose turn comes before, and then."""
FIRST = 4
"""So many launchers, one of which most likely leads next, ask twice as many in each round."""
ASKED_AT_ONCE = 256
"""More than so many are asked more rarely."""


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

    ``settled``: there is a generation to go on from; ``fresh``: this launcher had no part in it. ``head`` is the maker
    of the newest claim. ``enough``: whether those who are there could run a generation; ``stuck``: whether the ranks
    of this node make no progress.
    """

    own: str
    order: Sequence[str]
    body: Collection[str]
    gone: Collection[str]
    head: str
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
    """From the moment at which there is no head until there is one."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._near: dict[str, Neighbour] = {}
        self._vouched = -1e9
        self._enough_since: float | None = None
        self._ask_at = -1e9
        self._rounds = 0.0

    def forgive(self, stall_s: float) -> None:
        """This launcher was held up for so long."""
        self.since += stall_s
        self._vouched += stall_s

    def ask(
        self, now: float, order: Sequence[str], ahead: int, known: Mapping[str, Member],
        send: Callable[[Member, Message], None], message: Seek, *, settled: bool,
    ) -> None:  # fmt: skip
        """Ask the others in this order, some times a second; the turn of the first ``ahead`` comes before this one's.

        Of very many a few are asked first, and then more: soon if none of those is there whose turn comes first, since
        this launcher has to know all of them then, and slowly if it only has to hear who leads. ``settled`` as in
        ``Situation``: while nothing runs yet there is no hurry.
        """
        if now < self._ask_at:
            return
        names = [name for name in order if name in known]
        if len(names) > ALL_AT_ONCE:
            near = self.near(now)
            if not near.keys().isdisjoint(order[:ahead]):
                self._rounds += 1 / MORE_ROUNDS
            else:
                self._rounds += 1.0 if settled and ahead <= FIRST else 1 / FEW_ROUNDS
            names = names[: 4 << min(int(self._rounds), 20)]
        self._ask_at = now + SEEK_S * max(1.0, len(names) / ASKED_AT_ONCE)
        for name in names:
            send(known[name], message)

    def note(self, sender: Member, answer: Near, now: float) -> None:
        """Somebody has answered."""
        self._near[sender.name] = Neighbour(sender, now, answer.size, answer.fresh, answer.incarnation)

    def vouch(self, now: float) -> None:
        """Somebody hears the head."""
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
        waited = now - self._enough_since
        return waited >= self._pause_s(here, situation, near, now) + ahead * STAGGER_S

    def _may(self, here: Collection[str], situation: Situation, now: float) -> bool:
        body = set(situation.body) - set(situation.gone)
        part = share(here, body)
        if part is Share.MAJORITY or (part is Share.HALF and situation.head == situation.own):
            return situation.settled or situation.enough()
        if not situation.settled:
            return False
        can = part is Share.HALF or situation.enough()
        if not can and not situation.stuck():
            return False
        limit_s, idle_s = (TURN_S, LEASE_S) if can else (LAST_S, LAST_S)
        own = situation.head == situation.own
        return now - self.since >= limit_s and (own or situation.lease_idle_s >= idle_s)

    def _pause_s(self, here: Collection[str], situation: Situation, near: Mapping[str, Neighbour], now: float) -> float:
        expected = set(situation.body) - set(situation.gone)
        if situation.settled:
            expected -= {situation.head}
        back = now - self.since > TURN_S and situation.lease_idle_s < LEASE_S  # an outage that ends: the head lives
        if expected <= set(here) and not (back and situation.settled and situation.head not in here):
            return 0.0
        if situation.head == situation.own or back:
            return RESUME_S
        at_work = situation.settled and not (situation.fresh and all(one.fresh for one in near.values()))
        return GATHER_S if at_work else SETTLE_S
