"""``opsd nodes``: which nodes fail again and again, and which to take for a run."""

from __future__ import annotations

import json
import math
import stat
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from opsd import exitcodes, lemons
from opsd.commands.node_service import names_of
from opsd.commands.options import Finite, Group, exit_codes, option
from opsd.commands.output import fail, output_console, plain_table, warn, written
from opsd.commands.settings import BadConfig
from opsd.lemons import DAY_S, LEAST_NODES, Judgement, Lift, NodeFailure
from opsd.slurm import fabric, job_faults, leaf_paths, node_comment
from opsd.slurm.candidates import Candidate, accounting, candidates, due, faults, free
from opsd.slurm.connect import choose
from opsd.slurm.hostlist import compress
from opsd.slurm.node_comment import Accounting, domains
from opsd.slurm.pick import Choice, for_runs, pick_in_one
from opsd.slurm.port import Node, Partition, SlurmError
from opsd.slurm.topology import Topology, TopologyError, text
from opsd.slurm.topology_source import read

NODE_DESCRIPTION: Final = 64
"""Characters that InfiniBand has for the description of an adapter."""
_WRITTEN = click.Path(dir_okay=False, allow_dash=True, path_type=Path)


@click.command()
@click.argument("file", type=_WRITTEN, default="-")
@option("--output", type=_WRITTEN, help="Write it to this file, which is replaced whole, in place of stdout.")
def topology(file: Path, output: Path | None) -> int:
    """Make a topology.conf from what ibnetdiscover (infiniband-diags) prints; FILE has that, by default stdin.

    opsd reads /etc/opsd/topology.conf, or what OPSD_TOPOLOGY names, where Slurm has no topology of its own:

        ibnetdiscover | opsd nodes topology --output /etc/opsd/topology.conf

    Slurm can take the file too (TopologyPlugin=topology/tree). Nodes are Slurm's, found by the descriptions of their
    adapters (rdma-ndd sets them); those with adapters on the same switches are together, as nodes with rails are.
    Several outputs may follow each other, one of each subnet.
    """
    try:
        found = fabric.parse(_printed(file))
    except TopologyError as error:
        raise BadConfig(f"{'stdin' if str(file) == '-' else file}: {error}") from error
    names = _names()
    tree = fabric.tree(found, names)
    hosts, nameless = found.others(names)
    if not tree.leaf:
        called = [repr(nameless[0][:NODE_DESCRIPTION])] if nameless else hosts[:1]
        nodes = f" ({compress(names[:1])} for one)" if names else ""
        example = f", but {called[0]}" if called else ""
        fail(f"no adapter in it is called as a node of Slurm{nodes}{example}; rdma-ndd sets what they are called")
    head = f"# From ibnetdiscover by opsd nodes topology, {time.strftime('%Y-%m-%d %H:%M')}\n"
    if not written(output or Path("-"), head + text(tree), "the topology"):
        return exitcodes.FAILED
    _tell(tree, names, hosts, nameless)
    if output and output.is_file() and not output.stat().st_mode & stat.S_IROTH:
        warn(f"{output} cannot be read by all, as the launchers of users do: chmod a+r {output}")
    return exitcodes.OK


def _printed(file: Path) -> str:
    if str(file) == "-" and sys.stdin.isatty():
        raise click.UsageError("give a file, or pipe what ibnetdiscover prints into this")
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise BadConfig(f"{file} cannot be read: {error.strerror}") from error
    return content.decode(errors="replace")


def _names() -> list[str]:
    """The nodes of Slurm, none where it does not answer."""
    try:
        return [node.name for node in choose().slurm.nodes()]
    except SlurmError as error:
        warn(f"Slurm: {error}; every host in the fabric is taken for a node")
        return []


def _tell(tree: Topology, names: list[str], hosts: list[str], nameless: list[str]) -> None:
    leaves, tops = {*tree.leaf.values()}, {tree.top(name) for name in tree.leaf}
    apart = f", in {len(tops)} trees that are not connected" if len(tops) > 1 else ""
    click.echo(f"{len(tree.leaf)} nodes below {len(leaves)} leaf switches or groups of them{apart}", err=True)
    if absent := [name for name in names if name not in tree.leaf]:
        warn(f"not in the fabric: {compress(absent)}")
        if hosts:
            warn(f"in the fabric, but not in Slurm: {', '.join(hosts[:3])}{', …' if len(hosts) > 3 else ''}")
        if nameless:
            warn(f"{len(nameless)} adapters bear no name of a node, as {nameless[0]!r}: rdma-ndd sets it")


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_history = option("--history", type=_FILE, help="More faults, one JSON object a line: node, kind, at, back (epoch s).")
_jobs = option("--jobs", is_flag=True, help="Ask sacct now which jobs failed on a node and ran without it.")
_json = option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(
    cls=Group,
    epilog=exit_codes(
        {
            0: "done",
            1: "Slurm does not answer, or there are too few nodes",
            2: "the command line or a file is wrong",
        }
    ),
)
def nodes() -> None:
    """The cluster's nodes by their history, which Slurm keeps in their comments."""


