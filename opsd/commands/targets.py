"""``opsd targets``: the agents of the cluster as Prometheus' file_sd reads them, from Slurm's list of nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from opsd import durable
from opsd.commands.options import Seconds, option
from opsd.commands.output import fail
from opsd.slurm.connect import choose
from opsd.slurm.port import Node, Slurm, SlurmError

PORT = 9477


def file_sd(nodes: Sequence[Node], *, cluster: str, port: int, domain: str) -> list[dict[str, Any]]:
    """One group of targets with the label ``cluster``. Nodes that Slurm only plans for (future) are left out."""
    names = sorted({node.name for node in nodes if node.state != "future"})
    suffix = f".{domain.strip('.')}" if domain else ""
    targets = [f"{name}{suffix}:{port}" for name in names]
    return [{"targets": targets, "labels": {"cluster": cluster}}] if targets else []


def discover(slurm: Slurm, *, cluster: str | None, port: int, domain: str) -> str:
    """The file's text. Raises SlurmError if Slurm does not answer or knows no node."""
    named = cluster if cluster is not None else slurm.configuration().get("ClusterName", "")
    groups = file_sd(slurm.nodes(), cluster=named, port=port, domain=domain)
    if not groups:
        raise SlurmError("Slurm lists no node; is this the right cluster?")
    return json.dumps(groups, indent=1) + "\n"


def replace(file: Path, text: str) -> bool:
    """Put ``text`` into ``file`` at once, so that Prometheus never reads half; False if it held that already."""
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return False
    with durable.replacing(file) as draft:
        draft.write(text.encode())
        os.fchmod(draft.fileno(), 0o644)
    return True


@click.command()
@option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Replace FILE instead of printing.")
@option("--cluster", help="Value of the label cluster; Slurm's ClusterName by default.")
@option("--port", default=PORT, type=click.IntRange(1, 65_535), help="Port of the agents.")
@option("--domain", default="", help="Appended to the nodes' names, for instance cluster.example.com.")
@option("--deadline", default=12.0, type=Seconds(min=0.1), help="Seconds for Slurm.")
def targets(out: Path | None, cluster: str | None, port: int, domain: str, deadline: float) -> None:
    """Print the agents of all nodes for Prometheus' file_sd, or write them to a file.

    Exits with 1 if Slurm does not answer or the file cannot be written; the file is left as it is then.
    """
    try:
        text = discover(choose(deadline).slurm, cluster=cluster, port=port, domain=domain)
        if out is None:
            click.echo(text, nl=False)
        elif replace(out, text):
            click.echo(f"wrote {out}")
    except SlurmError as error:
        fail(f"{error}" + ("" if out is None else f"; {out} is left as it is"))
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}")
