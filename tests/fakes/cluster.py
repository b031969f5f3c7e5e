"""A launcher with fellows, one of three; its node, the agreement and the time are played."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from opsd.launch.io.member import Message
from opsd.launch.quorum.port import Plan
from opsd.launch.run.cluster import ClusterRun
from tests.fakes.head import NODES, PlayedLoop, PlayedQuorum, member

OWN, HEAD = "n2", "n1"


class PlayedNode:
    """The ranks of a node, which do at once what they are told."""

    def __init__(self, loop: PlayedLoop) -> None:
        self.loop = loop
        self.settings = SimpleNamespace(stop_timeout_s=120.0, local_size=2)
        self.progress = SimpleNamespace(furthest=7, committed=5, recovery=None)
        self.generation = SimpleNamespace(number=0, running=[])
        self.state, self.stopping, self.done = "waiting", "", False
        self.left: tuple[int, str] | None = None

    def start(self, number: int, place: object, restarts: int) -> None:
        self.generation = SimpleNamespace(number=number, running=["rank"])
        self.state, self.stopping, self.done = "running", "", False

    def stand_by(self, number: int) -> None:
        self.generation = SimpleNamespace(number=number, running=[])
        self.state, self.stopping, self.done = "spare", "", False

    def end(self, then: Callable[[], None], *, gently: bool = False) -> None:
        self.generation.running = []
        then()

    def stop(self, by: str) -> None:
        self.stopping = by

    def set_state(self, state: str) -> None:
        self.state = state

    def finish(self, code: int, reason: str) -> None:
        self.left = (code, reason)


class Fellow:
    """The launcher of n2; n1 is the head. ``told`` is what the head has heard of it."""

    def __init__(self, *, guest: bool = False, waits: bool = False) -> None:
        self.loop = PlayedLoop()
        self.node = PlayedNode(self.loop)
        self.told: list[Message] = []
        self.quorum = PlayedQuorum(*NODES)
        self.quorum.own, self.quorum.head = member(OWN), HEAD
        self.quorum.tell_head = self.told.append  # type: ignore[method-assign]
        self.run = ClusterRun(
            self.node,  # type: ignore[arg-type]
            self.quorum,
            new_head=lambda over: None,  # type: ignore[arg-type, return-value]
            fence=None,  # type: ignore[arg-type]
            job=None,  # type: ignore[arg-type]
            ready=lambda: "",
            guest=guest,
            waits=waits,
            isolated_s=60.0,
        )

    def begin(self, number: int, *slots: str, spares: tuple[str, ...] = (), keep: int = 0) -> None:
        """A plan becomes valid."""
        members = tuple(member(name) for name in sorted((*slots, *spares)))
        payload: dict[str, Any] = {"first": True, "keep": keep, "restarts": 0, "unfit": [], "noticed_s": 0.0}
        answers = {one.name: {"local_size": 2, "port": 1, "furthest": 7, "committed": 5} for one in members}
        self.run.begin(Plan(number, slots, members, payload), answers)
        self.loop.settle()

    def finish_ranks(self) -> None:
        """The ranks end in good order."""
        self.node.generation.running, self.node.done = [], True
        self.run.ended()

    def elect(self, head: str | None) -> None:
        """The head changes, or is lost."""
        self.quorum.head = head
        self.run.head_changed(head)

    def kinds(self) -> list[str]:
        """What the head was told since it was asked last, progress left out."""
        kinds = [message["kind"] for message in self.told if message["kind"] != "progress"]
        self.told.clear()
        return kinds
