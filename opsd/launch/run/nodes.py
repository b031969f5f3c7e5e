"""The nodes of a run as the leader knows them: node health, and which nodes run ranks in the next generation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from opsd.events import NodeCleared, NodeRetired, SpareRefused, SpareWanted, SwapRefused
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.election import LeaderView
from opsd.launch.io.loop import Timer, Timers
from opsd.launch.io.protocol import Member
from opsd.launch.io.reporting import print_message
from opsd.launch.io.run_log import RunEventLog
from opsd.launch.ranks.failure import Failure
from opsd.slurm.pick import pick
from opsd.slurm.topology import Topology

if TYPE_CHECKING:
    from opsd.launch.run.leader import Leader


REGROUP_S = 2.0
"""How long a new leader waits for the others to find it before it decides that there are too few."""
BLAMED_OFTEN = 2
"""Faults after which a node is unfit without a hardware error; with one, even if nobody can take its place."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """How many nodes run ranks, at least and at most, in which order of preference, and how long to wait for nodes.

    The first generation waits ``join_s`` seconds for the least number, then ``last_call_s`` for more; a later one that
    has too few waits ``wait_s``. ``grow_s`` is what ``Growth`` takes a restart to cost. After failures that all look
    like consequences of a failure on another node, that one gets ``victim_s`` to show, longer than the detection of a
    lost node takes. Each ``segment`` consecutive nodes are to be in one NVLink domain, or below one leaf switch.
    ``lemons`` are the nodes that the cluster's history speaks against at the start, taken last.
    """

    least: int
    most: int
    order: tuple[str, ...]
    join_s: float = 600.0
    last_call_s: float = 0.0
    wait_s: float = 0.0
    grow_s: float = 0.0
    victim_s: float = 3.0
    topology: Topology = field(default_factory=Topology)
    segment: int = 1
    lemons: frozenset[str] = frozenset()

    def seen_by(self, launchers: Iterable[Member]) -> RunShape:
        """With the NVLink domains that the drivers of these nodes tell; they count for more than Slurm's blocks."""
        told = {one.name: one.domain for one in launchers if one.domain}
        return replace(self, topology=self.topology.with_domains(told)) if told else self

    @property
    def nnodes(self) -> str:
        """The value of ``--nnodes``."""
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


def assign_slots(
    shape: RunShape,
    before: Sequence[str],
    alive: Collection[str],
    unfit: Collection[str],
    flaps: Mapping[str, int] | None = None,
    lemons: Collection[str] = (),
) -> tuple[str, ...] | None:
    """The nodes by node rank: those of ``before`` keep their slots, others fill the gaps; None if there are too few.

    A node that keeps its slot keeps its ranks, and their in-memory checkpoints. Of the free nodes, those that were
    never lost are preferred and ``lemons`` come last, then those near the rest of the segment, or near the node whose
    place they take. Before all that, one is preferred between whose leaf switch and those of the others no way was bad.
    """
    if usable(alive, unfit) < shape.least:
        return None
    places = [name if name in alive and name not in unfit else None for name in before]
    ranked = {name: number for number, name in enumerate(shape.order)}
    doubts = {name: (name in lemons, (flaps or {}).get(name, 0)) for name in set(alive) - set(before) - set(unfit)}
    free = sorted(doubts, key=lambda name: (*doubts[name], ranked.get(name, len(ranked)), name))
    if not places:
        free = _at_first(shape, free, lemons)
    for number, name in enumerate(places):
        if name is None and free:
            first = number // shape.segment * shape.segment
            peers = [*filter(None, places[first : first + shape.segment])] or [before[number]]
            bad, tree = shape.topology.bad_towards(filter(None, places)), shape.topology
            order = {name: (bad[tree.leaf.get(name, "")], *doubts[name], *tree.cost(name, peers)) for name in free}
            places[number] = best = min(order, key=order.__getitem__)
            free.remove(best)
    nodes = [name for name in places if name is not None]
    return (*nodes, *free[: shape.most - len(nodes)])


def _at_first(shape: RunShape, free: Sequence[str], lemons: Collection[str]) -> list[str]:
    """``free`` with those first that begin: no lemons and no bad way among them if possible, in whole segments."""
    sound = [name for name in free if name not in lemons]
    chosen = sound if len(sound) >= shape.most else [*free]
    if shape.topology.bad_ways(chosen[: shape.most]):
        choice = pick(dict.fromkeys(chosen, 0.0), shape.most, shape.topology)
        chosen = [name for name in chosen if choice is None or name in choice.nodes]
    if shape.segment > 1:
        chosen = shape.topology.arranged(chosen, shape.segment)
    begun = {*chosen}
    return [*chosen, *(name for name in free if name not in begun)]


