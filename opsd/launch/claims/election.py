"""Who leads a group of launchers, and what the leader knows of it.

What a leader needs of its group: who is there, the newest plan, and a way to propose, to tell and to end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Body, Message, Seek, SeekReply
from opsd.launch.claims.peers import Quorum, quorum
from opsd.launch.io.protocol import Member


class LeaderView(Protocol):
    """Implemented by ``Group``, and under a virtual clock by ``opsd.simulate``."""

    @property
    def plan(self) -> Plan | None:
        """The newest plan, None before the first."""

    @property
    def alive(self) -> Mapping[str, Member]:
        """The launchers that are heard, by name."""

    @property
    def begun(self) -> bool:
        """Whether the ranks of the newest plan were started."""

    @property
    def leaderless_s(self) -> float:
        """Seconds since the previous leader was heard from."""

    @property
    def inherited(self) -> Mapping[str, Any]:
        """What the leader of an earlier start left with an end that asked for this one; empty if nothing."""

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        """Claim the next generation; a later proposal replaces this one."""

    def end(self, code: int, reason: str, lost: Sequence[str], unfit: Sequence[str], memory: Mapping[str, Any]) -> None:
        """Claim the end of the run; ``memory`` is ``inherited`` by the leader of the next start."""

    def tell_all(self, body: Body) -> None:
        """Send to every live launcher, this one included."""


# Election: which launcher is to claim the next generation while there is no leader, and when.
#
# Safety does not depend on it, since claims are exclusive. It makes the majority go on quickly and keeps the others
# from interfering.


SEEK_S = 0.2
ASK_AGAIN_S = 0.5
"""A launcher that has answered is not asked again before this: the first in order hears of all others."""
REACHABLE_S = 1.5
"""How long an answer counts."""
ELECTION_WAIT_S = 0.4
"""How long the remaining members wait for each other once they are enough."""
RESUME_S = 3.0
"""How long a leader that leads again waits for all members: their ranks may be running, so there is no hurry."""
START_WAIT_S = 2.0
"""The same at the start of a run, when all expected launchers may still come."""
STAGGER_S = 0.5
"""Each next launcher in order claims by so much later, if those before it do not."""
MINORITY_WAIT_S = 3.0
LEASE_S = 4.0
"""Half of the launchers or fewer wait ``MINORITY_WAIT_S``, and until the lease was not renewed for ``LEASE_S``."""
LAST_RESORT_S = 30.0
"""The same for too few to run a generation: they end the run, so that it is started again. Also at the start for half
of the expected launchers or fewer, if they are enough: the others have not come."""
GROWTH_WAIT_S = 2.0
"""Extra time while further launchers answer: not all of a thousand do so at once."""
MANY = 64
"""With more launchers each asks only a few at first, and less often, so that they do not flood those first in order.
Those hear of everybody all the same: a launcher that is asked asks back."""
MAX_SLOWDOWN = 3.0
"""Times ``SEEK_S``: still often enough for an answer to count until the next."""
INITIAL_TARGETS = 2
"""How many are asked at first; twice as many in each round without an answer of one that precedes this launcher …"""
ROUNDS_PER_DOUBLING = 15
"""… and after so many rounds with one."""
FOUND_S = 6.0
"""A launcher that has answered within this may be slow and is not gone: no reason to ask more of the others."""
MAX_SILENT_TARGETS, MOST_PATIENCE_S = 6, 4.0
"""How many silent launchers are asked per round at most; each is asked half as often every time."""


@dataclass(frozen=True, slots=True)
class Responder:
    """Another launcher, which answered at the monotonic second ``heard``."""

    member: Member
    heard: float
    size: int
    fresh: bool
    incarnation: str


@dataclass(frozen=True, slots=True)
class ElectionView:
    """The inputs of the decision. ``order`` is the precedence; half of the ``electorate`` or more is wanted.

    ``settled``: there is a generation to continue; ``fresh``: this launcher had no part in it. ``leader`` is the maker
    of the newest claim. ``enough``: whether the reachable launchers could run a generation; ``stuck``: whether the
    ranks of this node make no progress.
    """

    own: str
    order: Sequence[str]
    electorate: Collection[str]
    gone: Collection[str]
    leader: str
    settled: bool
    fresh: bool
    lease_idle_s: float
    enough: Callable[[], bool]
    stuck: Callable[[], bool]

    @property
    def turn(self) -> int:
        """How many launchers precede this one."""
        return self.order.index(self.own) if self.own in self.order else len(self.order)


def _by_precedence(order: Sequence[str], known: Collection[str], left: Collection[str]) -> Iterator[str]:
    """Those ``known`` and not ``left`` out, first the ones in ``order``; of thousands only the first are looked at."""
    yield from (name for name in order if name in known and name not in left)
    placed = set(order)
    yield from (name for name in known if name not in placed and name not in left)


def _ask_interval_s(launchers: int) -> float:
    """Seconds between two rounds of questions."""
    return SEEK_S * min(MAX_SLOWDOWN, max(1.0, launchers / MANY))


class Election:
    """One election, from the loss of the leader until there is another."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._responders: dict[str, Responder] = {}
        self._leader_heard_at = -1e9
        self._enough_since: float | None = None
        self._last_new = now
        """When a launcher answered for the first time last."""
        self._ask_at = -1e9
        self._rounds = 0.0
        self._due: dict[str, float] = {}
        """When a silent launcher is asked again …"""
        self._patience: dict[str, float] = {}
        """… and how long it was given to answer."""

    def discount_stall(self, stall_s: float) -> None:
        """This launcher was held up for so long."""
        self.since += stall_s
        self._leader_heard_at += stall_s

    def ask(
        self, now: float, view: ElectionView, known: Mapping[str, Member],
        send: Callable[[Member, Message], None], message: Seek,
    ) -> None:  # fmt: skip
        """Ask the others by precedence, several times a second.

        Of very many only the first few are asked unless they do not answer: since those asked ask back, not everybody
        has to ask everybody.
        """
        if now < self._ask_at:
            return
        left = {*view.gone} - {view.leader} | {view.own}  # the leader does not look for others
        count = len(known) - sum(name in known for name in left)
        names = _by_precedence(view.order, known, left)
        self._ask_at = now + _ask_interval_s(count)
        for name in names if count <= MANY else self._targets(now, names, view):
            if not self.heard_recently(name, now):
                send(known[name], message)

    def _targets(self, now: float, names: Iterator[str], view: ElectionView) -> Sequence[str]:
        """The first of ``names`` that answer, and some of the silent ones, more with each round."""
        reachable = self.reachable(now)
        asked = list(islice(names, INITIAL_TARGETS << min(int(self._rounds), 20)))
        recent = {name for name, one in self._responders.items() if now - one.heard < FOUND_S}
        found = bool(recent) and any(name in recent for name in view.order[: view.turn])
        self._rounds += 1 / ROUNDS_PER_DOUBLING if found else 1.0
        due = [name for name in asked if name not in reachable and now >= self._due.get(name, now)]
        silent = sorted(due, key=lambda name: self._patience.get(name, 0.0))[:MAX_SILENT_TARGETS]
        for name in silent:
            self._patience[name] = min(2 * self._patience.get(name, SEEK_S), MOST_PATIENCE_S)
            self._due[name] = now + self._patience[name]
        return [name for name in asked if name in reachable][:INITIAL_TARGETS] + silent

    def note(self, sender: Member, answer: SeekReply, now: float) -> None:
        if sender.name not in self._responders:
            self._last_new = now
        self._responders[sender.name] = Responder(sender, now, answer.size, answer.fresh, answer.incarnation)

    def heard_recently(self, name: str, now: float) -> bool:
        """Whether this launcher has answered within ``ASK_AGAIN_S``."""
        one = self._responders.get(name)
        return one is not None and now - one.heard < ASK_AGAIN_S

    def leader_alive(self, now: float) -> None:
        """Another launcher hears the leader."""
        self._leader_heard_at = now

    def drop(self, name: str) -> None:
        """The launcher ``name`` has ended."""
        self._responders.pop(name, None)

    def reachable(self, now: float) -> dict[str, Responder]:
        """The launchers that have answered within ``REACHABLE_S``."""
        return {name: one for name, one in self._responders.items() if now - one.heard <= REACHABLE_S}

    def should_claim(self, now: float, view: ElectionView, timeout_s: float) -> bool:
        """Whether this launcher is to claim the next generation now."""
        if now - self._leader_heard_at < timeout_s:
            self._enough_since = None
            return False
        reachable = self.reachable(now)
        here = {view.own, *reachable}
        if not self._eligible(here, view, now):
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        ahead = sum(name in reachable for name in view.order[: view.turn])
        waited = now - max(self._enough_since, min(self._last_new, self._enough_since + GROWTH_WAIT_S))
        return waited >= self._pause_s(here, view, reachable, now) + ahead * STAGGER_S

    def _eligible(self, here: Collection[str], view: ElectionView, now: float) -> bool:
        part = quorum(here, view.electorate, view.gone)
        if part is Quorum.MAJORITY or (part is Quorum.HALF and view.leader == view.own):
            return view.settled or view.enough()
        if not view.settled:
            return view.enough() and now - self.since >= LAST_RESORT_S
        can = part is Quorum.HALF or view.enough()
        if not can and not view.stuck():
            return False
        limit_s, idle_s = (MINORITY_WAIT_S, LEASE_S) if can else (LAST_RESORT_S, LAST_RESORT_S)
        own = view.leader == view.own
        return now - self.since >= limit_s and (own or view.lease_idle_s >= idle_s)

    def _pause_s(
        self, here: Collection[str], view: ElectionView, reachable: Mapping[str, Responder], now: float
    ) -> float:
        expected = set(view.electorate) - set(view.gone)
        if view.settled:
            expected -= {view.leader}
        back = (
            now - self.since > MINORITY_WAIT_S and view.lease_idle_s < LEASE_S
        )  # an outage that ends: the leader lives
        if expected <= set(here) and not (back and view.settled and view.leader not in here):
            return 0.0
        if view.leader == view.own or back:
            return RESUME_S
        at_work = view.settled and not (view.fresh and all(one.fresh for one in reachable.values()))
        # Between two rounds of questions nobody answers: the others may come with the next one.
        return (ELECTION_WAIT_S if at_work else START_WAIT_S) + _ask_interval_s(len(view.electorate)) - SEEK_S
