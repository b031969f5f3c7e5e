"""Who becomes head: votes, and the order and pace in which launchers stand for election.

As in Raft (Ongaro and Ousterhout, 2014), a head is elected for a term by more than half of the launchers; a launcher
votes once a term, only for one that knows as new a plan as itself, and is asked beforehand (pre-vote), so that a flaky
node deposes nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from opsd.launch.io.member import Member
from opsd.launch.quorum.consent import Consent
from opsd.launch.quorum.outlet import Outlet
from opsd.launch.quorum.peers import Share

STAGGER_S = 0.3
"""By so much later each next launcher stands for election."""
ASK_AGAIN_S = 0.15
"""A candidate asks again after this, then after twice that, and so on up to what a round takes."""
VOTES_PER_SECOND = 500

Role = Literal["follower", "candidate", "head"]


class Election:
    """This launcher's votes and candidacies; ``won`` is called when it has become head. Times on its own clock."""

    def __init__(self, own: Member, consent: Consent, out: Outlet, won: Callable[[], None], now: float) -> None:
        self.role: Role = "follower"
        self.asking: Literal["", "pre", "vote"] = ""
        self.looking = True
        """Nothing is heard of a head; the others are asked."""
        self.looking_since = now
        self.tie_won = False
        """Half of those that have a say are enough, until the next plan is valid."""
        self.gone: set[str] = set()
        """Those that have said goodbye."""
        self.answered: dict[str, float] = {}
        """When each of the others was last heard of."""
        self.votes: set[str] = set()
        self._own = own
        self._consent = consent
        self._out = out
        self._won = won
        self._voted: str | None = None
        self._asked = 0
        """How often the others were asked since the head fell silent."""
        self._stand_at = now + self.turn() * STAGGER_S

    # -- the order -----------------------------------------------------------------------------------------------

    def turn(self, without: str = "") -> int:
        """This launcher's place in the order in which to stand; after all others if it is no member."""
        order = [name for name in self._consent.electorate if name != without and name not in self.gone]
        return order.index(self._own.name) if self._own.name in order else len(order) + 1

    def first_of(self, near: Sequence[str]) -> bool:
        """True if none of ``near`` comes before this launcher."""
        order = list(self._consent.electorate)
        return self._own.name in order and all(
            order.index(self._own.name) < order.index(name) for name in near if name in order
        )

    @property
    def round_s(self) -> float:
        """What it takes at most to ask all others, of which a thousand need a while."""
        return max(0.5, len(self._consent.electorate) / VOTES_PER_SECOND)

    # -- looking for a head --------------------------------------------------------------------------------------

    def look_around(self, now: float, gone: str = "") -> None:
        """Nothing is heard of a head: ask the others."""
        self.looking, self.looking_since, self._asked = True, now, 0
        self.answered = {}
        self._stand_at = now + self.turn(without=gone) * STAGGER_S

    def heard_since(self, name: str) -> bool:
        """True if ``name`` was heard of since then."""
        return self.answered.get(name, 0.0) >= self.looking_since

    def near(self) -> list[str]:
        """All that were heard of since then."""
        return [name for name in self.answered if self.heard_since(name)]

    def forgive(self, stall_s: float) -> None:
        """This launcher was held up for so long."""
        self.looking_since += stall_s
        self._stand_at += stall_s

    def stand_after(self, now: float, delay_s: float) -> None:
        """Stand for election so much later, whoever's turn it is."""
        self._stand_at = now + delay_s

    def follow(self) -> None:
        """There is a head."""
        self.asking, self.looking = "", False

    # -- standing ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Stand for election when it is time."""
        if now >= self._stand_at:
            self.stand(now)

    def stand(self, now: float) -> None:
        """Ask the others whether they would vote for this launcher; one without a vote asks to be taken in."""
        pause_s = min(ASK_AGAIN_S * 2**self._asked, self.round_s)
        self._stand_at = now + pause_s + STAGGER_S * min(self.turn(), 4) / 4
        self._asked += 1
        if self._own.name in self._consent.voters:
            self._ask("pre", now)
        else:
            for member in self._consent.electorate.values():
                self._out.post(member, "join")

    def _ask(self, what: Literal["pre", "vote"], now: float) -> None:
        if self.asking != what or what == "vote":
            self.asking, self.votes = what, {self._own.name}
        if what == "vote":
            self._stand_at = now + self.round_s + STAGGER_S * min(self.turn(), 4)
            self._out.term += 1
            self._voted = self._own.name
            self.role = "candidate"
        ask = self._out.message("ask", what=what, newest=self._consent.newest)
        ask["term"] += what == "pre"
        for member in self._consent.voters.values():
            if member.name not in self.votes:
                self._out.send(member, ask)
        self._count(now)

    def add_vote(self, name: str, what: str, term: int, now: float) -> None:
        """``name`` has said yes to ``what`` it was asked."""
        if what == self.asking and (what == "pre" or term == self._out.term):
            self.votes.add(name)
            self._count(now)

    def _count(self, now: float) -> None:
        if 2 * len(self.votes) < len(self._consent.electorate):
            return
        part = self._consent.share({self._own.name, *self.votes}, head=False)
        if self.asking and (part is Share.MAJORITY or (part is Share.HALF and self.tie_won)):
            what, self.asking = self.asking, ""
            if what == "pre":
                self._ask("vote", now)
            else:
                self.role = "head"
                self._won()

    # -- voting --------------------------------------------------------------------------------------------------

    def enter(self, term: int) -> None:
        """Somebody is in a higher term: so is this launcher, which has not voted in it."""
        self._out.term, self._voted = term, None

    def vote(self, name: str, term: int, what: str, newest: Sequence[int], head_lives: bool, now: float) -> bool:
        """Vote for ``name`` in ``term``, or say beforehand (``what`` is "pre") how this launcher would."""
        fit = tuple(newest) >= self._consent.newest and not head_lives
        if what == "pre":
            yes = fit and term >= self._out.term
        else:
            if term > self._out.term and not head_lives:
                self.enter(term)
                self.role = "follower"
            yes = fit and term == self._out.term and self._voted in (None, name)
            if yes:
                self._voted = name
        if yes:
            self._stand_at = now + ASK_AGAIN_S + self.turn() * STAGGER_S
        return yes
