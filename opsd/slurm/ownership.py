"""Rules for draining nodes and returning them: who holds a node, how many, how often, after which preflight.

The cluster-wide state is in Slurm alone. A node's reason says who holds it, its comment (``opsd.slurm.node_comment``)
how often it was out of service. So it does not matter on which node a command is given. The rules are pure; ``drain``
and ``give_back`` apply them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from opsd.settings.policy import PolicySettings
from opsd.slurm import drain as effects
from opsd.slurm import node_comment
from opsd.slurm.node_comment import NodeHistory
from opsd.slurm.port import Node, SlurmNodes, SlurmRejected

DAY_S = 86_400.0
CHECK_AGE_S = DAY_S
"""A preflight that began longer ago does not return a node."""
MANUAL = "manual"
"""Replaces the incident in the reason of a drain that a person asked for."""


SMALL = 4
"""One of so many nodes may be held for the sake of ``policy.min_drained``."""


class Refused(SlurmRejected):
    """The rules forbid it; the message has one sentence for each node concerned."""


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """When a preflight began (epoch seconds), and whether the node passed it."""

    at: float
    passed: bool


def reason(kind: str, text: str = "", *, incident: str = MANUAL, evidence: str = "") -> str:
    """The reason of a drain: ``opsd:<incident> <kind>: <text>; see <evidence>``, on one line."""
    about = f"{effects.OWN_PREFIX}{incident} {kind}"
    said = f"{about}: {text}" if text else about
    return " ".join((f"{said}; see {evidence}" if evidence else said).split())


def kind_of(told: str) -> str:
    """The kind in a reason made by ``reason``; the first word of any other reason of opsd, for instance preflight."""
    if not told.startswith(effects.OWN_PREFIX):
        return "unknown"
    about = told.removeprefix(effects.OWN_PREFIX)
    incident, *words = about.split() or ["unknown"]
    return (incident if about.startswith(" ") or not words else words[0]).rstrip(":;")


def allowance(nodes: Sequence[Node], policy: PolicySettings) -> int:
    """How many of ``nodes`` opsd may hold: their share rounded down, and in a small cluster somewhat more."""
    return max(
        1, math.floor(policy.max_drained_share * len(nodes) + 1e-9), min(policy.min_drained, len(nodes) // SMALL)
    )


def held(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that opsd has drained or set down, in order of time; nodes drained by others do not count.

    Ties are broken by name, so that agents that drained in the same second agree on the order.
    """
    ours = [node for node in nodes if effects.owned(node) and ("drain" in node.flags or node.state == "down")]
    return sorted(ours, key=lambda node: (node.reason_at if node.reason_at is not None else math.inf, node.name))


def surplus(nodes: Sequence[Node], name: str, policy: PolicySettings) -> bool:
    """Whether ``name`` is held beyond the allowance: several agents may have drained at the same time."""
    return name in {node.name for node in held(nodes)[allowance(nodes, policy) :]}


def drain_objections(
    nodes: Sequence[Node], records: Mapping[str, NodeHistory], names: Sequence[str], policy: PolicySettings, now: float
) -> list[str]:
    """Why ``names`` may not be drained, one sentence each; empty if they may be. ``nodes`` are all of the cluster."""
    known = {node.name: node for node in nodes}
    against = [f"Slurm has no node {name}" for name in names if name not in known]
    fresh = [name for name in dict.fromkeys(names) if name in known and not _held(known[name])]
    against += [sentence for name in fresh if (sentence := effects.foreign_hold(known[name]))]
    against += [
        sentence for name in fresh if (sentence := _resting(name, records.get(name, NodeHistory()), policy, now))
    ]
    ours, limit = held(nodes), allowance(nodes, policy)
    if fresh and len(ours) + len(fresh) > limit:
        listed = f" ({', '.join(node.name for node in ours[:5])}{' …' if len(ours) > 5 else ''})" if ours else ""
        against.append(
            f"opsd holds {len(ours)} of {len(nodes)} nodes already{listed}; {limit} may be held at once "
            "(policy.max_drained_share, policy.min_drained)"
        )
    return against


def return_objection(
    node: Node, history: NodeHistory, checked: PreflightResult | None, policy: PolicySettings, now: float
) -> str:
    """Why ``node`` may not be returned to service, "" if it may be, or if it is in service."""
    if not node.out_of_service:
        return ""
    return (
        effects.foreign_hold(node)
        or relapse_objection(node.name, history, policy)
        or _not_checked(node, checked, policy, now)
    )


def relapse_objection(name: str, history: NodeHistory, policy: PolicySettings) -> str:
    """Why the node may not be returned by opsd: returns have not lasted; "" if nothing speaks against it."""
    relapses = history.relapses(policy.relapse_days * DAY_S)
    if len(relapses) < policy.max_returns:
        return ""
    told = ", ".join(
        f"{f'back {day(one.back)}' if one.back else f'out {day(one.out)}'}, out again {day(again.out)} ({again.kind})"
        for one, again in relapses
    )
    return (
        f"{name} came back to service and failed again {len(relapses)} times: {told}; have it repaired, "
        f"then `opsd nodes replaced {name}` if hardware was replaced, or give it back with --force and a reason"
    )


