"""``opsd swap``: exchange a node of a run for one of its spares."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from opsd import exitcodes
from opsd.agent.swap import Members, SwapError, UnderWay, planned_swap, swapped_out
from opsd.collectors.ranks import RanksSettings
from opsd.commands.options import Seconds, config_options, exit_codes, option
from opsd.commands.output import warn
from opsd.commands.settings import load
from opsd.control import ControlError, ask_launcher
from opsd.slurm import topology_source
from opsd.slurm.connect import choose
from opsd.slurm.leaf_paths import with_bad
from opsd.slurm.node_comment import domains
from opsd.slurm.port import SlurmError
from opsd.slurm.topology import Topology, TopologyError

TIMEOUT_S = 600.0
"""A step, a checkpoint, and the start of the next generation; or a spare that has to come first."""


@click.command(
    epilog=exit_codes(
        {
            0: "the node has no ranks any more",
            1: "the run has no spare, its launcher refuses, or it takes longer than --timeout",
            2: "the command line is wrong",
        }
    )
)
@click.argument("node")
@option("--run", "run_name", help="The run, if several have a launcher here.")
@option("--reason", default="asked for by hand", help="Why; it stands in the run's events.")
@option("--dry-run", is_flag=True, help="Say which spare would come, and do nothing.")
@option(
    "--timeout",
    type=Seconds(0),
    default=TIMEOUT_S,
    help="Wait so long at most; a swap that has begun goes on.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options
def swap(
    node: str,
    run_name: str | None,
    reason: str,
    dry_run: bool,
    timeout: float,
    as_json: bool,
    file: Path | None,
    overrides: tuple[str, ...],
) -> int:
    """Let a spare take the place of NODE at the next step boundary; no step is lost.

    To be called on any node of the run. NODE stays in the allocation and in service: `opsd drain` takes it out.
    """
    root = load(file, overrides).section(RanksSettings).root
    outcome: dict[str, Any] = {"run": run_name, "node": node, "result": "refused", "spares": []}
    try:
        control, status = _launcher(root, run_name, node)
        members = Members.of(status)
        outcome |= {"run": status.get("run"), "spares": members.spares}
        if dry_run:
            said = _plan(members, node, str(status.get("run")), timeout)
            outcome["result"] = "possible"
        else:
            came = planned_swap(lambda request: ask_launcher(control, request), node, reason, patience_s=timeout)
            said = swapped_out(node, came) + _hops(_tree([*members.nodes, *came]), members, node, came)
            outcome |= {"result": "done", "spares": came}
    except (ControlError, SwapError) as error:
        said = str(error)
        if isinstance(error, UnderWay):
            outcome["result"] = "under_way"
    good = outcome["result"] in ("possible", "done")
    if as_json:
        click.echo(json.dumps({**outcome, "sentence": said}, indent=1))
    else:
        click.echo(said if good else f"opsd: {said}", err=not good)
    return exitcodes.OK if good else exitcodes.FAILED


def _launcher(root: Path, run_name: str | None, node: str) -> tuple[Path, dict[str, Any]]:
    """Control socket and status of the run that is meant. Raises SwapError."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    silent: list[str] = []
    for control in sorted(root.glob("*/control.sock")):
        try:
            found[control.parent.name] = (control, ask_launcher(control, {"cmd": "status"}))
        except ControlError as error:
            if control.parent.name == run_name:
                raise SwapError(str(error)) from error
            silent.append(f"; {control.parent.name}: {error}")
    if run_name is not None and run_name not in found:
        raise SwapError(f"run {run_name} has no launcher on this node; there is {', '.join(found) or 'none at all'}")
    wanted = [run_name] if run_name else [name for name, (_, status) in found.items() if _has(status, node)]
    if len(wanted) == 1:
        return found[wanted[0]]
    if not wanted:
        where = f"these run here: {', '.join(found)}" if found else "call it on a node of the run"
        raise SwapError(f"no run with a launcher on this node has ranks on {node}; {where}{''.join(silent)}")
    raise SwapError(f"{', '.join(wanted)} have ranks on {node}; name one with --run")


def _has(status: dict[str, Any], node: str) -> bool:
    return node in Members.of(status).nodes


def _plan(members: Members, node: str, run: str, timeout_s: float) -> str:
    """The effects of a swap. Raises SwapError if it cannot be done."""
    if why_not := members.why_not(node):
        raise SwapError(why_not)
    first = "" if members.spares else f"ask for a spare, which has to come within {timeout_s:g} s, "
    tree = _tree([*members.nodes, *members.spares])
    bad = tree.bad_towards(name for name in members.nodes if name != node)
    spares = sorted(members.spares, key=lambda name: (bad[tree.leaf.get(name, "")], *tree.cost(name, [node])))
    spare, *others = spares or ("it",)
    lead = f"; it leads the run, {spare} or another node takes that over" if node == members.leader else ""
    then = f" (then {', '.join(others)})" if others else ""
    hops = _hops(tree, members, node, spares)
    return (
        f"run {run} would {first}checkpoint at a step boundary and go on with {spare}{then} in the place of "
        f"{node}, node rank {members.nodes.index(node)}{lead}{hops}"
    )


def _tree(names: Sequence[str]) -> Topology:
    """That of the cluster, with bad ways and the NVLink domains of these nodes; what cannot be read is missing."""
    try:
        tree = topology_source.read(say=warn)
    except TopologyError:
        tree = Topology()
    try:
        comments = choose(topology_source.DEADLINE_S).slurm.comments()
    except SlurmError:
        return tree
    told = domains({name: comments[name] for name in names if name in comments})
    return with_bad(tree, comments, time.time()).with_domains(told)


def _hops(tree: Topology, members: Members, node: str, spares: Sequence[str]) -> str:
    """What the place of the first of ``spares`` costs, as the end of a sentence; "" without a topology."""
    told = tree.swap_text(members.nodes, node, spares[0]) if spares else ""
    return f"; {told}" if told else ""
