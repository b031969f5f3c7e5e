"""Launchers of a run in virtual time: production's groups, elections and leader, on a network that takes time.

Each launcher is a ``Group`` without ranks. Its single thread takes the time of ``Costs`` for every message that it
sends or receives, so that a leader with too much to do is late, as a real one would be. What all launchers would keep
alike (the members, the newest plan, the order of precedence) they share here: thousands of copies fit into no memory.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.claim_store import Plan, StoreRead
from opsd.launch.claims.group import Group
from opsd.launch.claims.messages import MESSAGES, Begun, Body, MemberChanges, Message, Ready
from opsd.launch.claims.tcp_group import FEW, TICK_S
from opsd.launch.io.connection import encode
from opsd.launch.io.protocol import Codec, Member
from opsd.launch.ranks.failure import RestartPolicy
from opsd.launch.run.leader import Leader
from opsd.launch.run.messages import CODEC, Progress
from opsd.launch.run.nodes import RunShape, assign_slots
from opsd.simulate.clock import VirtualLoop
from opsd.simulate.group import SimulatedLog

LATENCY_S = 0.0001
"""Of the network, one way: a fat tree with TCP."""
STORE_S = 0.003
"""Of a read or a claim in the run's folder."""
TIMED = 4
"""Those that lead in turn; a clock of CPU time is slow."""
SPREAD_S = 1.0
"""All launchers are started within this."""
FURTHEST, COMMITTED = 1_234_567, 1_234_500
"""Steps that launchers report: as long as those of a real run."""
FRAME_BYTES = 20
"""Length and tag of a frame (opsd/launch/io/connection.py)."""
_CODEC = Codec(MESSAGES)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a launcher's thread: to encode a message, send one, receive one, and for a new connection."""

    encode_s: float = 0.0
    send_s: float = 0.0
    receive_s: float = 0.0
    connect_s: float = 0.0


@dataclass(slots=True)
class Traffic:
    """What one launcher has sent and received, and the CPU time of its protocol beside that."""

    encoded: int = 0
    sent: int = 0
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    connections: int = 0
    cpu_s: float = 0.0
    """Of the group and the leader of the first ``TIMED`` launchers, on this machine, without what is in ``Costs``."""

    def transport_s(self, costs: Costs) -> float:
        """CPU time of the messages and connections themselves, by what one of them costs."""
        messages_s = self.encoded * costs.encode_s + self.sent * costs.send_s + self.received * costs.receive_s
        return messages_s + self.connections * costs.connect_s


class Launchers:
    """``ranked`` launchers with ranks and ``spares`` without, numbered by precedence."""

    def __init__(self, ranked: int, spares: int = 0, costs: Costs = Costs()) -> None:
        self.loop = VirtualLoop()
        self.costs = costs
        self.members = {name: Member(name, f"10.{k >> 16}.{k >> 8 & 255}.{k & 255}", 29_400)
                        for k in range(ranked + spares) for name in [f"n{k:05d}"]}  # fmt: skip
        self.shape = RunShape(ranked, ranked, tuple(self.members), wait_s=600.0)
        self.claims: list[Claim] = []
        self.lease = (0, 0)
        self.claim_bytes = 0
        """Of the newest claim, which every launcher reads."""
        self.ended = ""
        """Why the run has ended, if it has."""
        self.tick_s = TICK_S if ranked + spares <= FEW else 2 * TICK_S
        self._plans: dict[int, Plan] = {}
        self._by_name: tuple[Sequence[Member], dict[str, Member]] = ((), {})
        self._order: tuple[object, object, str, tuple[str, ...]] = (None, None, "", ())
        self._changed: tuple[MemberChanges | None, tuple[Member, ...]] = (None, ())
        self._encoded: tuple[Message | None, int] = (None, 0)
        size = len(self.members)
        self.all = {name: _Launcher(self, member, SPREAD_S * (k + 1) / size, time.thread_time if k < TIMED else float)
                    for k, (name, member) in enumerate(self.members.items())}  # fmt: skip

    # -- what is asked --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[_Launcher]:
        """Those that have not been lost."""
        return [one for one in self.all.values() if not one.dead]

    @property
    def leader(self) -> _Launcher:
        """The maker of the newest claim."""
        return self.all[self.claims[-1].plan["head"]]

    def lose(self, name: str) -> None:
        """The machine of ``name`` loses its power: nobody is told."""
        self.all[name].dead = True

    def pass_time(self, seconds: float) -> float:
        """Let so many seconds pass, in which ``traffic`` is counted; returns them."""
        self._count_anew()
        self.loop.run(self.loop.time() + seconds)
        return seconds

    def _count_anew(self) -> None:
        for one in self.all.values():
            one.traffic = Traffic()

    def until_agreed(self, *, without: Collection[str] = (), limit_s: float = 120.0) -> float:
        """Run until all have begun one generation whose ranks are on none of ``without``; returns the seconds.

        ``traffic`` is that of this time. Raises TimeoutError.
        """
        self._count_anew()
        began = self.loop.time()
        while True:
            numbers = {one.began for one in self.alive}
            if (
                self.claims
                and numbers == {self.claims[-1].number}
                and not {*without} & {*self.claims[-1].plan["slots"]}
            ):
                return max(one.began_at for one in self.alive) - began
            if self.ended or self.loop.time() - began > limit_s:
                why = self.ended or f"{len(self.alive)} launchers agree on no generation within {limit_s:g} s"
                raise TimeoutError(why)
            self.loop.run(self.loop.time() + self.tick_s)

    # -- what the launchers share -----------------------------------------------------------------------------------

    def plan(self, claim: Claim, parse: Callable[[], Plan]) -> Plan:
        """The plan of ``claim``, parsed once."""
        return self._plans.get(claim.number) or self._plans.setdefault(claim.number, parse())

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

    def send(self, source: _Launcher, target: Member, message: Message) -> None:
        """Encoded as production does, once for a message to many."""
        began = source.clock()
        if new := self._encoded[0] is not message:
            self._encoded = (message, len(encode(_CODEC.encode(message))) + FRAME_BYTES)
        size = self._encoded[1]
        source.has_sent(target.name, size, new=new)
        one = self.all[target.name]
        self.loop.later(source.busy_until - self.loop.time() + LATENCY_S, partial(one.arrives, source, message, size))
        source.traffic.cpu_s -= source.clock() - began

    def claimed(self, claim: Claim) -> bool:
        """Whether ``claim`` is the first of its number; it is in the folder then."""
        if self.claims and self.claims[-1].number >= claim.number:
            return False
        self.claims.append(claim)
        self.claim_bytes = len(json.dumps(claim.plan))
        return True