def drain(
    slurm: SlurmNodes,
    names: Sequence[str],
    told: str,
    policy: PolicySettings,
    *,
    force: bool = False,
    now: float | None = None,
) -> tuple[str, ...]:
    """Drain the nodes with the reason ``told`` and return those that opsd did not hold before.

    ``force`` overrides the budget and the cool-down, but never someone else's drain. Nodes beyond the budget because
    others drained at the same time are returned. A repeated drain, after one that was interrupted once Slurm had
    drained the nodes, adds what is missing in their history. Raises Refused (and drains none), NotOurs and SlurmError.
    """
    at = time.time() if now is None else now
    nodes, comments = slurm.nodes(), slurm.comments(names)
    records = {name: node_comment.read(comment) for name, comment in comments.items()}
    against = drain_objections(nodes, records, names, policy, at)
    if against and not force:
        raise Refused("; ".join(against))
    fresh = effects.drain(slurm, names, told)
    late = [name for name in fresh if not force and surplus(slurm.nodes(), name, policy)]
    if late:
        effects.give_back(slurm, late)
        raise Refused(f"other nodes were drained at the same time; {', '.join(late)} went back into service")
    since = {**_unrecorded(nodes, records, told, at), **dict.fromkeys(fresh, at)}
    for name, out in since.items():
        slurm.set_comment(name, node_comment.write(comments[name], records[name].drained(kind_of(told), out)))
    return fresh


def take_over(slurm: SlurmNodes, name: str, told: str, policy: PolicySettings, *, now: float | None = None) -> None:
    """Hold a node that Slurm has drained for opsd's own word, with the reason ``told``, as if opsd had drained it.

    Raises Refused where a drain would be, and leaves the node drained as it is, and SlurmError.
    """
    at = time.time() if now is None else now
    nodes, comment = slurm.nodes(), slurm.comments([name]).get(name, "")
    record = node_comment.read(comment)
    in_service = [
        replace(node, state="idle", flags=frozenset(), reason="") if node.name == name else node for node in nodes
    ]
    if against := drain_objections(in_service, {name: record}, [name], policy, at):
        raise Refused("; ".join(against))
    before = next(node.reason for node in nodes if node.name == name)
    slurm.update_nodes([name], "drain", told)
    if surplus(slurm.nodes(), name, policy):
        slurm.update_nodes([name], "drain", before)
        raise Refused(f"other nodes were drained at the same time; {name} stays out of service as Slurm has it")
    slurm.set_comment(name, node_comment.write(comment, record.drained(kind_of(told), at)))


def give_back(
    slurm: SlurmNodes,
    names: Sequence[str],
    checked: Mapping[str, PreflightResult],
    policy: PolicySettings,
    *,
    force: bool = False,
    now: float | None = None,
) -> tuple[str, ...]:
    """Resume the nodes and return those that opsd had held; ``checked`` holds what is known of their preflights.

    ``force`` overrides the checks and the rule about relapses, but never someone else's drain. Raises Refused (and
    resumes none), NotOurs and SlurmError. A repeated return, after one that was interrupted once Slurm had resumed the
    nodes, adds what is missing in their history.
    """
    at = time.time() if now is None else now
    comments = slurm.comments(names)
    records = {name: node_comment.read(comment) for name, comment in comments.items()}
    nodes = slurm.nodes(names)
    against = [return_objection(node, records[node.name], checked.get(node.name), policy, at) for node in nodes]
    if any(against) and not force:
        raise Refused("; ".join(filter(None, against)))
    back = effects.give_back(slurm, names)
    resumed = {node.name for node in nodes if not node.out_of_service and records[node.name].out}
    for name in sorted({*back, *resumed}):
        record, proof = records[name].returned(at), checked.get(name)
        tested_at = proof.at if proof is not None and proof.passed else record.tested_at
        slurm.set_comment(name, node_comment.write(comments[name], replace(record, tested_at=tested_at)))
    return back


def note_test(slurm: SlurmNodes, name: str, at: float, domain: str = "", now: float | None = None) -> bool:
    """Keep in the node's history that it passed a preflight begun at ``at``, and the NVLink ``domain`` that it told.

    False if a later one is known. A time after ``now`` came from a wrong clock. Raises
    SlurmError.
    """
    comment = slurm.comments([name]).get(name, "")
    record = node_comment.read(comment)
    if at <= record.tested_at <= (time.time() if now is None else now):
        return False
    slurm.set_comment(name, node_comment.write(comment, replace(record, tested_at=at, domain=domain)))
    return True


def day(at: float) -> str:
    """The epoch second ``at`` as local time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _held(node: Node) -> bool:
    return node.out_of_service and effects.owned(node)


def _unrecorded(nodes: Sequence[Node], records: Mapping[str, NodeHistory], told: str, now: float) -> dict[str, float]:
    """The nodes held for the reason ``told`` whose history lacks that stay, with the time since when they are out."""
    return {
        node.name: node.reason_at or now
        for node in nodes
        if node.name in records and _held(node) and node.reason == told and not records[node.name].out
    }


def _resting(name: str, history: NodeHistory, policy: PolicySettings, now: float) -> str:
    last = max((stay.back or stay.out for stay in history.stays), default=None)
    if last is None or abs(now - last) >= policy.drain_cooldown_s:
        return ""
    return (
        f"{name} was last taken out or given back by opsd at {day(last)}; it may be drained again "
        f"{policy.drain_cooldown_s:.0f} s later (policy.drain_cooldown_s)"
    )


def _not_checked(node: Node, checked: PreflightResult | None, policy: PolicySettings, now: float) -> str:
    needed = f"run `opsd preflight --profile {policy.return_profile}` on it"
    if checked is None:
        return f"{node.name} has no result of preflight {policy.return_profile}; {needed}"
    if node.reason_at is not None and checked.at < node.reason_at:
        return (
            f"the last preflight {policy.return_profile} of {node.name} ({day(checked.at)}) is older than its drain "
            f"({day(node.reason_at)}); {needed}"
        )
    if not checked.passed:
        return f"{node.name} failed preflight {policy.return_profile} at {day(checked.at)}; repair it, then {needed}"
    if now - checked.at > CHECK_AGE_S:
        return f"the preflight {policy.return_profile} of {node.name} is of {day(checked.at)} and too old; {needed}"
    return ""
