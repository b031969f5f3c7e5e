"""Faults from a trace in the form of InfiniteHBD: node_id, event_time in days, fault_start or fault_end, fault_type.

The trace of 400 servers that StepFun published with InfiniteHBD (SIGCOMM 2025) has it:
github.com/stepfun-ai/InfiniteHBD-Trace.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from opsd.simulate.faults import DAY_S, Effect, FaultsError, SimulatedFault

_EFFECTS: Mapping[str, Effect] = {
    "GPU": "hardware", "NIC": "hardware", "Parameter Plane Cable": "hardware", "Fan": "degraded",
    "Motherboard Battery": "degraded",
}  # fmt: skip
_MOST_DAYS = 36_500
"""By the class of a fault; all others take the node away. The trace does not say: these are assumptions."""


@dataclass(frozen=True, slots=True)
class Outage:
    """Of one node, in seconds of the trace. ``ended``: the end is in the trace, and not just the trace's own."""

    start_s: float
    end_s: float
    kind: str
    effect: Effect
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Trace:
    """The outages of each node of a cluster in ``span_s`` seconds."""

    name: str
    nodes: tuple[tuple[Outage, ...], ...]
    span_s: float

    @property
    def per_node_day(self) -> float:
        return sum(map(len, self.nodes)) / (len(self.nodes) * self.span_s / DAY_S)

    @property
    def repairs(self) -> list[tuple[float, bool]]:
        """How long each outage lasted in seconds, and whether its end was seen."""
        return [(outage.end_s - outage.start_s, outage.ended) for node in self.nodes for outage in node]

    def draw(self, nodes: int, seconds: float, seed: int) -> list[SimulatedFault]:
        """See ``FaultSource.draw``: nodes in random order, the trace shifted in time by a random part of its span.

        A larger cluster is several copies with shifts of their own. After its end the trace begins again.
        """
        faults: list[SimulatedFault] = []
        size = len(self.nodes)
        for copy in range(math.ceil(nodes / size)):
            random = Random(f"{seed}:{copy}")
            shift_s, order = random.random() * self.span_s, random.sample(range(size), size)
            for node, index in enumerate(order[: nodes - copy * size], start=copy * size):
                for outage in self.nodes[index]:
                    faults += self._played(node, outage, shift_s, seconds)
        return sorted(faults, key=lambda fault: (fault.start_s, fault.node))

    def _played(self, node: int, outage: Outage, shift_s: float, seconds: float) -> list[SimulatedFault]:
        start_s = (outage.start_s + shift_s) % self.span_s - self.span_s
        length_s = outage.end_s - outage.start_s
        faults = []
        while start_s < seconds:
            if start_s + length_s > 0 or start_s >= 0:
                faults.append(SimulatedFault(node, start_s, start_s + length_s, outage.kind, outage.effect))
            start_s += self.span_s
        return faults


def parse(path: Path, text: str, nodes: int | None) -> Trace:
    """The trace in ``path``, of ``nodes`` nodes, by default as many as it names. Raises FaultsError."""
    try:
        events = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FaultsError(
            f"{path} is no JSON: give a trace in the form of InfiniteHBD, the output of sacctmgr --parsable2 show "
            "event or another history with the columns NodeName|Start|End|State, or an agent's journal.db"
        ) from error
    if not isinstance(events, list) or not events:
        raise FaultsError(f"{path} has no list of events: give a trace in the form of InfiniteHBD")
    read = sorted((_event(path, number, event) for number, event in enumerate(events, start=1)), key=lambda one: one[0])
    span_s = math.ceil(read[-1][0] / DAY_S) * DAY_S or DAY_S
    named = {node for _, node, _, _ in read}
    if nodes is not None and nodes < len(named):
        raise FaultsError(f"{path} names {len(named)} nodes, more than --trace-nodes {nodes}: give the cluster's size")
    by_node = _outages(read, span_s)
    healthy = (nodes or len(named)) - len(by_node)
    return Trace(path.name, (*map(tuple, by_node.values()), *[()] * healthy), span_s)


_Event = tuple[float, str, bool, str]
"""Second, node, whether a fault begins, class."""


def _event(path: Path, number: int, event: Any) -> _Event:
    try:
        at, node, what = float(event["event_time"]), str(event["node_id"]), event["event_type"]
        kind = str(event["fault_type"]["Class"])
    except (KeyError, TypeError, ValueError) as error:
        raise FaultsError(
            f"event {number} of {path} lacks node_id, event_time, event_type or fault_type.Class"
        ) from error
    if what not in ("fault_start", "fault_end"):
        raise FaultsError(f"event {number} of {path} is {what!r}: it should be fault_start or fault_end")
    if not 0 <= at < _MOST_DAYS:
        raise FaultsError(f"event {number} of {path} is at {at:g}: event_time should be days since the trace began")
    return at * DAY_S, node, what == "fault_start", kind


def _outages(events: list[_Event], span_s: float) -> dict[str, list[Outage]]:
    """By node; an end without a start belongs to an outage that began before the trace.

    Faults of several classes that overlap are one outage, of the first class, until the last of them ends.
    """
    by_node: dict[str, list[Outage]] = {}
    open_since: dict[str, tuple[float, str]] = {}
    present: dict[str, set[str]] = defaultdict(set)
    for at, node, begins, kind in events:
        outages = by_node.setdefault(node, [])
        if begins:
            open_since.setdefault(node, (at, kind))
            present[node].add(kind)
            continue
        present[node].discard(kind)
        if (node in open_since or not outages) and not present[node]:
            since, first = open_since.pop(node, (0.0, kind))
            outages.append(Outage(since, at, first, _EFFECTS.get(first, "lost")))
    for node, (since, kind) in open_since.items():
        by_node[node].append(Outage(since, span_s, kind, _EFFECTS.get(kind, "lost"), ended=False))
    return by_node
