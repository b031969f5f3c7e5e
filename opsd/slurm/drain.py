"""Draining nodes and returning them, without touching nodes that others have drained.

The owner of a drain is given by its reason. opsd's reasons begin with ``opsd:``; a node that is drained or down for
another reason, or for none, is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opsd.slurm.port import Node, SlurmNodes, SlurmRejected

OWN_PREFIX: Final = "opsd:"


class NotOurs(SlurmRejected):
    """The node was drained or set down by someone else."""


def owned(node: Node) -> bool:
    """Whether opsd set the node's reason."""
    return node.reason.startswith(OWN_PREFIX)


def foreign_hold(node: Node) -> str:
    """Who else took the node out of service, as a sentence; "" if nobody did."""
    if not node.out_of_service or owned(node):
        return ""
    whose = f"by {node.reason_by or 'somebody'}: {node.reason}" if node.reason else "without a reason"
    return f"{node.name} was taken out of service {whose}; opsd leaves it alone"


def drain(slurm: SlurmNodes, names: Sequence[str], reason: str) -> tuple[str, ...]:
    """Let the nodes finish their jobs and accept no new ones; return those that opsd had not drained before.

    A node keeps its first reason, as evidence. Raises ValueError for a reason that does not begin with ``opsd:``,
    NotOurs (and drains none) if a node is held by someone else, otherwise SlurmError.
    """
    _check_reason(reason)
    fresh = tuple(node.name for node in _ours(slurm, names) if "drain" not in node.flags)
    if fresh:
        slurm.update_nodes(fresh, "drain", reason)
    return fresh


def take_down(slurm: SlurmNodes, name: str, reason: str) -> None:
    """Drain the node and set it down, which ends its jobs there at once: for a node that is dead or has to be.

    A living node that is only set down resumes by itself within seconds if ReturnToService is 2, so it is drained as
    well. Raises as ``drain`` does.
    """
    drain(slurm, [name], reason)
    if slurm.nodes([name])[0].state != "down":
        slurm.update_nodes([name], "down", reason)


def give_back(slurm: SlurmNodes, names: Sequence[str]) -> tuple[str, ...]:
    """Resume the nodes that opsd holds and return their names; nodes in service are skipped.

    Raises NotOurs (and resumes none) if a node is held by someone else, otherwise SlurmError.
    """
    held = tuple(node.name for node in _ours(slurm, names) if node.out_of_service)
    if held:
        slurm.update_nodes(held, "resume")
    return held


def _ours(slurm: SlurmNodes, names: Sequence[str]) -> Sequence[Node]:
    nodes = slurm.nodes(names)
    unknown = sorted(set(names) - {node.name for node in nodes})
    if unknown:
        raise SlurmRejected(f"Slurm has no node {', '.join(unknown)}")
    for node in nodes:
        if why := foreign_hold(node):
            raise NotOurs(why)
    return nodes


def _check_reason(reason: str) -> None:
    if not reason.startswith(OWN_PREFIX) or not reason.isprintable():
        raise ValueError(f"a reason of opsd begins with {OWN_PREFIX} and is one line, not {reason!r}")
