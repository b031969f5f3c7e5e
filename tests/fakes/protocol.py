"""The launchers' protocol at the size of a large run, in virtual time: its speed, and what it costs the leader.

Groups, elections, messages, their encoding and the leader are production's; there are no ranks. The single thread of a
launcher takes the time of ``Costs`` for each message, so a leader with too much to do is late. ``opsd bench protocol``
measures these costs first. Launchers share what is the same for all of them, since copies would fit into no memory.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from opsd.bench import BenchError
from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.claim_store import Plan, StoreRead
from opsd.launch.claims.group import Group
from opsd.launch.claims.messages import (
    MESSAGES,
    Begun,
    Body,
    Claimed,
    HeartbeatReply,
    MemberChanges,
    Message,
    Ready,
)
from opsd.launch.claims.tcp_group import FEW, TICK_S
from opsd.launch.io.connection import Frames, encode
from opsd.launch.io.handshake import Handshake, Identity
from opsd.launch.io.protocol import Codec, Member
from opsd.launch.ranks.failure import RestartPolicy
from opsd.launch.run.leader import Leader
from opsd.launch.run.messages import CODEC, Progress
from opsd.launch.run.nodes import RunShape, usable
from opsd.simulate.cluster import VirtualLoop
from opsd.simulate.supervised import SimulatedLog

STORE_S = 0.003
"""Of a read or a claim in the run's folder."""
FURTHEST, COMMITTED = 1_234_567, 1_234_500
"""Steps that launchers report: as long as those of a real run."""
LATENCY_S = 0.0001
"""Of the network, one way: a fat tree with TCP."""
TIMED = 4
"""Those that lead in turn; a clock of CPU time is slow."""
SPREAD_S = 1.0
"""All launchers are started within this."""
FRAME_BYTES = 20
"""Length and tag of a frame (opsd/launch/io/connection.py)."""
SPARES = 4
IDLE_S, SETTLE_S = 3.0, 2.0
BLOCKS, PER_BLOCK = 30, 100
_KEY_IN, _KEY_OUT = b"i" * 32, b"o" * 32
_ANSWER = HeartbeatReply(12, 8, "n00001-12345-0123abcd", Ready(29_500, 1_234_567, 1_234_500), 3, 2)
_CODEC = Codec(MESSAGES)


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


class _Store:
    """The run's folder as one launcher sees it: it answers after ``STORE_S``."""

    error = None

    def __init__(self, world: Launchers, call: Callable[[Callable[[float], None]], None]) -> None:
        self._world, self._call, self._known, self._told = world, call, 0, 0
        self.group: Group

    def told(self, claim: Claim) -> None:
        self._told = claim.number

    def read(self, *, full: bool) -> None:
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
        def answer() -> None:
            mine = self._world.claimed(claim)
            self._known = max(self._known, claim.number) if mine else self._known
            self._call(lambda now: self.group.claimed(now, mine))

        self._world.loop.later(STORE_S, answer)

    def renew(self, number: int, beat: int) -> None:
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

    def _told_claim(self, leader: str, message: Claimed) -> Claim | None:
        return self.world.told(message, lambda: super(_SharingGroup, self)._told_claim(leader, message))

    def _succession(self, leader: str) -> tuple[str, ...]:
        return self.world.order(
            self.plan, self._electorate, leader, lambda: super(_SharingGroup, self)._succession(leader)
        )

    def share(self, world: Launchers) -> None:
        """All launchers of ``world`` are expected."""
        self.world, self._known, self._electorate = world, world.members, world.members
        self._expected = world.expected


class Launcher:
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
        return usable(reachable, ()) >= self._world.shape.least

    def stuck(self) -> bool:
        return not self.began

    def leader_changed(self, leader: str | None) -> None:
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
        if self._leader is not None:
            self._leader.joined(member)

    def lost(self, name: str, silent_s: float) -> None:
        if self._leader is not None:
            self._leader.lost(name, silent_s)

    def prepare(self, plan: Plan) -> None:
        self._group.ready(plan.number, Ready(29_500, FURTHEST, COMMITTED))

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        self.began, self.began_at = plan.number, max(self._world.loop.time(), self.busy_until)
        if self._leader is not None and begun is not None:
            self._leader.began(plan, begun)

    def received(self, sender: str, body: Body) -> None:
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


