"""``opsd drain``: a node out of service."""

from __future__ import annotations

from pathlib import Path

import click

from opsd.commands.node_service import Sentences, node_options, node_service, write_evidence
from opsd.commands.options import exit_codes, option
from opsd.commands.settings import load
from opsd.slurm import ownership
from opsd.slurm.deferred import DeferredUpdate


@click.command(
    epilog=exit_codes(
        {
            0: "the nodes are out of service",
            1: "a rule forbids it, or Slurm refused or does not answer",
            2: "the command line is wrong",
        }
    )
)
@node_options
@option("--reason", "text", required=True, help="Why, in a few words; people read it in sinfo -R.")
@option("--kind", help="Kind of trouble, one word. Default: that of the incident, else maintenance.")
@option("--incident", help="Incident that this is for, from `opsd incidents`; it is kept as evidence.")
@option("--force", is_flag=True, help="Beyond the cap and within the cool-down. Never other people's nodes.")
def drain(
    nodes: tuple[str, ...],
    file: Path | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    text: str,
    kind: str | None,
    incident: str | None,
    force: bool,
) -> int:
    """Let NODE... finish their jobs and take no new ones.

    Names may be hostlists, n[01-04]. All of them are drained, or none. If Slurm does not answer, the agent of this
    machine does it later, once, provided it may: it runs as root, or policy.drain is on.
    """
    settings, say = load(file, overrides), Sentences(as_json)
    kind = kind or (incident.rsplit("-", 2)[0] if incident else "maintenance")
    service = node_service(settings, say)
    evidence = "" if dry_run else write_evidence(settings, file, nodes, text, incident, service)
    told = ownership.reason(kind, text, incident=incident or ownership.MANUAL, evidence=evidence)
    update = DeferredUpdate("drain", nodes, service.now, told, force)
    return say.conclude(update, service.apply(update, dry_run, evidence))
