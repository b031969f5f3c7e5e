"""What Slurm remembers of all nodes, as faults to judge them by, and which nodes a run should rather not have. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opsd.lemons import Judgement, NodeFailure, judge
from opsd.slurm import node_comment
from opsd.slurm.node_comment import NO_FAULTS, Accounting, Stay
from opsd.slurm.port import Node

JOB: Final = "job"
"""The kind of fault of a job that failed on a node and ran without it."""
SAME_S: Final = 3600.0
"""A job that fails so near a stay out of service is part of the same fault."""
TESTED_S: Final = 30 * 86_400.0

PLANNED, LEMON, RELAPSED, FAILED, UNTESTED = 16.0, 8.0, 4.0, 2.0, 1.0
"""The order in which nodes are avoided, most first; any of these outweighs all below it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node; ``why_not`` is why it cannot be had now, ``remarks`` what speaks against it, ``badness`` in all."""

    node: str
    badness: float = 0.0
    remarks: tuple[str, ...] = ()
    why_not: str = ""


def faults(comments: Mapping[str, str], jobs: Iterable[NodeFailure] = ()) -> list[NodeFailure]:
    """The stays out of service in the nodes' comments that were not for maintenance, and the failures of jobs there.

    ``jobs`` are further failures of jobs. One that a stay explains is not counted beside it, nor any twice, nor what
    was before a node's hardware was replaced.
    """
    known = {name: node_comment.read(comment) for name, comment in comments.items()}
    failed = dict.fromkeys(NodeFailure(name, JOB, at, at) for name, record in known.items() for at in record.failed)
    failed |= dict.fromkeys(jobs)
    stays = [
        NodeFailure(name, stay.kind, stay.out, stay.back) for name, record in known.items() for stay in record.stays
    ]
    explained = {name: record.stays for name, record in known.items()}
    found = [
        *(fault for fault in stays if fault.kind not in NO_FAULTS),
        *(fault for fault in failed if not any(_explains(stay, fault.at) for stay in explained.get(fault.node, ()))),
    ]
    return [fault for fault in found if fault.node not in known or fault.at >= known[fault.node].anew]


def accounting(comments: Mapping[str, str]) -> Accounting | None:
    """The newest reading of Slurm's accounting for all nodes that their comments tell of."""
    told = (node_comment.read(comment).accounting for comment in comments.values())
    return max(filter(None, told), key=lambda one: one.at, default=None)


def _explains(stay: Stay, at: float) -> bool:
    return stay.out - SAME_S <= at <= (stay.out if stay.back is None else stay.back) + SAME_S


def candidates(
    nodes: Sequence[Node],
    comments: Mapping[str, str],
    judged: Judgement,
    now: float,
    tested: Mapping[str, float] | None = None,
) -> list[Candidate]:
    """Every node by what speaks against it at ``now``. ``tested`` has the times of preflights that the comments lack.

    Faults count only where they foretold later ones in this cluster; without a test of any node none is missed.
    """
    known = {name: node_comment.read(comment) for name, comment in comments.items()}
    at = {name: max(record.tested_at, (tested or {}).get(name, 0.0)) for name, record in known.items()}
    anyone = any(abs(now - moment) < TESTED_S for moment in at.values())
    recent = {score.node: score for score in judged.scores} if judged.soon.proven else {}
    lemons = {score.node for score in judged.lemons}
    found = []
    for node in nodes:
        record, score = known.get(node.name), recent.get(node.name)
        against = {
            "Slurm keeps it for another job": PLANNED * ("planned" in node.flags),
            "a lemon": LEMON * (node.name in lemons),
            "failed again soon after a repair": RELAPSED * (score is not None and score.relapses > 0),
            "failed in the last 30 days": FAILED * (score is not None),
            "not tested in the last 30 days": UNTESTED * (anyone and abs(now - at.get(node.name, 0.0)) >= TESTED_S),
        }
        spare = record is not None and bool(record.spare)
        why_not = _why_not(node) or ("it is a spare" if spare else "")
        remarks = tuple(text for text, weight in against.items() if weight)
        found.append(Candidate(node.name, sum(against.values()), remarks, why_not))
    return found


def lemons_of(nodes: Sequence[Node], comments: Mapping[str, str], now: float) -> set[str]:
    """The nodes that keep failing, by the comments of all."""
    return {score.node for score in judge([node.name for node in nodes], faults(comments), now).lemons}


def lemons_to_spare(
    nodes: Sequence[Node], comments: Mapping[str, str], pool: Collection[str], refused: Collection[str], now: float
) -> list[str]:
    """The lemons among the free nodes of ``pool``, if there are others that could come: who is asked for last."""
    worst = lemons_of(nodes, comments, now)
    free = {node.name for node in nodes if node.name in pool and node.state == "idle" and node.usable} - {*refused}
    return sorted(free & worst) if free - worst else []


def due(nodes: Sequence[Node], comments: Mapping[str, str], now: float, age_s: float) -> list[str]:
    """The idle nodes whose last test is older than ``age_s`` at ``now``, the longest ago first; spares are left out.

    A time so far in the future came from a wrong clock.
    """
    known = {node.name: node_comment.read(comments.get(node.name, "")) for node in nodes if not _why_not(node)}
    old = [name for name, record in known.items() if not record.spare and abs(now - record.tested_at) >= age_s]
    return sorted(old, key=lambda name: (known[name].tested_at, name))


def _why_not(node: Node) -> str:
    return "" if node.free else f"Slurm has it as {'+'.join([node.state, *sorted(node.flags)])}"


def free(found: Collection[Candidate]) -> dict[str, float]:
    """The badness of the nodes that can be had now."""
    return {one.node: one.badness for one in found if not one.why_not}