nodes.add_command(topology)


@nodes.command("lemons")
@_history
@_jobs
@_json
def show_lemons(history: Path | None, jobs: bool, as_json: bool) -> int:
    """Show the nodes that failed in the last 30 days, and whether that says anything about them here.

    A fault is a drain that opsd has recorded (not maintenance), or a job that failed on a node and then ran without it.
    The agents read such jobs from Slurm's accounting every six hours. --history adds faults that Slurm does not know,
    for instance from tickets.
    """
    more = _read(history) if history else []
    found, comments = _from_slurm()
    _warn_of_useless(more, {node.name for node in found}, time.time())
    judged = _judge(found, comments, more, jobs)
    if as_json:
        read = None if jobs else accounting(comments)
        click.echo(
            json.dumps({**_document(judged), "jobs_counted": jobs or (read is not None and read.answered)}, indent=1)
        )
        return exitcodes.OK
    click.echo("The tenth of the nodes that failed most had, in this cluster's history,")
    click.echo(_told(judged.soon, "so prefer others", "which is no reason to prefer others"))
    click.echo(_told(judged.lasting, "so there are lemons", "which shows no lemons"))
    called = {score.node for score in judged.lemons}
    table = plain_table("node", "faults", "soon after a repair", "not by chance", "")
    for score in judged.scores:
        said = "lemon" if score.node in called else ""
        table.add_row(score.node, str(score.faults), str(score.relapses), f"{score.confidence:.0%}", said)
    if table.row_count:
        output_console().print(table)
    if not jobs:
        click.echo(_told_of_jobs(accounting(comments)))
    if called:
        click.echo("Propose to replace the lemons: `opsd evidence` on each makes the archive for its vendor.")
    return exitcodes.OK


@nodes.command("pick")
@click.argument("count", type=click.IntRange(min=1))
@option("--partition", help="Only nodes of this partition.")
@option("--topology", type=_FILE, help="A topology.conf; by default the cluster's.")
@_history
@_jobs
@_json
def pick_nodes(
    count: int, partition: str | None, topology: Path | None, history: Path | None, jobs: bool, as_json: bool
) -> int:
    """Pick COUNT idle nodes for a run: healthy ones, tested ones, near each other.

    NVLink domains are those that the nodes' drivers told in their last test, otherwise Slurm's blocks.

    Prints a hostlist for sbatch's --nodelist, with the partition of the nodes. A partition with PriorityTier=0 is used
    only if --partition names it or there is no other. Pairs of leaf switches with a bad network are avoided if
    possible; otherwise they are named. Nodes below switches that are not connected are never picked together. Nodes
    that failed lately are avoided if past failures predicted later ones in this cluster (`opsd nodes lemons`). Spares
    and reserved nodes are left out.
    """
    tree = _tree(topology)
    more_faults = _read(history) if history else []
    found, comments = _from_slurm(partition)
    _warn_of_strange(tree, found)
    up = _up(partition)
    judged = _judge(found, comments, more_faults, jobs)
    offered = {name for one in up for name in one.nodes}
    known = [one for one in candidates(found, comments, judged, time.time()) if one.node in offered]
    tree = leaf_paths.with_bad(tree, _comments() if partition else comments, time.time())
    choice = pick_in_one(up, free(known), count, tree.with_domains(domains(comments)))
    if choice is None:
        taken = [f"{one.node}: {one.why_not}" for one in known if one.why_not]
        more = f" ({'; '.join(taken[:3])}{'; …' if len(taken) > 3 else ''})" if taken else ""
        of = f"partition {up[0].name}" if len(up) == 1 else f"{len(up)} partitions, of which a job has one"
        apart = sorted({tree.top(name) for name in free(known)} - {""})
        of += f", below switches that are not connected ({', '.join(apart)})" if len(apart) > 1 else ""
        fail(f"{len(known) - len(taken)} of {len(known)} nodes can be had now in {of}, {count} are wanted{more}")
    _show(choice, {one.node: one for one in known}, tree, as_json)
    return exitcodes.OK


