"""``opsd nodes topology``: the switch tree from what the fabric shows, for clusters whose Slurm has none."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path
from typing import Final

import click

from opsd import exitcodes
from opsd.commands.options import option
from opsd.commands.output import fail, warn, written
from opsd.commands.settings import BadConfig
from opsd.slurm import fabric
from opsd.slurm.connect import choose
from opsd.slurm.hostlist import compress
from opsd.slurm.port import SlurmError
from opsd.slurm.topology import Topology, TopologyError, text

NODE_DESCRIPTION: Final = 64
"""Characters that InfiniBand has for the description of an adapter."""
_FILE = click.Path(dir_okay=False, allow_dash=True, path_type=Path)


@click.command()
@click.argument("file", type=_FILE, default="-")
@option("--output", type=_FILE, help="Write it to this file, which is replaced whole, in place of stdout.")
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
