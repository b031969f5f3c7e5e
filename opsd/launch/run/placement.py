"""Which nodes run the ranks of the next generation. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """How many nodes run ranks, at least and at most, and which of them first.

    For ``join_s`` seconds the first generation waits for nodes, for ``wait_s`` a later one that has too few. After
    failures that all look like the consequence of another on another node, that other has ``victim_s`` to show; longer
    than it takes to notice that a node is lost.
    """

    least: int
    most: int
    order: tuple[str, ...]
    join_s: float = 600.0
    wait_s: float = 0.0
    victim_s: float = 3.0


def place(
    shape: Shape,
    before: Sequence[str],
    alive: Collection[str],
    unfit: Collection[str],
    flaps: Mapping[str, int] | None = None,
) -> tuple[str, ...] | None:
    """The nodes by node rank: those of ``before`` where they were, others in the gaps; None if they are too few.

    Who keeps the place keeps the ranks, and with them what is in the node's memory. Of those that are free, who has
    never been lost comes before who has.
    """
    places = [name if name in alive and name not in unfit else None for name in before]
    ranked = {name: number for number, name in enumerate(shape.order)}
    lost = flaps or {}
    free = sorted(
        set(alive) - set(before) - set(unfit),
        key=lambda name: (lost.get(name, 0), ranked.get(name, len(ranked)), name),
    )
    for number, name in enumerate(places):
        if name is None and free:
            places[number] = free.pop(0)
    nodes = [name for name in places if name is not None]
    nodes += free[: shape.most - len(nodes)]
    return tuple(nodes) if len(nodes) >= shape.least else None
