"""A leader of a run on several nodes; its peers and the time are simulated."""

from __future__ import annotations

import heapq
import json
import queue
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Begun, Body, GroupListener, Ready
from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.protocol import Member
from opsd.launch.io.run_log import RunLog
from opsd.launch.ranks.failure import Failure, RestartPolicy
from opsd.launch.run import messages
from opsd.launch.run.leader import Leader
from opsd.launch.run.messages import CODEC, FromLeader, Stop, StopReason, ToLeader
from opsd.launch.run.nodes import RunShape
from opsd.slurm.topology import Topology

NODES = ("n1", "n2", "n3")
SPARE = "n4"


def member(name: str) -> Member:
    return Member(name, f"10.0.0.{name[1:]}", 20_000)


def swap_of(node: str) -> Stop:
    return Stop(StopReason.SWAP, node)


SIGTERM = Stop(StopReason.SIGNAL, "SIGTERM")


class FakeLoop(Loop):
    """Timers whose time passes when told to, and what is done beside the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._done: queue.Queue[Callable[[], None]] = queue.Queue()

    def time(self) -> float:
        return self.now

    def later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay_s, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self._done.put(callback)

    def settle(self) -> None:
        """Wait for what is done beside the loop."""
        self._done.get(timeout=60)()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
        self.now = end


class FakeGroup:
    """A group in which every claim holds, once the test says so; two ranks a node."""

    def __init__(self, *names: str) -> None:
        self.own = member("n1")
        self.leader: str | None = "n1"
        self.plan: Plan | None = None
        self.begun = self.holds = False
        self.leaderless_s = 2.0
        self.inherited: Mapping[str, Any] = {}
        self.alive = {name: member(name) for name in names}
        self.folder_silent_s = 0.0
        self.replacing = False
        self.folder_error: OSError | None = None
        self.proposals: list[Plan] = []
        self.ends: list[tuple[int, str]] = []
        self.answers: list[tuple[int, Ready]] = []
        self.orders: list[FromLeader] = []
        self.told: list[ToLeader] = []

    @property
    def members(self) -> list[str]:
        return list(self.alive)

    def start(self, listener: GroupListener) -> None: ...

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        members = tuple(self.alive[name] for name in sorted(self.alive))
        sizes = dict.fromkeys(self.alive, 2)
        number = len(self.proposals) + 1
        self.proposals.append(Plan(number, self.own.name, slots, members, sizes, json.loads(json.dumps(payload))))

    def end(self, code: int, reason: str, lost: Sequence[str], unfit: Sequence[str], memory: Mapping[str, Any]) -> None:
        self.ends.append((code, reason))
        self.memory = json.loads(json.dumps(memory))

    def ready(self, number: int, answer: Ready) -> None:
        self.answers.append((number, answer))

    def tell_leader(self, body: Body) -> None:
        self.told.append(CODEC.decode(json.loads(json.dumps(body))))

    def tell_all(self, body: Body) -> None:
        self.orders.append(CODEC.decode(json.loads(json.dumps(body))))

    def leave(self) -> None: ...


class LeaderHarness:
    """A leader and its world: two ranks a node."""

    def __init__(
        self,
        folder: Path,
        *alive: str,
        least: int = 3,
        most: int = 3,
        max_restarts: int = 8,
        wait_s: float = 0.0,
        grow_s: float = 0.0,
        topology: Topology | None = None,
        segment: int = 1,
        lemons: frozenset[str] = frozenset(),
    ) -> None:
        self.loop = FakeLoop()
        self.group = FakeGroup(*alive)
        self.folder = folder
        self.bad: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.shape = RunShape(
            least, most, (*NODES, SPARE), join_s=60.0, wait_s=wait_s, grow_s=grow_s,
            topology=topology or Topology(), segment=segment, lemons=lemons,
        )  # fmt: skip
        self.max_restarts = max_restarts
        self.leader = self.new_leader()

    @classmethod
    def at_work(cls, folder: Path, *alive: str, **shape: Any) -> LeaderHarness:
        """Three nodes at work, and a spare if no others are named."""
        stage = cls(folder, *(alive or (*NODES, SPARE)), **shape)
        stage.leader.take_over()
        return stage.begin()

    def new_leader(self) -> Leader:
        log = RunLog("run", "n1", self.folder / "events.jsonl")
        policy = RestartPolicy(self.max_restarts)

        def over(code: int, reason: str, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
            self.bad.append((lost, unfit))

        return Leader(self.shape, self.group, self.loop, policy, log, over)  # type: ignore[arg-type]

    def succeed(self) -> None:
        """The leader is lost, and another launcher takes over."""
        self.leader = self.new_leader()
        self.group.holds = False
        self.leader.take_over()
        self.begin()

    def begin(self) -> LeaderHarness:
        """The last proposal is claimed, and all of its nodes are ready."""
        self.group.plan, self.group.begun, self.group.holds = self.group.proposals[-1], True, True
        self.leader.began(self.group.plan, Begun("10.0.0.1", 1))
        return self

    def lose(self, *names: str) -> None:
        for name in names:
            del self.group.alive[name]
        for name in names:
            self.leader.lost(name, 2.0)

    def join(self, *names: str) -> None:
        for name in names:
            self.group.alive[name] = member(name)
            self.leader.joined(member(name))

    @property
    def generation(self) -> int:
        """Of the ranks that run."""
        return self.group.plan.generation if self.group.plan is not None else 0

    def tell(self, sender: str, message: ToLeader) -> None:
        self.leader.received(sender, message)

    def swap(self, node: str, reason: str = "Xid 79") -> None:
        self.tell("n2", messages.SwapWanted(self.generation, node, reason))

    def stop(self, *senders: str) -> None:
        for sender in senders:
            self.tell(sender, messages.StopWanted(SIGTERM))

    def finish_ranks(self, *names: str, told: Stop | None = None, cut_off: bool = False) -> None:
        for name in names:
            self.tell(name, messages.Ended(self.generation, told, cut_off))

    def fail(self, sender: str, rank: int, kind: Any, **fields: Any) -> None:
        failure = Failure(rank, "exit code 1", kind, 0.0, **fields)
        self.tell(sender, messages.Failed(self.generation, (messages.FailedRank(failure),)))

    @property
    def over(self) -> list[tuple[int, str]]:
        """How the run was told to end."""
        return self.group.ends

    @property
    def slots(self) -> list[tuple[str, ...]]:
        return [plan.slots for plan in self.group.proposals]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == kind]