@nodes.command("due")
@option("--count", type=click.IntRange(min=1), help="At most so many; by default all.")
@option("--days", type=Finite(0), default=7.0, help="Those not tested for so long.")
@option("--partition", help="Only nodes of this partition.")
@option("--pairs", is_flag=True, help="Pairs of nodes instead, below leaf switches whose connection is due.")
@option("--topology", type=_FILE, help="With --pairs: a topology.conf; by default the cluster's.")
@_json
def show_due(
    count: int | None, days: float, partition: str | None, pairs: bool, topology: Path | None, as_json: bool
) -> int:
    """Name the idle nodes that are due for a test, one a line, the longest untested first.

    With --pairs each line is a hostlist of two nodes; `opsd preflight network --note` on both measures the way between
    their leaf switches and keeps that in their comments. One that was not well stays due.

    A node is tested by `opsd preflight --act` with the profile policy.return_profile; deploy/slurm/idle-checks.sh
    has that done by jobs that give way. Spares and reserved nodes are left out.
    """
    if topology is not None and not pairs:
        raise click.UsageError("--topology goes with --pairs only")
    found, comments = _from_slurm(partition)
    now, age_s = time.time(), days * 86_400
    if pairs:
        tree = _tree(topology)
        _warn_of_strange(tree, found)
        ways = leaf_paths.due(leaf_paths.idle(found, comments), comments, tree, now, age_s)[:count]
        told: dict[str, object] = {"pairs": [*map(asdict, ways)]}
        lines = [compress(way.nodes) for way in ways]
    else:
        lines = due(found, comments, now, age_s)[:count]
        told = {"nodes": lines}
    for line in [json.dumps(told)] if as_json else lines:
        click.echo(line)
    return exitcodes.OK


@nodes.command("replaced")
@click.argument("names", nargs=-1, required=True, callback=names_of, metavar="NODE...")
def note_replaced(names: tuple[str, ...]) -> int:
    """Say that hardware of NODE... was replaced: what failed until now no longer counts against them.

    It neither makes them lemons nor keeps `opsd undrain` or a repair from giving them back, which need a passed
    preflight as ever. What else stands in their comments stays.
    """
    try:
        slurm, now = choose().slurm, time.time()
        comments = slurm.comments(names)
        if strange := sorted({*names} - {*comments}):
            fail(f"Slurm has no node {', '.join(strange)}")
        for name, comment in comments.items():
            slurm.set_comment(name, node_comment.write(comment, node_comment.read(comment).replaced(now)))
            known = len(faults({name: comment}))
            told = "1 fault until now no longer counts" if known == 1 else f"{known} faults until now no longer count"
            click.echo(f"{name}: {told}")
    except SlurmError as error:
        fail(f"Slurm: {error}")
    return exitcodes.OK


def _tree(path: Path | None) -> Topology:
    try:
        return read(path, say=warn)
    except TopologyError as error:
        raise BadConfig(str(error)) from error


def _warn_of_strange(tree: Topology, found: Sequence[Node]) -> None:
    """Say so if none of the nodes is in the topology, as if they have a domain in one of the two."""
    if tree.leaf and found and tree.leaf.keys().isdisjoint(node.name for node in found):
        warn(f"none of these nodes is in the topology: it has {next(iter(tree.leaf))} for one, Slurm {found[0].name}")


def _show(choice: Choice, known: dict[str, Candidate], tree: Topology, as_json: bool) -> None:
    hostlist = compress(choice.nodes)
    against = {node: known[node].remarks for node in choice.nodes if known[node].remarks}
    if as_json:
        ways = [{"leaves": way, "measured": tree.bad[way]} for way in choice.bad_ways]
        told = {**asdict(choice), "bad_ways": ways, "hostlist": hostlist, "remarks": against}
        click.echo(json.dumps(told, indent=1))
        return
    click.echo(hostlist)
    below = f"all below switch {choice.switch}" if choice.switch else "no switch above all of them is known"
    within = f"in NVLink domain {choice.domain}, " if choice.domain else ""
    click.echo(f"{len(choice.nodes)} nodes of partition {choice.partition}, {within}{below}", err=True)
    for way in choice.bad_ways:
        click.echo(f"{tree.bad_text(way)}; no choice is without a bad way", err=True)
    for node, remarks in against.items():
        click.echo(f"{node}: {', '.join(remarks)}", err=True)


