"""One launcher in virtual time: production's group and leader, without ranks, whose thread is busy with messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.claim_store import Plan, StoreRead
from opsd.launch.claims.group import Group
from opsd.launch.claims.messages import Begun, Body, Claimed, MemberChanges, Message, Ready
from opsd.launch.io.protocol import Member
from opsd.launch.ranks.failure import RestartPolicy
from opsd.launch.run.leader import Leader
from opsd.launch.run.messages import CODEC, Progress
from opsd.launch.run.nodes import usable
from opsd.simulate.group import SimulatedLog
from opsd.simulate.surroundings import COMMITTED, FURTHEST, STORE_S, Surroundings, Traffic


class _Store:
    """The run's folder as one launcher sees it: it answers after ``STORE_S``."""

    error = None

    def __init__(self, world: Surroundings, call: Callable[[Callable[[float], None]], None]) -> None:
        self._world, self._call, self._known, self._told = world, call, 0, 0
        self.group: Group

    def told(self, claim: Claim) -> None:
        """See ``ClaimStore.told``."""
        self._told = claim.number

    def read(self, *, full: bool) -> None:
        """See ``ClaimStore.read``."""

        def answer() -> None:
            world = self._world
            looks = full or world.lease[0] > self._known
            newest = world.claims[-1] if looks and world.claims else None
            found = StoreRead(world.lease, newest, full or newest is not None)
            if found.number > max(self._known, self._told):
                world.bytes_read += world.claim_bytes
            self._known = max(self._known, found.number)
            self._call(lambda now: self.group.store_read(now, found))

        self._world.loop.later(STORE_S, answer)

    def claim(self, claim: Claim) -> None:
        """See ``ClaimStore.claim``."""

        def answer() -> None:
            mine = self._world.claimed(claim)
            self._known = max(self._known, claim.number) if mine else self._known
            self._call(lambda now: self.group.claimed(now, mine))

        self._world.loop.later(STORE_S, answer)

    def renew(self, number: int, beat: int) -> None:
        """See ``ClaimStore.renew``."""
        self._world.lease = (number, beat)


class _SharingGroup(Group):
    """Keeps nothing of its own that is the same for all launchers."""

    world: Surroundings

    def _adopt(self, members: Sequence[Member]) -> None:
        self._electorate = self.world.by_name(members)

    def _members_after(self, plan: Plan, changes: MemberChanges) -> tuple[Member, ...]:
        return self.world.members_after(changes, lambda: super(_SharingGroup, self)._members_after(plan, changes))

    def _plan_of(self, claim: Claim, *, its_maker_counts: bool) -> Plan:
        return self.world.plan(claim, lambda: super(_SharingGroup, self)._plan_of(claim, its_maker_counts=True))

    def _told_claim(self, leader: str, message: Claimed) -> Claim | None:
        return self.world.told(message, lambda: super(_SharingGroup, self)._told_claim(leader, message))

    def _succession(self, leader: str) -> tuple[str, ...]:
        return self.world.order(
            self.plan, self._electorate, leader, lambda: super(_SharingGroup, self)._succession(leader)
        )

    def share(self, world: Surroundings) -> None:
        """All launchers of ``world`` are expected."""
        self.world, self._known, self._electorate = world, world.members, world.members
        self._expected = world.expected


class Launcher:
    """A launcher whose ranks end at once, and its part as ``GroupListener``."""

    def __init__(self, world: Surroundings, own: Member, start_s: float, clock: Callable[[], float]) -> None:
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
            own,
            (),
            partial(world.send, own.name),
            store,
            self._wake,
            size=8,
            start="simulated",
            launcher=own.name,
            now=start_s,
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

    def arrives(self, source: str, message: Message, size: int) -> None:
        """It waits in the socket until the thread is free."""
        if self.dead or not self._started:
            return
        self._meets(source)
        self.traffic.received += 1
        self.traffic.bytes_received += size
        self._inbox.append((self._world.members[source], message))
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
        return usable(reachable, ()) >= self._world.shape.least

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
