"""Whose consent the next plan needs, so that of two plans that exclude each other at most one ever becomes valid.

This is Paxos over configurations. A plan is proposed under a ballot, the head's term and the plan's number; of two
ballots the one with the higher term is newer. It is valid once all of its members have accepted it, more than half of
the members of the last valid plan among them. Until that is known for certain it may be valid for somebody else, so
its members are a body of their own: whoever becomes head later needs more than half of them as well, and says so with
its own proposals, until one of those is valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from opsd.launch.io.member import Member
from opsd.launch.quorum.codec import Answers
from opsd.launch.quorum.peers import Share, share
from opsd.launch.quorum.port import Plan

Ballot = tuple[int, int]
"""Term and number."""
Body = tuple[str, ...]


def _names(plan: Plan) -> Body:
    return tuple(member.name for member in plan.members)


class Consent:
    """What one launcher knows of plans. ``bodies`` are those inherited with a proposal, besides ``electorate``."""

    def __init__(self, initial: Sequence[Member], first_number: int) -> None:
        self.plan: Plan | None = None
        self.answers = Answers.of({})
        self.settled: Ballot = (0, 0)
        """Under which ``plan`` was proposed."""
        self.proposal: Plan | None = None
        """Accepted, or proposed by this launcher, and not known to be valid."""
        self.bodies: tuple[Body, ...] = ()
        self.highest = first_number - 1
        """Of all plans heard of."""
        self.electorate: Mapping[str, Member] = {member.name: member for member in initial}
        """The members of the last valid plan; before the first one those that were named at the beginning."""
        self._accepted: Ballot = (0, 0)
        self._founders = Plan(0, (), tuple(sorted(initial, key=lambda member: member.name)))
        self._mark = hashlib.sha256(repr(self._founders.members).encode()).hexdigest()[:16]

    @property
    def base(self) -> tuple[Plan, str]:
        """In relation to what the members of a proposal are told, and a mark by which others know that they have it."""
        return (self.plan, str(self.plan.number)) if self.plan is not None else (self._founders, self._mark)

    @property
    def number(self) -> int:
        """Of the last valid plan; 0 before the first."""
        return self.plan.number if self.plan is not None else 0

    def accepted(self, ballot: Ballot) -> Plan | None:
        """The proposal under ``ballot``, if it is the one that this launcher has accepted last."""
        return self.proposal if self._accepted == ballot else None

    @property
    def voters(self) -> dict[str, Member]:
        """Those to ask for their votes."""
        accepted = self.proposal.members if self.proposal is not None else ()
        return {**self.electorate, **{member.name: member for member in accepted}}

    @property
    def newest(self) -> Ballot:
        """Of all that this launcher has accepted or knows to be valid."""
        return max(self.settled, self._accepted)

    def share(self, names: Collection[str], *, head: bool) -> Share:
        """The smallest part that ``names`` are of any body that has a say; a head's own proposal has none."""
        return min((share(names, body) for body in self._all_bodies(head)), key=lambda part: part.value)

    def _all_bodies(self, head: bool) -> Iterator[Collection[str]]:
        yield self.electorate
        yield from self.bodies
        if self.proposal is not None and not head:
            yield _names(self.proposal)

    def inherit(self) -> None:
        """This launcher has become head: what it has accepted may be valid, but is not gone on with."""
        if self.proposal is not None:
            self.bodies = tuple(dict.fromkeys((*self.bodies, _names(self.proposal))))
            self.proposal = None

    def propose(self, term: int, plan: Plan) -> None:
        """This head's next plan."""
        self.highest = max(self.highest, plan.number)
        self.proposal, self._accepted = plan, (term, plan.number)

    def accept(self, term: int, plan: Plan, after: int, bodies: tuple[Body, ...]) -> bool:
        """Accept a proposal of the head of ``term``, made after plan ``after`` was valid; False if it is too old.

        False as well while plan ``after`` is not known here.
        """
        self.highest = max(self.highest, plan.number)
        if (term, plan.number) <= self.newest or after > self.number:
            return False
        self.proposal, self.bodies, self._accepted = plan, bodies, (term, plan.number)
        return True

    def learn(self, plan: Plan, answers: Answers, ballot: Ballot) -> bool:
        """``plan``, proposed under ``ballot``, is valid; True if that is news."""
        self.highest = max(self.highest, plan.number)
        if ballot <= self.settled:
            return False
        self.plan, self.answers, self.settled = plan, answers, ballot
        self.electorate = {member.name: member for member in plan.members}
        if self._accepted <= ballot:
            self.proposal, self.bodies = None, ()
        return True