def usable(alive: Collection[str], unfit: Collection[str]) -> int:
    """How many nodes may get a slot, in time by the number of the ``unfit``: an election asks at every tick."""
    return len(alive) - sum(name in alive for name in unfit)


class NodeHealth:
    """What the leader knows about the health of nodes. ``spares`` returns the nodes that could take a slot.

    ``wall`` returns epoch seconds.
    """

    def __init__(
        self,
        log: RunEventLog,
        spares: Callable[[], Collection[str]],
        wall: Callable[[], float] = time.time,
        lemons: Collection[str] = (),
    ) -> None:
        self.gone: set[str] = set()
        self.flaps: Counter[str] = Counter()
        """How often nodes were lost and came back."""
        self.lemons = set(lemons)
        """Those that keep failing, as the cluster's history says."""
        self._log = log
        self._spares = spares
        self._wall = wall
        self._faults: Counter[str] = Counter()
        self._retired: dict[str, float] = {}
        """Nodes that a spare has replaced, or is about to replace, and since when."""
        self._proven: dict[str, str] = {}
        """Those that stay out even without a spare, and why."""
        self._unready: dict[str, str] = {}

    @property
    def unfit(self) -> set[str]:
        """The nodes that must run no ranks."""
        return self._retired.keys() | self._unready.keys()

    @property
    def retired(self) -> set[str]:
        """Nodes that are present and must not be used again."""
        return self._retired.keys() - self.gone

    def snapshot(self) -> dict[str, Any]:
        """The state for a successor, for JSON."""
        return {
            "unfit": sorted(self._retired), "retired": self._retired, "proven": self._proven,
            "blamed": self._faults, "gone": sorted(self.gone), "flaps": self.flaps,
        }  # fmt: skip

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Continue from the state of the previous leader."""
        self._retired, self._proven = dict(memory["retired"]), dict(memory["proven"])
        self._faults = Counter(memory["blamed"])
        self.gone, self.flaps = set(memory["gone"]), Counter(memory["flaps"])

    def joined(self, node: str) -> None:
        """A launcher has joined; it will report whether it is ready."""
        if node in self.gone:
            self.gone.discard(node)
            self.flaps[node] += 1
        self._unready.pop(node, None)

    def given_back(self, node: str, at: float) -> bool:
        """The node was given back to service at ``at``: it is fit again if it was retired before; returns whether so.

        A node that just comes again is as bad as it was.
        """
        if self._retired.get(node, at) >= at:
            return False
        for known in (self._retired, self._proven, self._faults):
            known.pop(node, None)
        self._log.emit("node_cleared", **NodeCleared(cleared=node))
        return True

    def note_readiness(self, node: str, why: str) -> bool:
        """Use a spare only while it reports that it is ready; True if that has changed."""
        known = self._unready.pop(node, "")
        if why:
            self._unready[node] = why
        if why and why != known:
            self._log.emit("spare_refused", **SpareRefused(refused=node, reason=why))
        return why != known

    def note_lemon(self, node: str, lemon: bool) -> None:
        """Use a spare that keeps failing only where there is no other."""
        (self.lemons.add if lemon else self.lemons.discard)(node)

    def withdraw(self, node: str, reason: str) -> None:
        """The node is wanted elsewhere: it is not a spare until it joins again."""
        self._unready[node] = reason

    def note_fault(self, node: str, cause: Failure, repeats: int) -> None:
        """Replace a node that has proven unfit by a spare. Program errors and lost connections are not counted.

        Without a spare the ranks start there once more: many errors of hardware do not come back. One that does,
        ``repeats`` times without progress, proves that the node cannot take part; then the run goes on without it, or
        waits, or ends.
        """
        if node in self.gone or cause.kind not in ("hardware", "signal", "hang"):
            return
        self._faults[node] += 1
        told = f"{cause.cause}, fault number {self._faults[node]} of this node"
        if cause.kind == "hardware" and repeats >= BLAMED_OFTEN:
            self._take_out(node, told)
        elif cause.kind == "hardware" or self._faults[node] >= BLAMED_OFTEN:
            self.retire(node, told)

    def _take_out(self, node: str, reason: str) -> None:
        """Mark ``node`` unfit whether or not another can replace it; without a spare one is to be fetched."""
        if not self.retire(node, reason):
            self._retired[node] = self._wall()
            self._log.emit("spare_wanted", **SpareWanted(swap=node, reason=reason))
        self._proven[node] = reason

    def retire(self, node: str, reason: str) -> bool:
        """Mark ``node`` unfit if another can replace it; returns whether that is so."""
        if not self._spares():
            return False
        self._retired[node] = self._wall()
        self._log.emit("node_retired", **NodeRetired(retired=node, reason=reason))
        return True

    def keep(self, slots: Collection[str]) -> None:
        """Retired nodes among ``slots`` that are still present stay if there is no spare, unless proven unfit."""
        if self._spares():
            return
        for node in sorted(self.retired & set(slots) - self._proven.keys()):
            del self._retired[node]
            self.refuse_swap(node)

    def out(self) -> str:
        """The present nodes that are proven unfit and why, in words."""
        return "; ".join(f"{node} is out: {why}" for node, why in self._proven.items() if node not in self.gone)

    def refuse_swap(self, node: str) -> None:
        """Note that ``node`` stays."""
        self._log.emit("swap_refused", **SwapRefused(swap=node, reason="there is no spare for it"))


class GenerationPlanner:
    """Proposes the generations of one leader. A proposal replaces the previous; ``begun`` is called once one holds."""

    def __init__(
        self,
        shape: RunShape,
        group: LeaderView,
        loop: Timers,
        health: NodeHealth,
        callbacks: Leader,
        say: Callable[[str], None] = print_message,
    ) -> None:
        self.plan: Plan | None = None
        """The newest plan that has begun, or that a previous leader has left."""
        self.placed: frozenset[str] = frozenset()
        """The nodes of ``slots``: whether one of thousands is lost, or has joined, is asked for each."""
        self.changing = False
        """True while a generation is proposed: reports about the previous one are outdated."""
        self.proposed: frozenset[str] = frozenset()
        """The nodes that run ranks in the generation proposed last."""
        self._shape = shape
        self._group = group
        self._loop = loop
        self._health = health
        self._callbacks = callbacks
        self._say = say
        self._waiting: Timer | None = None
        self._regroup_until = 0.0
        self._closed = False

    @property
    def waiting(self) -> bool:
        """True while there are too few nodes."""
        return self._waiting is not None

    @property
    def slots(self) -> tuple[str, ...]:
        """The nodes that run ranks."""
        return self.plan.slots if self.plan is not None else ()

    @property
    def spares(self) -> set[str]:
        """The nodes that could take a slot."""
        return self._group.alive.keys() - self._health.unfit - self.placed

    def take_over(self, plan: Plan) -> None:
        """Continue from ``plan`` of the previous leader; some members may not have found this leader yet."""
        self._use(plan, changing=not self._group.begun)
        self._regroup_until = self._loop.time() + REGROUP_S

    def begun(self, plan: Plan) -> None:
        """The ranks of ``plan`` are started."""
        self._use(plan, changing=False)

    def _use(self, plan: Plan, *, changing: bool) -> None:
        self.plan, self.placed, self.changing = plan, frozenset(plan.slots), changing

    def propose_next(self) -> None:
        """Propose the next generation; with too few nodes one without ranks, which waits for more."""
        if self._closed:
            return
        alive, health = self._group.alive, self._health
        shape = self._shape.seen_by(alive.values())
        slots = assign_slots(shape, self.slots, alive, health.unfit, health.flaps, health.lemons)
        if slots is not None:
            self._stop_waiting()
            self._propose(slots)
        elif self._waiting is None:
            self._wait()

    def keep(self, plan: Plan) -> None:
        """Claim a generation that keeps the ranks of a previous leader, or of this one's earlier term."""
        self._group.propose(plan.slots, self._callbacks.payload(keep=plan.generation))

    def _propose(self, slots: tuple[str, ...]) -> None:
        self._callbacks.replaced()
        self.changing, self.proposed = True, frozenset(slots)
        self._group.propose(slots, self._callbacks.payload(keep=0))

    def _wait(self) -> None:
        wait_s = max(self._shape.wait_s, self._regroup_until - self._loop.time())
        if wait_s > 0:
            self._say(f"too few nodes are left; waiting up to {wait_s:.3g} s for another")
            self._waiting = self._loop.later(wait_s, self._too_few)
            self._propose(())
        else:
            self._too_few()

    def _too_few(self) -> None:
        self._waiting = None
        fit = self._group.alive.keys() - self._health.unfit
        reason = f"too few nodes are left: {len(fit)} are there, {self._shape.least} are needed"
        self._callbacks.too_few("; ".join(filter(None, (reason, self._health.out()))))

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def close(self) -> None:
        """Propose nothing more."""
        self._closed = True
        self._stop_waiting()
