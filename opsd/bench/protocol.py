"""The launchers' protocol at the size of a large run, in virtual time: how long it takes, and what it costs the leader.

The groups, elections, messages, their encoding and the leader are production's (``opsd.simulate.launchers``). The other
costs of a message for a launcher's thread are measured first on this machine and pass in virtual time.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from opsd.bench import BenchError
from opsd.launch.claims.messages import MESSAGES, HeartbeatReply, Ready
from opsd.launch.io.connection import Frames, encode
from opsd.launch.io.handshake import Handshake, Identity
from opsd.launch.io.protocol import Codec, Member
from opsd.simulate.launchers import Launchers
from opsd.simulate.surroundings import Costs

NODES = 1024
SPARES = 4
IDLE_S, SETTLE_S = 3.0, 2.0
BLOCKS, PER_BLOCK = 30, 100
_KEY_IN, _KEY_OUT = b"i" * 32, b"o" * 32
_ANSWER = HeartbeatReply(12, 8, "n00001-12345-0123abcd", Ready(29_500, 1_234_567, 1_234_500), 3, 2)
_CODEC = Codec(MESSAGES)


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


def run(nodes: int = NODES, *, costs: Costs | None = None) -> dict[str, Any]:
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
