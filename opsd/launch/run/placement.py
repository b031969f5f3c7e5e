"""What the events of a run say of the places of its nodes: what a swap costs, and which segments are split. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opsd.slurm.topology import Topology


def swap_cost(topology: Topology, before: Sequence[str], slots: Sequence[str], place: int) -> dict[str, Any]:
    """Whose place ``slots[place]`` has, and the mean hops of both to the other nodes, as far as they are known."""
    old = before[place] if place < len(before) and before[place] not in slots else None
    if old is None:
        return {}
    hops = topology.swap_hops(slots, old, slots[place])
    return {"replaces": old} | ({"hops_before": hops[0], "hops": hops[1]} if hops is not None else {})


def split_segments(topology: Topology, slots: Sequence[str], segment: int) -> list[dict[str, Any]]:
    """The segments that are in several NVLink domains or below several leaf switches, by their first node rank."""
    found = []
    for group in topology.split_groups(slots, segment):
        places: dict[str, list[str]] = {}
        for node in group:
            places.setdefault(topology.place(node) or "unknown", []).append(node)
        first = slots.index(group[0])
        found.append({"first": first, "last": first + len(group) - 1, "places": places})
    return found
