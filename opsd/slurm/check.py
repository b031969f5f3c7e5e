"""Finds out what opsd may do with this machine's Slurm, without changing anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from opsd.slurm.advice import Advice, advise, seconds
from opsd.slurm.port import Slurm, SlurmDenied, SlurmError, SlurmMissing, SlurmRejected, SlurmUnavailable

PROBE = "opsd-permission-probe"
"""A node that does not exist. Slurm checks permission first, so its answer tells without touching a node."""


LONG_S = 60.0
"""A requeue that waits longer than this is reported to the administrator."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report. ``ok`` is None for neutral facts."""

    ok: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result; ``usable`` is False if opsd can do nothing with Slurm here."""

    usable: bool
    facts: tuple[Fact, ...]
    advice: tuple[Advice, ...] = ()


def check(slurm: Slurm, node: str, *, no_bindings: str = "", clock: Callable[[], float] = time.monotonic) -> Report:
    """Find out what this user may do with ``slurm`` on ``node``.

    ``no_bindings`` is why pyslurm is not used, "" if it is.
    """
    try:
        version = slurm.version
        began = clock()
        config = slurm.configuration()
        facts = (
            Fact(True, f"Slurm {version}, the controller answers in {1000 * (clock() - began):.0f} ms"),
            Fact(None, f"through Slurm's commands: {no_bindings}" if no_bindings else "through pyslurm"),
            *_node(slurm, node),
            *_permissions(slurm, config),
        )
        return Report(True, facts, advise(config, version, slurm.partitions()))
    except (SlurmMissing, SlurmUnavailable) as error:
        return Report(False, (Fact(False, str(error)),))


def _node(slurm: Slurm, name: str) -> Iterator[Fact]:
    found = slurm.nodes([name])
    if not found:
        yield Fact(False, f"Slurm has no node {name}; if it has another name for this machine, set agent.node")
        return
    node = found[0]
    state = "+".join([node.state, *sorted(node.flags)])
    yield Fact(
        node.usable, f"node {name} is {state}" + (f": {node.reason} (by {node.reason_by})" if node.reason else "")
    )


def _permissions(slurm: Slurm, config: Mapping[str, str]) -> Iterator[Fact]:
    may = may_update_nodes(slurm)
    if may:
        yield Fact(True, "may drain, resume and down nodes, requeue any job and keep reservations")
        return
    yield Fact(False, "may not drain, resume or down nodes: that needs root, SlurmUser or an operator (sacctmgr)")
    yield Fact(True, "may submit jobs and requeue, reschedule and cancel its own")
    if (noticed_s := longest_until_noticed(config)) is not None and noticed_s > LONG_S:
        yield Fact(
            False,
            f"where the node of a batch script dies, a requeue waits until Slurm notices, up to {noticed_s:.0f} s: an "
            "administrator shortens that by SlurmdTimeout=30, or to nothing by sacctmgr modify user NAME set "
            "adminlevel=operator; opsd slurm run --pool same needs no requeue while a node is free",
        )
    if "jobs" in config.get("PrivateData", "").lower():
        yield Fact(False, "sees only its own jobs (PrivateData=jobs)")


def longest_until_noticed(config: Mapping[str, str]) -> float | None:
    """Seconds until Slurm itself sets a dead node down: its timeout plus up to a third. None if it never does."""
    timeout_s = seconds(config.get("SlurmdTimeout", ""))
    return timeout_s * 4 / 3 if timeout_s else None


def may_update_nodes(slurm: Slurm) -> bool:
    """Whether this user may change the state of nodes. Raises SlurmError if Slurm does not answer."""
    try:
        slurm.update_nodes([PROBE], "resume")
    except SlurmDenied:
        return False
    except SlurmRejected:
        return True
    raise SlurmError(f"Slurm has a node named {PROBE}")