class _Store:
    """The run's folder as one launcher sees it: it answers after ``STORE_S``."""

    error = None

    def __init__(self, world: Launchers, call: Callable[[Callable[[float], None]], None]) -> None:
        self._world, self._call, self._known = world, call, 0
        self.group: Group

    def read(self, *, full: bool) -> None:
        """See ``ClaimStore.read``."""

        def answer() -> None:
            world = self._world
            looks = full or world.lease[0] > self._known
            newest = world.claims[-1] if looks and world.claims else None
            found = StoreRead(world.lease, newest, full or newest is not None)
            self._known = max(self._known, found.number)
            self._call(lambda now: self.group.store_read(now, found))

        self._world.loop.later(STORE_S, answer)

    def claim(self, claim: Claim) -> None:
        """See ``ClaimStore.claim``."""

        def answer() -> None:
            mine = self._world.claimed(claim)
            self._call(lambda now: self.group.claimed(now, mine))

        self._world.loop.later(STORE_S, answer)

    def renew(self, number: int, beat: int) -> None:
        """See ``ClaimStore.renew``."""
        self._world.lease = (number, beat)


class _SharingGroup(Group):
    """Keeps nothing of its own that is the same for all launchers."""

    world: Launchers

    def _adopt(self, members: Sequence[Member]) -> None:
        self._electorate = self.world.by_name(members)

    def _members_after(self, plan: Plan, changes: MemberChanges) -> tuple[Member, ...]:
        return self.world.members_after(changes, lambda: super(_SharingGroup, self)._members_after(plan, changes))

    def _plan_of(self, claim: Claim, *, its_maker_counts: bool) -> Plan:
        return self.world.plan(claim, lambda: super(_SharingGroup, self)._plan_of(claim, its_maker_counts=True))

    def _succession(self, leader: str) -> tuple[str, ...]:
        return self.world.order(
            self.plan, self._electorate, leader, lambda: super(_SharingGroup, self)._succession(leader)
        )

    def share(self, world: Launchers) -> None:
        """All launchers of ``world`` are expected."""
        self.world, self._known, self._electorate = world, world.members, world.members