class Launchers:
    """``ranked`` launchers with ranks and ``spares`` without, numbered by precedence; network and folder."""

    def __init__(self, ranked: int, spares: int = 0, costs: Costs = FREE) -> None:
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
        self._encoded: tuple[Message | None, int] = (None, 0)
        size = len(self.members)
        self.all = {name: Launcher(self, member, SPREAD_S * (k + 1) / size, time.thread_time if k < TIMED else float)
                    for k, (name, member) in enumerate(self.members.items())}  # fmt: skip

    @property
    def alive(self) -> list[Launcher]:
        """Those that have not been lost."""
        return [one for one in self.all.values() if not one.dead]

    @property
    def leader(self) -> Launcher:
        """The maker of the newest claim."""
        return self.all[self.claims[-1].plan["head"]]

    def lose(self, name: str) -> None:
        """The machine of ``name`` loses its power, without a message."""
        self.all[name].dead = True

    def pass_time(self, seconds: float) -> float:
        """Let so many seconds pass, in which ``traffic`` is counted; returns them."""
        self._count_anew()
        self.loop.run(self.loop.time() + seconds)
        return seconds

    def _count_anew(self) -> None:
        self.bytes_read = 0
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

    def send(self, source: str, target: Member, message: Message) -> None:
        """Encoded as production does, once for a message to many."""
        sender = self.all[source]
        began = sender.clock()
        if new := self._encoded[0] is not message:
            self._encoded = (message, len(encode(_CODEC.encode(message))) + FRAME_BYTES)
        size = self._encoded[1]
        sender.has_sent(target.name, size, new=new)
        one = self.all[target.name]
        self.loop.later(sender.busy_until - self.loop.time() + LATENCY_S, partial(one.arrives, source, message, size))
        sender.traffic.cpu_s -= sender.clock() - began

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


def message_costs() -> Costs:
    """Seconds of CPU, medians over blocks: JSON, tags, sockets, the selector, and the proofs of a new connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs, selectors.DefaultSelector() as selector:
        selector.register(theirs, selectors.EVENT_READ)
        out, incoming = Frames(), Frames()
        out.secure(_KEY_IN, _KEY_OUT)
        incoming.secure(_KEY_OUT, _KEY_IN)
        payload = encode(_CODEC.encode(_ANSWER))

        def send() -> None:
            ours.send(out.pack(payload))

        def receive() -> None:
            selector.select()
            for raw in incoming.feed(theirs.recv(len(payload) + 20)):
                _CODEC.decode(raw)

        encodes, sends, receives = [], [], []
        for _ in range(BLOCKS):
            encodes.append(_each(lambda: encode(_CODEC.encode(_ANSWER))))
            sends.append(_each(send))
            receives.append(_each(receive))
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = [_each(lambda: _connect(server)) / 2 for _ in range(3)]
    return Costs(median(encodes), median(sends), median(receives), median(connects))


def _each(call: Callable[[], object]) -> float:
    began = time.thread_time()
    for _ in range(PER_BLOCK):
        call()
    return (time.thread_time() - began) / PER_BLOCK


def _connect(server: socket.socket) -> None:
    """Both sides of a new connection."""
    secret, one, other = os.urandom(32), Member("n1", "10.0.0.1", 29_400), Member("n2", "10.0.0.2", 29_400)
    with socket.socket() as calling:
        calling.connect(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            caller = Handshake(Identity(one, "bench", secret), other)
            called = Handshake(Identity(other, "bench", secret), None)
            for message in caller.begin():
                for answer in called.hear(message):
                    for proof in caller.hear(answer):
                        called.hear(proof)
            if not (caller.proven and called.proven):
                raise BenchError("the two sides of a connection do not trust each other")
            assert (caller.key_in, caller.key_out) == (called.key_out, called.key_in)


def run(nodes: int, *, costs: Costs | None = None) -> dict[str, Any]:
    """The start of ``nodes`` launchers with ranks, quiet, and the loss of a node, of a spare and of the leader."""
    costs = costs or message_costs()
    world = Launchers(nodes, SPARES, costs)
    try:
        results = {"start": _figures(world, world.until_agreed())}
        world.pass_time(SETTLE_S)
        results["quiet"] = _figures(world, world.pass_time(IDLE_S))
        node = world.claims[-1].plan["slots"][-1]
        world.lose(node)
        results["node_lost"] = _figures(world, world.until_agreed(without=[node]))
        world.pass_time(SETTLE_S)
        world.lose(world.alive[-1].name)
        results["spare_lost"] = _figures(world, world.pass_time(IDLE_S))
        leader = world.leader.name
        world.lose(leader)
        results["leader_lost"] = _figures(world, world.until_agreed(without=[leader]))
    except TimeoutError as error:
        raise BenchError(str(error)) from error
    return {
        "nodes": nodes, **{f"{name[:-2]}_us": value * 1e6 for name, value in asdict(costs).items()},
        "claim_bytes": world.claim_bytes, **results,
    }  # fmt: skip


def _figures(world: Launchers, seconds: float) -> dict[str, float]:
    """Of the leader, in the last ``seconds``; CPU in percent of a core."""
    traffic = world.leader.traffic
    cpu_s = traffic.cpu_s + traffic.transport_s(world.costs)
    return {
        "seconds": seconds, "sent": traffic.sent, "received": traffic.received, "connections": traffic.connections,
        "kb_per_s": (traffic.bytes_sent + traffic.bytes_received) / 1000 / seconds,
        "messages_per_s": (traffic.sent + traffic.received) / seconds,
        "folder_mb": world.bytes_read / 1e6, "cpu_s": cpu_s, "cpu_percent": 100 * cpu_s / seconds,
    }  # fmt: skip