def _from_slurm(partition: str | None = None) -> tuple[Sequence[Node], dict[str, str]]:
    """The nodes and their comments, of one partition or of all."""
    try:
        slurm = choose().slurm
        of = next((one.nodes for one in slurm.partitions() if one.name == partition), None) if partition else ()
        if of is None:
            raise BadConfig(f"Slurm has no partition {partition}; `sinfo -s` lists them")
        return slurm.nodes(of), dict(slurm.comments(of))
    except SlurmError as error:
        fail(f"Slurm: {error}")


def _comments() -> dict[str, str]:
    """Those of all nodes."""
    try:
        return dict(choose().slurm.comments())
    except SlurmError as error:
        fail(f"Slurm: {error}")


def _up(partition: str | None) -> list[Partition]:
    """The partitions for runs, or the one that was asked for, if it starts jobs."""
    try:
        known = [one for one in choose().slurm.partitions() if partition in (None, one.name)]
    except SlurmError as error:
        fail(f"Slurm: {error}")
    up = for_runs(known)
    if not up and partition and known:
        fail(f"partition {partition} is {known[0].state}, so no job starts there; `sinfo -s` lists those that are up")
    if not up:
        fail("no partition is up, so no job starts; `sinfo -s` lists them")
    return up


def _judge(found: Sequence[Node], comments: Mapping[str, str], more: list[NodeFailure], jobs: bool) -> Judgement:
    try:
        known = faults(comments, job_faults.read() if jobs else ()) + more
    except SlurmError as error:
        fail(f"Slurm: {error}")
    return lemons.judge([node.name for node in found], known, time.time())


def _warn_of_useless(more: Sequence[NodeFailure], names: Collection[str], now: float) -> None:
    """Say which faults of a file do not count: under another name, or in milliseconds, they would look like health."""
    strange = sorted({fault.node for fault in more} - {*names})
    if strange:
        listed = f"{', '.join(strange[:3])}{', …' if len(strange) > 3 else ''}"
        click.echo(f"Slurm has no node {listed}; faults of unknown nodes do not count", err=True)
    if late := sum(fault.at > now for fault in more):
        click.echo(f"faults in the future do not count ({late}): times are epoch seconds", err=True)


def _told_of_jobs(read: Accounting | None) -> str:
    """Whether the faults have the failures of jobs that the agents keep in the comments."""
    if read is None:
        return "Failed jobs are not counted: no agent has read the accounting; --jobs does"
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(read.at))
    if not read.answered:
        return f"Failed jobs are not counted: Slurm's accounting gave no answer at {at}"
    return f"Jobs that failed on a node and ran without it are counted as of {at}"


def _read(history: Path) -> list[NodeFailure]:
    """The faults in a file. Raises BadConfig."""
    found = []
    for number, line in enumerate(history.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            at, back = float(told["at"]), told.get("back")
            back = None if back is None else float(back)
            if not 0 < at < math.inf or not (back is None or at <= back < math.inf):
                raise ValueError("no times")
            found.append(NodeFailure(str(told["node"]), str(told["kind"]), at, back))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadConfig(
                f'line {number} of {history} is no fault: give {{"node": "n1", "kind": "gpu_xid", "at": 1763705000}}'
            ) from error
    return found


def _told(lift: Lift, proven: str, otherwise: str) -> str:
    days, lag = (f"{seconds / DAY_S:.2g} days" for seconds in (lift.window_s, lift.lag_s))
    when = f"  in {days}, {lag} later" if lift.lag_s else f"  in the {days} that follow"
    if lift.window_s < DAY_S:
        when = f"  {lag} later" if lift.lag_s else "  in the days that follow"
        return f"{when}: the history of faults is too short to tell"
    if not math.isfinite(lift.high):
        few = f"on {lift.failed} of these nodes; fewer than {LEAST_NODES} are too few to tell"
        return f"{when}: faults of all nodes: {lift.later}, {few}"
    value = f"{lift.value:.1f} times the failures of all nodes (95 %: {lift.low:.1f} to {lift.high:.1f})"
    return f"{when}: {value}, {proven if lift.proven else otherwise}"


def _document(judged: Judgement) -> dict[str, Any]:
    def of(lift: Lift) -> dict[str, Any]:
        return {**asdict(lift), "high": lift.high if math.isfinite(lift.high) else None, "proven": lift.proven}

    return {
        "soon": of(judged.soon),
        "lasting": of(judged.lasting),
        "mean_faults": judged.mean,
        "nodes": [asdict(score) for score in judged.scores],
        "lemons": [score.node for score in judged.lemons],
    }
