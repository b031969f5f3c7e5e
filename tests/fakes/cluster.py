"""A launcher among three; its node, the group and the time are simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Begun
from opsd.launch.ranks.failure import Failure, Kind
from opsd.launch.run.cluster import ClusterRun
from opsd.launch.run.messages import Progress, ToLeader
from opsd.launch.run.nodes import RunShape
from opsd.launch.run.slow_ranks import StepSampler
from tests.fakes.leader import NODES, FakeGroup, FakeLoop, member

OWN, LEADER = "n2", "n1"


class FakeNode:
    """The ranks of a node, which do at once what they are told; unless their end is ``slow``, until ``collect``."""

    slow = False

    def __init__(self, loop: FakeLoop) -> None:
        self.loop = loop
        self.settings = SimpleNamespace(stop_timeout_s=120.0, local_size=2)
        self.folders = SimpleNamespace(folder="/runs/r")
        self.events = SimpleNamespace(relay=None, emit=lambda kind, **fields: None)
        self.progress = SimpleNamespace(furthest=7, committed=5, recovery=None)
        self.step_times = StepSampler()
        self.generation = SimpleNamespace(number=0, running=[], ranks=[])
        self.state, self.stopping, self.done, self.ending = "waiting", "", False, False
        self.cut_off = False
        self.left: tuple[int, str] | None = None

    def start(self, number: int, place: object, restarts: int) -> None:
        self.generation = SimpleNamespace(number=number, running=["rank"], ranks=["rank"])
        self.state, self.stopping, self.done = "running", "", False

    def stand_by(self, number: int) -> None:
        self.generation = SimpleNamespace(number=number, running=[], ranks=[])
        self.state, self.stopping, self.done = "spare", "", False

    def end(self, then: Callable[[], None], *, gracefully: bool = False) -> None:
        self._after = then
        self.ending = True
        if not self.slow:
            self.collect()

    def collect(self) -> None:
        """The ranks have ended."""
        self.generation.running, self.ending = [], False
        self._after()

    def stop(self, by: str) -> None:
        self.stopping = by

    def set_state(self, state: str) -> None:
        self.state = state

    def finish(self, code: int, reason: str) -> None:
        self.left = (code, reason)


class FollowerLauncher:
    """The launcher of n2; n1 is the leader. ``told`` is what the leader has heard of it."""

    def __init__(self, *, borrowed: bool = False, waits: bool = False, least: int = 3) -> None:
        self.loop = FakeLoop()
        self.node = FakeNode(self.loop)
        self.group = FakeGroup(*NODES)
        self.job: list[tuple[int, tuple[str, ...]]] = []
        self.group.own, self.group.leader = member(OWN), LEADER
        self.run = ClusterRun(
            self.node,  # type: ignore[arg-type]
            self.group,
            RunShape(least, 3, NODES, wait_s=60.0 if waits else 0.0),
            new_leader=self._new_leader,  # type: ignore[arg-type]
            job=SimpleNamespace(end=lambda code, lost, unfit: self.job.append((code, lost))),
            ready=lambda: "",
            given_back=lambda: 1234.5,
            borrowed=borrowed,
            isolated_s=60.0,
        )
        self.run.start_run()

    def _new_leader(self, over: Callable[[int, str, tuple[str, ...], tuple[str, ...]], None]) -> SimpleNamespace:
        """A leader that does nothing; ``end_run`` is what it calls at the end."""
        self.end_run = over
        return SimpleNamespace(take_over=lambda: None, step_down=lambda: None)

    @property
    def told(self) -> list[ToLeader]:
        return self.group.told

    def plan(self, number: int, *slots: str, spares: tuple[str, ...] = (), keep: int = 0) -> Plan:
        members = tuple(member(name) for name in sorted((*slots, *spares)))
        payload: dict[str, Any] = {"first": True, "keep": keep, "restarts": 0, "unfit": [], "noticed_s": 0.0}
        return Plan(number, LEADER, slots, members, {one.name: 2 for one in members}, payload)

    def prepare(
        self, number: int, *slots: str, spares: tuple[str, ...] = (), keep: int = 0, unfit: tuple[str, ...] = ()
    ) -> None:
        """A plan is claimed."""
        plan = self.group.plan = self.plan(number, *slots, spares=spares, keep=keep)
        plan.payload["unfit"].extend(unfit)  # type: ignore[attr-defined]
        self.run.prepare(plan)

    def begin(self, number: int, *slots: str, spares: tuple[str, ...] = (), keep: int = 0, **payload: object) -> None:
        """A plan with more in its ``payload`` is claimed, and all are ready."""
        self.prepare(number, *slots, spares=spares, keep=keep)
        assert self.group.plan is not None
        self.group.plan = replace(self.group.plan, payload={**self.group.plan.payload, **payload})
        self.run.begin(self.group.plan, Begun("10.0.0.1", 1, 7, 5))
        if OWN not in slots:
            self.loop.settle()

    def finish_ranks(self) -> None:
        """The ranks end in good order."""
        self.node.generation.running, self.node.done = [], True
        self.run.ended()

    def fail(self, kind: Kind) -> None:
        """The first of the two ranks fails; the other runs on."""
        rank = SimpleNamespace(rank=2, log="", log_tail=lambda lines=0: "", report_exit=lambda *_, culprit: None)
        self.run.failed([(Failure(2, "exit code 1", kind, 0.0), rank)])  # type: ignore[list-item]

    def elect(self, leader: str | None) -> None:
        """The leader changes, or is lost."""
        self.group.leader = leader
        self.run.leader_changed(leader)

    def hear(self) -> list[ToLeader]:
        """What the leader was told since it was asked last, progress left out."""
        told = [message for message in self.told if not isinstance(message, Progress)]
        self.told.clear()
        return told
