"""Who is within reach: the head hears of everybody, everybody hears of the head; who hears of too few stops.

A launcher that is silent for too long is lost. One that hears of at most half of those that have a say cannot know
whether the others go on without it: it is cut off, and what it runs may no longer be valid.
"""

from __future__ import annotations

from collections.abc import Iterable

from opsd.launch.io.member import Member
from opsd.launch.quorum.consent import Consent
from opsd.launch.quorum.election import STAGGER_S, Election
from opsd.launch.quorum.mail import Mail
from opsd.launch.quorum.outlet import Outlet
from opsd.launch.quorum.peers import Peer, Share

TIMEOUT_S = 2.0
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 0.8
PEERS_PER_SECOND = 1280
"""Heartbeats a second that the head of many launchers is up to; beyond that they become rarer."""
ALONE_S = 0.7
"""How long the others have to answer, once the head is silent, before this side counts as cut off."""
DECIDE_S = 5.0
"""How long the other launchers of a half wait for the first of them to settle the tie."""


class Reach:
    """What one launcher hears of the others. ``now`` is set before anything is asked of it."""

    def __init__(
        self, own: Member, consent: Consent, election: Election, mail: Mail, out: Outlet, timeout_s: float, now: float
    ) -> None:
        self.now = now
        self.head: str | None = None
        self.head_peer: Peer | None = None
        """(On the others.) The head."""
        self.peers: dict[str, Peer] = {}
        """(On the head.) Those it hears of."""
        self.cut_off: Share | None = None
        """What part of those that have a say is within reach, while that is too few."""
        self._lost_head: Peer | None = None
        self._beat_at = now
        self._own = own
        self._consent = consent
        self._election = election
        self._mail = mail
        self._out = out
        self._timeout = timeout_s

    @property
    def is_head(self) -> bool:
        """True on the head."""
        return self._election.role == "head"

    @property
    def head_member(self) -> Member | None:
        """(On the others.) The head, None while there is none."""
        return self.head_peer.member if self.head_peer is not None else None

    @property
    def head_lives(self) -> bool:
        """True on the head, and on those that hear of it."""
        peer = self.head_peer
        return self.is_head or (peer is not None and peer.silence(self.now, self._timeout) is None)

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats."""
        size = max(len(self.peers), len(self._consent.electorate))
        return min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, size / PEERS_PER_SECOND))

    def tick(self) -> None:
        """Time has passed."""
        if self.is_head:
            self._beat()
            self._lose_silent()
        else:
            self._watch_head()

    def forgive(self, stall_s: float) -> None:
        """This launcher was held up for so long."""
        for peer in [*self.peers.values(), *([self.head_peer] if self.head_peer else [])]:
            peer.heard += stall_s
        self._election.forgive(stall_s)

    def gone(self, name: str, silent_s: float | None = None) -> None:
        """``name`` is gone for certain, whoever it is; heard of ``silent_s`` seconds ago, or when it was last."""
        if self.is_head and name in self.peers:
            self._lose(name, self.now - self.peers[name].heard if silent_s is None else silent_s)
        elif self.head_peer is not None and name == self.head:
            self.lose_head()

    def settle_tie(self, go_on: bool) -> None:
        """Whether this half goes on."""
        if self.cut_off is not Share.HALF:
            return
        if not go_on:
            self.cut_off = Share.MINORITY
            self._out.call(lambda listener: listener.isolated())
            return
        self._election.tie_won, self.cut_off = True, None
        if self.is_head:
            self._lose_silent()
        else:
            self._election.stand(self.now)

    # -- as the head ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        if self.now >= self._beat_at:
            self._beat_at = self.now + self.interval_s
            beat = self._out.message("beat")
            for peer in self.peers.values():
                self._out.send(peer.member, beat)

    def _lose_silent(self) -> None:
        """Lose those that are silent, unless it is this side that has lost the others.

        Whether it has is judged by the usual timeout, whatever patience single ones have earned: after that the others
        may go on without this side. While it is open, because many have just fallen silent, nobody is lost.
        """
        now = self.now
        late = {name: peer for name, peer in self.peers.items() if now - peer.heard > self._timeout / 2}
        if not late:
            return
        overdue = [name for name, peer in late.items() if now - peer.heard > self._timeout]
        part = self._share(self.peers.keys() - set(overdue))
        if overdue and part is not Share.MAJORITY and not self._election.tie_won:
            for name in overdue:
                self._forget(name)
            self._step_down(part)
            return
        silent = {name: seconds for name in overdue if (seconds := late[name].silence(now, self._timeout)) is not None}
        if silent and (self._election.tie_won or self._share(self.peers.keys() - late.keys()) is Share.MAJORITY):
            for name, seconds in silent.items():
                self._lose(name, seconds)

    def _forget(self, name: str) -> None:
        del self.peers[name]
        self._mail.forget(name)

    def _lose(self, name: str, silent_s: float) -> None:
        self._forget(name)
        part = self._share(self.peers)
        if part is Share.MAJORITY or self._election.tie_won:
            self._out.call(lambda listener: listener.lost(name, silent_s))
        else:
            self._step_down(part)

    def _step_down(self, part: Share) -> None:
        """This head has too few fellows left."""
        self._election.role = "follower"
        if part is Share.MINORITY:
            for peer in self.peers.values():
                self._out.post(peer.member, "adrift")
        self.set_head(None)
        self._election.look_around(self.now)
        self._election.answered = dict.fromkeys(self.peers, self.now)
        self._election.stand_after(self.now, STAGGER_S)
        self._cut_off_as(part, self.peers)

    def become_head(self) -> None:
        """This launcher has been elected."""
        self.cut_off = None
        before = self._consent.voters
        self._consent.inherit()
        self.peers = {
            name: Peer(member, self.now)
            for name, member in before.items()
            if name != self._own.name and name in self._election.votes
        }
        waiting = [name for name in before if name != self._own.name and name not in self.peers]
        self._mail.to, self._mail.of = {}, {}
        self._beat_at = self.now
        self.set_head(self._own.name)
        beat = self._out.message("beat")
        for name in waiting:
            if self._consent.plan is not None:
                self.peers[name] = Peer(before[name], self.now - self._grace(name))
            self._out.send(before[name], beat)
        self._lose_old_head()
        for message in self._mail.to_head.waiting:
            self._out.call(lambda listener, message=message: listener.received(self._own.name, message))  # type: ignore[misc]
        self._mail.to_head.confirm(self._mail.to_head.last)

    def _grace(self, name: str) -> float:
        """How much of the timeout has passed for a member that has not voted and has not been heard of."""
        return 0.0 if self._election.heard_since(name) else self._timeout * 0.75

    def _lose_old_head(self) -> None:
        """The others have stood for election because it is silent: it need not be waited for again."""
        lost, self._lost_head = self._lost_head, None
        if lost is None or self._election.heard_since(lost.member.name):
            return
        if self.peers.pop(lost.member.name, None) is not None:
            silent_s = self.now - lost.heard
            self._out.call(lambda listener: listener.lost(lost.member.name, silent_s))

    # -- as one of the others ------------------------------------------------------------------------------------

    def _watch_head(self) -> None:
        now, peer, election = self.now, self.head_peer, self._election
        if peer is not None:
            if now - peer.heard <= self._timeout:
                election.looking = False
                return
            if not election.looking:
                election.look_around(now, peer.member.name)
            if peer.silence(now, self._timeout) is not None:
                self._part_from_head()
        election.tick(now)
        looking_s = now - election.looking_since
        if looking_s > ALONE_S and self.cut_off is None and self._own.name in self._consent.voters:
            near = election.near()
            part = self._share(near)
            if part is Share.MINORITY or looking_s > ALONE_S + DECIDE_S:
                self._cut_off_as(Share.MINORITY, near)
            elif part is Share.HALF and election.first_of(near):
                self._cut_off_as(part, near)

    def lose_head(self) -> None:
        """The head is gone for certain."""
        gone = self.head or ""
        self._part_from_head()
        self._election.look_around(self.now, gone)

    def _part_from_head(self) -> None:
        self._lost_head = self.head_peer
        self.set_head(None)

    def _cut_off_as(self, part: Share, near: Iterable[str]) -> None:
        if self.head_peer is not None:
            self._part_from_head()
        self.cut_off = part
        absent = tuple(sorted(self._consent.electorate.keys() - {self._own.name, *near}))
        if part is Share.HALF:
            self._out.call(lambda listener: listener.tied(absent))
        else:
            self._out.call(lambda listener: listener.isolated())

    # -- both ----------------------------------------------------------------------------------------------------

    def _share(self, others: Iterable[str]) -> Share:
        """What part of those that have a say this launcher and ``others`` are."""
        return self._consent.share({self._own.name, *others}, head=self.is_head)

    def set_head(self, name: str | None, peer: Peer | None = None) -> None:
        """``name`` is the head from now on, if anybody is."""
        changed = name != self.head
        self.head, self.head_peer = name, peer
        if name is not None:
            self.cut_off = None
            self._election.follow()
        if changed:
            self._out.call(lambda listener: listener.head_changed(name))
