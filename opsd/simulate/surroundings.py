"""What surrounds the simulated launchers of a run: time, members, the run's folder, and what all would keep alike.

Thousands of copies of the members, the newest plan and the order of precedence fit into no memory: they are shared.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Claimed, MemberChanges, Message
from opsd.launch.claims.tcp_group import FEW, TICK_S
from opsd.launch.io.protocol import Member
from opsd.launch.run.nodes import RunShape
from opsd.simulate.clock import VirtualLoop

STORE_S = 0.003
"""Of a read or a claim in the run's folder."""
FURTHEST, COMMITTED = 1_234_567, 1_234_500
"""Steps that launchers report: as long as those of a real run."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a launcher's thread: to encode a message, send one, receive one, and for a new connection."""

    encode_s: float = 0.0
    send_s: float = 0.0
    receive_s: float = 0.0
    connect_s: float = 0.0


FREE = Costs()


@dataclass(slots=True)
class Traffic:
    """The messages that one launcher has sent and received, and the other CPU time of its protocol."""

    encoded: int = 0
    sent: int = 0
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    connections: int = 0
    cpu_s: float = 0.0
    """Of the group and the leader of the launchers that are timed, on this machine, without what is in ``Costs``."""

    def transport_s(self, costs: Costs) -> float:
        """CPU time of the messages and connections themselves, by what one of them costs."""
        messages_s = self.encoded * costs.encode_s + self.sent * costs.send_s + self.received * costs.receive_s
        return messages_s + self.connections * costs.connect_s


class Surroundings(ABC):
    """Of ``ranked`` launchers with ranks and ``spares`` without, numbered by precedence."""

    def __init__(self, ranked: int, spares: int, costs: Costs) -> None:
        self.loop = VirtualLoop()
        self.costs = costs
        self.members = {name: Member(name, f"10.{k >> 16}.{k >> 8 & 255}.{k & 255}", 29_400)
                        for k in range(ranked + spares) for name in [f"n{k:05d}"]}  # fmt: skip
        self.shape = RunShape(ranked, ranked, tuple(self.members), wait_s=600.0)
        self.claims: list[Claim] = []
        self.lease = (0, 0)
        self.expected = Plan(0, "", tuple(self.members), tuple(self.members.values()), {})
        self.claim_bytes = self.bytes_read = 0
        """Of the newest claim, and what the launchers have read of claims."""
        self.ended = ""
        """Why the run has ended, if it has."""
        self.tick_s = TICK_S if ranked + spares <= FEW else 2 * TICK_S
        self._plans: dict[int, Plan] = {}
        self._by_name: tuple[Sequence[Member], dict[str, Member]] = ((), {})
        self._order: tuple[object, object, str, tuple[str, ...]] = (None, None, "", ())
        self._told: tuple[Claimed | None, Claim | None] = (None, None)
        self._changed: tuple[MemberChanges | None, tuple[Member, ...]] = (None, ())

    @abstractmethod
    def send(self, source: str, target: Member, message: Message) -> None:
        """Deliver ``message`` after the time that it takes."""

    def claimed(self, claim: Claim) -> bool:
        """Whether ``claim`` is the first of its number; it is in the folder then."""
        if self.claims and self.claims[-1].number >= claim.number:
            return False
        self.claims.append(claim)
        self.claim_bytes = len(json.dumps(claim.plan))
        return True

    def plan(self, claim: Claim, parse: Callable[[], Plan]) -> Plan:
        """The plan of ``claim``, parsed once."""
        return self._plans.get(claim.number) or self._plans.setdefault(claim.number, parse())

    def told(self, message: Claimed, claim: Callable[[], Claim | None]) -> Claim | None:
        """The claim in ``message``, built once for all receivers."""
        if self._told[0] is not message:
            self._told = (message, claim())
        return self._told[1]

    def members_after(self, changes: MemberChanges, of: Callable[[], tuple[Member, ...]]) -> tuple[Member, ...]:
        """The members with ``changes``, made once for all who hear of them."""
        if self._changed[0] is not changes:
            self._changed = (changes, of())
        return self._changed[1]

    def by_name(self, members: Sequence[Member]) -> dict[str, Member]:
        """``members`` by name, one mapping for all who have the same."""
        if self._by_name[0] is not members:
            self._by_name = (members, {member.name: member for member in members})
        return self._by_name[1]

    def order(
        self, plan: object, electorate: object, leader: str, of: Callable[[], tuple[str, ...]]
    ) -> tuple[str, ...]:
        """The order of precedence, made once for all who would get the same."""
        if self._order[0] is not plan or self._order[1] is not electorate or self._order[2] != leader:
            self._order = (plan, electorate, leader, of())
        return self._order[3]
