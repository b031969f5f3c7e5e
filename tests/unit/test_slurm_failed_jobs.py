"""Jobs that failed on a node and ran elsewhere: asked for by one agent, counted by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from opsd.lemons import NodeFailure
from opsd.slurm import node_comment
from opsd.slurm.candidates import accounting, faults
from opsd.slurm.job_faults import FIRST_S, PERIOD_S, FailedJobs, NodeFaults
from opsd.slurm.node_comment import KEPT_FAILED, Accounting, NodeHistory, Stay
from opsd.slurm.port import Node, SlurmDenied, SlurmRejected
from tests.fakes.slurm import FakeSlurm

NOW = 1_763_711_000.0
DAY_S = 86_400.0


class World:
    """The agents of three nodes, one Slurm, and an accounting that knows ``failed``, or nothing if that is None."""

    def __init__(
        self, failed: Sequence[NodeFailure] | None = (), *, operator: bool = True, may_ask: bool = True
    ) -> None:
        self.slurm = FakeSlurm([Node(name, "idle") for name in ("n1", "n2", "n3")], operator=operator)
        self.failed = failed
        self.asked: list[float] = []
        self.now = 0.0
        self.agents = {name: self.agent(name) for name in self.slurm.by_name}
        for agent in self.agents.values():
            agent.may_ask = may_ask

    def agent(self, name: str) -> FailedJobs:
        return FailedJobs(self.slurm, name, read=self._read, clock=lambda: self.now, wall=lambda: NOW + self.now)

    def _read(self, now: float, days: float) -> list[NodeFailure]:
        self.asked.append(days)
        if self.failed is None:
            raise SlurmRejected("sacct: this cluster keeps no accounting (AccountingStorageType)")
        return [fault for fault in self.failed if now - days * DAY_S <= fault.at <= now]

    def go_on(self, seconds: float) -> list[str]:
        """Let every agent look once a minute; what was said by those that could not."""
        said, end = [], self.now + seconds
        while self.now < end:
            self.now += 60
            for agent in self.agents.values():
                try:
                    agent.refresh()
                except (SlurmRejected, SlurmDenied) as error:
                    said.append(str(error))
        return said

    def failures(self, name: str) -> tuple[float, ...]:
        return node_comment.read(self.slurm.by_comment.get(name, "")).failed


def test_one_agent_asks_and_all_know() -> None:
    """The failures are in the comments, beside what people wrote there, and in what each node is scored by."""
    world = World(
        [
            NodeFailure("n2", "job", NOW - 5 * DAY_S),
            NodeFailure("n2", "job", NOW - DAY_S),
            NodeFailure("gone", "job", NOW - 60),
        ]
    )
    world.slurm.by_comment["n2"] = "rack 12"
    assert [agent.counted for agent in world.agents.values()] == [None, None, None]
    world.go_on(FIRST_S + 60)
    assert world.asked == [90]
    assert world.failures("n2") == (NOW - 5 * DAY_S, NOW - DAY_S)
    assert world.slurm.by_comment["n2"].startswith("rack 12 [opsd1 ")
    assert [agent.counted for agent in world.agents.values()] == [True, True, True]
    assert NodeFaults(world.slurm, "n2", wall=lambda: NOW).refresh().faults == 2
    assert NodeFaults(world.slurm, "n1", wall=lambda: NOW).refresh().faults == 0


def test_it_is_asked_every_six_hours_and_only_for_what_is_new() -> None:
    """Each failure is kept once; another agent goes on where the one that asked is gone."""
    world = World([NodeFailure("n2", "job", NOW - DAY_S)])
    world.go_on(FIRST_S + 3 * PERIOD_S)
    first, *later = world.asked
    assert (first, len(later)) == (90, 3)
    assert all(7 <= days < 8 for days in later)
    assert world.failures("n2") == (NOW - DAY_S,)
    asking = next(name for name, text in world.slurm.by_comment.items() if node_comment.read(text).accounting)
    del world.agents[asking]
    world.failed = [NodeFailure("n3", "job", NOW + world.now)]
    world.go_on(2 * PERIOD_S)
    assert world.failures("n3") == (world.failed[0].at,)


def test_without_an_answer_nobody_says_that_jobs_are_counted() -> None:
    """Where there is no accounting one agent asks for all, and learns no more; so too after an answer that is old."""
    world = World(None)
    said = world.go_on(FIRST_S + 60)
    assert (world.asked, len(said)) == ([90], 1)
    assert [agent.counted for agent in world.agents.values()] == [False, False, False]
    world = World()
    world.go_on(FIRST_S + 60)
    world.failed = None
    world.go_on(2 * PERIOD_S)
    assert [agent.counted for agent in world.agents.values()] == [False, False, False]


@pytest.mark.parametrize("world", [World(operator=False), World(may_ask=False)], ids=["denied", "policy"])
def test_who_may_not_write_does_not_ask(world: World) -> None:
    """Else every agent would, as none could tell the others."""
    world.go_on(FIRST_S + 60)
    assert world.asked == []
    assert [agent.counted for agent in world.agents.values()] == [False, False, False]


def test_what_an_agent_writes_meanwhile_is_kept() -> None:
    """The comment is read again just before it is written."""
    world = World([NodeFailure("n2", "job", NOW - DAY_S)])
    stay = NodeHistory((Stay("gpu_xid", NOW - 9 * DAY_S, NOW - 8 * DAY_S),))

    def read(now: float, days: float) -> list[NodeFailure]:
        world.slurm.by_comment["n2"] = node_comment.write("", stay)
        return [NodeFailure("n2", "job", NOW - DAY_S)]

    agent = FailedJobs(world.slurm, "n1", read=read, clock=lambda: world.now, wall=lambda: NOW)
    agent.may_ask, world.now = True, FIRST_S
    agent.refresh()
    assert node_comment.read(world.slurm.by_comment["n2"]).stays == stay.stays
    assert world.failures("n2") == (NOW - DAY_S,)


def test_a_failure_that_a_stay_explains_counts_once() -> None:
    """The node was drained for what killed the job; a stay for maintenance explains as much."""
    record = NodeHistory(
        (Stay("gpu_xid", NOW, NOW + 7200), Stay("maintenance", NOW + 5 * DAY_S, NOW + 6 * DAY_S)),
        failed=(NOW - 600, NOW + 5 * DAY_S + 60, NOW + 8 * DAY_S),
    )
    comments: Mapping[str, str] = {"a": node_comment.write("", record)}
    twice = [NodeFailure("a", "job", NOW + 8 * DAY_S, NOW + 8 * DAY_S), NodeFailure("b", "job", NOW, NOW)]
    found = [(fault.node, fault.kind, fault.at) for fault in faults(comments, twice)]
    assert found == [("a", "gpu_xid", NOW), ("a", "job", NOW + 8 * DAY_S), ("b", "job", NOW)]


def test_the_comment_keeps_the_newest_failures_and_the_reading() -> None:
    """A node that all jobs fail on must not fill it; a reading without an answer is told apart."""
    record = NodeHistory().blamed((NOW - hour * 3600.4 for hour in range(20)), NOW)
    record = record.blamed([NOW - 100 * DAY_S], NOW)
    assert len(record.failed) == KEPT_FAILED
    assert record.failed[-1] == NOW
    assert node_comment.read(node_comment.write("", record)) == record
    for answered in (True, False):
        told = NodeHistory(accounting=Accounting(NOW, answered))
        assert node_comment.read(node_comment.write("x", told)) == told
    older = node_comment.write("", NodeHistory(accounting=Accounting(NOW - 5, answered=True)))
    assert accounting({"a": older, "b": node_comment.write("", told), "c": ""}) == Accounting(NOW, answered=False)
