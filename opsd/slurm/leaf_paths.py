"""The ways between pairs of leaf switches: which are due for a measurement, and what the nodes' comments keep of it.

A measurement takes a node below each of the two; both keep it, so that no record grows with the number of switches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from opsd.slurm import node_comment
from opsd.slurm.node_comment import Path
from opsd.slurm.port import Node, SlurmNodes
from opsd.slurm.topology import Topology

DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class LeafPath:
    """Two leaf switches, an idle node below each, and the newest measurement between them, 0 if none is known.

    ``passed`` is None if that could not be made.
    """

    leaves: tuple[str, str]
    nodes: tuple[str, str]
    at: float = 0.0
    passed: bool | None = True


def due(
    idle: Sequence[str], comments: Mapping[str, str], topology: Topology, now: float, age_s: float
) -> list[LeafPath]:
    """The pairs that were not well or not measured for ``age_s``, the longest ago first; each node is in one at most.

    A measurement that could not be made counts as one: what it lacks, it would lack again a few minutes later. Pairs
    that no two of the ``idle`` nodes can measure beside the others come another time. Of several nodes the one
    that measured least recently is taken, so that a bad node is not taken for a bad way. A time so far in the future
    came from a wrong clock.
    """
    known = {
        name: [path for path in node_comment.read(comment).paths if path.at - now < age_s]
        for name, comment in comments.items()
    }
    newest = _newest(known, topology)
    free: dict[str, list[str]] = {}
    for name in sorted(idle, key=lambda name: (max((path.at for path in known.get(name, ())), default=0.0), name)):
        if (leaf := topology.leaf.get(name)) is not None:
            free.setdefault(leaf, []).append(name)
    found = []
    for at, pair in sorted((newest[pair].at if pair in newest else 0.0, pair) for pair in topology.leaf_pairs(idle)):
        passed = pair not in newest or newest[pair].passed
        if (now - at >= age_s or passed is False) and all(free[leaf] for leaf in pair):
            found.append(LeafPath(pair, (free[pair[0]].pop(0), free[pair[1]].pop(0)), at, passed))
    return found


def with_bad(topology: Topology, comments: Mapping[str, str], now: float) -> Topology:
    """``topology`` with the ways that were bad when last measured, by the comments of all nodes.

    A measurement that could not be made says nothing, nor does one of a clock that was a day ahead.
    """
    made = {
        name: [path for path in node_comment.read(comment).paths if path.passed is not None and path.at - now < DAY_S]
        for name, comment in comments.items()
    }
    return replace(
        topology, bad={pair: _told(path) for pair, path in _newest(made, topology).items() if path.passed is False}
    )


def _told(path: Path) -> str:
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.at))
    return f"{path.rate / 1e9:.3g} GB/s, {at}" if path.rate else at


def _newest(known: Mapping[str, Sequence[Path]], topology: Topology) -> dict[tuple[str, str], Path]:
    newest: dict[tuple[str, str], Path] = {}
    for name, paths in known.items():
        for path in paths if name in topology.leaf else ():
            one, other = sorted((topology.leaf[name], path.leaf))
            if (before := newest.get((one, other))) is None or path.at > before.at:
                newest[one, other] = path
    return newest


def note(
    slurm: SlurmNodes,
    nodes: tuple[str, str],
    leaf: Mapping[str, str],
    at: float,
    *,
    passed: bool | None,
    rate: float = 0.0,
) -> None:
    """Keep in the history of both nodes how the way between their leaf switches was at ``at``, None if that is unknown.

    ``rate`` is that of its slowest exchange in bytes per second, 0 if unknown. Raises SlurmError.
    """
    comments = slurm.comments(nodes)
    for name, other in (nodes, nodes[::-1]):
        comment = comments.get(name, "")
        record = node_comment.read(comment).measured(Path(leaf[other], at, passed, rate))
        slurm.set_comment(name, node_comment.write(comment, record))


def idle(nodes: Sequence[Node], comments: Mapping[str, str]) -> list[str]:
    """The nodes that may be measured now: neither busy nor reserved nor spares."""
    spares = {name for name, comment in comments.items() if node_comment.read(comment).spare}
    return [node.name for node in nodes if node.free and node.name not in spares]