class _Launcher:
    """A launcher whose ranks end at once, and its part as ``GroupListener``."""

    def __init__(self, world: Launchers, own: Member, start_s: float, clock: Callable[[], float]) -> None:
        self.name = own.name
        self.clock = clock
        """Of the CPU time of this thread."""
        self.dead = False
        self.began, self.began_at = 0, 0.0
        """The newest generation that has begun here, and when."""
        self.busy_until = 0.0
        self.traffic = Traffic()
        self._world = world
        self._inbox: deque[tuple[Member, Message]] = deque()
        self._peers: set[str] = set()
        self._leader: Leader | None = None
        store = _Store(world, self._calls)
        self._group = store.group = _SharingGroup(
            own, (), partial(world.send, self), store, self._wake, size=8, start="simulated", launcher=own.name
        )
        self._group.share(world)
        self._started = False
        world.loop.later(start_s, self._start)

    @property
    def members(self) -> Mapping[str, Member]:
        """Whom this launcher knows to be there."""
        return self._group.members

    # -- its thread -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._started = True
        self._calls(lambda now: self._group.start(self))
        self._tick()

    def _tick(self) -> None:
        loop = self._world.loop
        if self.dead:
            return
        if self.busy_until > loop.time():
            loop.later(self.busy_until - loop.time(), self._tick)
        else:
            self._calls(self._group.tick)
            loop.later(self._world.tick_s, self._tick)

    def _wake(self) -> None:
        self._world.loop.later(0.0, lambda: self._calls(lambda now: self._group.flush()))

    def _calls(self, call: Callable[[float], None]) -> None:
        """Call the group, unless the machine is gone; its CPU time counts."""
        if self.dead or not self._started:
            return
        began = self.clock()
        call(self._world.loop.time())
        self.traffic.cpu_s += self.clock() - began

    def _spends(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self._world.loop.time()) + seconds

    def has_sent(self, target: str, size: int, *, new: bool) -> None:
        """A message of ``size`` bytes goes to ``target``; ``new``: it had to be encoded."""
        self._meets(target)
        self._spends(self._world.costs.send_s + new * self._world.costs.encode_s)
        self.traffic.sent += 1
        self.traffic.bytes_sent += size
        self.traffic.encoded += new

    def _meets(self, other: str) -> None:
        if other not in self._peers:
            self._peers.add(other)
            self._spends(self._world.costs.connect_s)
            self.traffic.connections += 1

    def arrives(self, source: _Launcher, message: Message, size: int) -> None:
        """It waits in the socket until the thread is free."""
        if self.dead or not self._started:
            return
        self._meets(source.name)
        self.traffic.received += 1
        self.traffic.bytes_received += size
        self._inbox.append((self._world.members[source.name], message))
        if len(self._inbox) == 1:
            self._world.loop.later(self.busy_until - self._world.loop.time(), self._serve)

    def _serve(self) -> None:
        self._spends(self._world.costs.receive_s)
        source, message = self._inbox[0]
        self._calls(lambda now: self._group.receive(now, source, message))
        self._inbox.popleft()
        if self._inbox:
            self._world.loop.later(self.busy_until - self._world.loop.time(), self._serve)

    # -- the listener -----------------------------------------------------------------------------------------------

    def enough(self, reachable: Collection[str]) -> bool:
        """See ``GroupListener.enough``."""
        plan = self._group.plan
        return assign_slots(self._world.shape, plan.slots if plan is not None else (), reachable, ()) is not None

    def stuck(self) -> bool:
        """See ``GroupListener.stuck``."""
        return not self.began

    def leader_changed(self, leader: str | None) -> None:
        """See ``GroupListener.leader_changed``."""
        self._leader = None
        if leader == self.name:
            self._leader = Leader(
                self._world.shape, self._group, self._world.loop, RestartPolicy(100), SimulatedLog(_unseen),
                over=lambda *_: None, interrupted=lambda _: None, say=lambda _: None, wall=self._world.loop.time,
            )  # fmt: skip
            self._leader.take_over()
        if leader is not None and self.began:
            self._group.tell_leader(CODEC.encode(Progress(self.began, FURTHEST, COMMITTED)))

    def joined(self, member: Member) -> None:
        """See ``GroupListener.joined``."""
        if self._leader is not None:
            self._leader.joined(member)

    def lost(self, name: str, silent_s: float) -> None:
        """See ``GroupListener.lost``."""
        if self._leader is not None:
            self._leader.lost(name, silent_s)

    def prepare(self, plan: Plan) -> None:
        """See ``GroupListener.prepare``."""
        self._group.ready(plan.number, Ready(29_500, FURTHEST, COMMITTED))

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        """See ``GroupListener.begin``."""
        self.began, self.began_at = plan.number, max(self._world.loop.time(), self.busy_until)
        if self._leader is not None and begun is not None:
            self._leader.began(plan, begun)

    def received(self, sender: str, body: Body) -> None:
        """See ``GroupListener.received``."""
        if self._leader is not None:
            self._leader.received(sender, CODEC.decode(body))

    def cut_off(self) -> None:
        """There are no ranks to end."""

    def overtaken(self) -> None:
        """Nobody else uses this folder."""

    def over(self, end: End) -> None:
        """The leader has given up."""
        self._world.ended = end.reason


def _unseen(event: Mapping[str, Any]) -> None:
    """Nobody reads the events."""
