"""The agreement as a state machine: time and messages come in, messages and calls of the listener go out.

Elections follow Raft (Ongaro and Ousterhout, 2014): a head is elected for a term by more than half of the launchers; a
launcher votes once a term, only for one that knows as new a plan as itself, and is asked beforehand (pre-vote), so that
a flaky node deposes nobody. There is no log to replicate: the one thing agreed on is the newest plan (``consent.py``).
The head is the hub of a star: it hears of everybody, everybody hears of it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from opsd.launch.quorum.codec import Answers, member_from_json, member_to_json, plan_from_json, plan_to_json
from opsd.launch.quorum.consent import Consent
from opsd.launch.quorum.peers import Outbox, Peer, Share
from opsd.launch.quorum.port import Listener, Member, Message, Plan

TIMEOUT_S = 2.0
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 0.8
PEERS_PER_SECOND = 1280
"""Heartbeats a second that the head of many launchers is up to; beyond that they become rarer."""
STAGGER_S = 0.3
"""By so much later each next launcher stands for election."""
ASK_AGAIN_S = 0.15
"""A candidate asks again after this, then after twice that, and so on up to what a round takes."""
VOTES_PER_SECOND = 500
ALONE_S = 0.7
"""How long the others have to answer, once the head is silent, before this side counts as cut off."""
DECIDE_S = 5.0
"""How long the other launchers of a half wait for the first of them to settle the tie."""
REPEAT_S = 1.0
"""What may have been lost is said again after this."""
SEEK_S, LIKELY = 1.0, 3
"""Without a head, so often the first so many launchers are asked for it."""
NEAR_S = 10.0
"""How often a launcher says something to the next head, and nothing more than that it is there."""
STALL_S = 0.5
"""Not called for so long, the launcher itself was held up, and the others are given that time."""

Role = Literal["follower", "candidate", "head"]


class Core:
    """One launcher's side. ``send`` may lose messages; ``listener`` is called from ``tick``, ``receive`` and ``flush``.

    A launcher that was started anew counts its messages on from a higher ``first_message`` than before.
    """

    def __init__(
        self,
        own: Member,
        initial: Sequence[Member],
        send: Callable[[Member, Message], None],
        *,
        first_number: int = 1,
        first_message: int = 1,
        timeout_s: float = TIMEOUT_S,
        now: float = 0.0,
    ) -> None:
        self.own = own
        self.head: str | None = None
        self.consent = Consent(initial, first_number)
        self._send = send
        self._timeout = timeout_s
        self._now = self._ticked = now
        self.term = 0
        self._voted: str | None = None
        self._role: Role = "follower"
        self._proposal_answers: dict[str, Message] = {}
        self._prepare_message: Message = {}
        self._ready: tuple[int, Message] | None = None
        self._peers: dict[str, Peer] = {}
        self._head_peer: Peer | None = None
        self._left: set[str] = set()
        self._looking = True
        """Nothing is heard of a head; the others are asked."""
        self._looking_since = now
        self._asked = 0
        """How often the others were asked since then."""
        self._stand_at = now + self._turn() * STAGGER_S
        self._votes: set[str] = set()
        self._asking: Literal["", "pre", "vote"] = ""
        self._answered: dict[str, float] = {}
        self._beat_at = now
        self._cut_off: Share | None = None
        self._tie_won = False
        self._near_at = now + SEEK_S * self._turn() / (len(initial) + 1)
        self._to_head = Outbox(first_message)
        self._lost_head: Peer | None = None
        self._to_all: dict[str, Outbox] = {}
        self._seen: dict[str, int] = {}
        self._seen_of_head = 0
        self._listener: Listener | None = None
        self._calls: deque[Callable[[Listener], None]] = deque()
        self._flushing = False

    # -- what the launcher asks ----------------------------------------------------------------------------------

    def start(self, listener: Listener) -> None:
        """Call ``listener`` from now on."""
        self._listener = listener

    @property
    def alive(self) -> Mapping[str, Member]:
        """(On the head.) Itself and those it hears of."""
        return {self.own.name: self.own} | {name: peer.member for name, peer in self._peers.items()}

    @property
    def plan(self) -> Plan | None:
        """The newest plan that is known to be valid."""
        return self.consent.plan

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats."""
        size = max(len(self._peers), len(self.consent.electorate))
        return min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, size / PEERS_PER_SECOND))

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> int:
        """See ``Quorum.propose``. Without effect on a launcher that is head no longer, and does not know it yet."""
        number = self.consent.highest + 1
        if self._role != "head":
            return number
        alive = self.alive
        plan = Plan(number, slots, tuple(alive[name] for name in sorted(alive)), dict(payload))
        self.consent.propose(self.term, plan)
        self._proposal_answers = {}
        self._ready = None
        self._prepare_message = self._proposal(whole=False)
        for peer in self._peers.values():
            self._send_proposal(peer)
        self._call(lambda listener: listener.prepare(plan))
        return number

    def ready(self, number: int, answer: Message) -> None:
        """See ``Quorum.ready``."""
        self._ready = (number, answer)
        if self._role == "head":
            self._note_ready(self.own.name, number, answer)
        elif self._head_peer is not None:
            self._post(self._head_peer.member, "ready", number=number, answer=answer)

    def tell_head(self, message: Message) -> None:
        """See ``Quorum.tell_head``."""
        if self._role == "head":
            self._call(lambda listener: listener.received(self.own.name, message))
            return
        number = self._to_head.add(message)
        if self._head_peer is not None:
            self._post(self._head_peer.member, "tell", number=number, oldest=self._to_head.oldest, body=message)

    def tell_all(self, message: Message) -> None:
        """See ``Quorum.tell_all``."""
        for name, peer in self._peers.items():
            box = self._to_all.setdefault(name, Outbox())
            number = box.add(message)
            self._post(peer.member, "order", number=number, oldest=box.oldest, body=message)
        self._call(lambda listener: listener.received(self.own.name, message))

    def decide_tie(self, go_on: bool) -> None:
        """See ``Quorum.decide_tie``."""
        if self._cut_off is not Share.HALF:
            return
        if not go_on:
            self._cut_off = Share.MINORITY
            self._call(lambda listener: listener.isolated())
            return
        self._tie_won, self._cut_off = True, None
        if self._role == "head":
            self._lose_silent(self._now)
        else:
            self._stand()

    def leave(self) -> None:
        """Say goodbye to everybody."""
        for member in {**self.consent.electorate, **self.alive}.values():
            if member.name != self.own.name:
                self._post(member, "bye")

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed; to be called some ten times a second."""
        stall = now - self._ticked
        self._now = self._ticked = now
        if stall > STALL_S:
            self._forgive(stall)
        if self._role == "head":
            if now >= self._beat_at:
                self._beat_at = now + self.interval_s
                beat = self._message("beat")
                for peer in self._peers.values():
                    self._send(peer.member, beat)
            self._lose_silent(now)
        else:
            self._watch_head(now)
            if now >= self._near_at:
                self._near_at = now + (SEEK_S if self.head is None else NEAR_S)
                self._keep_near()
        self.flush()

    def _keep_near(self) -> None:
        """Have a connection to whoever would be the next head, so that an election need not wait for it.

        Without a head, ask the most likely ones whether they are.
        """
        order = (
            member
            for name, member in self.consent.electorate.items()
            if name not in (self.head, self.own.name) and name not in self._left
        )
        for member in itertools.islice(order, LIKELY if self.head is None else 1):
            self._post(member, "join" if self.head is None else "near")

    def _forgive(self, stall_s: float) -> None:
        for peer in [*self._peers.values(), *([self._head_peer] if self._head_peer else [])]:
            peer.heard += stall_s
        self._looking_since += stall_s
        self._stand_at += stall_s

    def _beat(self, peer: Peer) -> None:
        self._post(peer.member, "beat")

    def _lose_silent(self, now: float) -> None:
        """Lose those that are silent, unless it is this side that has lost the others.

        Whether it has is judged by the usual timeout, whatever patience single ones have earned: after that the others
        may go on without this side. While it is open, because many have just fallen silent, nobody is lost.
        """
        late = {name: peer for name, peer in self._peers.items() if now - peer.heard > self._timeout / 2}
        if not late:
            return
        overdue = [name for name, peer in late.items() if now - peer.heard > self._timeout]
        part = self._share(self._peers.keys() - set(overdue))
        if overdue and part is not Share.MAJORITY and not self._tie_won:
            for name in overdue:
                self._forget(name)
            self._step_down(part)
            return
        silent = {name: seconds for name in overdue if (seconds := late[name].silence(now, self._timeout)) is not None}
        if silent and (self._tie_won or self._share(self._peers.keys() - late.keys()) is Share.MAJORITY):
            for name, seconds in silent.items():
                self._lose(name, seconds)

    def _forget(self, name: str) -> None:
        del self._peers[name]
        self._to_all.pop(name, None)
        self._seen.pop(name, None)

    def _lose(self, name: str, silent_s: float) -> None:
        self._forget(name)
        part = self._share(self._peers)
        if part is Share.MAJORITY or self._tie_won:
            self._call(lambda listener: listener.lost(name, silent_s))
        else:
            self._step_down(part)

    def _step_down(self, part: Share) -> None:
        """This head has too few fellows left."""
        self._role = "follower"
        if part is Share.MINORITY:
            for peer in self._peers.values():
                self._post(peer.member, "adrift")
        self._set_head(None)
        self._look_around()
        self._answered = dict.fromkeys(self._peers, self._now)
        self._stand_at = self._now + STAGGER_S
        self._cut_off_as(part, self._peers)

    def _look_around(self, gone: str = "") -> None:
        """Nothing is heard of a head: ask the others."""
        self._looking, self._looking_since, self._asked = True, self._now, 0
        self._answered = {}
        self._stand_at = self._now + self._turn(without=gone) * STAGGER_S

    def _watch_head(self, now: float) -> None:
        peer = self._head_peer
        if peer is not None:
            if now - peer.heard <= self._timeout:
                self._looking = False
                return
            if not self._looking:
                self._look_around(peer.member.name)
            if peer.silence(now, self._timeout) is not None:
                self._part_from_head()
        if now >= self._stand_at:
            self._stand()
        looking_s = now - self._looking_since
        if looking_s > ALONE_S and self._cut_off is None and self.own.name in self.consent.voters:
            near = [name for name, at in self._answered.items() if at >= self._looking_since]
            part = self._share(near)
            if part is Share.MINORITY or looking_s > ALONE_S + DECIDE_S:
                self._cut_off_as(Share.MINORITY, near)
            elif part is Share.HALF and self._first_of(near):
                self._cut_off_as(part, near)

    def _lose_head(self) -> None:
        """The head is gone for certain."""
        gone = self.head or ""
        self._part_from_head()
        self._look_around(gone)

    def _part_from_head(self) -> None:
        self._lost_head = self._head_peer
        self._set_head(None)

    def _cut_off_as(self, part: Share, near: Iterable[str]) -> None:
        if self._head_peer is not None:
            self._part_from_head()
        self._cut_off = part
        absent = tuple(sorted(self.consent.electorate.keys() - {self.own.name, *near}))
        if part is Share.HALF:
            self._call(lambda listener: listener.tied(absent))
        else:
            self._call(lambda listener: listener.isolated())

    # -- elections -----------------------------------------------------------------------------------------------

    def _share(self, others: Iterable[str]) -> Share:
        """What part of those that have a say this launcher and ``others`` are."""
        return self.consent.share({self.own.name, *others}, head=self._role == "head")

    def _turn(self, without: str = "") -> int:
        """This launcher's place in the order in which to stand; after all others if it is no member."""
        order = [name for name in self.consent.electorate if name != without and name not in self._left]
        return order.index(self.own.name) if self.own.name in order else len(order) + 1

    def _first_of(self, near: Sequence[str]) -> bool:
        order = list(self.consent.electorate)
        return self.own.name in order and all(
            order.index(self.own.name) < order.index(name) for name in near if name in order
        )

    @property
    def _round_s(self) -> float:
        """What it takes at most to ask all others, of which a thousand need a while."""
        return max(0.5, len(self.consent.electorate) / VOTES_PER_SECOND)

    def _stand(self) -> None:
        pause_s = min(ASK_AGAIN_S * 2**self._asked, self._round_s)
        self._stand_at = self._now + pause_s + STAGGER_S * min(self._turn(), 4) / 4
        self._asked += 1
        if self.own.name in self.consent.voters:
            self._ask("pre")
        else:
            for member in self.consent.electorate.values():
                self._post(member, "join")

    def _ask(self, what: Literal["pre", "vote"]) -> None:
        if self._asking != what or what == "vote":
            self._asking, self._votes = what, {self.own.name}
        if what == "vote":
            self._stand_at = self._now + self._round_s + STAGGER_S * min(self._turn(), 4)
            self.term += 1
            self._voted = self.own.name
            self._role = "candidate"
        ask = self._message("ask", what=what, newest=self.consent.newest)
        for member in self.consent.voters.values():
            if member.name not in self._votes:
                self._send(member, ask)
        self._count()

    def _count(self) -> None:
        if 2 * len(self._votes) < len(self.consent.electorate):
            return
        part = self._share(self._votes)
        if self._asking and (part is Share.MAJORITY or (part is Share.HALF and self._tie_won)):
            what, self._asking = self._asking, ""
            if what == "pre":
                self._ask("vote")
            else:
                self._become_head()

    def _become_head(self) -> None:
        self._role, self._asking, self._cut_off = "head", "", None
        before = self.consent.voters
        self.consent.inherit()
        self._peers = {
            name: Peer(member, self._now)
            for name, member in before.items()
            if name != self.own.name and name in self._votes
        }
        waiting = [name for name in before if name != self.own.name and name not in self._peers]
        self._to_all, self._seen = {}, {}
        self._beat_at = self._now
        self._set_head(self.own.name)
        beat = self._message("beat")
        for name in waiting:
            if self.plan is not None:
                self._peers[name] = Peer(before[name], self._now - self._grace(name))
            self._send(before[name], beat)
        lost, self._lost_head = self._lost_head, None
        silent = lost is not None and self._answered.get(lost.member.name, 0.0) < self._looking_since
        if lost is not None and silent and self._peers.pop(lost.member.name, None) is not None:
            silent_s = self._now - lost.heard
            self._call(lambda listener: listener.lost(lost.member.name, silent_s))
        for _, message in self._to_head.waiting:
            self._call(lambda listener, message=message: listener.received(self.own.name, message))  # type: ignore[misc]
        self._to_head.confirm(self._to_head.last)

    def _grace(self, name: str) -> float:
        """How much of the timeout has passed for a member that has not voted: all of it for the lost head."""
        return 0.0 if self._answered.get(name, 0.0) >= self._looking_since else self._timeout * 0.75

    def _set_head(self, name: str | None, peer: Peer | None = None) -> None:
        changed = name != self.head
        self.head, self._head_peer = name, peer
        if name is not None:
            self._cut_off = None
            self._asking = ""
            self._looking = False
        if changed:
            self._call(lambda listener: listener.head_changed(name))

    # -- messages ------------------------------------------------------------------------------------------------

    def receive(self, now: float, sender: Member, message: Message) -> None:
        """``message`` has come from ``sender``, whose name is proven. Raises KeyError, TypeError or ValueError."""
        self._now = now
        term, kind = int(message["term"]), str(message["kind"])
        self._answered[sender.name] = now
        if kind == "bye":
            self._bye(sender)
        elif kind == "ask":
            self._answer(sender, term, str(message["what"]), message["newest"])
        else:
            if term > self.term:
                self.term, self._voted = term, None
                if self._role != "follower":
                    self._role = "follower"
                    self._set_head(None)
                    self._look_around()
            if self._role == "head":
                self._hear(sender, kind, message, term)
            elif kind == "say":
                self._vote_counts(sender, message, term)
            elif kind in ("beat", "prepare", "begin", "order", "told"):
                if term == self.term:
                    self._obey(sender, kind, message)
                else:  # a head of an earlier term, which this tells it
                    self._post(sender, "here", plan=self.consent.number, orders=0)
            elif kind == "adrift" and sender.name == self.head and term == self.term:
                self._lose_head()
                self._stand_at = now
            elif kind == "join" and self.head is not None and self._head_peer is not None:
                self._post(sender, "see", head=member_to_json(self._head_peer.member))
            elif kind == "see":
                self._post(member_from_json(message["head"]), "join")
        self.flush()

    def look_for(self, member: Member) -> None:
        """Ask somebody, member or not, where the head is, to be taken in."""
        if self.head is None:
            self._post(member, "join")

    def unreachable(self, now: float, name: str) -> None:
        """The launcher ``name`` is no longer there: its machine answers and says so."""
        self._now = now
        if self._role == "head" and name in self._peers:
            self._lose(name, now - self._peers[name].heard)
        elif self._head_peer is not None and name == self.head:
            self._lose_head()
        self.flush()

    def _bye(self, sender: Member) -> None:
        self._left.add(sender.name)
        if self._role == "head" and sender.name in self._peers:
            self._lose(sender.name, 0.0)
        elif sender.name == self.head:
            self._lose_head()

    def _answer(self, sender: Member, term: int, what: str, newest: Sequence[int]) -> None:
        """Vote, or say beforehand how one would vote."""
        peer = self._head_peer
        lives = self._role == "head" or (
            peer is not None and peer.member.name != sender.name and peer.silence(self._now, self._timeout) is None
        )
        late = tuple(newest) < self.consent.newest
        if what == "pre":
            yes = not late and not lives and term >= self.term
        else:
            if term > self.term and not lives:
                self.term, self._voted, self._role = term, None, "follower"
            yes = not late and not lives and term == self.term and self._voted in (None, sender.name)
            if yes:
                self._voted = sender.name
        if yes:
            self._stand_at = self._now + ASK_AGAIN_S + self._turn() * STAGGER_S
        news = self._news() if late and self.plan is not None else None
        head = member_to_json(peer.member) if peer is not None and lives else None
        self._post(sender, "say", what=what, yes=yes, highest=self.consent.highest, news=news, head=head)
        if self._role == "head" and sender.name not in self._peers:
            self._hear(sender, "join", {}, term)

    def _vote_counts(self, sender: Member, message: Message, term: int) -> None:
        self.consent.highest = max(self.consent.highest, int(message["highest"]))
        if message["news"] is not None:
            self._learn(message["news"])
        if message["head"] is not None:
            self._post(member_from_json(message["head"]), "join")
        if message["what"] == self._asking and message["yes"] and (self._asking == "pre" or term == self.term):
            self._votes.add(sender.name)
            self._count()

    def _obey(self, sender: Member, kind: str, message: Message) -> None:
        if self.head != sender.name or self._head_peer is None:
            self._role = "follower"
            self._seen_of_head = 0
            self._set_head(sender.name, Peer(sender, self._now))
            self._repeat(sender, "tell", self._to_head)
        assert self._head_peer is not None
        self._head_peer.hear(self._now, self.interval_s)
        self._asking = ""
        if kind == "prepare":
            self._prepare(sender, message)
        elif kind == "begin":
            self._learn(message["news"])
        elif kind == "order" and int(message["number"]) == max(self._seen_of_head + 1, int(message["oldest"])):
            self._seen_of_head = int(message["number"])
            body = message["body"]
            self._call(lambda listener: listener.received(sender.name, body))
        elif kind == "told":
            self._to_head.confirm(int(message["number"]))
        peer = self._head_peer
        if kind == "beat" and self._now - peer.repeated >= REPEAT_S:
            peer.repeated = self._now
            self._repeat(sender, "tell", self._to_head)
        if kind in ("beat", "order"):
            self._post(sender, "here", plan=self.consent.number, orders=self._seen_of_head)

    def _prepare(self, sender: Member, message: Message) -> None:
        after, wanted = int(message["after"]), message["base"]
        base, mark = self.consent.base
        if after > self.consent.number or wanted not in (None, mark):
            self._post(sender, "lack", plan=self.consent.number)
            return
        plan = plan_from_json(message["plan"], base if wanted == mark else None)
        if self.consent.accept(self.term, plan, after, tuple(map(tuple, message["bodies"]))):
            self._ready = None
            self._call(lambda listener: listener.prepare(plan))
        elif self._ready is not None and self._ready[0] == plan.number:
            self._post(sender, "ready", number=plan.number, answer=self._ready[1])

    def _learn(self, news: Message) -> None:
        """A plan is valid."""
        term, number = news["ballot"]
        ballot = int(term), int(number)
        plan = plan_from_json(news["plan"]) if news["plan"] is not None else self.consent.accepted(ballot)
        answers = Answers(str(news["answers"]))
        if plan is not None and self.consent.learn(plan, answers, ballot):
            self._tie_won = False
            if self.consent.newest == ballot:  # and nothing newer has been prepared for since
                self._call(lambda listener: listener.begin(plan, answers))

    def _news(self, *, accepted: bool = False) -> Message:
        """What makes others learn of the last valid plan; without the plan itself for those who have accepted it."""
        assert self.plan is not None
        plan = None if accepted else plan_to_json(self.plan)
        return {"plan": plan, "answers": self.consent.answers.packed, "ballot": self.consent.settled}

    # -- the head ------------------------------------------------------------------------------------------------

    def _hear(self, sender: Member, kind: str, message: Message, term: int) -> None:
        peer = self._peers.get(sender.name)
        if peer is None:
            peer = self._peers[sender.name] = Peer(sender, self._now)
            self._left.discard(sender.name)
            self._call(lambda listener: listener.joined(sender))
            self._beat(peer)
            if self.plan is not None:
                self._send_begin(peer)
        peer.hear(self._now, self.interval_s)
        if term != self.term:
            self._beat(peer)
        elif kind == "here":
            self._to_all.setdefault(sender.name, Outbox()).confirm(int(message["orders"]))
            self._catch_up(peer, int(message["plan"]))
        elif kind == "ready":
            self._note_ready(sender.name, int(message["number"]), message["answer"])
        elif kind == "lack":
            if int(message["plan"]) < self.consent.number:
                self._send_begin(peer)
            if self.consent.proposal is not None:
                self._send(sender, self._proposal(whole=True))
        elif kind == "tell":
            number, body = int(message["number"]), message["body"]
            if number == max(self._seen.get(sender.name, 0) + 1, int(message["oldest"])):
                self._seen[sender.name] = number
                self._call(lambda listener: listener.received(sender.name, body))
            self._post(sender, "told", number=self._seen.get(sender.name, 0))

    def _catch_up(self, peer: Peer, plan: int) -> None:
        """Say again what seems to have been lost on the way."""
        proposed = self.consent.proposal is not None and peer.member.name not in self._proposal_answers
        behind = plan < self.consent.number
        if (behind or proposed) and self._now - peer.told >= REPEAT_S:
            if behind:
                self._send_begin(peer)
            if proposed:
                self._send_proposal(peer)
        if self._now - peer.repeated >= REPEAT_S:
            peer.repeated = self._now
            self._repeat(peer.member, "order", self._to_all.setdefault(peer.member.name, Outbox()))

    def _repeat(self, member: Member, kind: str, box: Outbox) -> None:
        for number, body in box.waiting:
            self._post(member, kind, number=number, oldest=box.oldest, body=body)

    def _send_proposal(self, peer: Peer) -> None:
        peer.told = self._now
        self._send(peer.member, self._prepare_message)

    def _proposal(self, *, whole: bool) -> Message:
        """The proposal: to most in relation to what they know, to others as a whole."""
        consent = self.consent
        assert consent.proposal is not None
        base, mark = consent.base
        bodies = (*consent.bodies, tuple(consent.electorate)) if whole and self.plan is None else consent.bodies
        plan = plan_to_json(consent.proposal, None if whole else base)
        number = consent.number
        return self._message("prepare", plan=plan, base=None if whole else mark, after=number, bodies=bodies)

    def _send_begin(self, peer: Peer) -> None:
        peer.told = self._now
        self._post(peer.member, "begin", news=self._news())

    def _note_ready(self, name: str, number: int, answer: Message) -> None:
        plan = self.consent.proposal
        if plan is None or number != plan.number:
            return
        self._proposal_answers[name] = answer
        if len(self._proposal_answers) < len(plan.members):
            return
        names = {member.name for member in plan.members}
        if not names <= self._proposal_answers.keys():
            return
        part = self.consent.share(names, head=True)
        if part is Share.MAJORITY or (part is Share.HALF and self._tie_won):
            answers = Answers.of(self._proposal_answers)
            self.consent.learn(plan, answers, (self.term, number))
            self._tie_won = False
            self._call(lambda listener: listener.begin(plan, answers))
            begin = self._message("begin", news=self._news(accepted=True))
            for peer in self._peers.values():
                peer.told = self._now
                self._send(peer.member, begin)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _post(self, member: Member, kind: str, **fields: Any) -> None:
        self._send(member, self._message(kind, **fields))

    def _message(self, kind: str, **fields: Any) -> Message:
        return {"kind": kind, "term": self.term + (kind == "ask" and self._asking == "pre"), **fields}

    def _call(self, call: Callable[[Listener], None]) -> None:
        self._calls.append(call)

    def flush(self) -> None:
        """Make the calls that are due; those that come up meanwhile are made by the outermost."""
        if self._flushing or self._listener is None:
            return
        self._flushing = True
        try:
            while self._calls:
                self._calls.popleft()(self._listener)
        finally:
            self._flushing = False
