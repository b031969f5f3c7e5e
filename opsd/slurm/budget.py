"""How many of the cluster's nodes opsd may hold out of service at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opsd.slurm.drain import owned
from opsd.slurm.port import Node


def allowance(nodes: Sequence[Node], share: float) -> int:
    """How many of ``nodes`` opsd may hold: their ``share`` (0 to 1) rounded down, at least one."""
    return max(1, math.floor(share * len(nodes) + 1e-9))


def held(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that opsd has drained or set down, in order of time; nodes drained by others do not count.

    Ties are broken by name, so that agents that drained in the same second agree on the order.
    """
    ours = [node for node in nodes if owned(node) and ("drain" in node.flags or node.state == "down")]
    return sorted(ours, key=lambda node: (node.reason_at if node.reason_at is not None else math.inf, node.name))


def why_not(nodes: Sequence[Node], name: str, share: float) -> str:
    """Why opsd may not drain the node ``name`` too, "" if it may. A node that it already holds is always allowed."""
    ours, limit = held(nodes), allowance(nodes, share)
    if any(node.name == name for node in ours) or len(ours) < limit:
        return ""
    names = ", ".join(node.name for node in ours[:5]) + (" …" if len(ours) > 5 else "")
    return f"opsd holds {len(ours)} of {len(nodes)} nodes already ({names}); {limit} may be held at once"


def surplus(nodes: Sequence[Node], name: str, share: float) -> bool:
    """Whether ``name`` is held beyond the allowance: several agents may have drained at the same time."""
    return name in {node.name for node in held(nodes)[allowance(nodes, share) :]}
