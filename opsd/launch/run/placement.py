"""What the events of a run say of the places of its nodes: what a swap costs, and which segments are split."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from opsd.events import GenerationStarted, SegmentSplit, SpareJoined
from opsd.launch.claims.claim_store import Plan
from opsd.launch.io.protocol import Member
from opsd.launch.ranks.settings import gpu_count
from opsd.launch.run.nodes import RunShape
from opsd.slurm.topology import Topology


def begun_events(
    shape: RunShape, plan: Plan, before: Sequence[str], launchers: Iterable[Member]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a generation that starts: which spares came in for those of ``before``, and where all nodes are."""
    joined = {*plan.slots} - {*before} if before else ()
    for place, name in enumerate(plan.slots):
        if name in joined:
            cost = _swap_cost(shape.topology, before, plan.slots, place)
            yield "spare_joined", {**SpareJoined(joined=name, place=place), **cost}
    size = sum(plan.sizes[name] for name in plan.slots)
    gpus = gpu_count(os.environ) * len({*plan.slots, *plan.spares})
    nodes, spares = list(plan.slots), list(plan.spares)
    yield "generation_started", {**GenerationStarted(world_size=size, gpus=gpus, nodes=nodes, spares=spares)}
    for fields in _split_segments(shape.seen_by(launchers).topology, plan.slots, shape.segment):
        yield "segment_split", {**fields}


def _swap_cost(topology: Topology, before: Sequence[str], slots: Sequence[str], place: int) -> dict[str, Any]:
    """Whose place ``slots[place]`` has, the mean hops of both to the other nodes, and bad ways to them, if known."""
    old = before[place] if place < len(before) and before[place] not in slots else None
    if old is None:
        return {}
    hops = topology.swap_hops(slots, old, slots[place])
    bad = [topology.bad_text(pair) for pair in topology.bad_from(slots[place], slots)]
    cost = {"hops_before": hops[0], "hops": hops[1]} if hops is not None else {}
    return {"replaces": old} | cost | ({"bad_ways": bad} if bad else {})


def _split_segments(topology: Topology, slots: Sequence[str], segment: int) -> list[SegmentSplit]:
    """The segments that are in several NVLink domains or below several leaf switches, by their first node rank."""
    found = []
    for group in topology.split_groups(slots, segment):
        places: dict[str, list[str]] = {}
        for node in group:
            places.setdefault(topology.place(node) or "unknown", []).append(node)
        first = slots.index(group[0])
        found.append(SegmentSplit(first=first, last=first + len(group) - 1, places=places))
    return found
