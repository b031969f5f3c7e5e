"""How plans travel: a proposal to those it concerns, their consent back, and the news that it is valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opsd.launch.io.member import Member, Message
from opsd.launch.quorum.codec import Answers, plan_from_json, plan_to_json
from opsd.launch.quorum.consent import Consent
from opsd.launch.quorum.election import Election
from opsd.launch.quorum.outlet import Outlet
from opsd.launch.quorum.peers import Peer, Share
from opsd.launch.quorum.port import Plan

REPEAT_S = 1.0
"""What may have been lost is said again after this."""


class Planning:
    """One launcher's part in it, as head and as follower. ``consent`` has the rules."""

    def __init__(self, consent: Consent, election: Election, out: Outlet) -> None:
        self._consent = consent
        self._election = election
        self._out = out
        self._answers: dict[str, Message] = {}
        self._prepare_message: Message = {}
        self._ready: tuple[int, Message] | None = None

    # -- the head ------------------------------------------------------------------------------------------------

    def propose(self, plan: Plan, peers: Iterable[Peer], now: float) -> None:
        """Propose ``plan`` to ``peers``, and to this launcher."""
        self._consent.propose(self._out.term, plan)
        self._answers = {}
        self._ready = None
        self._prepare_message = self._proposal(whole=False)
        for peer in peers:
            self._send_proposal(peer, now)
        self._out.call(lambda listener: listener.prepare(plan))

    def _send_proposal(self, peer: Peer, now: float) -> None:
        peer.told = now
        self._out.send(peer.member, self._prepare_message)

    def _proposal(self, *, whole: bool) -> Message:
        """The proposal: to most in relation to what they know, to others as a whole."""
        consent = self._consent
        assert consent.proposal is not None
        base, mark = consent.base
        whole_first = whole and consent.plan is None
        bodies = (*consent.bodies, tuple(consent.electorate)) if whole_first else consent.bodies
        plan = plan_to_json(consent.proposal, None if whole else base)
        number = consent.number
        return self._out.message("prepare", plan=plan, base=None if whole else mark, after=number, bodies=bodies)

    def send_begin(self, peer: Peer, now: float) -> None:
        """Tell ``peer`` the last valid plan, if there is one."""
        if self._consent.plan is not None:
            peer.told = now
            self._out.post(peer.member, "begin", news=self.news())

    def catch_up(self, peer: Peer, known: int, now: float) -> None:
        """Say again what seems to have been lost on the way to ``peer``, which knows the plan ``known``."""
        proposed = self._consent.proposal is not None and peer.member.name not in self._answers
        behind = known < self._consent.number
        if (behind or proposed) and now - peer.told >= REPEAT_S:
            if behind:
                self.send_begin(peer, now)
            if proposed:
                self._send_proposal(peer, now)

    def lacks(self, peer: Peer, known: int, now: float) -> None:
        """``peer`` cannot make sense of the proposal with what it knows."""
        if known < self._consent.number:
            self.send_begin(peer, now)
        if self._consent.proposal is not None:
            self._out.send(peer.member, self._proposal(whole=True))

    def note_ready(self, name: str, number: int, answer: Message, peers: Mapping[str, Peer], now: float) -> None:
        """``name`` consents; with the last one that is asked the plan becomes valid."""
        plan = self._consent.proposal
        if plan is None or number != plan.number:
            return
        self._answers[name] = answer
        if len(self._answers) < len(plan.members):
            return
        names = {member.name for member in plan.members}
        if not names <= self._answers.keys():
            return
        part = self._consent.share(names, head=True)
        if part is Share.MAJORITY or (part is Share.HALF and self._election.tie_won):
            self._settle(plan, peers.values(), now)

    def _settle(self, plan: Plan, peers: Iterable[Peer], now: float) -> None:
        answers = Answers.of(self._answers)
        self._consent.learn(plan, answers, (self._out.term, plan.number))
        self._election.tie_won = False
        self._out.call(lambda listener: listener.begin(plan, answers))
        begin = self._out.message("begin", news=self.news(accepted=True))
        for peer in peers:
            peer.told = now
            self._out.send(peer.member, begin)

    def news(self, *, accepted: bool = False) -> Message:
        """What makes others learn of the last valid plan; without the plan itself for those who have accepted it."""
        assert self._consent.plan is not None
        plan = None if accepted else plan_to_json(self._consent.plan)
        return {"plan": plan, "answers": self._consent.answers.packed, "ballot": self._consent.settled}

    # -- the others ----------------------------------------------------------------------------------------------

    def ready(self, number: int, answer: Message, head: Member | None) -> None:
        """This launcher consents; kept for a head that has not heard it."""
        self._ready = (number, answer)
        if head is not None:
            self._out.post(head, "ready", number=number, answer=answer)

    def prepare(self, head: Member, message: Message) -> None:
        """The head proposes a plan."""
        consent = self._consent
        after, wanted = int(message["after"]), message["base"]
        base, mark = consent.base
        if after > consent.number or wanted not in (None, mark):
            self._out.post(head, "lack", plan=consent.number)
            return
        plan = plan_from_json(message["plan"], base if wanted == mark else None)
        if consent.accept(self._out.term, plan, after, tuple(map(tuple, message["bodies"]))):
            self._ready = None
            self._out.call(lambda listener: listener.prepare(plan))
        elif self._ready is not None and self._ready[0] == plan.number:
            self._out.post(head, "ready", number=plan.number, answer=self._ready[1])

    def learn(self, news: Mapping[str, Any]) -> None:
        """A plan is valid."""
        term, number = news["ballot"]
        ballot = int(term), int(number)
        accepted = self._consent.accepted(ballot)
        plan = plan_from_json(news["plan"]) if news["plan"] is not None else accepted
        answers = Answers(str(news["answers"]))
        if plan is not None and self._consent.learn(plan, answers, ballot):
            self._election.tie_won = False
            if self._consent.newest == ballot:  # and nothing newer has been prepared for since
                self._out.call(lambda listener: listener.begin(plan, answers))
